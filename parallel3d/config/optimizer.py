"""The optimizer that `optim` names, and the keys of the group that it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

import torch

from .schema import Optim
from .targets import check_keys, locate, takes
from .values import spell

SHARED = ("betas", "eps", "weight_decay")
OURS = {"lamb": "parallel3d.optim.Lamb", "muon": "parallel3d.optim.Muon"}


def optimizer_class(optim: Optim) -> Callable[..., torch.optim.Optimizer]:
    """The class that the group names; raises as `class_of`."""
    return class_of(optim.name, optim._target_)


def classes() -> dict[str, Callable[..., torch.optim.Optimizer]]:
    """What `optim.name` may name, in lower case: `lamb`, `muon` and the classes of torch.optim."""
    found: dict[str, Callable[..., torch.optim.Optimizer]] = {
        name.lower(): found
        for name, found in vars(torch.optim).items()
        if isinstance(found, type) and issubclass(found, torch.optim.Optimizer)
    }
    del found["optimizer"]
    return found | {name: locate(target, "optim.name") for name, target in OURS.items()}


def class_of(name: str | None, target: str | None) -> Callable[..., torch.optim.Optimizer]:
    """The class: that at `target`, or one of `classes` in any case.

    Raises:
        ValueError: no such class; names the nearest.
    """
    if target is not None:
        return locate(target, "optim._target_")
    known, wanted = classes(), (name or "").lower()
    if wanted not in known:
        close = get_close_matches(wanted, known, n=1)
        hint = f"did you mean optim.name={close[0]}?" if close else f"it has {', '.join(known)}"
        raise ValueError(
            f"optim.name = {spell(name)} is not a class of torch.optim (another class is "
            f"optim._target_=module.Class); {hint}"
        )
    return known[wanted]


def optimizer_keys(optim: Optim) -> dict[str, Any]:
    """What the class is called with beside the parameters.

    `lr`, those of `betas`, `eps` and `weight_decay` that it takes, and the extra keys.
    """
    shared = {name: getattr(optim, name) for name in shared_by(optimizer_class(optim))}
    return {"lr": optim.lr, **shared, **optim.extra}


def shared_by(target: Callable[..., Any]) -> list[str]:
    """Those of `betas`, `eps` and `weight_decay` that the class takes from the group.

    Adafactor's `eps` is a pair of other numbers, which stays as it is.
    """
    others = {"eps"} if target is torch.optim.Adafactor else set()
    return [name for name in SHARED if name not in others and takes(target, name)]


def check_optimizer(optim: Optim) -> None:
    """Refuse a class that does not exist and a key that it does not take."""
    target = optimizer_class(optim)
    known = {item.name for item in fields(optim)} - {"extra", "_target_"}
    check_keys("optim", target, optim.extra, known=known, supplied=("params", "lr", *SHARED))
