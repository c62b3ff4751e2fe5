"""How long files and functions are: fails on a file over 400 lines or a function over 60."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

MAX_FILE, MAX_FUNCTION = 400, 60
FOLDERS = ("parallel3d", "models", "recipes", "tools", "tests")


class Size(NamedTuple):
    """Lines of a file or a function, and where it stands."""

    lines: int
    where: str


def main(root: Path) -> int:
    """Print the medians and the largest, then what is too long; the exit code."""
    paths = [path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py"))]
    files = [Size(len(p.read_text().splitlines()), str(p.relative_to(root))) for p in paths]
    functions = [size for path in paths for size in _functions(path, root)]
    print(_summary("file", files, MAX_FILE))
    print(_summary("function", functions, MAX_FUNCTION))
    too_long = [s for s in files if s.lines > MAX_FILE]
    too_long += [s for s in functions if s.lines > MAX_FUNCTION]
    for size in too_long:
        print(f"{size.where}: {size.lines} lines")
    return 1 if too_long else 0


def _functions(path: Path, root: Path) -> Iterator[Size]:
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            where = f"{path.relative_to(root)}:{node.lineno} {node.name}"
            yield Size((node.end_lineno or node.lineno) - node.lineno + 1, where)


def _summary(kind: str, sizes: list[Size], most: int) -> str:
    written = [size for size in sizes if size.lines]  # not the empty __init__.py
    if not written:
        return f"no {kind}"
    middle, largest = median(size.lines for size in written), max(written)
    return (
        f"{len(written)} {kind}s, median {middle:g} lines, longest {largest.lines} "
        f"of {most} ({largest.where})"
    )


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parents[1]))
