"""The host's memory for what units keep between updates: masters and the optimizer's state."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

PAGE = 4096  # bytes; each tensor begins at a multiple


class Room(NamedTuple):
    """What a tensor needs: elements, flat, and their dtype."""

    numel: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Of the elements."""
        return self.numel * self.dtype.itemsize


class Store:
    """Owns one block of host memory a unit, pinned where a device copies from it.

    Args:
        pinned: whether the device copies faster from memory that stays where it is.
    """

    def __init__(self, pinned: bool = False) -> None:
        self._pinned = pinned
        self._blocks: dict[int, Tensor] = {}
        self._tensors: dict[int, dict[str, Tensor]] = {}

    def reserve(self, unit: int, rooms: Mapping[str, Room]) -> None:
        """Take memory for the tensors that a unit will keep, by name; once for each unit."""
        starts, size = {}, 0
        for name, room in rooms.items():
            starts[name] = size
            size += -(-room.nbytes // PAGE) * PAGE
        block = self._blocks[unit] = self._block(unit, size)
        self._tensors[unit] = {
            name: block[starts[name] : starts[name] + room.nbytes].view(room.dtype)
            for name, room in rooms.items()
        }

    def tensor(self, unit: int, name: str) -> Tensor:
        """What was reserved, [numel]; KeyError for another name."""
        return self._tensors[unit][name]

    def has(self, unit: int, name: str) -> bool:
        """Whether it was reserved."""
        return name in self._tensors.get(unit, {})

    def owns(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in the memory of this store."""
        address = tensor.untyped_storage().data_ptr()
        return any(b.untyped_storage().data_ptr() == address for b in self._blocks.values())

    @property
    def nbytes(self) -> int:
        """Of all blocks."""
        return sum(block.numel() for block in self._blocks.values())

    def fetch(self, unit: int) -> None:
        """A unit is next: have its memory near."""

    def release(self, unit: int) -> None:
        """A unit is not needed for some time."""

    def let_go(self, unit: int) -> None:
        """As ``release``, of memory that was read or will soon be written again."""

    def settle(self) -> None:
        """Wait for what ``release`` has begun."""

    def _block(self, unit: int, size: int) -> Tensor:
        block = torch.empty(size, dtype=torch.uint8)
        if self._pinned and size:
            _pin(block)
        return block


def _pin(block: Tensor) -> None:
    """Lock the block's pages. Torch's own pinned memory is rounded up to a power of two."""
    cuda = torch.cuda.cudart()
    torch.cuda.check_error(cuda.cudaHostRegister(block.data_ptr(), block.nbytes, 0))
    # With the store, whose owner keeps it as long as its tensors; not at exit, when the device may
    # be gone before this.
    weakref.finalize(block, _unpin, cuda, block.data_ptr()).atexit = False


def _unpin(cuda: Any, address: int) -> None:
    torch.cuda.synchronize()  # copies may be queued
    cuda.cudaHostUnregister(address)
