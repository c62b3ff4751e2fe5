"""Schedules: functions from (ranks, microbatches, chunks) to the order of every rank's computes.

``p`` ranks, ``m`` microbatches (any number from 1 up), ``v`` chunks a rank. Stage ``s`` lives on
rank ``s mod p`` (a loop); in the V of ``zbv``, ``v-half`` and ``v-min`` on ``s`` going down and on
``2p-1-s`` coming back.
"""

from collections.abc import Callable
from functools import partial
from itertools import islice, pairwise
from typing import NamedTuple

from parallel3d.pipeline.actions import COMPUTE, Action, Op, Program, Schedule
from parallel3d.pipeline.costs import Costs
from parallel3d.pipeline.greedy import paced
from parallel3d.pipeline.passes import split_backward
from parallel3d.pipeline.rhythm import Stretch, building_block, repeat

Order = Callable[[int, int, int, int], list[Action]]  # (rank, p, m, v) -> that rank's computes
Programs = Callable[[int, int, int], Program]  # (p, m, v) -> the computes of all ranks


def stage_rank(stage: int, num_ranks: int, style: str = "loop") -> int:
    """The rank a stage lives on; ``style`` is ``loop`` or ``v``."""
    return stage % num_ranks if style == "loop" else min(stage, 2 * num_ranks - 1 - stage)


def _alternate(forwards: list[Action], backwards: list[Action], warmup: int) -> list[Action]:
    """``warmup`` forwards, then forward and backward in turn, then the backwards that are left."""
    warmup = min(warmup, len(forwards))
    steady = len(forwards) - warmup
    pairs = zip(forwards[warmup:], backwards[:steady], strict=True)
    return [*forwards[:warmup], *(action for pair in pairs for action in pair), *backwards[steady:]]


def _stages(op: Op, stages: list[int], m: int) -> list[Action]:
    return [Action(stage, op, k) for stage in stages for k in range(m)]


def _gpipe(rank: int, p: int, m: int, v: int) -> list[Action]:
    """All forwards, then all backwards (Huang et al. 2019), chunk by chunk (Lamy-Poirier 2022)."""
    stages = [rank + chunk * p for chunk in range(v)]
    return _stages(Op.FORWARD, stages, m) + _stages(Op.BACKWARD, stages[::-1], m)


def _one_f_one_b(rank: int, p: int, m: int, v: int) -> list[Action]:
    """A backward as soon as there is one: rank r keeps p - r of them (Narayanan et al. 2019)."""
    forwards, backwards = _stages(Op.FORWARD, [rank], m), _stages(Op.BACKWARD, [rank], m)
    return _alternate(forwards, backwards, warmup=p - 1 - rank)


def _interleaved(rank: int, p: int, m: int, v: int) -> list[Action]:
    """1F1B over v chunks, with microbatches in groups of p (Narayanan et al. 2021, section 2.2).

    A remainder below p cannot be a group of its own, the order would not end: it is spread over
    the others. (Joined to the last group it would take as long and keep more activations.)
    """
    num_groups = max(1, m // p)
    starts = [group * m // num_groups for group in range(num_groups + 1)]
    groups = [range(start, stop) for start, stop in pairwise(starts)]
    table = [(chunk, k) for group in groups for chunk in range(v) for k in group]
    forwards = [Action(rank + chunk * p, Op.FORWARD, k) for chunk, k in table]
    backwards = [Action(rank + (v - 1 - chunk) * p, Op.BACKWARD, k) for chunk, k in table]
    return _alternate(forwards, backwards, 2 * (p - 1 - rank) + (v - 1) * max(map(len, groups)))


def _zb_h1(rank: int, p: int, m: int, v: int) -> list[Action]:
    """1F1B whose weight gradients wait for the bubble; each rank keeps p (Qi et al. 2023)."""
    return split_backward(_one_f_one_b(rank, p, m, v), delay=rank)


def _zbv(rank: int, p: int, m: int, v: int) -> list[Action]:
    """Zero bubble on a V of two chunks; each rank keeps p microbatches (Qi et al. 2023, ZB-V).

    The order is for 2p - 1 microbatches or more. Between p and that, the absent ones are left out
    of it; up to p it takes less time to let the phases run dry.
    """
    total = m if m <= p else max(m, 2 * p - 1)
    left = {  # by op and chunk
        f"{op}{chunk}": iter(_stages(op, [stage], total))
        for op in (Op.FORWARD, Op.INPUT_GRAD, Op.WEIGHT_GRAD)
        for chunk, stage in enumerate((rank, 2 * p - 1 - rank))
    }
    out: list[Action] = []

    def run(names: str, times: int) -> None:
        for name in names.split() * times:
            out.extend(islice(left[name], 1))

    run("F0", 2 * (p - rank) - 1)
    run("F1 F0", rank)
    run("F1 I1 W1", p - rank)
    run("F0 I0 W0 F1 I1 W1", total - p)
    run("I0 I1", rank)
    run("I0 W0", p - rank)
    run("W1", total)
    run("W0", total)
    return [action for action in out if action.microbatch < m]


def _v_half(p: int, m: int, v: int) -> Program:
    """Each rank keeps p/2 + 1 microbatches: a rhythm stretched on the way out (Qi et al. 2024)."""
    return _v_paced(p, m, Stretch(2, 1), keeps=p + 2)


def _v_min(p: int, m: int, v: int) -> Program:
    """Each rank keeps p/3 + 2 microbatches or less: a rhythm without gaps (Qi et al. 2024)."""
    return _v_paced(p, m, Stretch(1, 1), keeps=2 * p // 3 + 4)


def _v_paced(p: int, m: int, stretch: Stretch, keeps: int) -> Program:
    """A rhythm on the V for stages of equal costs, which keeps ``keeps`` chunks."""
    homes = [stage_rank(stage, p, "v") for stage in range(2 * p)]
    return paced(_equal(2 * p), homes, m, stretch, limit=keeps).program


def _equal(num_stages: int, trains: bool = True) -> Costs:
    """Stages that cost and keep one of everything, or of a forward alone."""
    ones, zeros = (1,) * num_stages, (0,) * num_stages
    some = ones if trains else zeros
    return Costs(ones, some, some, saved=some, deferred=some, output=zeros)


def _by_rank(order: Order, p: int, m: int, v: int) -> Program:
    return [order(rank, p, m, v) for rank in range(p)]


class _Kind(NamedTuple):
    programs: Programs
    style: str
    chunks: int | None  # the one legal number, None for any
    default_chunks: int


_KINDS = {
    "gpipe": _Kind(partial(_by_rank, _gpipe), "loop", 1, 1),
    "1f1b": _Kind(partial(_by_rank, _one_f_one_b), "loop", 1, 1),
    "interleaved": _Kind(partial(_by_rank, _interleaved), "loop", None, 2),
    "looped-bfs": _Kind(partial(_by_rank, _gpipe), "loop", None, 2),
    "zb-h1": _Kind(partial(_by_rank, _zb_h1), "loop", 1, 1),
    "zbv": _Kind(partial(_by_rank, _zbv), "v", 2, 2),
    "v-half": _Kind(_v_half, "v", 2, 2),
    "v-min": _Kind(_v_min, "v", 2, 2),
}
NAMES = tuple(_KINDS)


def build(
    name: str, num_ranks: int, num_microbatches: int, num_chunks: int | None = None
) -> Schedule:
    """Make a training schedule: compute actions only.

    ``num_chunks`` None is 1, or 2 where the schedule needs chunks.

    >>> from parallel3d.pipeline.actions import show
    >>> print(show(build("1f1b", num_ranks=2, num_microbatches=3).program))
    0F0 0F1 0B0 0F2 0B1 0B2
    1F0 1B0 1F1 1B1 1F2 1B2

    Raises ValueError for a name that is not in ``NAMES`` and for numbers the schedule cannot have.
    """
    kind = _find(name)
    if num_ranks < 1:
        raise ValueError(f"topology.pp = {num_ranks}: a pipeline has 1 rank or more")
    if num_microbatches < 1:
        raise ValueError(
            f"pipeline.num_microbatches = {num_microbatches}: a step has 1 microbatch or more"
        )
    v = kind.default_chunks if num_chunks is None else num_chunks
    if v < 1 or (kind.chunks is not None and v != kind.chunks):
        legal = "1 or more" if kind.chunks is None else f"exactly {kind.chunks}"
        raise ValueError(
            f"pipeline.num_chunks = {v}, but {name} has {legal} on each rank:"
            " change it, or take interleaved or looped-bfs, which have any number"
        )
    program = kind.programs(num_ranks, num_microbatches, v)
    homes = [stage_rank(stage, num_ranks, kind.style) for stage in range(num_ranks * v)]
    return Schedule(program, homes, v)


def forwards_of(schedule: Schedule) -> Schedule:
    """Make an evaluation schedule of a training schedule: its forwards in its order.

    On a V, where neighbours share a rank, that order makes forwards wait for each other while there
    is no backward to do: there it is the order of ``forwards_over``.
    """
    if any(rank == other for rank, other in pairwise(schedule.rank_of_stage)):
        forwards = [a for actions in schedule.program for a in actions if a.op is Op.FORWARD]
        return forwards_over(schedule, 1 + max(action.microbatch for action in forwards))
    return schedule._replace(program=_keep(schedule.program, {Op.FORWARD}))


def forwards_over(schedule: Schedule, num_microbatches: int) -> Schedule:
    """Make an evaluation schedule over the stages of any schedule, all ranks busy in one rhythm.

    It is for schedules whose order for another number of microbatches nobody knows, such as
    programs of the user's.
    """
    homes, v = schedule.rank_of_stage, schedule.num_chunks
    block = building_block(_equal(len(homes), trains=False), homes, v, Stretch(1, 1))
    assert block is not None, f"a rank does not have {v} forwards in {v} units of time"
    program = [
        [Action(due.stage, Op.FORWARD, due.microbatch) for due in order if due.is_forward]
        for order in repeat(block, homes, v, num_microbatches)
    ]
    return schedule._replace(program=program)


def from_program(program: Program) -> Schedule:
    """Make a schedule of a program of the user's, lowered or not: its computes without the rest.

    Raises ValueError if the ranks do not hold equally many stages. ``simulate`` proves the rest.
    """
    computes = _keep(program, COMPUTE)
    home = {action.stage: rank for rank, actions in enumerate(computes) for action in actions}
    held = [sum(rank == r for r in home.values()) for rank in range(len(computes))]
    if sorted(home) != list(range(len(home))) or len(set(held)) != 1 or 0 in held:
        raise ValueError(
            f"the ranks of the program hold {held} of the stages {sorted(home)}:"
            " number them from 0 without a gap and give each rank as many"
        )
    return Schedule(computes, [home[stage] for stage in sorted(home)], held[0])


def _keep(program: Program, ops: set[Op] | frozenset[Op]) -> Program:
    return [[action for action in actions if action.op in ops] for actions in program]


def _find(name: str) -> _Kind:
    if name not in _KINDS:
        raise ValueError(
            f"pipeline.schedule = {name!r} is not a schedule: choose one of {', '.join(NAMES)},"
            " or auto, or write a program to a file"
        )
    return _KINDS[name]
