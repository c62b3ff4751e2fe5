"""The most bytes of tensor memory that lived at one time inside a block, counted by storage."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakBytes(TorchDispatchMode):
    """Hears every operator; each new storage counts from its first appearance to its end.

    ``start`` are tensors that live already. A storage counts with what it has at the time: what is
    sharded is often freed and filled again without an end of its storage.
    """

    def __init__(self, start: list[Tensor]) -> None:
        super().__init__()
        self.peak = 0
        self._living: dict[int, weakref.ref[Any]] = {}
        for tensor in start:
            self._add(tensor)
        self._look()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operator and register what it takes and returns."""
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, out)):
            if isinstance(leaf, Tensor):
                self._add(leaf)
        self._look()
        return out

    def _add(self, tensor: Tensor) -> None:
        local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
        storage = local.untyped_storage()
        key = storage._cdata
        if local.device == torch.device("meta") or key in self._living:
            return
        self._living[key] = weakref.ref(storage, lambda _: self._living.pop(key, None))

    def _look(self) -> None:
        living = [reference() for reference in self._living.values()]
        self.peak = max(self.peak, sum(each.nbytes() for each in living if each is not None))
