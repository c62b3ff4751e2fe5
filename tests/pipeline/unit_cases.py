"""Lists of units that pass to each other whatever a user's may."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.pipeline.units import WIDTH, Apply, Modules, OnFirst, Twice, frozen, linear


def two_outputs(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 3
    return y, y.sin()


def packed(x: Tensor) -> dict[str, Any]:
    return {"h": x * 2, "ids": torch.arange(3), "keep": x > 0, "scale": 2, "flag": True, "no": None}


def unpacked(x: dict[str, Any]) -> Tensor:
    assert x["ids"].dtype == torch.int64 and x["keep"].dtype == torch.bool
    assert x["scale"] == 2 and x["flag"] is True and x["no"] is None
    return x["h"] * x["keep"] * x["scale"] + x["ids"][:, None]


def in_place_through_a_view(x: Tensor) -> Tensor:
    x[:, ::2].mul_(2)
    return x


CASES: dict[str, Modules] = {
    "layers": lambda: [linear(), nn.GELU(), nn.LayerNorm(WIDTH), linear(), nn.Tanh()],
    "in place on a linear layer's output": lambda: [linear(), nn.ReLU(inplace=True), linear()],
    "in place on the stage's input": lambda: [Apply(lambda x: x.mul_(2)), linear()],
    "in place through a view": lambda: [Apply(in_place_through_a_view), linear()],
    "in place inside and returned": lambda: [Apply(lambda x: x.add_(1)), Apply(torch.square)],
    "y and f(y)": lambda: [linear(), Apply(two_outputs), Apply(lambda x: x[0] + 2 * x[1])],
    "y and f(y) as last": lambda: [linear(), Apply(two_outputs)],
    "y and f(y), then y in place": lambda: [
        linear(),
        Apply(lambda x: (x * 3, x.sin())),
        Apply(lambda x: x[0].add_(1) * x[1]),
    ],
    "y twice": lambda: [linear(), Apply(lambda x: (x, x)), Apply(lambda x: x[0] * x[1].sin())],
    "parts of one memory": lambda: [
        Apply(lambda x: (x * 2).chunk(3)),
        Apply(lambda x: x[0] * x[1] + x[2]),
    ],
    "a dict of tensors, numbers and None": lambda: [linear(), Apply(packed), Apply(unpacked)],
    "nested tuples and lists": lambda: [
        Apply(lambda x: [(x * 2, None), {"a": x.cos()}]),
        Apply(lambda x: x[0][0] - x[1]["a"]),
    ],
    "an output without gradient": lambda: [
        Apply(lambda x: (x * 2, x.detach() * 5)),
        OnFirst(linear()),
    ],
    "an input that is not used": lambda: [Apply(two_outputs), Apply(lambda x: x[1]), linear()],
    "an input that nothing uses": lambda: [Apply(lambda x: torch.ones_like(x)), linear()],
    "a frozen unit between": lambda: [linear(), frozen(linear()), nn.ReLU(), linear()],
    "frozen units first": lambda: [frozen(linear()), linear(), frozen(linear())],
    "everything frozen": lambda: [frozen(linear()), nn.ReLU(), frozen(linear())],
    "a module used twice in a unit": lambda: [Twice(), nn.ReLU(), Twice()],
    "the identity": lambda: [nn.Identity(), linear(), nn.Identity()],
    "a transposed output": lambda: [linear(), Apply(lambda x: x.t()), Apply(torch.exp)],
    "an expanded output": lambda: [Apply(lambda x: x[:, :1].expand(3, WIDTH)), Apply(torch.exp)],
    "complex numbers": lambda: [
        Apply(lambda x: torch.complex(x, x.sin()).conj()),
        Apply(lambda z: z * z),
        Apply(torch.Tensor.abs),
    ],
    "no element": lambda: [Apply(lambda x: (x[:0], x * 2)), Apply(lambda x: x[1] + x[0].sum())],
}
REPEATABLE = sorted(name for name in CASES if "in place" not in name)
