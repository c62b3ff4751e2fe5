"""What the engine reads off a model before it is cut, and how a rank's units get their values."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..comm.collectives import broadcast
from ..pipeline.stage import Unit
from ..placement import Placement, Replicate, cut, placements, whole_shape
from ..rng import materialise
from ..topology import Topology

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


@dataclass
class Facts:
    """About one parameter of the whole model, the same on every rank.

    ``owner`` is the name under which it is held: its own, or for a second use of a tied parameter
    that of the first. ``index`` numbers owners in model order.
    """

    name: str
    unit: int
    owner: str
    index: int
    placement: Placement
    shape: tuple[int, ...]
    trained: bool


def units_of(model: nn.Module) -> list[Unit]:
    """The elements of an ``nn.Sequential`` as units; raises ValueError for anything else."""
    if not isinstance(model, nn.Sequential):
        raise ValueError(
            f"the model is a {type(model).__name__}: pass an nn.Sequential whose elements are the "
            f"units that a pipeline may separate"
        )
    if type(model).forward is not nn.Sequential.forward:
        raise ValueError(
            f"{type(model).__name__} has a forward of its own, which a pipeline would not run: "
            f"pass a plain nn.Sequential of units"
        )
    if len(model) == 0:
        raise ValueError("the model is an nn.Sequential of 0 units: give it one or more")
    return [Unit(at, name, unit) for at, (name, unit) in enumerate(model.named_children())]


def check_batch_norm(units: list[Unit], dp: int, num_microbatches: int) -> None:
    """Refuse BatchNorm where its statistics would depend on the layout."""
    for unit in units:
        for path, module in unit.module.named_modules():
            if isinstance(module, _BatchNorm) and (dp > 1 or num_microbatches > 1):
                raise ValueError(
                    f"{unit.name}.{path} is a {type(module).__name__}, whose statistics depend on "
                    f"how the batch is cut (dp = {dp}, num_microbatches = {num_microbatches}): "
                    f"use LayerNorm, RMSNorm or GroupNorm"
                )


def facts_of(units: list[Unit]) -> dict[str, Facts]:
    """Every parameter name of the whole model, in order, with its owner and placement."""
    found: dict[str, Facts] = {}
    first: dict[int, str] = {}
    for unit in units:
        placed = placements(unit.module)
        for path, parameter in unit.module.named_parameters(remove_duplicate=False):
            name = f"{unit.name}.{path}"
            index = len(first)
            owner = first.setdefault(id(parameter), name)
            found[name] = Facts(
                name,
                unit.number,
                owner,
                index if owner == name else found[owner].index,
                placed[path],
                whole_shape(placed[path], tuple(parameter.shape)),
                parameter.requires_grad,
            )
    return found


def separate_ties(units: list[Unit], facts: dict[str, Facts]) -> None:
    """Give each unit that shares a parameter with an earlier one a Parameter object of its own.

    The values stay shared (``zero.flat.Flat`` with ``of``), but each use gets its own gradient.
    Units that share whole modules are copied first.
    """
    seen: set[int] = set()
    for at, unit in enumerate(units):
        modules = {id(module) for module in unit.module.modules()}
        if modules & seen:
            units[at] = unit = unit._replace(module=copy.deepcopy(unit.module))
        seen |= modules
        fresh: dict[str, nn.Parameter] = {}
        for prefix, module in unit.module.named_modules(remove_duplicate=False):
            for key in list(module._parameters):
                owner = facts.get(".".join(part for part in (unit.name, prefix, key) if part))
                if owner is None or owner.name == owner.owner:
                    continue
                if facts[owner.owner].unit != unit.number:
                    old = module._parameters[key]
                    assert old is not None
                    new = fresh.setdefault(
                        owner.owner, nn.Parameter(old.detach(), old.requires_grad)
                    )
                    module._parameters[key] = new


def give_values(
    units: list[Unit],
    facts: dict[str, Facts],
    topology: Topology,
    precision: str,
    seed: int,
    init: Callable[[str, Tensor], object] | None,
) -> None:
    """Put the units on the device with initial values that no layout changes, in ``precision``."""
    real = [unit for unit in units if not _on_meta(unit.module)]
    materialise(((unit.name, unit.module) for unit in units), seed, check=init is None)
    if init is not None:
        _override(units, facts, topology, init)
    for unit in units:
        _check_width(unit, precision)
        unit.module.to(topology.device)
        for parameter in unit.module.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(DTYPES[precision])
    for unit in real:
        _share(unit, facts, topology)


def _on_meta(module: nn.Module) -> bool:
    tensors: Iterable[Tensor] = [*module.parameters(), *module.buffers()]
    return any(tensor.is_meta for tensor in tensors)


def _override(
    units: list[Unit],
    facts: dict[str, Facts],
    topology: Topology,
    init: Callable[[str, Tensor], object],
) -> None:
    for unit in units:
        for path, parameter in unit.module.named_parameters():
            fact = facts[f"{unit.name}.{path}"]
            whole = torch.zeros(fact.shape)
            init(fact.owner, whole)
            with torch.no_grad():
                parameter.copy_(cut(whole, fact.placement, topology.tp))


def _check_width(unit: Unit, precision: str) -> None:
    for path, parameter in unit.module.named_parameters():
        if parameter.dtype == torch.float64 and precision != "fp64":
            raise ValueError(
                f"{unit.name}.{path} is float64, but precision = {precision!r} would round it: "
                f"use precision='fp64', or convert the model"
            )


def _share(unit: Unit, facts: dict[str, Facts], topology: Topology) -> None:
    """Ranks may have drawn different values on a real device: those of the first count."""
    for path, parameter in unit.module.named_parameters():
        if isinstance(facts[f"{unit.name}.{path}"].placement, Replicate):
            broadcast(parameter.data, topology.tp)
        broadcast(parameter.data, topology.dp)
    for buffer in unit.module.buffers():
        broadcast(buffer, topology.tp)
        broadcast(buffer, topology.dp)
