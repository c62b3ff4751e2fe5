"""``metrics.jsonl``: a line of strict JSON for each step, once, over kills and resumes too."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


class Jsonl:
    """Appends rows to ``path``; each stands in the file when ``write`` returns.

    Args:
        path: the file; its folder must exist.
        resume_step: the step of the checkpoint that the run goes on from. Lines of later steps,
            doubled ones and a line that a kill left half-written are dropped, in one rename.

    Attributes:
        dropped: how many steps past ``resume_step`` had been written before.

    A process that dies loses no line: each is handed to the system whole, in one write.
    """

    def __init__(self, path: Path, *, resume_step: int = 0) -> None:
        self.dropped = 0
        if path.exists():
            before = path.read_bytes()
            steps = dict(_steps(before))
            self.dropped = max(0, max(steps, default=0) - resume_step)
            after = b"".join(line for step, line in sorted(steps.items()) if step <= resume_step)
            if after != before:
                replace(path, after)
        self._file = path.open("ab", buffering=0)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row; its numbers must be finite (ValueError)."""
        self._file.write(json.dumps(row, allow_nan=False).encode() + b"\n")

    def close(self, failed: bool = False) -> None:
        """Close the file, on the disk."""
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()


def _steps(content: bytes) -> Iterator[tuple[int, bytes]]:
    """(step, line) of each line that is whole; its newline may be missing."""
    for line in content.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            yield row["step"], line + b"\n"


def replace(path: Path, content: bytes) -> None:
    """Give ``path`` new content such that a kill leaves the old or the new one, never a mixture."""
    temporary = path.with_name(path.name + ".new")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
