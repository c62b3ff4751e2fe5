"""Adafactor over slices: of a matrix the means of squares along rows and along columns are kept.

The optimizer is ``torch.optim.Adafactor``, whose options and numbers these are (Shazeer and Stern,
2018, arXiv 1804.04235). Each rank that updates some of a matrix has both means of all of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..comm.collectives import bytes_in_order
from .make import Options
from .whole import Shapes, Slice, UpdateContext


class AdafactorRule:
    """Two messages over each axis: squares of weights and gradients, then of the updates."""

    name = "Adafactor"

    def check(self, name: str, shape: tuple[int, ...], options: Options) -> None:
        """Refuse more than two dims, of which torch takes the last two for the matrix."""
        if len(shape) > 2:
            raise ValueError(
                f"{name} has shape {list(shape)}: Adafactor is built for parameters of at most two "
                f"dims; use torch.optim.AdamW, or keep the parameter as a matrix"
            )

    def shapes(self, each: Slice, options: Options) -> Shapes:
        """Means along rows and columns of a matrix; squares of anything else."""
        if len(each.shape) < 2:
            return {"variance": each.extent}
        rows, cols = each.shape
        return {"row_var": (rows, 1), "col_var": (1, cols)}

    def sent(self, slices: Sequence[Slice], options: Sequence[Options]) -> int:
        """Squares of all that is summed up, and the squared length of each update."""
        axis = slices[0].flat.axis
        counts = sum(map(_count, slices)), len(slices)
        return sum(bytes_in_order(count, torch.float64, axis) for count in counts)

    def update(self, slices: Sequence[Slice], step: UpdateContext) -> None:
        """The lines of ``torch.optim.Adafactor`` in their order."""
        flat = slices[0].flat
        squares = step.total(torch.cat([_squares(each, step) for each in slices]), flat)
        lengths = torch.zeros(len(slices), dtype=torch.float64, device=squares.device)
        rates, updates, at = {}, {}, 0
        for number, each in enumerate(slices):
            count = _count(each)
            if each.here:
                weight, *_ = mine = squares[at : at + count]
                rates[number] = _rate(each, step, weight)
                updates[number] = _update(each, step, mine[1:])
                lengths[number] = updates[number][slice(*each.counted)].norm().double().square()
            at += count
        lengths = step.total(lengths, flat)
        for number, update in updates.items():
            each = slices[number]
            options = step.of(each)
            rms = (lengths[number] / each.numel).sqrt() / options["d"]
            factor = -rates[number] / rms.clamp(min=1.0)
            values = each.values.mul_(1 - options["lr"] * options["weight_decay"])
            values.addcmul_(update, factor.to(update.dtype))


def _count(each: Slice) -> int:
    """Numbers that are summed of a parameter before its update."""
    return 1 + (sum(each.shape) if len(each.shape) == 2 else 0)


def _squares(each: Slice, step: UpdateContext) -> Tensor:
    """Of this rank's part: the weights' squared norm; of a matrix squares by row and by column."""
    found = torch.zeros(_count(each), dtype=torch.float64, device=each.flat.master.device)
    part = each.counted
    if not each.here or part[0] == part[1]:
        return found
    found[0] = each.values[slice(*part)].norm().double().square()
    if len(each.shape) == 2:
        rows, cols = found[1:].split(each.shape)
        for offset, place in each.rectangles(part):
            piece = each.grads[offset : offset + place.area].view(place.rows, place.cols)
            rows[place.row : place.row + place.rows] += piece.norm(dim=1).double().square()
            cols[place.col : place.col + place.cols] += piece.norm(dim=0).double().square()
    return found


def _rate(each: Slice, step: UpdateContext, weight: Tensor) -> Tensor:
    """The step size: a share of the weights' root mean square."""
    options = step.of(each)
    rms = (weight / each.numel).sqrt().clamp(min=options["eps"][1])
    return rms * min(options["lr"], step.number**-0.5)


def _update(each: Slice, step: UpdateContext, squares: Tensor) -> Tensor:
    """The gradient over the root of its estimated variance, before any rate."""
    options, gradient = step.of(each), each.grads
    gradient = -gradient if options["maximize"] else gradient
    least = options["eps"][0]
    least = torch.finfo(gradient.dtype).eps if least is None else least
    decay, state = step.number ** options["beta2_decay"], each.state
    if "variance" in state:
        estimate = state["variance"].lerp_(gradient * gradient, decay).clone()
    else:
        estimate = _estimate(each, squares, decay, least)
    return estimate.clamp_(min=least * least).rsqrt_().mul_(gradient)


def _estimate(each: Slice, squares: Tensor, decay: float, least: float) -> Tensor:
    """The variance of each element by its row and its column; updates what is kept of them."""
    rows, cols = each.shape
    row_var, col_var = each.state["row_var"], each.state["col_var"]
    by_row, by_col = squares.split((rows, cols))
    row_var.lerp_((by_row / cols).to(row_var.dtype)[:, None], decay)
    col_var.lerp_((by_col / rows).to(col_var.dtype)[None], decay)
    scale = row_var.mean().clamp(min=least)
    estimate = torch.zeros_like(each.values)
    for offset, place in each.rectangles((0, each.high - each.low)):
        piece = estimate[offset : offset + place.area].view(place.rows, place.cols)
        of_rows = row_var[place.row : place.row + place.rows]
        of_cols = col_var[:, place.col : place.col + place.cols]
        torch.mul(of_rows, of_cols, out=piece).div_(scale)
    return estimate
