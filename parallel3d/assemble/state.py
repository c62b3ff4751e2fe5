"""The engine's state as fragments of whole tensors, which any layout can take its part of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.fragment import Fragment
from ..checkpoint.load import load, read_meta
from ..checkpoint.save import save
from ..comm.collectives import all_gather_objects
from ..optim.bundle import State, Updated, is_elementwise_state
from ..optim.whole import is_whole_state
from ..placement import Replicate, rectangles
from ..zero.flat import Flat
from .parts import Parts
from .whole import join


def save_state(parts: Parts, folder: Path, meta: dict[str, Any]) -> None:
    """Write weights, optimizer state and buffers; each element by one rank."""
    parts.shards.wait()
    states = parts.optimizer.states()
    names, scalars = _state_names(parts, states)
    fragments = [*_weights(parts, saving=True), *_rest(parts, saving=True)]
    for name in names:
        fragments += _optimizer_state(parts, states, name, saving=True)
    counters: dict[str, State] = {}
    for other in all_gather_objects(parts.optimizer.counters(), parts.topology.world):
        counters |= other
    optimizer = {
        "updates": parts.optimizer.updates,
        "states": names,
        "scalars": scalars,
        "counters": counters,
    }
    save(folder, fragments, {**meta, "optimizer": optimizer}, parts.topology.world)


def load_state(parts: Parts, folder: Path) -> dict[str, Any]:
    """Fill this rank's part of everything; returns the meta."""
    parts.shards.wait()
    saved = read_meta(folder, parts.topology.world)["optimizer"]
    states = parts.optimizer.blank_states() if saved["states"] or saved["scalars"] else []
    fragments = [*_weights(parts, saving=False), *_rest(parts, saving=False)]
    names, _ = _state_names(parts, states)
    for name in names:
        fragments += _optimizer_state(parts, states, name, saving=False)
    # In another precision: masters are as wide or wider, frozen parameters may be narrower.
    meta = load(folder, fragments, parts.topology.world, convert=True)
    _set_scalars(parts, states, saved["scalars"])
    parts.optimizer.restart(states, saved["updates"], saved["counters"])
    parts.shards.publish()
    return meta


def load_weights(parts: Parts, folder: Path) -> dict[str, Any]:
    """Fill this rank's part of parameters and buffers only, in the precision they have here."""
    parts.shards.wait()
    fragments = [*_weights(parts, saving=False), *_rest(parts, saving=False)]
    meta = load(folder, fragments, parts.topology.world, convert=True, subset=True)
    parts.shards.publish()
    return meta


def whole_state(parts: Parts) -> dict[str, Tensor]:
    """Whole tensors on rank 0, under every name of the model."""
    parts.shards.wait()
    fragments = [*_weights(parts, saving=True), *_rest(parts, saving=True)]
    whole = join(fragments, parts.topology.world)
    if parts.topology.rank > 0:
        return {}
    for fact in parts.facts.values():
        # One without elements is in no fragment.
        tensor = whole.get(fact.owner, torch.zeros(fact.shape))
        # Only a frozen parameter has no wider master.
        wide = torch.promote_types(tensor.dtype, torch.float32)
        whole[fact.name] = tensor.to(wide)
    return whole


def whole_gradients(parts: Parts) -> dict[str, Tensor]:
    """Whole gradients on rank 0, of each trained parameter, between reduction and update."""
    fragments = []
    for flat in parts.shards.trained():
        start, stop = flat.owned
        fragments += _cuts(parts, flat, start, stop, "grad", flat.owned_grad, start, saving=True)
    return join(fragments, parts.topology.world)


def _weights(parts: Parts, saving: bool) -> list[Fragment]:
    found = []
    for flat in parts.shards.held():
        low = flat.updated[0]
        for start, stop in [flat.owned if saving else flat.updated]:
            found += _cuts(parts, flat, start, stop, "weight", flat.master, low, saving)
    return found


def _optimizer_state(
    parts: Parts, states: Sequence[State], name: str, saving: bool
) -> list[Fragment]:
    found = []
    for part, state in zip(parts.optimizer.parts(), states, strict=False):
        value = state.get(name)
        if value is None:
            continue
        start, stop = part.start, part.stop
        if is_whole_state(value, part):
            found += _table(parts, part, name, value, saving)
            continue
        if saving:
            start, stop = max(start, part.flat.owned[0]), min(stop, part.flat.owned[1])
        found += _cuts(parts, part.flat, start, stop, name, value, part.start, saving)
    return found


def _table(parts: Parts, part: Updated, name: str, value: Tensor, saving: bool) -> list[Fragment]:
    """State of a whole parameter: all that update some of it have it, and the first saves it."""
    (slot,) = part.flat.parts(part.start, part.stop)
    begin = next(each.start for each in part.flat.slots if each.held is slot.held)
    owner = parts.facts[slot.held.name].owner
    is_first = part.flat.owned[0] <= begin < part.flat.owned[1] and owner == slot.held.name
    if saving and (not is_first or parts.topology.tp.rank or parts.shards.replicas.rank):
        return []
    return [Fragment.whole(f"{name}/{owner}", value)]


def _cuts(
    parts: Parts, flat: Flat, start: int, stop: int, kind: str, data: Tensor, at: int, saving: bool
) -> list[Fragment]:
    """Fragments of ``[start, stop)`` of a flat buffer whose element ``at`` is ``data[0]``.

    A copy of a tied parameter is filled, and never saved: its owner is. Of replicas one is saved.
    """
    found: list[Fragment] = []
    if saving and parts.shards.replicas.rank > 0:
        return found
    for held, low, high in flat.parts(start, stop):
        if saving and isinstance(held.placement, Replicate) and parts.topology.tp.rank:
            continue
        if saving and parts.facts[held.name].owner != held.name:
            continue
        begin = next(slot.start for slot in flat.slots if slot.held is held)
        shape = tuple(held.parameter.shape)
        fact = parts.facts[held.name]
        for offset, place in rectangles(
            held.placement, shape, parts.topology.tp, low - begin, high - begin
        ):
            first = low + offset - at
            piece = data[first : first + place.area]
            key = f"{kind}/{fact.owner}"
            found.append(Fragment(key, fact.shape, [place], piece, parts.shards.let_go(flat)))
    return found


def _rest(parts: Parts, saving: bool) -> list[Fragment]:
    """Persistent buffers, and frozen parameters that are whole, by the first rank that has them."""
    topology, found = parts.topology, []
    whole = not parts.shards.keeps_owned
    for unit in parts.units:
        trained = {path for path, p in unit.module.named_parameters() if p.requires_grad}
        for path, tensor in unit.module.state_dict(keep_vars=True).items():
            name = f"{unit.name}.{path}"
            fact = parts.facts.get(name)
            second_use = fact is not None and fact.owner != name
            flat = path in trained or (fact is not None and (fact.trained or not whole))
            if flat or (saving and second_use):
                continue
            data = tensor.detach()
            placement = fact.placement if fact else Replicate()
            replicated = isinstance(placement, Replicate) and topology.tp.rank > 0
            if saving and (topology.dp.rank > 0 or replicated):
                continue
            shape = fact.shape if fact else tuple(data.shape)
            key = f"weight/{fact.owner}" if fact else f"buffer/{name}"
            for offset, place in rectangles(
                placement, tuple(data.shape), topology.tp, 0, data.numel()
            ):
                piece = data.view(-1)[offset : offset + place.area]
                found.append(Fragment(key, shape, [place], piece))
    return found


def _state_names(
    parts: Parts, states: Sequence[State]
) -> tuple[list[str], dict[str, dict[str, float]]]:
    """Names of the elementwise state, and the scalars by parameter name, of all ranks."""
    names: set[str] = set()
    scalars: dict[str, dict[str, float]] = {}
    for part, state in zip(parts.optimizer.parts(), states, strict=False):
        for key, value in state.items():
            if is_elementwise_state(value, part) or is_whole_state(value, part):
                names.add(key)
            elif value is not None:
                for held, _, _ in part.flat.parts(part.start, part.stop):
                    owner = parts.facts[held.name].owner
                    scalars.setdefault(owner, {})[key] = float(value)
    for other_names, other_scalars in all_gather_objects((names, scalars), parts.topology.world):
        names |= other_names
        scalars |= other_scalars
    return sorted(names), dict(sorted(scalars.items()))


def _set_scalars(
    parts: Parts, states: Sequence[State], scalars: dict[str, dict[str, float]]
) -> None:
    for part, state in zip(parts.optimizer.parts(), states, strict=False):
        held = part.flat.parts(part.start, part.stop)
        if not held:
            continue
        owner = parts.facts[held[0][0].name].owner
        for key, value in scalars.get(owner, {}).items():
            if isinstance(state.get(key), Tensor):
                state[key].fill_(value)
            else:
                state[key] = value
