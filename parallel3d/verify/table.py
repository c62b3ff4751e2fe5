"""The proof as a table, printed as its rows come."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from .proof import Row

COLUMNS = (
    *(("model", 13), ("layout", 7), ("zero", 6), ("schedule", 13), ("recompute", 10), ("loss", 9)),
    *(("gradient", 9), ("norm", 9), ("sgd", 9), ("adamw", 9), ("bits", 7), ("seconds", 8)),
)


class Table:
    """Rows one below another, with a progress bar under them on a terminal; plain text elsewhere.

    Use as a context manager.
    """

    def __init__(self, num_rows: int) -> None:
        self.console = Console(highlight=False, soft_wrap=True)
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self.task = self.progress.add_task("plain PyTorch", total=num_rows)

    def add(self, model: str, row: Row) -> None:
        """Print a row; what breaks a promise is red, and marked with !."""
        self.console.print(_line(model, row))
        self.progress.update(self.task, advance=1, description=f"after {row.case.grid}")

    def __enter__(self) -> Table:
        names = (f"{name:>{width}}" for name, width in COLUMNS)
        self.console.print(Text(" ".join(names), style="bold"))
        self.progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.progress.stop()


def _line(model: str, row: Row) -> Text:
    case, fine = row.case, True
    chunks = f" x{case.num_chunks}" if case.num_chunks else ""
    values = {
        "model": (model, fine),
        "layout": (str(case.grid), fine),
        "zero": (f"{case.zero} {case.reduce}" if case.zero >= 2 else str(case.zero), fine),
        "schedule": (case.schedule + chunks, fine),
        "recompute": (case.recompute, fine),
        **{name: (f"{cell.error:.1e}", cell.passes) for name, cell in row.cells.items()},
        "bits": _bits(row),
        "seconds": (f"{row.seconds:.1f}", fine),
    }
    line = Text()
    for name, width in COLUMNS:
        text, passes = values[name]
        style = "" if passes else "bold red"
        line.append(f"{text + ('' if passes else '!'):>{width}} ", style=style)
    line.rstrip()
    return line


def _bits(row: Row) -> tuple[str, bool]:
    if row.unequal_copies:
        return "copies", False
    if row.bits is None:
        return "first", True
    return ("differ", False) if row.bits else ("equal", True)
