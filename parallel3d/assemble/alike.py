"""What every rank must have been given the same of, compared before anything rests on it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from torch import nn

from ..comm.collectives import all_gather_objects
from ..config.schema import Fp16
from ..optim.make import Make, made_for_trial
from ..topology import Topology
from .options import Offload

PLAIN = (str, int, float, bool, type(None))
OWN = {"timeout", "path"}  # a rank may have its own
LEFT_OUT = {"self", "model", "topology", "sample", "optimizer"}
LONG = 100  # letters, from which on a text is told by its digest


def check_alike(model: nn.Module, given: Mapping[str, Any], topology: Topology) -> None:
    """Raise ValueError, on every rank, for an argument that is another one on some rank.

    Plain values are compared, of functions only whether there is one, the optimizer's class and
    defaults, and the parameters' names, shapes and which of them are trained.

    Moves   two small messages per rank; where models differ, the lists of their parameters.
    """
    filled = {**given, "fp16": {**vars(Fp16()), **(given["fp16"] or {})}}
    mine = {**_told(filled), "optimizer": _optimizer(given["optimizer"])}
    for name, values in _first_differing(all_gather_objects(mine, topology.world)):
        _refuse(name, values)
    # Shapes are those of the rank's part.
    listed = [f"{n} {tuple(p.shape)} {p.requires_grad}" for n, p in model.named_parameters()]
    at = f"the model's parameters at tp {topology.tp.rank}"
    digests = all_gather_objects({at: _short(repr(listed))}, topology.world)
    if any(_first_differing(digests)):
        every = all_gather_objects((topology.tp.rank, listed), topology.world)
        _refuse_models(every)


def _first_differing(ranks: list[dict[str, str]]) -> list[tuple[str, dict[int, str]]]:
    """Of names with several values, one value for the first rank that has it and one other."""
    found = []
    for name in dict.fromkeys(name for told in ranks for name in told):
        values = {rank: told[name] for rank, told in enumerate(ranks) if name in told}
        first, *others = values
        if other := next((rank for rank in others if values[rank] != values[first]), None):
            found.append((name, {first: values[first], other: values[other]}))
    return found


def _refuse(name: str, values: Mapping[int, str]) -> None:
    (first, expected), (other, value) = values.items()
    raise ValueError(
        f"{name} = {value} on rank {other}, but {expected} on rank {first}: every rank must be "
        f"given the same"
    )


def _refuse_models(ranks: list[tuple[int, list[str]]]) -> None:
    """Name the first parameter that two ranks of one tp index have not alike."""
    first: dict[int, int] = {}
    for rank, (tp, listed) in enumerate(ranks):
        other = first.setdefault(tp, rank)
        expected = ranks[other][1]
        for at in range(max(len(listed), len(expected))):
            values = [lines[at] if at < len(lines) else "none" for lines in (expected, listed)]
            if values[0] != values[1]:
                _refuse("the model's parameter", {other: values[0], rank: values[1]})


def _told(given: Mapping[str, Any], of: str = "") -> dict[str, str]:
    """A text for each argument, as far as it can be compared."""
    found: dict[str, str] = {}
    for name, value in given.items():
        if name in OWN or (name in LEFT_OUT and not of):
            continue
        if isinstance(value, Mapping | Offload):
            inner = value if isinstance(value, Mapping) else vars(value)
            found |= _told(inner, f"{of}{name}.")
        else:
            plain = _is_plain(value)
            found[of + name] = _short(repr(value)) if plain else f"a {type(value).__name__}"
    return found


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, PLAIN)


def _optimizer(make: Make) -> str:
    """The class and its defaults; or the error, which is for who checks the optimizer to raise."""
    try:
        made = made_for_trial(make, {})
        told = [f"{key}={value!r}" for key, value in made.defaults.items() if _is_plain(value)]
        return f"{type(made).__name__}({', '.join(told)})"
    except Exception as error:
        return type(error).__name__


def _short(text: str) -> str:
    """The text, or a few letters for a long one."""
    if len(text) <= LONG:
        return text
    return f"{text[: LONG // 2]}... ({hashlib.blake2b(text.encode(), digest_size=4).hexdigest()})"
