"""Token files in which a token says where it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from parallel3d.data import TokenWriter


def write(folder: Path, documents: Iterable[Sequence[int]], vocab_size: int) -> Path:
    """Token files with exactly these documents."""
    with TokenWriter(folder, vocab_size) as writer:
        for ids in documents:
            writer.add(ids)
        writer.finish(tokenizer="bytes", source="test", source_state="")
    return folder


def counting(folder: Path, sizes: Sequence[int]) -> Path:
    """Documents of these sizes that hold 0, 1, 2, ... one after another."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    pairs = zip(ends, sizes, strict=True)
    return write(folder, [range(end - size, end) for end, size in pairs], max(sum(sizes), 1))
