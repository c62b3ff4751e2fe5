"""Memory that tensors keep: their storages, counted from the operation that made them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """A registry of the storages made while it is active, for as long as somebody keeps them.

    It sees the operations of backward too, on the CPU, where they run in the same thread. It keeps
    no storage itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[StorageWeakRef, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = set(_storages((args, kwargs)))
        result = func(*args, **(kwargs or {}))
        for storage, size in _storages(result).items():
            if storage not in given:
                self._sizes[storage] = size
        self.peak = max(self.peak, self.bytes())
        return result

    def bytes(self, without: Iterable[Any] = ()) -> int:
        """What is kept now, but for the storages of some tensors, which may lie in pytrees."""
        for storage in [storage for storage in self._sizes if storage.expired()]:
            del self._sizes[storage]
        left_out = _storages(list(without))
        return sum(size for storage, size in self._sizes.items() if storage not in left_out)


def _storages(tree: Any) -> dict[StorageWeakRef, int]:
    return {
        StorageWeakRef(leaf.untyped_storage()): leaf.untyped_storage().nbytes()
        for leaf in tree_leaves(tree)
        if isinstance(leaf, Tensor) and not leaf.is_meta
    }


def resident_bytes(start: str) -> int:
    """Of this process's memory, what is mapped from files whose path begins so and is resident."""
    total, mine = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, *values = line.split()
        if not key.endswith(":"):
            mine = len(values) > 4 and values[4].startswith(start)
        elif mine and key == "Rss:":
            total += 1024 * int(values[0])
    return total
