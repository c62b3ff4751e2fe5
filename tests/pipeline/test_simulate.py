import pytest

from parallel3d.pipeline.actions import parse
from parallel3d.pipeline.costs import Costs
from parallel3d.pipeline.passes import lower
from parallel3d.pipeline.schedules import build
from parallel3d.pipeline.simulate import simulate, simulate_costs

SIZES = ((4, 8), (8, 16), (8, 32))
GOLDEN = [  # makespan and bubble for each of SIZES, and the peak on rank 0 for p = 8, m = 32
    ("gpipe", 1, [(33, 9), (69, 21), (117, 21)], 32),
    ("1f1b", 1, [(33, 9), (69, 21), (117, 21)], 8),
    ("interleaved", 2, [(28.5, 4.5), (58.5, 10.5), (106.5, 10.5)], 11.5),
    ("interleaved", 4, [(26.25, 2.25), (53.25, 5.25), (101.25, 5.25)], 9.75),
    ("looped-bfs", 2, [(28.5, 4.5), (58.5, 10.5), (106.5, 10.5)], 32),
    ("zb-h1", 1, [(27, 3), (55, 7), (103, 7)], 8),
    ("zbv", 2, [(25.5, 1.5), (51.5, 3.5), (99.5, 3.5)], 8),
]


@pytest.mark.parametrize("is_lowered", [False, True])
@pytest.mark.parametrize(("name", "v", "times", "peak"), GOLDEN)
def test_makespan_bubble_and_peak_are_the_papers(
    name: str, v: int, times: list[tuple[float, float]], peak: float, is_lowered: bool
) -> None:
    for (p, m), (makespan, bubble) in zip(SIZES, times, strict=True):
        schedule = build(name, p, m, v)
        timeline = simulate(lower(schedule) if is_lowered else schedule.program)
        assert timeline.makespan == pytest.approx(makespan)
        assert timeline.idle == pytest.approx([bubble] * p)
        assert timeline.bubble == pytest.approx(bubble)
    assert timeline.peaks[0] == timeline.peak == peak


@pytest.mark.parametrize("is_lowered", [False, True])
@pytest.mark.parametrize(
    ("name", "makespan"), [("1f1b", 120.4), ("interleaved", 108), ("zb-h1", 107.2), ("zbv", 101.85)]
)
def test_unequal_times_and_slow_messages_give_the_known_makespans(
    name: str, makespan: float, is_lowered: bool
) -> None:
    schedule = build(name, 8, 32)
    program = lower(schedule) if is_lowered else schedule.program
    assert simulate(program, f=1.0, i=1.2, w=0.8, comm=0.05).makespan == pytest.approx(makespan)


def test_zb_h1_keeps_p_activations_on_every_rank() -> None:
    assert simulate(build("zb-h1", 8, 32).program).peaks == [8.0] * 8
    assert simulate(build("zbv", 8, 32).program).peaks == [8.0] * 8


def test_a_sequence_gives_each_stage_its_own_time() -> None:
    program = build("gpipe", 2, 2).program
    timeline = simulate(program, f=[1, 3], i=0, w=0)
    assert [span[1:] for span in timeline.spans[1][:2]] == [(1, 4), (4, 7)]
    assert timeline.idle == [5, 1]
    assert timeline.bubble == 5
    with pytest.raises(ValueError, match="3 values for 2 stages"):
        simulate(program, f=[1, 3, 1])


def test_a_message_late_in_its_channel_delays_its_reader_and_not_its_sender() -> None:
    program = parse("0F0 0SEND_F0 0F1 0SEND_F1\n1RECV_F0 1RECV_F1 1F0 1F1")
    timeline = simulate(program, comm=5)
    assert [span[1:] for span in timeline.spans[0]] == [(0, 1), (1, 2)]
    assert [span[1:] for span in timeline.spans[1]] == [(6, 7), (11, 12)]  # one after the other


@pytest.mark.report("NVIDIA/nccl#479")
@pytest.mark.report("pytorch/pytorch#172668")
def test_neighbours_that_both_send_first_are_refused_and_named() -> None:
    program = parse(
        """
        0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
        1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1
        """
    )
    with pytest.raises(ValueError, match="program cannot finish") as error:
        simulate(program)
    assert str(error.value).splitlines() == [
        "program cannot finish: rank 0 at 0SEND_F1 waits for 1RECV_F1,"
        " which stands behind 1SEND_B0 on rank 1, which waits for 0RECV_B0,"
        " which stands behind 0SEND_F1 on rank 0",
        "  rank 0: 0F0 0SEND_F0 0F1 >>> 0SEND_F1",
        "  rank 1: 1RECV_F0 1F0 1B0 >>> 1SEND_B0",
    ]


@pytest.mark.report("NVIDIA/nccl#479")
def test_a_crossed_order_at_the_two_ends_of_a_channel_is_refused_as_a_circle() -> None:
    sent = "0F0 0F1 0F2 0SEND_F2 0SEND_F0 0SEND_F1\n1RECV_F0 1RECV_F1 1F0 1F1 1RECV_F2 1F2"
    posted = "0F0 0F1 0F2 0SEND_F0 0SEND_F1 0SEND_F2\n1RECV_F1 1RECV_F2 1RECV_F0 1F0 1F1 1F2"
    with pytest.raises(ValueError) as error:
        simulate(parse(sent.replace("1F0 1F1 1RECV_F2", "1RECV_F2 1F0 1F1")))
    assert str(error.value).splitlines() == [
        "program cannot finish: rank 0 at 0SEND_F2 waits for 1RECV_F2,"
        " which stands behind 1RECV_F1 on rank 1, which stands behind 1RECV_F0 on rank 1,"
        " which waits for 0SEND_F0, which stands behind 0SEND_F2 on rank 0",
        "  rank 0: 0F0 0F1 0F2 >>> 0SEND_F2",
        "  rank 1: 1RECV_F0 1RECV_F1 1RECV_F2 >>> 1F0",
    ]
    with pytest.raises(
        ValueError, match="0SEND_F2 waits for 1RECV_F2, .* 1F0 on rank 1, .*SEND_F0"
    ):
        simulate(parse(sent))
    with pytest.raises(
        ValueError, match="0SEND_F0 waits for 1RECV_F0, .* 1RECV_F2 .* for 0SEND_F1"
    ):
        simulate(parse(posted))
    gradients = """
        0F0 0F1 0SEND_F0 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0B1
        1RECV_F0 1RECV_F1 1F0 1F1 1B0 1B1 1SEND_B1 1SEND_B0
    """
    with pytest.raises(ValueError, match="1SEND_B1 waits for 0RECV_B1, .* 0RECV_B0 on rank 0"):
        simulate(parse(gradients))


def test_a_circle_of_computes_is_named_without_the_ranks_that_only_wait_for_it() -> None:
    program = parse("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1\n2F0 2F1 2B0 2B1")
    circle = (
        "rank 1 at 1B0 waits for 2B0, which stands behind 2F1 on rank 2,"
        " which waits for 1F1, which stands behind 1B0 on rank 1\n"
    )
    with pytest.raises(ValueError, match=f"^program cannot finish: {circle}"):
        simulate(program)
    alone = parse("0B0 0F0\n1F0 1B0")
    with pytest.raises(ValueError, match=r"0B0 waits for 0F0, which stands behind 0B0 on rank 0\n"):
        simulate(alone)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0 0F0 0B0", "0F0 is on rank 0 and again on rank 0"),
        ("0F0\n0B0", "put all actions of a stage on one rank"),
        ("0F0 0B0\n2F0 2B0", r"the stages are \[0, 2\]"),
        ("0F0 0F1 0B0", "the program has no 0B1 or 0I1"),
        ("0F0 0F1 0I0 0W0 0I1", "the program has no 0B1 or 0W1"),
        ("0F1 0F0 0B0 0B1", "rank 0 runs 0F1 before 0F0: the microbatches of a stage must ascend"),
        ("0F0 0F1 0B1 0B0", "rank 0 runs 0B1 before 0B0"),
        ("0F0 0F1 0I0 0I1 0W1 0W0", "rank 0 runs 0W1 before 0W0"),
        ("0F0 0SEND_F0\n1F0", "0SEND_F0 on rank 0 needs 1RECV_F0, which is on no rank"),
        ("0F0\n1RECV_F0 1F0", "1RECV_F0 on rank 1 needs 0SEND_F0, which is on no rank"),
        ("0F0 0SEND_F0 1RECV_F0 1F0", "rank 0 sends to itself for 1RECV_F0"),
    ],
)
def test_a_malformed_program_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate(parse(text))


def test_an_empty_program_takes_no_time() -> None:
    timeline = simulate([])
    assert (timeline.makespan, timeline.bubble, timeline.peak) == (0, 0, 0)


@pytest.mark.parametrize("is_lowered", [False, True])
@pytest.mark.parametrize(("name", "v"), [(name, v) for name, v, _, _ in GOLDEN])
def test_bytes_kept_until_the_weight_gradient_peak_where_the_count_does(
    name: str, v: int, is_lowered: bool
) -> None:
    schedule = build(name, 8, 16, v)
    program = lower(schedule) if is_lowered else schedule.program
    timeline = simulate(program, saved=1, deferred=1)
    assert timeline.peak_bytes == pytest.approx(timeline.peaks)
    stages = [1.0 / v] * (8 * v)
    assert simulate(program, saved=stages, deferred=stages).peak_bytes == timeline.peak_bytes
    assert simulate(program).peak_bytes == [0] * 8


def test_what_an_input_gradient_frees_is_free_and_what_it_defers_is_kept() -> None:
    program = parse("0F0 0F1 0I0 0I1 0W0 0W1")
    assert simulate(program, saved=10).peak_bytes == [20]
    assert simulate(program, deferred=10).peak_bytes == [20]
    assert simulate(program, saved=10, deferred=3).peak_bytes == [20]
    assert simulate(program, saved=10, deferred=30).peak_bytes == [60]
    at_once = parse("0F0 0F1 0I0 0W0 0I1 0W1")
    assert simulate(at_once, saved=10, deferred=30).peak_bytes == [40]  # 10 and 30, then 30


def test_zb_h1_keeps_in_bytes_what_its_weight_gradients_wait_with() -> None:
    p, program = 4, build("zb-h1", 4, 16).program
    assert simulate(program, saved=8).peak_bytes == [8 * (p - rank) for rank in range(p)]
    assert simulate(program, deferred=8).peak_bytes == [8 * (rank + 1) for rank in range(p)]


def test_an_output_is_kept_until_its_message_is_taken() -> None:
    program = parse(
        "0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2\n1RECV_F0 1F0 1RECV_F1 1F1 1RECV_F2 1F2"
    )
    assert simulate(program, output=[8, 8]).peak_bytes == [8, 0]  # the last stage hands on nothing
    assert simulate(program, f=[1, 2], output=[8, 8]).peak_bytes == [16, 0]
    assert simulate(program, comm=1.5, output=[8, 8]).peak_bytes == [24, 0]


def test_an_output_of_no_message_is_kept_until_the_next_stage_has_run() -> None:
    together = parse("0F0 0F1 1F0 1F1 2F0 2F1")
    assert simulate(together, output=[8, 2, 9]).peak_bytes == [18]  # 0F0 and 0F1, then 1F0 too
    apart = parse("0F0 0F1 0F2\n1F0 1F1 1F2")
    assert simulate(apart, f=1.0, output=[8, 8]).peak_bytes == [16, 0]


def test_evaluation_keeps_no_more_than_the_microbatch_it_works_on() -> None:
    assert simulate(parse("0F0 0F1 0F2"), saved=8).peak_bytes == [8]


def test_costs_of_stages_are_simulated_as_their_parts() -> None:
    costs = Costs((1, 3), (2, 2), (1, 4), (100, 200), (50, 60), (7, 9), 0.5)
    program = lower(build("zb-h1", 2, 5))
    assert simulate_costs(program, costs) == simulate(
        program,
        f=[1, 3],
        i=[2, 2],
        w=[1, 4],
        comm=0.5,
        saved=[100, 200],
        deferred=[50, 60],
        output=[7, 9],
    )
