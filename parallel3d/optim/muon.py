"""Muon: the update of a matrix is made orthogonal, which takes the matrix whole.

Its momentum lies in the shards, as that of any optimizer. Then each matrix goes to the rank of
``dp`` that makes its update, and the update goes back; matrices are dealt out by what they cost,
the dearest first. Where ``tp`` cuts a matrix, its ranks gather it. What is no matrix, and what the
group says, is updated as by AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..comm.collectives import all_to_all, start_all_gather
from ..placement import Replicate, cut
from ..topology import Axis
from .deal import Deal
from .make import Options
from .newton_schulz import Coefficients, orthogonal
from .whole import Shapes, Slice, Unbound, UpdateContext

RMS_OF_ADAMW = 0.2  # Liu et al. (2025, arXiv 2502.16982), section 2.2


class Muon(Unbound):
    """``torch.optim.Muon`` for matrices and AdamW for the rest, for ``Engine(optimizer=)``.

    Args:
        params: as of any torch optimizer; a group may have its own options, also ``muon``.
        lr, weight_decay: of both; see ``adjust_lr_fn``.
        momentum, nesterov, ns_coefficients, ns_eps, ns_steps: of Muon, as in torch.
        adjust_lr_fn: ``match_rms_adamw`` makes steps as long as those of AdamW at this rate;
            ``original`` gives matrices the longer ones of the first publication.
        betas, eps: of AdamW.
        muon: which of both; None for Muon where a parameter has two dims.

    Raises:
        ValueError: a value that ``torch.optim.Muon`` or ``AdamW`` refuses.
    """

    def __init__(
        self,
        params: torch.optim.optimizer.ParamsT,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients = (3.4445, -4.7750, 2.0315),
        ns_eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        muon: bool | None = None,
    ) -> None:
        matrix = [torch.nn.Parameter(torch.zeros(1, 1))]
        options: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
        of_muon: dict[str, Any] = {"momentum": momentum, "nesterov": nesterov}
        of_muon |= {"adjust_lr_fn": adjust_lr_fn, "ns_steps": ns_steps}
        of_muon["ns_coefficients"] = ns_coefficients
        torch.optim.Muon(matrix, eps=ns_eps, **options, **of_muon)
        torch.optim.AdamW(matrix, betas=betas, eps=eps, **options)
        of_adamw = {"betas": betas, "eps": eps, "muon": muon}
        super().__init__(params, {**options, **of_muon, "ns_eps": ns_eps, **of_adamw})


class MuonRule:
    """Two messages over ``dp`` for all matrices, and one over ``tp`` for those that it cuts."""

    name = "Muon"

    def __init__(self) -> None:
        self._deal: Deal | None = None

    def check(self, name: str, shape: tuple[int, ...], options: Options) -> None:
        """Refuse Muon for what has not two dims."""
        if _is_matrix(shape, options) and len(shape) != 2:
            ours = "muon" in options
            way_out = "leave its group's muon None" if ours else "use parallel3d.optim.Muon"
            raise ValueError(
                f"{name} has shape {list(shape)}, but Muon is for matrices: {way_out}, so that "
                f"AdamW updates it"
            )

    def shapes(self, each: Slice, options: Options) -> Shapes:
        """One moving average for Muon, two for AdamW."""
        if _is_matrix(each.shape, options):
            return {"momentum_buffer": each.extent}
        return {"exp_avg": each.extent, "exp_avg_sq": each.extent}

    def sent(self, slices: Sequence[Slice], options: Sequence[Options]) -> int:
        """Momentum to the owners of matrices, and updates from them."""
        matrices = [s for s in slices if _is_matrix(s.shape, options[s.held.group])]
        return self._dealt(matrices).nbytes if matrices else 0

    def _dealt(self, matrices: Sequence[Slice]) -> Deal:
        if self._deal is None:  # a rule has the same matrices in every step
            self._deal = Deal(matrices)
        return self._deal

    def update(self, slices: Sequence[Slice], step: UpdateContext) -> None:
        """AdamW in place; Muon by way of the owners."""
        matrices = []
        for each in slices:
            if _is_matrix(each.shape, step.of(each)):
                matrices.append(each)
            elif each.here:
                _adamw(each, step)
        if not matrices:
            return
        for each, update in _made_orthogonal(self._dealt(matrices), step):
            options = step.of(each)
            each.values.mul_(1 - options["lr"] * options["weight_decay"])
            each.values.add_(update, alpha=-options["lr"] * _ratio(each, options))


def _is_matrix(shape: tuple[int, ...], options: Options) -> bool:
    asked = options.get("muon", True)
    return len(shape) == 2 if asked is None else bool(asked)


def _adamw(each: Slice, step: UpdateContext) -> None:
    options, gradient = step.of(each), each.grads
    beta1, beta2 = options["betas"]
    first, second = each.state["exp_avg"], each.state["exp_avg_sq"]
    each.values.mul_(1 - options["lr"] * options["weight_decay"])
    first.lerp_(gradient, 1 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    root = (second.sqrt() / math.sqrt(1 - beta2**step.number)).add_(options["eps"])
    each.values.addcdiv_(first, root, value=-options["lr"] / (1 - beta1**step.number))


def _direction(each: Slice, step: UpdateContext) -> Tensor:
    """The momentum, or with Nesterov's look ahead."""
    options, momentum = step.of(each), each.state["momentum_buffer"]
    momentum.lerp_(each.grads, 1 - options["momentum"])
    if not options["nesterov"]:
        return momentum
    return each.grads.lerp(momentum, options["momentum"])


def _ratio(each: Slice, options: Options) -> float:
    """Of a matrix's learning rate to the group's."""
    rows, cols = each.shape
    if options["adjust_lr_fn"] == "match_rms_adamw":
        return RMS_OF_ADAMW * math.sqrt(max(rows, cols))
    return math.sqrt(max(1, rows / cols))


def _made_orthogonal(deal: Deal, step: UpdateContext) -> Iterator[tuple[Slice, Tensor]]:
    """The update of each slice that is here. Collective over the plane."""
    there = deal.packed(lambda each: _direction(each, step))
    arrived = all_to_all(there, deal.sent, deal.received, deal.axis, tag="optimizer")
    del there  # what is packed, and what has arrived, are as large as all momentum
    local = deal.joined(arrived)
    del arrived
    whole = _whole(local, deal.mine, step.tp)
    del local
    for at, each in enumerate(deal.mine):
        made = _orthogonal(whole[at], each, step)
        whole[at] = cut(made, each.held.placement, step.tp).reshape(-1)
    back = deal.shared_out(whole)
    del whole
    returned = all_to_all(back, deal.received, deal.sent, deal.axis, tag="optimizer")
    parts = returned.split([each.high - each.low for each in deal.here])
    return zip(deal.here, parts, strict=True)


def _whole(local: list[Tensor], mine: Sequence[Slice], tp: Axis) -> list[Tensor]:
    """Matrices that ``tp`` cuts, gathered in one message; the others as they are."""
    is_cut = [tp.size > 1 and not isinstance(each.held.placement, Replicate) for each in mine]
    parts = [matrix.reshape(-1) for matrix, yes in zip(local, is_cut, strict=True) if yes]
    if not parts:
        return local
    flat = torch.cat(parts)
    every = flat.new_empty(tp.size, flat.numel())
    start_all_gather(flat, every.view(-1), tp, tag="optimizer").wait()
    found, at = [], 0
    for matrix, each, yes in zip(local, mine, is_cut, strict=True):
        if yes:
            stop = at + matrix.numel()
            found.append(_assembled(each, [row[at:stop].view_as(matrix) for row in every]))
            at = stop
        else:
            found.append(matrix)
    return found


def _assembled(each: Slice, parts: Sequence[Tensor]) -> Tensor:
    """A whole matrix of the parts that the ranks of ``tp`` have; padding is left out."""
    placement = each.held.placement
    assert not isinstance(placement, Replicate)
    whole = parts[0].new_empty(each.shape)
    for rank, part in enumerate(parts):
        for piece in placement.pieces(len(parts), rank):
            source = part.narrow(placement.dim, piece.local, piece.length)
            whole.narrow(placement.dim, piece.whole, piece.length).copy_(source)
    return whole


def _orthogonal(matrix: Tensor, each: Slice, step: UpdateContext) -> Tensor:
    options = step.of(each)
    eps = options["ns_eps" if "ns_eps" in options else "eps"]  # torch's own Muon has one eps
    made = orthogonal(matrix, options["ns_coefficients"], options["ns_steps"], eps)
    return made.to(matrix.dtype)
