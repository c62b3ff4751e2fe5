"""torch.distributed.pipelining as a second oracle, for orders, for messages and for the proof.

Where torch leaves something else than we do, a test says what and why.
"""

from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as theirs
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from parallel3d.pipeline.actions import Action, Op, Program, Schedule, parse_action
from parallel3d.pipeline.passes import add_communication, lower
from parallel3d.pipeline.schedules import NAMES, build
from parallel3d.pipeline.simulate import simulate

RANKS = (1, 2, 3, 4, 7)
MICROBATCHES = range(1, 17)


def _stage(index: int, num_ranks: int, num_stages: int) -> SimpleNamespace:
    """As much of a stage of torch's as its schedules look at to make their order."""
    return SimpleNamespace(
        stage_index=index,
        num_stages=num_stages,
        group_size=num_ranks,
        group_rank=0,
        is_first=index == 0,
        is_last=index == num_stages - 1,
        submod=None,
    )


def _order(kind: type, p: int, m: int, v: int = 1) -> Program:
    """The computes of every rank as torch orders them."""
    stages = [_stage(chunk * p, p, v * p) for chunk in range(v)]
    schedule = kind(stages[0] if issubclass(kind, PipelineScheduleSingle) else stages, m)
    order = schedule.pipeline_order
    return [
        [parse_action(str(a)) for a in order[rank] if a is not None and a.is_compute_op]
        for rank in range(p)
    ]


def _refuses(kind: type, m: int, p: int) -> bool:
    """Rounds of equal length, of p or more: torch has no order for other numbers."""
    return issubclass(kind, PipelineScheduleMulti) and m % max(1, m // p) != 0


@pytest.mark.parametrize("p", RANKS)
def test_gpipe_is_torchs(p: int) -> None:
    for m in MICROBATCHES:
        assert build("gpipe", p, m).program == _order(theirs.ScheduleGPipe, p, m)


@pytest.mark.parametrize("p", RANKS)
def test_1f1b_is_torchs(p: int) -> None:
    # torch wants a microbatch a stage or more. The last rank has no warm-up, and there torch's
    # list, which is only for show, counts its forwards from 1.
    for m in range(p, 17):
        *others, last = _order(theirs.Schedule1F1B, p, m)
        last = [a._replace(microbatch=a.microbatch - (a.op is Op.FORWARD)) for a in last]
        assert build("1f1b", p, m).program == [*others, last]


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("v", [1, 2, 3])
def test_interleaved_is_torchs_where_torch_has_one(p: int, v: int) -> None:
    kind = theirs.ScheduleInterleaved1F1B
    for m in MICROBATCHES:
        if _refuses(kind, m, p):
            with pytest.raises(ValueError, match="multiple of the number of rounds"):
                _order(kind, p, m, v)
        else:
            assert build("interleaved", p, m, v).program == _order(kind, p, m, v)


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("v", [1, 2, 3])
def test_looped_bfs_is_torchs_but_that_backwards_ascend(p: int, v: int) -> None:
    # torch runs each chunk's backwards from the last microbatch to the first. Then the bits of a
    # sum of gradients would differ from those of other schedules: ours ascend.
    for m in MICROBATCHES:
        found = _order(theirs.ScheduleLoopedBFS, p, m, v)
        ascending = [
            [a._replace(microbatch=m - 1 - a.microbatch) if a.op is Op.BACKWARD else a for a in own]
            for own in found
        ]
        assert build("looped-bfs", p, m, v).program == ascending
    with pytest.raises(ValueError, match="must ascend"):
        simulate(found)


@pytest.mark.parametrize("p", RANKS)
def test_zb_h1_is_torchs_interleaved_zero_bubble_of_one_chunk(p: int) -> None:
    kind = theirs.ScheduleInterleavedZeroBubble
    for m in MICROBATCHES:
        if not _refuses(kind, m, p):
            assert build("zb-h1", p, m).program == _order(kind, p, m)


@pytest.mark.parametrize("p", RANKS)
def test_zbv_is_torchs_and_no_slower_where_microbatches_are_few(p: int) -> None:
    # Up to p microbatches torch leaves the absent ones out of the order for 2p - 1.
    for m in MICROBATCHES:
        ours, found = build("zbv", p, m).program, _order(theirs.ScheduleZBVZeroBubble, p, m, 2)
        if m > p:
            assert ours == found
        else:
            assert simulate(ours).makespan <= simulate(found).makespan


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 10), (8, 16)])
def test_an_order_that_is_not_ours_passes_the_proof_and_has_a_smaller_bubble_than_unsplit(
    p: int, m: int
) -> None:
    order = _order(theirs.ScheduleInterleavedZeroBubble, p, m, 2)
    schedule = Schedule(order, [stage % p for stage in range(2 * p)], 2)
    split, whole = simulate(lower(schedule)), simulate(build("interleaved", p, m, 2).program)
    assert split.makespan == simulate(order).makespan
    assert split.bubble < whole.bubble


def _to_torch(program: Program) -> dict[int, list[theirs._Action]]:
    return {
        rank: [theirs._Action.from_str(str(a)) for a in actions if a.op is not Op.REDUCE]
        for rank, actions in enumerate(program)
    }


SIZES = [(1, 3), (2, 3), (3, 11), (4, 5), (4, 8), (8, 16)]


@pytest.mark.parametrize("name", NAMES)
def test_messages_as_torch_adds_them_end_as_soon_as_ours(name: str) -> None:
    for p, m in SIZES:
        schedule = build(name, p, m)
        home = schedule.rank_of_stage
        theirs_by_rank = theirs._add_send_recv(
            _to_torch(schedule.program), home.__getitem__, len(home)
        )
        lowered = [[_from_torch(a) for a in theirs_by_rank[rank]] for rank in range(p)]
        assert simulate(lowered).makespan == simulate(lower(schedule)).makespan
        assert [*map(sorted, lowered)] == [*map(sorted, add_communication(schedule))]


def _from_torch(action: theirs._Action) -> Action:
    return parse_action(str(action))


@pytest.mark.parametrize("name", NAMES)
def test_our_messages_end_where_a_receive_holds_up_its_rank(name: str) -> None:
    # That is torch's dry run: strict with receives, so none may be early, and kind to sends.
    for p, m in SIZES:
        schedule = build(name, p, m)
        home = schedule.rank_of_stage
        program = add_communication(schedule, early=0)
        steps = theirs._simulate_comms_compute(_to_torch(program), home.__getitem__, len(home))
        ran = [[_from_torch(a) for a in steps[rank] if a is not None] for rank in range(p)]
        assert ran == program
