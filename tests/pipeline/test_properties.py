"""What holds for every schedule of every size, and the proof on paper against one by trial.

The trial knows nothing of ``Dependencies``: it runs the actions, one at a time, over queues.
"""

from collections import defaultdict, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel3d.pipeline.actions import COMPUTE, RECEIVES, SENDS, Action, Op, Program, Schedule
from parallel3d.pipeline.memory import in_flight
from parallel3d.pipeline.passes import lower
from parallel3d.pipeline.schedules import NAMES, build, forwards_of
from parallel3d.pipeline.simulate import simulate

CHUNKED = ("interleaved", "looped-bfs")

some = settings(max_examples=6, deadline=None, derandomize=True)
any_size = given(
    p=st.integers(1, 16), m=st.integers(1, 64), v=st.integers(1, 4), early=st.integers(0, 4)
)
middle_size = given(
    p=st.integers(1, 8), m=st.integers(1, 24), v=st.integers(1, 4), early=st.integers(0, 4)
)
small_size = given(
    p=st.integers(2, 4), m=st.integers(1, 6), v=st.integers(1, 3), picks=st.randoms()
)


def _build(name: str, p: int, m: int, v: int) -> Schedule:
    return build(name, p, m, v if name in CHUNKED else None)


class Trial:
    """Ranks that run a program where a send blocks until its receive is first in its channel."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.home = {a.stage: rank for rank, actions in enumerate(program) for a in actions}
        self.made: set[str] = set()  # results, and receives that have been served
        self.posted: dict[tuple[int, int, str], deque[Action]] = defaultdict(deque)

    def ends(self) -> bool:
        left = [deque(actions) for actions in self.program]
        moved = True
        while moved:
            moved = False
            for rank, actions in enumerate(left):
                while actions and self._run(rank, actions[0]):
                    self.made.add(str(actions.popleft()))
                    moved = True
        return not any(left)

    def _run(self, rank: int, action: Action) -> bool:
        stage, op, k = action
        way = op.value[-1]
        if op in SENDS:
            to = stage + (1 if way == "F" else -1)
            channel = self.posted[rank, self.home[to], way]
            receive = f"{to}RECV_{way}{k}"
            is_made = self._has(stage, "F" if way == "F" else "BI", k)
            if not is_made or not channel or str(channel[0]) != receive:
                return False
            channel.popleft()
            self.made.add(f"served {receive}")
            return True
        if op in RECEIVES:
            if way == "B" and f"{stage}SEND_F{k}" not in self.made:
                return False
            source = self.home[stage + (-1 if way == "F" else 1)]
            self.posted[source, rank, way].append(action)
            return True
        if op is Op.FORWARD:
            return stage == 0 or self._has_input(stage, stage - 1, "F", k)
        if op is Op.WEIGHT_GRAD:
            return self._has(stage, "I", k)
        if op is Op.REDUCE:
            return True
        is_last = stage == max(self.home)
        return self._has(stage, "F", k) and (is_last or self._has_input(stage, stage + 1, "BI", k))

    def _has_input(self, stage: int, neighbour: int, ops: str, k: int) -> bool:
        if self.home[stage] == self.home[neighbour]:
            return self._has(neighbour, ops, k)
        return f"served {stage}RECV_{ops[0]}{k}" in self.made

    def _has(self, stage: int, ops: str, k: int) -> bool:
        return any(f"{stage}{op}{k}" in self.made for op in ops)


@pytest.mark.parametrize("name", NAMES)
@any_size
@some
def test_every_lowered_schedule_ends_on_paper_and_by_trial(
    name: str, p: int, m: int, v: int, early: int
) -> None:
    schedule = _build(name, p, m, v)
    program = lower(schedule, early=early)
    assert [[a for a in actions if a.op in COMPUTE] for actions in program] == schedule.program
    assert simulate(program).makespan == simulate(schedule.program).makespan
    assert Trial(program).ends()
    assert _receives_by_channel(program) == _sends_by_channel(program)
    evaluation = lower(forwards_of(schedule), early=early)
    assert simulate(evaluation).peak <= 1
    assert Trial(evaluation).ends()


def _sends_by_channel(program: Program) -> dict[tuple[int, int, str], list[tuple[int, int]]]:
    """By channel the (receiving stage, microbatch) of every message, in the sender's order."""
    home = {a.stage: rank for rank, actions in enumerate(program) for a in actions}
    channels = defaultdict(list)
    for rank, actions in enumerate(program):
        for stage, op, k in (action for action in actions if action.op in SENDS):
            to = stage + (1 if op is Op.SEND_FORWARD else -1)
            channels[rank, home[to], op.value[-1]].append((to, k))
    return channels


def _receives_by_channel(program: Program) -> dict[tuple[int, int, str], list[tuple[int, int]]]:
    home = {a.stage: rank for rank, actions in enumerate(program) for a in actions}
    channels = defaultdict(list)
    for rank, actions in enumerate(program):
        for stage, op, k in (action for action in actions if action.op in RECEIVES):
            source = stage + (-1 if op is Op.RECV_FORWARD else 1)
            channels[home[source], rank, op.value[-1]].append((stage, k))
    return channels


@pytest.mark.report("NVIDIA/nccl#479")
@pytest.mark.parametrize("name", NAMES)
@small_size
@settings(max_examples=40, deadline=None, derandomize=True)
def test_with_two_actions_swapped_the_proof_fails_exactly_where_the_trial_does(
    name: str, p: int, m: int, v: int, picks
) -> None:
    program = lower(_build(name, p, m, v), early=picks.randrange(3))
    for _ in range(4):
        actions = program[picks.randrange(p)]
        one, other = picks.randrange(len(actions)), picks.randrange(len(actions))
        actions[one], actions[other] = actions[other], actions[one]
        refusal = ""
        try:
            simulate(program)
        except ValueError as error:
            refusal = str(error)
        if "must ascend" not in refusal:
            assert Trial(program).ends() == (not refusal)
            assert not refusal or _is_circle(refusal.splitlines()[0])
        actions[one], actions[other] = actions[other], actions[one]


def _is_circle(refusal: str) -> bool:
    """Whether what is told ends where it began."""
    first = refusal.split(" at ")[1].split()[0]
    last = refusal.rpartition(" behind ")[2].split()[0]
    return first == last


@pytest.mark.parametrize("name", NAMES)
@middle_size
@some
def test_bytes_follow_the_counts_of_activations(
    name: str, p: int, m: int, v: int, early: int
) -> None:
    schedule = _build(name, p, m, v)
    program = lower(schedule, early=early)
    chunks = schedule.num_chunks
    counted = simulate(program, saved=chunks, deferred=chunks)
    assert counted.peak_bytes == pytest.approx([peak * chunks for peak in counted.peaks])
    halved = simulate(program, saved=2 * chunks, deferred=chunks)
    unsent = simulate(program, saved=chunks, deferred=chunks, output=[1] * (p * chunks))
    for rank in range(p):
        least, most = counted.peak_bytes[rank], 2 * counted.peak_bytes[rank]
        assert least <= halved.peak_bytes[rank] <= most
        assert unsent.peak_bytes[rank] >= least
    kept = in_flight(schedule.program)
    for rank in range(p):
        own = [kept[s] for s, home in enumerate(schedule.rank_of_stage) if home == rank]
        assert max(own) <= counted.peak_bytes[rank] <= sum(own)


@pytest.mark.parametrize("name", NAMES)
@middle_size
@some
def test_slower_parts_never_make_a_step_faster_nor_idle_less_than_nothing(
    name: str, p: int, m: int, v: int, early: int
) -> None:
    program = lower(_build(name, p, m, v), early=early)
    plain = simulate(program, f=2, i=2, w=1)
    for slower in (
        simulate(program, f=3, i=2, w=1),
        simulate(program, f=2, i=2, w=2),
        simulate(program, f=2, i=2, w=1, comm=0.25),
    ):
        assert slower.makespan >= plain.makespan - 1e-9
        assert min(slower.idle) >= -1e-9


@pytest.mark.parametrize("p", range(1, 9))
def test_interleaved_is_valid_for_every_number_of_microbatches(p: int) -> None:
    for v in range(1, 5):
        for m in range(1, 33):
            simulate(build("interleaved", p, m, v).program)
