"""Tensors cut at random, or as ZeRO and tensor parallelism would; files damaged on purpose."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from parallel3d.checkpoint import Fragment
from parallel3d.placement import Rectangle, Replicate, Shard, rectangles, view_2d
from parallel3d.topology import Axis

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool]


def tensor_of(rng: random.Random, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rng.getrandbits(62))
    return torch.randint(0, 100, tuple(shape), generator=generator).to(dtype)


def random_tensors(rng: random.Random, count: int) -> dict[str, Tensor]:
    shapes = [[rng.randint(0, 6) for _ in range(rng.randint(0, 3))] for _ in range(count)]
    return {f"weight/{i}": tensor_of(rng, s, rng.choice(DTYPES)) for i, s in enumerate(shapes)}


def cut_at_random(rng: random.Random, place: Rectangle, depth: int = 4) -> list[Rectangle]:
    if place.area == 0:
        return []
    if depth == 0 or place.area == 1 or rng.random() < 0.2:
        return [place]
    row, col, rows, cols = place
    if rows > 1 and (cols == 1 or rng.random() < 0.5):
        at = rng.randint(1, rows - 1)
        parts = [Rectangle(row, col, at, cols), Rectangle(row + at, col, rows - at, cols)]
    else:
        at = rng.randint(1, cols - 1)
        parts = [Rectangle(row, col, rows, at), Rectangle(row, col + at, rows, cols - at)]
    return [piece for part in parts for piece in cut_at_random(rng, part, depth - 1)]


def fragment_of(key: str, whole: Tensor, places: Sequence[Rectangle], blank: bool) -> Fragment:
    """These rectangles of a tensor, with its values, or ``blank``: to be loaded."""
    view = whole.reshape(view_2d(tuple(whole.shape)))
    parts = [view[r.row : r.row + r.rows, r.col : r.col + r.cols].reshape(-1) for r in places]
    data = torch.cat([whole.new_empty(0), *parts])
    return Fragment(key, tuple(whole.shape), list(places), data.zero_() if blank else data)


def scatter(
    rng: random.Random, tensors: Mapping[str, Tensor], size: int, *, blank: bool = False
) -> list[list[Fragment]]:
    """Fragments of every rank: each element of each tensor on exactly one of ``size`` ranks."""
    ranks: list[list[Fragment]] = [[] for _ in range(size)]
    for key, whole in tensors.items():
        rows, cols = view_2d(tuple(whole.shape))
        hands: dict[int, list[Rectangle]] = {rng.randrange(size): []}
        for place in cut_at_random(rng, Rectangle(0, 0, rows, cols)):
            hands.setdefault(rng.randrange(size), []).append(place)
        for rank, places in hands.items():
            ranks[rank].append(fragment_of(key, whole, places, blank))
    return ranks


def sharded(
    key: str, whole: Tensor, dp: int, tp: int, rank: int, dim: int | None, *, blank: bool = False
) -> list[Fragment]:
    """Of one tensor, what rank (dp, tp) = divmod(rank, tp) holds under ZeRO over a tp cut."""
    shape = list(whole.shape)
    if dim is not None:
        shape[dim] = -(-shape[dim] // tp)
    placement = Replicate() if dim is None else Shard(dim, (whole.shape[dim],))
    axis = Axis("tp", tp, rank % tp, tuple(range(tp)))
    numel = torch.Size(shape).numel()
    share = -(-numel // dp)
    start = min(rank // tp * share, numel)
    if dim is None and rank % tp:
        return []
    found = rectangles(placement, tuple(shape), axis, start, min(start + share, numel))
    return [fragment_of(key, whole, [place for _, place in found], blank)]


def check_equal(fragments: Sequence[Fragment], tensors: Mapping[str, Tensor]) -> None:
    for fragment in fragments:
        wanted = fragment_of(fragment.key, tensors[fragment.key], fragment.rectangles, False)
        assert torch.equal(fragment.data, wanted.data), fragment.key


def damage_file(checkpoint: Path, how: str, name: str = "rank-00000.bin") -> None:
    path = checkpoint / name
    data = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
    elif how == "truncated":
        path.write_bytes(data[:-1])
    else:
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
