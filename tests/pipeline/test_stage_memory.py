from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from tests.pipeline.units import WIDTH, Apply, Told, gradients_for, hidden, linear, stage_of


class Saved:
    """Counts what autograd keeps."""

    def __init__(self) -> None:
        self.alive: weakref.WeakSet[Tensor] = weakref.WeakSet()

    def pack(self, tensor: Tensor) -> Tensor:
        kept = tensor.detach()
        self.alive.add(kept)
        return kept

    def __enter__(self) -> Saved:
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda kept: kept)
        self.hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.hooks.__exit__(*error)


def test_saved_tensors_are_those_of_the_microbatches_in_flight() -> None:
    stage = stage_of([linear(), nn.GELU(), linear()])
    with Saved() as saved:
        stage.forward(0, hidden(), seed=0)
        of_one = len(saved.alive)
        for k in range(1, 12):
            stage.forward(k, hidden(), seed=0)
            assert len(saved.alive) == 2 * of_one
            stage.backward(k - 1, [torch.ones(3, WIDTH)])
            assert len(saved.alive) == of_one
    assert of_one > 0


def test_recompute_keeps_inputs_only_and_one_unit_at_a_time() -> None:
    alive = []
    with Saved() as saved:
        stage = stage_of(
            [linear(), nn.GELU(), linear()],
            recompute=True,
            weights=Told(lambda unit: alive.append(len(saved.alive))),
        )
        output = stage.forward(0, hidden(), seed=0)
        assert len(saved.alive) == 0
        stage.backward(0, gradients_for(output))
    assert alive == [0, 0, 0]


def test_an_output_is_dropped_once_it_is_handed_on() -> None:
    made_by_first: list[weakref.ref[Tensor]] = []

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        made_by_first.append(weakref.ref(output))

    first = linear()
    first.register_forward_hook(keep)
    stage = stage_of([first, Apply(lambda x: x + 1)])
    y = stage.forward(0, hidden(), seed=0)
    handed = weakref.ref(y)
    del y
    assert made_by_first[0]() is None and handed() is None
    stage.backward(0, [torch.ones(3, WIDTH)])
    assert first.weight.grad is not None
