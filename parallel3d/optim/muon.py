"""Muon: the update of a matrix is made orthogonal, which takes the matrix whole.

Its momentum lies in the shards, as that of any optimizer. Then each matrix goes to the rank of
``dp`` that makes its update, and the update goes back; matrices are dealt out by what they cost,
the dearest first. Where ``tp`` cuts a matrix, its ranks gather it. What is no matrix, and what the
group says, is updated as by AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..comm.collectives import all_to_all, start_all_gather
from ..placement import Replicate, cut
from ..topology import Axis
from .bundle import Options, State
from .newton_schulz import Coefficients, orthogonal
from .whole import Slice, Unbound, Update

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

    def check(self, name: str, shape: tuple[int, ...], options: Options) -> None:
        """Refuse Muon for what has not two dims."""
        if _is_matrix(shape, options) and len(shape) != 2:
            ours = "muon" in options
            way_out = "leave its group's muon None" if ours else "use parallel3d.optim.Muon"
            raise ValueError(
                f"{name} has shape {list(shape)}, but Muon is for matrices: {way_out}, so that "
                f"AdamW updates it"
            )

    def blank(self, each: Slice, options: Options) -> State:
        """One moving average for Muon, two for AdamW."""
        if _is_matrix(each.shape, options):
            return {"momentum_buffer": each.blank()}
        return {"exp_avg": each.blank(), "exp_avg_sq": each.blank()}

    def update(self, slices: Sequence[Slice], step: Update) -> None:
        """AdamW in place; Muon by way of the owners."""
        matrices = []
        for each in slices:
            if _is_matrix(each.shape, step.of(each)):
                matrices.append(each)
            elif each.here:
                _adamw(each, step)
        if not matrices:
            return
        directions = {each: _direction(each, step) for each in matrices if each.here}
        for each, update in _made_orthogonal(matrices, directions, step).items():
            options = step.of(each)
            each.values.mul_(1 - options["lr"] * options["weight_decay"])
            each.values.add_(update, alpha=-options["lr"] * _ratio(each, options))


def _is_matrix(shape: tuple[int, ...], options: Options) -> bool:
    asked = options.get("muon", True)
    return len(shape) == 2 if asked is None else bool(asked)


def _adamw(each: Slice, step: Update) -> None:
    options, gradient = step.of(each), each.grads
    beta1, beta2 = options["betas"]
    first, second = each.state["exp_avg"], each.state["exp_avg_sq"]
    each.values.mul_(1 - options["lr"] * options["weight_decay"])
    first.lerp_(gradient, 1 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    root = (second.sqrt() / math.sqrt(1 - beta2**step.number)).add_(options["eps"])
    each.values.addcdiv_(first, root, value=-options["lr"] / (1 - beta1**step.number))


def _direction(each: Slice, step: Update) -> Tensor:
    """The momentum, or with Nesterov's look ahead; a new tensor."""
    options, momentum = step.of(each), each.state["momentum_buffer"]
    momentum.lerp_(each.grads, 1 - options["momentum"])
    if not options["nesterov"]:
        return momentum.clone()
    return each.grads.lerp(momentum, options["momentum"])


def _ratio(each: Slice, options: Options) -> float:
    """Of a matrix's learning rate to the group's."""
    rows, cols = each.shape
    if options["adjust_lr_fn"] == "match_rms_adamw":
        return RMS_OF_ADAMW * math.sqrt(max(rows, cols))
    return math.sqrt(max(1, rows / cols))


def _made_orthogonal(
    matrices: Sequence[Slice], directions: dict[Slice, Tensor], step: Update
) -> dict[Slice, Tensor]:
    """The update of each slice that is here. Collective over the plane.

    Where a rank updates everything it has everything, and does it all.
    """
    axis = matrices[0].flat.axis
    if matrices[0].flat.updated != matrices[0].flat.owned:
        axis = Axis.single()
    owners = deal([_cost(each) for each in matrices], axis.size)
    by_owner = [
        [each for each, owner in zip(matrices, owners, strict=True) if owner == rank]
        for rank in range(axis.size)
    ]
    mine = by_owner[axis.rank]
    sent = [sum(each.high - each.low for each in each_of if each.here) for each_of in by_owner]
    shares = [[_share(each, rank, axis) for each in mine] for rank in range(axis.size)]
    received = [sum(high - low for low, high in of_rank) for of_rank in shares]
    there = [directions[each] for each_of in by_owner for each in each_of if each.here]
    empty = matrices[0].flat.master.new_empty(0)
    arrived = all_to_all(torch.cat([empty, *there]), sent, received, axis, tag="optimizer")
    local = _joined(arrived, mine, shares)
    whole = _whole(local, mine, step.tp)
    done = [
        cut(_orthogonal(matrix, each, step), each.held.placement, step.tp).reshape(-1)
        for matrix, each in zip(whole, mine, strict=True)
    ]
    back = [
        matrix[slice(*span)]
        for of_rank in shares
        for matrix, span in zip(done, of_rank, strict=True)
    ]
    returned = all_to_all(torch.cat([empty, *back]), received, sent, axis, tag="optimizer")
    here = [each for each_of in by_owner for each in each_of if each.here]
    parts = returned.split([each.high - each.low for each in here])
    return dict(zip(here, parts, strict=True))


def deal(costs: Sequence[float], count: int) -> list[int]:
    """An owner for each, the dearest first to whoever has least."""
    loads, owners = [0.0] * count, [0] * len(costs)
    for at in sorted(range(len(costs)), key=lambda at: -costs[at]):
        owners[at] = loads.index(min(loads))
        loads[owners[at]] += costs[at]
    return owners


def _cost(each: Slice) -> float:
    """In proportion to the multiplications of an iteration."""
    rows, cols = each.shape
    return float(rows * cols * min(rows, cols))


def _share(each: Slice, rank: int, axis: Axis) -> tuple[int, int]:
    """What a rank of ``axis`` has of the local parameter, in its elements."""
    length = each.held.parameter.numel()
    if axis.size == 1:
        return 0, length
    shard = each.flat.owned[1] - each.flat.owned[0]
    low, high = rank * shard - each.start, (rank + 1) * shard - each.start
    return min(max(low, 0), length), max(min(high, length), 0)


def _joined(
    arrived: Tensor, mine: Sequence[Slice], shares: Sequence[Sequence[tuple[int, int]]]
) -> list[Tensor]:
    """The local part [local shape] of each of ``mine``, from what every rank had of it."""
    joined = [arrived.new_zeros(each.held.parameter.numel()) for each in mine]
    at = 0
    for of_rank in shares:
        for matrix, (low, high) in zip(joined, of_rank, strict=True):
            matrix[low:high] = arrived[at : at + high - low]
            at += high - low
    return [m.view(each.held.parameter.shape) for m, each in zip(joined, mine, strict=True)]


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


def _orthogonal(matrix: Tensor, each: Slice, step: Update) -> Tensor:
    options = step.of(each)
    eps = options["ns_eps" if "ns_eps" in options else "eps"]  # torch's own Muon has one eps
    made = orthogonal(matrix, options["ns_coefficients"], options["ns_steps"], eps)
    return made.to(matrix.dtype)
