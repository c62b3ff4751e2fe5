from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel3d.optim.probe import check_elementwise

CPU = torch.device("cpu")
ELEMENTWISE = {
    "Adam": {"amsgrad": True},
    "AdamW": {"fused": True},
    "Adamax": {},
    "ASGD": {},
    "Adadelta": {},
    "Adagrad": {"initial_accumulator_value": 0.1},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Rprop": {},
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
}


class NormWise(torch.optim.Optimizer):
    """Divides each parameter's gradient by its norm, as LARS and LAMB do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad / p.grad.norm(), alpha=-group["lr"])


class ByAllGradients(NormWise):
    """Divides by the largest gradient of all parameters that it was given."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = [p for group in self.param_groups for p in group["params"]]
        largest = max(p.grad.abs().max() for p in parameters)
        for p in parameters:
            p.sub_(0.1 * p.grad / largest)


class Noisy(NormWise):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn_like(p))


class ByRank(NormWise):
    """Decays matrices only, by the shape that it sees."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.9 if p.ndim > 1 else 1.0)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_an_elementwise_optimizer_passes(name: str) -> None:
    make = partial(getattr(torch.optim, name), **ELEMENTWISE[name])
    check_elementwise(make, [{}, {"weight_decay": 0.5}], CPU)


@pytest.mark.parametrize("make", [NormWise, ByAllGradients, Noisy, ByRank, torch.optim.Adafactor])
def test_one_that_looks_at_whole_tensors_is_refused_by_name(make: Any) -> None:
    with pytest.raises(ValueError, match=f"optimizer {make.__name__} is not elementwise"):
        check_elementwise(make, [{}], CPU)


@pytest.mark.parametrize(
    ("name", "reason"), [("LBFGS", "closure"), ("Muon", "2D"), ("SparseAdam", "dense")]
)
def test_one_that_cannot_take_flat_pieces_is_refused_with_its_own_reason(
    name: str, reason: str
) -> None:
    with pytest.raises(ValueError, match=f"optimizer {name} cannot update flat.*{reason}"):
        check_elementwise(getattr(torch.optim, name), [], CPU)


def test_a_group_whose_options_make_it_norm_wise_is_found() -> None:
    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        by_norm = any(group.pop("by_norm", False) for group in groups)
        return NormWise(groups) if by_norm else torch.optim.SGD(groups, lr=0.1)

    check_elementwise(make, [{}], CPU)
    with pytest.raises(ValueError, match="NormWise is not elementwise"):
        check_elementwise(make, [{}, {"by_norm": True}], CPU)


def test_an_option_that_the_optimizer_itself_refuses_keeps_its_message() -> None:
    with pytest.raises(ValueError, match="Invalid learning rate: -1"):
        check_elementwise(partial(torch.optim.SGD, lr=-1.0), [], CPU)


def test_no_random_state_changes() -> None:
    before: Tensor = torch.get_rng_state()
    with pytest.raises(ValueError, match="Noisy"):
        check_elementwise(Noisy, [], CPU)
    assert torch.equal(torch.get_rng_state(), before)
