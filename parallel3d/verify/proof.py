"""The proof of a model: each layout's numbers beside those of plain PyTorch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from torch import Tensor, nn

from ..topology import Grid, Topology
from . import parallel
from .cases import LAYOUTS, Case, Family, product
from .compare import PARAMETERS, Cell, cells, first_difference
from .ranks import run
from .reference import half_norm, train_plainly
from .subject import Batch, LossFn, Subject, count_items
from .trace import Setting, Trace


@dataclass(frozen=True)
class Row:
    """A case's result.

    ``cells`` has the columns loss, gradient, norm, sgd and adamw. ``bits`` is None for the first of
    a family of cases that promise equal bits, else the first difference to it, '' if there is none.
    ``unequal_copies`` names parameters of which two ranks hold different values.
    """

    case: Case
    cells: dict[str, Cell]
    bits: str | None
    unequal_copies: list[str]
    seconds: float

    @property
    def passes(self) -> bool:
        """Whether every promise is kept."""
        within = all(cell.passes for cell in self.cells.values())
        return within and not self.bits and not self.unequal_copies

    @property
    def failures(self) -> list[str]:
        """What is wrong, a column a line, those that name a parameter first."""
        order = sorted(self.cells, key=lambda column: column not in PARAMETERS)
        found = [
            f"{column}{f' of {cell.name}' if cell.name else ''} is {cell.error:.1e} off, "
            f"tolerance {cell.tolerance:g}"
            for column in order
            if not (cell := self.cells[column]).passes
        ]
        if self.unequal_copies:
            found.append(f"copies of {self.unequal_copies[0]} differ between ranks")
        if self.bits:
            found.append(f"bits differ from the first case of equal dp and tp: {self.bits}")
        return found


def verify(
    build: Callable[[Topology], nn.Sequential],
    reference: Callable[[], nn.Module],
    loss: LossFn,
    batch: Callable[[int], Batch],
    *,
    cut_loss: Callable[[Topology], LossFn] | None = None,
    num_items: Callable[[Any], Tensor | int] = count_items,
    layouts: Iterable[str] = LAYOUTS,
    zero: Iterable[int] = (1,),
    schedule: Iterable[str] = ("1f1b",),
    recompute: Iterable[str] = ("none",),
    num_chunks: Iterable[int | None] = (None,),
    reduce: Iterable[str] = ("each",),
    steps: int = 3,
    num_microbatches: int = 4,
    tolerance: float = 1e-12,
    report: Callable[[Row], object] | None = None,
) -> list[Row]:
    """Train a model under layouts and in plain PyTorch, in fp64, and compare.

    Starts its own CPU processes; call it from ``if __name__ == "__main__"``. The functions are
    those of ``Subject``, which says what each must do, and must be importable there.

    Args:
        build: ``build(topology)`` gives the model, an ``nn.Sequential`` of units.
        reference: gives the same model in plain ``torch.nn``, whole, with the same names.
        loss: ``loss(output, target)``, the sum over a batch's items.
        batch: ``batch(step)`` gives a whole batch ``(x, target)``, or a list of ready microbatches.
        cut_loss: ``cut_loss(topology)`` gives the loss for outputs left cut over ``tp``.
        num_items: counts a target's items.
        layouts: ``pp x dp x tp``, each.
        zero: ZeRO stages.
        schedule: pipeline schedules.
        recompute: modes.
        num_chunks: stages per pipeline rank, None for what a schedule needs.
        reduce: in ``each`` microbatch or the ``last``, of ZeRO 2 and 3.
        steps: training steps.
        num_microbatches: in each dp rank's share of a batch.
        tolerance: relative, of all columns but AdamW's weights, which get 100 times as much.
        report: called with each row as soon as it is there.

    Returns a row for every combination; ``all(row.passes for row in rows)`` is the proof. Raises
    RankError when a rank raises, for example ValueError for a layout that the model cannot have.
    """
    subject = Subject(build, reference, loss, batch, cut_loss, num_items)
    setting = Setting(steps, num_microbatches)
    rows = []
    cases = product(layouts, zero, schedule, recompute, num_chunks, reduce)
    for row in prove(subject, cases, setting, tolerance):
        rows.append(row)
        if report is not None:
            report(row)
    return rows


def prove(
    subject: Subject, cases: Sequence[Case], setting: Setting, tolerance: float
) -> Iterator[Row]:
    """A row for each case, as it is done. Cases of one layout should stand together."""
    ((setting, true),) = run(Grid(), plainly, subject, setting)
    firsts: dict[Family, Trace] = {}
    for grid, group in groupby(cases, key=lambda case: case.grid):
        mine = list(group)
        start = time.monotonic()
        traces = run(grid, parallel.train, subject, setting, mine)
        for case, trace in zip(mine, traces, strict=True):
            first = firsts.setdefault(case.family, trace)
            now = time.monotonic()
            yield judge(case, trace, true, first, tolerance, now - start)
            start = now


def judge(
    case: Case, ours: Trace, true: Trace, first: Trace, tolerance: float, seconds: float = 0.0
) -> Row:
    """A case's trace beside the reference's, and beside the first of its family."""
    bits = None if first is ours else first_difference(ours, first)
    copies = [name for each in ours.values() for name in each.unequal_copies]
    return Row(case, cells(ours, true, tolerance), bits, copies, seconds)


def plainly(
    topology: Topology, subject: Subject, setting: Setting
) -> Iterator[tuple[Setting, Trace]]:
    """On one rank: the setting with its norm to clip to, and the reference's trace."""
    initial = parallel.initial_values(topology, subject, setting)
    setting = replace(setting, max_grad_norm=half_norm(subject, initial))
    yield setting, train_plainly(subject, setting, initial)
