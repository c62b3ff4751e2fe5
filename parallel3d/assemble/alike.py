"""What every rank must have been given the same of, compared before anything rests on it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from torch import nn

from ..comm.collectives import all_gather_objects
from ..optim.make import Make, made_for_trial
from ..topology import Topology
from .options import Offload

PLAIN = (str, int, float, bool, type(None))
OWN = {"timeout", "path"}  # a rank may have its own


def check_alike(
    model: nn.Module, given: Mapping[str, Any], optimizer: Make, topology: Topology
) -> None:
    """Raise ValueError, on every rank, for an argument that is another one on some rank.

    Plain values are compared, what the optimizer's options are, and the parameters' names, shapes
    and which of them are trained. Functions cannot be compared.

    Moves   one small message per rank.
    """
    mine = dict(_plain(given))
    mine["optimizer"] = _told(optimizer)
    # Shapes are those of the rank's part.
    mine[f"the model's parameters at tp {topology.tp.rank}"] = _digest(model)
    first: dict[str, tuple[int, str]] = {}
    for rank, theirs in enumerate(all_gather_objects(mine, topology.world)):
        for name, value in theirs.items():
            known, expected = first.setdefault(name, (rank, value))
            if value != expected:
                raise ValueError(
                    f"{name} = {value} on rank {rank}, but {expected} on rank {known}: every rank "
                    f"must be given the same"
                )


def _plain(given: Mapping[str, Any], of: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in given.items():
        if isinstance(value, Mapping | Offload):
            inner = value if isinstance(value, Mapping) else vars(value)
            found |= _plain(inner, f"{of}{name}.")
        elif name not in OWN and _is_plain(value):
            found[of + name] = repr(value)
    return found


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, PLAIN)


def _told(optimizer: Make) -> str:
    """The class and its defaults; or the error, which is for who checks the optimizer to raise."""
    try:
        made = made_for_trial(optimizer, {})
        told = [f"{key}={value!r}" for key, value in made.defaults.items() if _is_plain(value)]
        return f"{type(made).__name__}({', '.join(told)})"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _digest(model: nn.Module) -> str:
    """A few letters for the whole list."""
    listed = [(name, tuple(p.shape), p.requires_grad) for name, p in model.named_parameters()]
    return hashlib.blake2b(repr(listed).encode(), digest_size=4).hexdigest()
