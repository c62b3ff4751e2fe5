"""What several units share: found, made by name, and given one value on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches

from torch import Tensor, nn

from ..comm.collectives import broadcast
from ..comm.lines import Ranks
from ..pipeline.stage import Unit
from ..topology import Axis
from ..zero.flat import Flat
from ..zero.ties import Tie
from .model import Facts


@dataclass
class Shared:
    """A parameter or buffer that several units use.

    ``owner`` is the name of its first use, ``paths`` by unit where it lies in it (the first place),
    ``ranks`` by unit the pipeline rank that holds it.
    """

    owner: str
    paths: dict[int, str] = field(default_factory=dict)
    ranks: dict[int, int] = field(default_factory=dict)

    @property
    def holders(self) -> Ranks:
        """The pipeline ranks that hold a use, ascending."""
        return tuple(sorted(set(self.ranks.values())))

    def axis_ranks(self) -> dict[int, int]:
        """By unit, where its pipeline rank stands among the holders."""
        return {unit: self.holders.index(rank) for unit, rank in self.ranks.items()}


def tie_by_name(units: list[Unit], groups: Sequence[Sequence[str]]) -> None:
    """Make the parameters of each group one, wherever they lie: the first in model order.

    Equals a model that was built with shared Parameter objects. Raises ValueError for a name that
    the model lacks, and for parameters that differ in shape, dtype, device or ``requires_grad``.
    """
    if not isinstance(groups, list | tuple):
        raise ValueError(f"tied = {groups!r} is no list of groups: [('0.weight', '5.weight')] is")
    for group in groups:
        named = {
            f"{unit.name}.{path}": parameter
            for unit in units
            for path, parameter in unit.module.named_parameters(remove_duplicate=False)
        }
        _check_group(group, named)
        joined = {id(named[name]) for name in group}
        first = next(name for name, parameter in named.items() if id(parameter) in joined)
        for name in group:
            _check_alike(first, named[first], name, named[name])
        for unit in units:
            for module in unit.module.modules():
                for key, parameter in module._parameters.items():
                    if id(parameter) in joined:
                        module._parameters[key] = named[first]


def _check_group(group: Sequence[str], named: Mapping[str, nn.Parameter]) -> None:
    if not isinstance(group, list | tuple) or len(group) < 2:
        raise ValueError(
            f"tied has {group!r}, which is no group of two names or more: it is a list of groups, "
            f"for example [('0.weight', '5.weight')]"
        )
    for name in group:
        if name not in named:
            close = get_close_matches(str(name), named, n=1, cutoff=0.0)
            nearest = f"; did you mean {close[0]}?" if close else ", which has none"
            raise ValueError(f"tied names {name}, which is no parameter of the model{nearest}")


def _check_alike(first: str, a: nn.Parameter, second: str, b: nn.Parameter) -> None:
    for what in ("shape", "dtype", "device", "requires_grad"):
        one, other = getattr(a, what), getattr(b, what)
        if one != other:
            raise ValueError(
                f"{second} cannot be tied to {first}: {what} {_text(other)} is not {_text(one)}, "
                f"and one parameter has one"
            )


def _text(value: object) -> str:
    return str(tuple(value)) if isinstance(value, tuple) else str(value)


def check_placements(facts: Mapping[str, Facts]) -> None:
    """Raise ValueError for uses of one parameter that cut it over ``tp`` in different ways."""
    for fact in facts.values():
        owner = facts[fact.owner]
        if fact.placement != owner.placement:
            raise ValueError(
                f"{fact.name} is tied to {owner.name}, but lies on tp as {fact.placement} and that "
                f"as {owner.placement}: use layers that cut it alike, or topology.tp=1"
            )


def shared_by(units: list[Unit], rank_of_unit: Sequence[int]) -> list[Shared]:
    """Everything that more than one unit uses, in model order. Before ``separate_ties``."""
    found: dict[int, Shared] = {}
    for unit in units:
        tensors = [
            *unit.module.named_parameters(remove_duplicate=False),
            *unit.module.named_buffers(remove_duplicate=False),
        ]
        for path, tensor in tensors:
            shared = found.setdefault(id(tensor), Shared(f"{unit.name}.{path}"))
            shared.paths.setdefault(unit.number, path)
            shared.ranks[unit.number] = rank_of_unit[unit.number]
    return [shared for shared in found.values() if len(shared.ranks) > 1]


def share_values(units: list[Unit], shared: list[Shared], axes: Mapping[Ranks, Axis]) -> None:
    """Give every rank that holds a use the owner's value; ``units`` are this rank's.

    Each drew, or was given, its own.
    """
    local = {unit.number: unit.module for unit in units}
    for each in shared:
        here = [unit for unit in each.paths if unit in local]
        if here and len(each.holders) > 1:
            tensor = _at(local[here[0]], each.paths[here[0]])
            broadcast(tensor.data, axes[each.holders], next(iter(each.axis_ranks().values())))


def fixed_of(
    units: list[Unit], shared: list[Shared], facts: Mapping[str, Facts]
) -> dict[int, list[tuple[str, Tensor]]]:
    """Buffers by unit and full name of which other pipeline ranks have copies."""
    found: dict[int, list[tuple[str, Tensor]]] = {}
    far = [each for each in shared if each.owner not in facts and len(each.holders) > 1]
    for unit in units:
        for path in (each.paths[unit.number] for each in far if unit.number in each.paths):
            found.setdefault(unit.number, []).append(
                (f"{unit.name}.{path}", _at(unit.module, path))
            )
    return found


def _at(module: nn.Module, path: str) -> Tensor:
    owner, _, key = path.rpartition(".")
    tensor: Tensor = getattr(module.get_submodule(owner), key)
    return tensor


def ties_of(
    shared: list[Shared],
    facts: dict[str, Facts],
    flats: dict[int, list[Flat]],
    axes: Mapping[Ranks, Axis],
) -> list[Tie]:
    """The trained ones of which this rank holds a use."""
    uses: dict[str, dict[int, Flat]] = {}
    for unit in sorted(flats):
        for flat in flats[unit]:
            uses.setdefault(facts[flat.slots[0].held.name].owner, {})[unit] = flat
    return [
        Tie(each.owner, axes[each.holders], each.axis_ranks(), uses[each.owner])
        for each in shared
        if each.owner in facts and facts[each.owner].trained and each.owner in uses
    ]
