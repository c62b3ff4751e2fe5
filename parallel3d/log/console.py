"""What a person sees of a run: a live line on a terminal, plain lines everywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Live
from rich.table import Column

from .meters import Record

_WIDE = 10_000  # columns of an output that is no terminal: its lines are never broken


def console() -> Console:
    """Standard output as it is now: coloured and live on a terminal, else plain."""
    terminal = sys.stdout.isatty()  # rich alone would believe FORCE_COLOR, and draw into files
    return Console(force_terminal=terminal, highlight=False, width=None if terminal else _WIDE)


def report(title: str, rows: Iterable[Sequence[object]], to: Console | None = None) -> None:
    """Print a table under its title; a value is never cut, and no text is taken for markup.

    Example:
        >>> report("run", [("grid", "2x1x2"), ("batch", "32 =", "1 x 4 x 8")])
        run
          grid   2x1x2
          batch  32 =   1 x 4 x 8
    """
    cells = [[str(value) for value in row] for row in rows]
    columns = zip_longest(*cells, fillvalue="")
    widths = [max(map(len, column)) for column in columns]
    to = to or console()
    to.print(title, style="bold", markup=False, soft_wrap=True)
    for row in cells:
        line = "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False))
        to.print(f"  {line}".rstrip(), markup=False, soft_wrap=True)


class Progress:
    """Shows each step: loss, tokens per second, the time left.

    Args:
        num_steps: the last step of the run.
        done: steps of the run that lie behind it already.
        every: steps between two lines where the output is no terminal. The first and last step
            and those with a validation loss are always shown; 0: only these.
        to: the console; on a terminal one line is drawn over and over, otherwise plain lines are
            printed, without carriage returns.
        clock: seconds, rising.
    """

    def __init__(
        self,
        *,
        num_steps: int,
        done: int = 0,
        every: int = 10,
        to: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_steps = num_steps
        self._first = done + 1
        self._every = every
        self._clock = clock
        self._since = clock()
        self._console = to or console()
        self._live: Live | None = None
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            text = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True))
            bar = BarColumn(bar_width=20)
            self._live = Live(bar, text, console=self._console, refresh_per_second=4)
            self._task = self._live.add_task("", total=num_steps, completed=done)
            self._live.start()

    def write(self, record: Record) -> None:
        """Show a step."""
        step = record.step
        left = self._seconds_left(step)
        text = describe(record, self._num_steps, left)
        kept = record.val_loss is not None or step == self._num_steps
        if self._live is not None:
            self._live.update(self._task, completed=step, description=text)
            if record.val_loss is not None:
                self._console.print(text, markup=False)
        elif kept or step == self._first or (self._every > 0 and step % self._every == 0):
            self._console.print(text, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Give the terminal back; the last line stays."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _seconds_left(self, step: int) -> float | None:
        """From the mean pace after the first step, which is slower than all others."""
        now = self._clock()
        if step <= self._first:
            self._since, self._first = now, step
            return None
        return (now - self._since) / (step - self._first) * (self._num_steps - step)


def describe(record: Record, num_steps: int, seconds_left: float | None = None) -> str:
    """One line about a step."""
    parts = [f"step {record.step:>{len(str(num_steps))}}/{num_steps}", f"loss {record.loss:.4f}"]
    if record.val_loss is not None:
        parts.append(f"val_loss {record.val_loss:.4f}")
    parts.append(f"grad_norm {record.grad_norm:.3g}")
    parts.append(f"{record.tokens_per_second:,.0f} tokens/s")
    if record.mfu is not None:
        parts.append(f"mfu {record.mfu:.1%}")
    if record.skipped:
        parts.append("skipped")
    if seconds_left is not None:
        parts.append(f"{duration(seconds_left)} left")
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """Whole seconds under two minutes, then ``h:mm:ss``."""
    whole = max(0, round(seconds))
    if whole < 120:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
