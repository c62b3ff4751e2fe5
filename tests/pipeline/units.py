"""Units that do what users' units do, and one autograd graph over all of them to compare with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from parallel3d.pipeline.activations import Activations
from parallel3d.pipeline.stage import AtHand, Stage, Unit

WIDTH = 8
Modules = Callable[[], list[nn.Module]]


class Apply(nn.Module):
    """A unit without parameters, from a function."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


class Twice(nn.Module):
    """One layer used two times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x).relu())


class OnFirst(nn.Module):
    """Works on the first of a tuple and passes the others through."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: tuple[Any, ...]) -> tuple[Any, ...]:
        return self.module(x[0]), *x[1:]


class Told(AtHand):
    """Writes down what it is told, and calls ``after`` with each unit whose backward is done."""

    def __init__(
        self, after: Callable[[int], None] = lambda unit: None, to: list[str] | None = None
    ) -> None:
        self.after = after
        self.events: list[str] = [] if to is None else to

    def before_forward(self, unit: int) -> None:
        self.events.append(f"before forward {unit}")

    def before_backward(self, unit: int, microbatch: int) -> None:
        self.events.append(f"before backward {unit} of {microbatch}")

    def before_weight_grad(self, unit: int, microbatch: int) -> None:
        self.events.append(f"before weights {unit} of {microbatch}")

    def after_backward(self, unit: int, microbatch: int, reduce: bool) -> None:
        self.events.append(f"{'reduce' if reduce else 'done'} {unit} of {microbatch}")
        self.after(unit)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def stage_of(
    modules: list[nn.Module], recompute: bool | str | Activations = False, **options: Any
) -> Stage:
    units = [Unit(number, f"{number}", module) for number, module in enumerate(modules)]
    return Stage(0, units, activations=keeping(recompute), **options)


def keeping(recompute: bool | str | Activations) -> Activations:
    """What units keep: by a mode of recompute, where True is ``full``."""
    if isinstance(recompute, Activations):
        return recompute
    return Activations({True: "full", False: "none"}.get(recompute, str(recompute)))


def fresh(tree: Any) -> Any:
    """The same values in memory of their own, as leaves."""
    return tree_map_only(Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), tree)


def gradients_for(output: Any) -> list[Tensor]:
    """A gradient for each leaf that needs one, which depends on its place only."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
            gradient = torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype)
            found += [gradient] if leaf.requires_grad else []
    return found


def same(one: Any, other: Any) -> bool:
    """Whether leaves are equal, bit for bit where they are tensors."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return bool(one == other)
    return one.dtype == other.dtype and torch.equal(one, other)


def hidden(needs_grad: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(3, WIDTH, generator=generator, requires_grad=needs_grad)


def made(modules: Modules) -> list[nn.Module]:
    torch.manual_seed(1)
    return modules()


def as_one_graph(modules: list[nn.Module], x: Tensor) -> tuple[list[Any], list[Any], list[Any]]:
    """Outputs, gradients of the input (zeros if none came) and the parameters, in plain PyTorch."""
    leaf = fresh(x)
    output = nn.Sequential(*modules)(leaf.clone() if leaf.requires_grad else leaf)
    gradients = gradients_for(output)
    if gradients:
        needing = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
        torch.autograd.backward(needing, gradients)
    grad = torch.zeros_like(x) if leaf.grad is None else leaf.grad
    inputs = [grad] if x.requires_grad else []
    return tree_leaves(output), inputs, [p.grad for m in modules for p in m.parameters()]


def by_stage(
    modules: list[nn.Module], x: Any, **options: Any
) -> tuple[list[Any], list[Any], list[Any]]:
    stage = stage_of(modules, **options)
    output = stage.forward(0, fresh(x), seed=0)
    inputs = stage.backward(0, gradients_for(output))
    assert stage.in_flight == 0
    return tree_leaves(output), inputs, [p.grad for m in modules for p in m.parameters()]


def agree(one: tuple[list[Any], ...], other: tuple[list[Any], ...]) -> bool:
    return all(len(a) == len(b) and all(map(same, a, b)) for a, b in zip(one, other, strict=True))
