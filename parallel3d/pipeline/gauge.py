"""What one unit does for one microbatch: its time or FLOPs, and the bytes that it keeps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from .activations import Activations
from .costs import UnitCosts
from .runtime import Criterion
from .stage import Stage, Unit

REPEATS = 5
Read = Callable[[], float]


class Gauged(NamedTuple):
    """A unit's costs, and its output, which is the next unit's input."""

    costs: UnitCosts
    output: Any


@contextmanager
def seconds(device: torch.device) -> Iterator[Read]:
    """A clock that first lets the device finish."""

    def read() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    yield read


@contextmanager
def flops() -> Iterator[Read]:
    """A count of the floating-point operations of matrix products and attention."""
    aten = torch.ops.aten
    on_cpu: dict[Any, Any] = {  # which torch does not count
        aten._scaled_dot_product_flash_attention_for_cpu: _attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    }
    counter = FlopCounterMode(display=False, custom_mapping=on_cpu)
    with counter:
        yield counter.get_total_flops


def gauge(
    unit: Unit,
    x: Any,
    read: Read,
    *,
    activations: Activations,
    end: Criterion | None,
    split: bool = True,
    compiled: bool = False,
) -> Gauged:
    """Run a unit forward and backward, once to warm up, and take the least of five runs.

    The least, because whatever else a machine does only adds to a time.
    Its parameters must have gradients, which are written. With ``split`` layers that can defer
    their weight gradients do; all else of a backward counts as input gradient. ``end`` follows the
    last unit.
    """
    stage = _stage(unit, activations, split)
    output, saved, deferred = _bytes(stage, unit, x, end)
    if compiled:
        unit.module.compile()
        stage = _stage(unit, activations, split)
    runs = [_run(stage, split, x, read, end) for _ in range(REPEATS + 1)][1:]
    forward, input_grad, weight_grad = map(min, zip(*runs, strict=True))
    handed = 0 if end else sum(map(_size, _tensors(output)))
    costs = UnitCosts(forward, input_grad, weight_grad, saved, deferred if split else 0, handed)
    return Gauged(costs, output)


def _stage(unit: Unit, activations: Activations, split: bool) -> Stage:
    stage = Stage(0, [unit], activations=activations, split=split)
    stage.train(True)
    return stage


def _run(
    stage: Stage, split: bool, x: Any, read: Read, end: Criterion | None
) -> tuple[float, float, float]:
    """The costs of forward, input gradient and weight gradient, with those of the loss."""
    x = tree_map_only(Tensor, _fresh, x)
    start = read()
    output = stage.forward(0, x, 0)
    if end is not None:
        end.forward(0, output)
    forward = read()
    gradients = [torch.ones_like(leaf) for leaf in _tensors(output) if leaf.requires_grad]
    ready = read()
    backward = stage.input_grad if split else stage.backward
    backward(0, gradients if end is None else end.backward(0))
    input_grad = read()
    if split:
        stage.weight_grad(0)
    return forward - start, input_grad - ready, read() - input_grad


def _fresh(leaf: Tensor) -> Tensor:
    """The same values as a leaf without a gradient yet."""
    return leaf.detach().requires_grad_(leaf.requires_grad)


def _bytes(stage: Stage, unit: Unit, x: Any, end: Criterion | None) -> tuple[Any, int, int]:
    """The output; bytes kept to the input gradient; bytes kept from there for the weights.

    An output that its own unit saves counts here, and with the next unit as that one's input.
    """
    saved = _Storages()
    deferred = _Storages()
    own = {p.untyped_storage().data_ptr() for p in unit.module.parameters()}
    handles = [
        module.register_forward_hook(
            lambda _, given, named, out: deferred.add(*_tensors((given, named, out))),
            with_kwargs=True,
        )
        for module in unit.module.modules()
        if hasattr(module, "defer")
        and any(p.requires_grad for p in module.parameters(recurse=False))
    ]

    def keep(tensor: Tensor) -> Tensor:
        saved.add(tensor)
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    # The graph of a forward that will be repeated is dropped.
    with nullcontext() if stage.activations.repeats(unit) else hooks:
        output = stage.forward(0, x, 0)
    saved.add(*stage.kept(0))
    with hooks:
        if end is not None:
            end.forward(0, output)
    for handle in handles:
        handle.remove()
    stage.clear()
    return output, saved.bytes(own), deferred.bytes(own)


class _Storages:
    """The memory behind tensors, each once; held, so that no address comes twice."""

    def __init__(self) -> None:
        self._held: dict[int, torch.UntypedStorage] = {}

    def add(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._held[storage.data_ptr()] = storage

    def bytes(self, without: set[int]) -> int:
        """Of all but some, by address."""
        return sum(s.nbytes() for address, s in self._held.items() if address not in without)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _attention(q: Any, k: Any, v: Any, *args: Any, out_shape: Any = None, **rest: Any) -> int:
    return int(sdpa_flop_count(q, k, v))


def _attention_backward(
    grad: Any, q: Any, k: Any, v: Any, *args: Any, out_shape: Any = None, **rest: Any
) -> int:
    return int(sdpa_backward_flop_count(grad, q, k, v))
