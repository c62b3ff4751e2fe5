"""How an optimizer is given: called with groups of options, it makes a torch optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

Options = dict[str, Any]
Make = Callable[[list[Options]], torch.optim.Optimizer]


def make_over(
    make: Make, options: Options, parameters: Sequence[nn.Parameter]
) -> torch.optim.Optimizer:
    """Over these parameters, with the options of one group."""
    return make([{**options, "params": list(parameters)}])


def made_for_trial(make: Make, options: Options) -> torch.optim.Optimizer:
    """Over a matrix of one zero, which any optimizer takes: to look at its class and options."""
    return make_over(make, options, [nn.Parameter(torch.zeros(1, 1))])
