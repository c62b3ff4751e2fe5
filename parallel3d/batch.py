"""A local batch as microbatches."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from .comm.collectives import all_gather_objects
from .rng import seed_of
from .topology import Axis, Topology


@dataclass
class Batch:
    """Inputs (None off the first stage) and targets of each microbatch."""

    inputs: list[Any]
    targets: list[Any]


def split(x: Any, target: Any, count: int, training: bool) -> Batch:
    """Cut a batch along dim 0 into ``count`` microbatches, or take a list as ready ones.

    In evaluation a batch may be smaller than ``count``, and empty: then there are fewer parts.
    """
    if isinstance(x, list):
        if target is not None:
            raise ValueError("pass either a list of (x, target) microbatches, or x and target")
        if training and not x:
            raise ValueError("an empty list of microbatches: a training step needs one or more")
        if not all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in x):
            raise ValueError("a list must be of (x, target) microbatches: pass a batch as a tensor")
        return Batch([pair[0] for pair in x], [pair[1] for pair in x])
    size = _size(target, "target")
    if x is not None and _size(x, "x") != size:
        raise ValueError(f"x has {_size(x, 'x')} samples along dim 0, but target has {size}")
    if training and size == 0:
        raise ValueError("a local batch of 0 samples: a training step needs one or more")
    if training and size < count:
        raise ValueError(
            f"a local batch of {size} cannot be cut into num_microbatches = {count}: "
            f"use a larger batch or num_microbatches={size}"
        )
    count = min(count, size)
    inputs = [None] * count if x is None else _cut(x, count)
    return Batch(inputs, _cut(target, count))


def to_device(batch: Batch, device: torch.device, dtype: torch.dtype, first: bool) -> Batch:
    """Put a batch on the device, floating inputs in the model's dtype; inputs only if ``first``.

    No gradient leaves the model: a batch that asks for one is detached.
    """

    def move(tensor: Tensor) -> Tensor:
        return tensor.detach().to(device, non_blocking=True)

    def cast(tensor: Tensor) -> Tensor:
        # A copy for each microbatch: the first unit may work on it in place.
        wanted = dtype if tensor.is_floating_point() else tensor.dtype
        return tensor.detach().to(device, wanted, non_blocking=True, copy=True)

    inputs = [tree_map_only(Tensor, cast, x) if first else None for x in batch.inputs]
    targets = [tree_map_only(Tensor, move, target) for target in batch.targets]
    return Batch(inputs, targets)


def shapes_of(batch: Batch) -> list[int]:
    """For each microbatch a number that stands for the shapes and dtypes of its input."""
    numbers = []
    for x in batch.inputs:
        leaves, spec = tree_flatten(x)
        text = [f"{tuple(t.shape)} {t.dtype}" if isinstance(t, Tensor) else repr(t) for t in leaves]
        numbers.append(seed_of(str(spec), *text))
    return numbers


def check_same(batch: Batch, topology: Topology, is_list: bool = False) -> bool:
    """Raise ValueError on every rank unless each dp index's ranks were given the same batch.

    Whether any rank was given a list of ready microbatches, whose number may change.
    """
    mine = (topology.dp.rank, len(batch.targets), *_fingerprint(batch))
    seen, lists = zip(*all_gather_objects((mine, is_list), topology.world), strict=True)
    _check_number(count for _, count, _, _ in seen)
    for what, at in (("x", 2), ("target", 3)):
        for dp in range(topology.dp.size):
            prints = {row[at] for row in seen if row[0] == dp and row[at] is not None}
            if len(prints) > 1:
                raise ValueError(
                    f"the ranks of dp index {dp} were given different {what}: all pp and tp ranks "
                    f"of one dp index must pass the same batch (cut it by topology.dp.rank)"
                )
    return any(lists)


def check_same_number(batch: Batch, world: Axis) -> None:
    """Raise ValueError on every rank unless they have equally many microbatches."""
    _check_number(all_gather_objects(len(batch.targets), world))


def _check_number(seen: Iterable[int]) -> None:
    if len(counts := sorted(set(seen))) > 1:
        raise ValueError(
            f"ranks were given {', '.join(map(str, counts))} microbatches: every dp rank runs the "
            f"same number"
        )


def _size(tree: Any, what: str) -> int:
    sizes = {leaf.shape[0] for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.dim()}
    if len(sizes) != 1:
        found = ", ".join(map(str, sorted(sizes))) or "none"
        raise ValueError(f"the tensors of {what} must have one size along dim 0, found {found}")
    return int(sizes.pop())


def _cut(tree: Any, count: int) -> list[Any]:
    """Parts along dim 0; what has no dim 0 goes to every part."""
    if count == 0:
        return []
    leaves, spec = tree_flatten(tree)
    cut = [
        torch.tensor_split(leaf, count)
        if isinstance(leaf, Tensor) and leaf.dim()
        else [leaf] * count
        for leaf in leaves
    ]
    return [tree_unflatten(list(parts), spec) for parts in zip(*cut, strict=True)]


def _fingerprint(batch: Batch) -> tuple[str | None, str]:
    return (
        None if any(x is None for x in batch.inputs) else _hash(batch.inputs),
        _hash(batch.targets),
    )


def _hash(tree: Any) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            data = leaf.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1)
            digest.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            digest.update(data.view(torch.uint8).numpy().data if data.numel() else b"")
    return digest.hexdigest()
