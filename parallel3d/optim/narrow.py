"""Whether an optimizer's state may be kept in fewer bits than it is updated in.

[Note: a step too small] bf16 has 8 bits: a number between two powers of two has 128 neighbours. A
moving average with factor ``beta`` moves by at most ``1 - beta`` of itself where it falls, and a
move of less than half the distance to the next number is rounded away: the average stands still,
and with it the rate of each weight. Half a distance is at most 2^-8 of the number.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .make import Make, Options, make_over

LARGEST_BETA = 1 - 2**-8
FACTORS = {"betas", "alpha", "rho", "momentum"}
SUMS = (torch.optim.Adagrad, torch.optim.ASGD)
ELEMENTS = 64


def check_narrow(make: Make, groups: Sequence[Options], device: torch.device) -> None:
    """Raise ValueError unless bf16 can hold the state that steps of these groups make.

    ``make`` is called with each group's options. Nothing is sent.
    """
    for options in groups or [{}]:
        parameter = nn.Parameter(torch.ones(ELEMENTS, device=device))
        optimizer = make_over(make, options, [parameter])
        name = type(optimizer).__name__
        _check_sums(name, optimizer)
        _check_factors(name, optimizer.param_groups[0])
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        _check_state(name, optimizer.state[parameter], parameter)


def _check_factors(name: str, options: Options) -> None:
    for key in FACTORS & options.keys():
        value = tuple(map(float, options[key])) if key == "betas" else float(options[key])
        if (max(value) if isinstance(value, tuple) else value) > LARGEST_BETA:
            raise ValueError(
                f"{name} with {key} = {value} and optim.state_dtype = bf16: a moving average "
                f"with a factor above {LARGEST_BETA:.4f} stands still in bf16, so set smaller "
                f"optim.{key}, such as {'[0.9, 0.95]' if key == 'betas' else 0.95}, or "
                f"optim.state_dtype=null"
            )


def _check_sums(name: str, optimizer: torch.optim.Optimizer) -> None:
    if isinstance(optimizer, SUMS):
        raise ValueError(
            f"{name} adds up what it keeps from the first step on, and optim.state_dtype = bf16: a "
            f"long sum stands still in bf16, so set optim.state_dtype=null"
        )


def _check_state(name: str, state: Options, parameter: Tensor) -> None:
    kept = {key: v for key, v in state.items() if isinstance(v, Tensor) and v.numel() > 1}
    if not kept:
        raise ValueError(
            f"{name} with these options keeps no moments that optim.state_dtype = bf16 would "
            f"narrow: set optim.state_dtype=null"
        )
    for key, value in kept.items():
        if value.shape != parameter.shape:
            raise ValueError(
                f"{name} keeps {key} {list(value.shape)} of a parameter "
                f"{list(parameter.shape)}, which is not elementwise: optim.state_dtype = bf16 is "
                f"for moments such as those of AdamW, so set optim.state_dtype=null"
            )
