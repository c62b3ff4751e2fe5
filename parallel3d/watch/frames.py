"""Where a thread is, by its Python frames."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import NamedTuple

MAX_CHARS = 120


class Place(NamedTuple):
    """``file:line in function``: the innermost frame, and the innermost of the user's own code."""

    at: str = ""
    user: str = ""


def place_of(thread: int) -> Place:
    """Where the thread of this identifier is; empty if it has ended."""
    frame = sys._current_frames().get(thread)
    return _place((frame, frame.f_lineno) for frame in _outwards(frame))


def place_of_error(error: BaseException) -> Place:
    """Where an error came from."""
    return _place(reversed(list(walk_tb(error.__traceback__))))


def is_users(filename: str) -> bool:
    """Whether a file is neither Python's, nor an installed package's, nor this package's."""
    if filename.startswith("<"):
        return False
    return not any(Path(filename).is_relative_to(folder) for folder in _foreign())


@cache
def _foreign() -> tuple[Path, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    torch = Path(str(sys.modules["torch"].__file__)).parent if "torch" in sys.modules else None
    installed = [Path(sysconfig.get_paths()[name]) for name in names]
    return (Path(__file__).parents[1], *installed, *([torch] if torch else []))


def _place(frames: Iterable[tuple[FrameType, int]]) -> Place:
    """Of frames and lines, the innermost first."""
    at = user = ""
    for frame, line in frames:
        at = at or _show(frame, line)
        if is_users(frame.f_code.co_filename):
            user = _show(frame, line)
            break
    return Place(at, user)


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _show(frame: FrameType, line: int) -> str:
    code = frame.f_code
    path = Path(code.co_filename)
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    elif len(path.parts) > 3:
        path = Path(*path.parts[-3:])
    return f"{path}:{line} in {code.co_name}"[-MAX_CHARS:]
