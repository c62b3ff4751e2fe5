"""Whether an optimizer is elementwise: on pieces of parameters it does what it does on whole ones.

A flat buffer gives the optimizer pieces that end where shards do, not where parameters do. One that
looks at a tensor as a whole, at its norm or its rows, would make something else of each piece:
other numbers in every layout, and no error. So it is tried on a few numbers first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .make import Make, Options, make_over

STEPS = 3
SHAPES = ((3, 64), (2, 64))
BORDERS = (64, 256)  # of the pieces: inside the first parameter, and inside the second
WAY_OUT = "use an elementwise one, such as torch.optim.AdamW or SGD"


def check_elementwise(make: Make, groups: Sequence[Options], device: torch.device) -> None:
    """Raise ValueError unless steps on whole parameters and on pieces agree bit for bit.

    ``make`` is called with a group of each of ``groups`` options, as for the real parameters. No
    random state is changed, and nothing is sent.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        for options in groups or [{}]:
            _check(make, options, device)


def _check(make: Make, options: Options, device: torch.device) -> None:
    sizes = [rows * cols for rows, cols in SHAPES]
    at = torch.arange(sum(sizes), dtype=torch.float32, device=device)
    start = torch.cos(at)
    # Pieces of different magnitudes, so that a norm of one is not that of another.
    gradients = [torch.sin((step + 1) * at + step) * 10 ** (at / 100 - 2) for step in range(STEPS)]

    def whole(flat: Tensor) -> list[Tensor]:
        return [part.view(shape) for part, shape in zip(flat.split(sizes), SHAPES, strict=True)]

    optimizer, parameters = _over(make, options, whole(start))
    name = type(optimizer).__name__
    try:
        expected = _train(optimizer, parameters, [whole(g) for g in gradients])
        found = [
            _train(*_over(make, options, [piece]), [[gradient] for gradient in pieces])
            for piece, *pieces in zip(*(_cut(flat) for flat in (start, *gradients)), strict=True)
        ]
    except Exception as error:
        raise ValueError(
            f"optimizer {name} cannot update flat pieces of parameters ({error}): {WAY_OUT}"
        ) from error
    if not torch.equal(torch.cat(found).nan_to_num(), expected.nan_to_num()):
        raise ValueError(
            f"optimizer {name} is not elementwise: {STEPS} steps on pieces of a parameter give "
            f"other values than on the whole one, so numbers would depend on the layout: {WAY_OUT}"
        )


def _over(
    make: Make, options: Options, values: list[Tensor]
) -> tuple[torch.optim.Optimizer, list[nn.Parameter]]:
    parameters = [nn.Parameter(value.clone()) for value in values]
    return make_over(make, options, parameters), parameters


def _train(
    optimizer: torch.optim.Optimizer,
    parameters: list[nn.Parameter],
    gradients: list[list[Tensor]],
) -> Tensor:
    """The parameters, flat, after a step on each of the gradients."""
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in parameters])


def _cut(flat: Tensor) -> tuple[Tensor, ...]:
    return flat.tensor_split(BORDERS)
