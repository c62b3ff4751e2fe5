"""What the engine reads off a model before it is cut, and how a rank's units get their values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..comm.collectives import broadcast
from ..pipeline.stage import Unit
from ..placement import Placement, Replicate, cut, placements, whole_shape
from ..rng import materialise, seed_of, seeded
from ..topology import Topology

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}


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
    # Not named_children(), which leaves out the second place of a module that has two.
    named = [(name, unit) for name, unit in model._modules.items() if unit is not None]
    return [Unit(at, name, unit) for at, (name, unit) in enumerate(named)]


def check_batch_norm(units: list[Unit], dp: int, num_microbatches: int) -> None:
    """Refuse BatchNorm where its statistics would depend on the layout."""
    for unit in units:
        for path, module in unit.module.named_modules():
            if isinstance(module, _BatchNorm) and (dp > 1 or num_microbatches > 1):
                name = ".".join(part for part in (unit.name, path) if part)
                raise ValueError(
                    f"{name} is a {type(module).__name__}, whose statistics depend on "
                    f"how the batch is cut (dp = {dp}, num_microbatches = {num_microbatches}): "
                    f"use LayerNorm, RMSNorm or GroupNorm"
                )


def check_state(units: list[Unit]) -> None:
    """Refuse state that no tensor holds: a checkpoint would lose it."""
    for unit in units:
        for path, module in unit.module.named_modules():
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                name = ".".join(part for part in (unit.name, path) if part)
                raise ValueError(
                    f"{name} ({type(module).__name__}) has an extra state, which a checkpoint of "
                    f"tensors cannot hold: keep it in a buffer"
                )


def check_values(units: list[Unit], precision: str, has_init: bool) -> None:
    """Refuse what ``give_values`` could not fill, or would round; for the units of all ranks."""
    seen: set[int] = set()
    for unit in units:
        _check_width(unit, precision)
        for path, module in unit.module.named_modules():
            own = [*module._parameters.items(), *module._buffers.items()]
            empty = [(n, t) for n, t in own if t is not None and t.is_meta and id(t) not in seen]
            seen.update(id(tensor) for _, tensor in empty)
            if has_init:  # it fills the parameters
                empty = [(name, t) for name, t in empty if name in module._buffers]
            if empty and not hasattr(module, "reset_parameters"):
                name = ".".join(part for part in (unit.name, path) if part)
                kind, what = type(module).__name__, "parameters or buffers on meta"
                raise ValueError(
                    f"{name}.{empty[0][0]} is a buffer on meta, and init fills parameters only: "
                    f"give its {kind} a reset_parameters(), or build the model on a real device"
                    if has_init
                    else f"{name} ({kind}) has {what} but no reset_parameters() to fill them: give "
                    f"it one, pass init=fn(name, tensor), or build the model on a real device"
                )


def _check_width(unit: Unit, precision: str) -> None:
    for path, parameter in unit.module.named_parameters():
        if parameter.dtype == torch.float64 and precision != "fp64":
            raise ValueError(
                f"{unit.name}.{path} is float64, but precision = {precision!r} would round it: "
                f"use precision='fp64', or convert the model"
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
    """Give each unit that trains a parameter of an earlier one a Parameter object of its own.

    The values stay shared (``zero.flat.Flat`` with ``of``), but each use gets its own gradient.
    Units that share whole modules are copied first; frozen parameters stay shared.
    """
    seen: set[int] = set()
    first: dict[str, nn.Parameter] = {}
    for at, unit in enumerate(units):
        modules = {id(module) for module in unit.module.modules()}
        if modules & seen:
            units[at] = unit = unit._replace(module=twin(unit.module))
        seen |= modules
        own: dict[str, nn.Parameter] = {}
        for prefix, module in unit.module.named_modules(remove_duplicate=False):
            for key, parameter in list(module._parameters.items()):
                if parameter is None:
                    continue
                fact = facts[".".join(part for part in (unit.name, prefix, key) if part)]
                owner = first.setdefault(fact.owner, parameter)
                if facts[fact.owner].unit == unit.number:
                    continue
                if fact.trained:
                    owner = own.setdefault(fact.owner, nn.Parameter(owner.detach()))
                module._parameters[key] = owner


def twin(module: nn.Module, made: dict[int, nn.Module] | None = None) -> nn.Module:
    """A module tree of its own with the same tensors; a deep copy would copy process groups too."""
    made = {} if made is None else made
    if id(module) not in made:
        new = made[id(module)] = copy.copy(module)
        new._parameters = dict(module._parameters)
        new._buffers = dict(module._buffers)
        new._modules = {
            name: child and twin(child, made) for name, child in module._modules.items()
        }
    return made[id(module)]


def give_values(
    units: list[Unit],
    facts: dict[str, Facts],
    topology: Topology,
    precision: str,
    seed: int,
    init: Callable[[str, Tensor], object] | None,
) -> None:
    """Put the units on the device with initial values that no layout changes.

    Frozen parameters are cast to ``precision``, trained ones no narrower than fp32: a flat buffer
    casts them, and keeps masters that were never rounded.
    """
    real = [_real_names(unit) for unit in units]
    materialise(((unit.name, unit.module) for unit in units), seed, check=init is None)
    if init is not None:
        _override(units, facts, topology, init, seed)
    dtype = DTYPES[precision]
    for unit, names in zip(units, real, strict=True):
        unit.module.to(topology.device)
        for parameter in unit.module.parameters():
            if parameter.is_floating_point():
                wide = torch.promote_types(dtype, torch.float32)
                parameter.data = parameter.data.to(wide if parameter.requires_grad else dtype)
        _share(unit, names, facts, topology)


def _real_names(unit: Unit) -> set[str]:
    """Of the parameters and buffers that have values already."""
    tensors = [*unit.module.named_parameters(), *unit.module.named_buffers()]
    return {path for path, tensor in tensors if not tensor.is_meta}


def _override(
    units: list[Unit],
    facts: dict[str, Facts],
    topology: Topology,
    init: Callable[[str, Tensor], object],
    seed: int,
) -> None:
    for unit in units:
        for path, parameter in unit.module.named_parameters():
            fact = facts[f"{unit.name}.{path}"]
            whole = torch.zeros(fact.shape)
            # Under a seed of its own: what it draws must not depend on who drew before.
            with seeded(seed_of(seed, "init", fact.owner)):
                init(fact.owner, whole)
            with torch.no_grad():
                parameter.copy_(cut(whole, fact.placement, topology.tp))


def _share(unit: Unit, names: set[str], facts: dict[str, Facts], topology: Topology) -> None:
    """Ranks may have given real tensors different values: those of the first count."""
    for path, tensor in [*unit.module.named_parameters(), *unit.module.named_buffers()]:
        if path in names:
            fact = facts.get(f"{unit.name}.{path}")
            if fact is None or isinstance(fact.placement, Replicate):
                broadcast(tensor.data, topology.tp)
            broadcast(tensor.data, topology.dp)
