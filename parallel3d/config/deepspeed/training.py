"""The sections `optimizer` and `scheduler`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from ..optimizer import class_of, classes, shared_by
from ..schema import Optim
from ..targets import parameters, path_of, takes
from .keys import number, whole
from .said import Claim, Said

PARAMS = "optimizer.params."
CURVE = "scheduler.params."
ADAM = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
DEFAULTS: dict[str, dict[str, Any]] = {
    "adam": ADAM,
    "adamw": ADAM,
    "lamb": ADAM,
    "muon": {"lr": 1e-3, "weight_decay": 0.0, "momentum": 0.95},
}
"""What DeepSpeed's own optimizers take where `optimizer.params` is silent."""
FUSED = "torch's fused optimizer"
SWITCHES: dict[str, tuple[tuple[bool, ...], str]] = {
    "adam_w_mode": ((True, False), "optim.name says it"),
    "torch_adam": ((True, False), FUSED),
    "bias_correction": ((True,), FUSED),
    "fp32_optimizer_states": ((True,), FUSED),
}
BOUNDS = ("max_coeff", "min_coeff")
OWN = {item.name for item in fields(Optim)} - {*ADAM, "extra"}
"""Keys of `optim` beside the parameters of an optimizer."""
LAMB_RATIO = "its trust ratio has no bounds here, 0.01 to 10 by DeepSpeed's default"
COMPRESSED = {"onebitadam": "Adam", "zerooneadam": "Adam", "onebitlamb": "Lamb"}
CLASSES = {"fusedadam": "Adam", "deepspeedcpuadam": "Adam", "fusedlamb": "Lamb"}
"""DeepSpeed's own classes, which a file calls otherwise."""

CURVES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
LACKS = {
    "WarmupLR": ("total_num_steps", "cos_min_ratio", "warmup_min_ratio"),
    "WarmupDecayLR": ("cos_min_ratio", "warmup_min_ratio"),
    "WarmupCosineLR": ("warmup_min_lr", "warmup_max_lr"),
}
CURVE_KEYS = {
    "warmup_num_steps": "optim.warmup_steps",
    "warmup_max_lr": "optim.lr",
    "total_num_steps": "train.steps",
    "cos_min_ratio": "optim.min_lr_ratio",
}
CURVE_ONLY = {
    "warmup_min_lr": (0, "the warm-up rises from lr / warmup_steps"),
    "warmup_min_ratio": (0, "the warm-up rises from lr / warmup_steps"),
    "warmup_type": ("linear", "the warm-up is linear"),
    "last_batch_iteration": (-1, "a resumed run knows its step"),
}


def optimizer(said: Said) -> Iterator[Claim]:
    """The type, and DeepSpeed's defaults of the parameters that are not there."""
    kind = said.get("optimizer.type")
    name = str(kind).lower()
    if kind is not None:
        _require_known(said, name)
        decoupled = name == "adam" and said.get(f"{PARAMS}adam_w_mode") is not False
        why = LAMB_RATIO if name == "lamb" else ""
        why = "Adam is AdamW there, unless adam_w_mode is false" if decoupled else why
        yield Claim("optimizer.type", "optim.name", "adamw" if decoupled else name, why)
        yield from _silent(said, name, "adamw" if decoupled else name)


def _silent(said: Said, name: str, ours: str) -> Iterator[Claim]:
    """Defaults of the parameters that are not there: DeepSpeed's, or those of torch's class."""
    defaults, why = DEFAULTS.get(name), ""
    if defaults is None or said.get(f"{PARAMS}torch_adam") is True:
        target, why = class_of(ours, None), "torch's default"
        taken = parameters(target)
        defaults = {param: taken[param].default for param in ("lr", *shared_by(target))}
    for param, value in defaults.items():
        if PARAMS + param not in said.fields:
            value = list(value) if isinstance(value, tuple) else value
            yield Claim(PARAMS + param, f"optim.{param}", value, why, implied=True)


def _require_known(said: Said, name: str) -> None:
    """Refuse a type that is not there; answers in the file's terms."""
    if name in COMPRESSED:
        reason = f'compresses what it sends, as nothing does here: write "{COMPRESSED[name]}"'
        raise said.refuse("optimizer.type", reason)
    if name in CLASSES:
        reason = f'is what "{CLASSES[name]}" means in DeepSpeed: write "{CLASSES[name]}"'
        raise said.refuse("optimizer.type", reason)
    known = classes()
    if name not in known:
        close = get_close_matches(name, known, n=1, cutoff=0.75)
        hint = f'; did you mean "{known[close[0]].__name__}"?' if close else ""
        names = ", ".join(sorted((each.__name__ for each in known.values()), key=str.lower))
        raise said.refuse("optimizer.type", f"is not one of {names}{hint}")


def parameter(said: Said, field: str) -> Iterator[Claim]:
    """One field of `optimizer.params`."""
    if not field.startswith(PARAMS):
        return
    param = field.removeprefix(PARAMS)
    if param in SWITCHES:
        values, why = SWITCHES[param]
        said.require(field, *values)
        yield Claim(field, None, why=why)
        return
    _require_taken(said, field, param)
    if (value := said.turned(field, number)) is not None:
        why = "0 for parameters with fewer than two dims" if param == "weight_decay" else ""
        yield Claim(field, f"optim.{param}", value, why)


def _require_taken(said: Said, field: str, param: str) -> None:
    """Refuse a parameter that the optimizer's class does not have."""
    if param in OWN:
        reason = f"take it out of the file, or set optim.{param} on the command line"
        raise said.refuse(field, f"is no parameter of an optimizer: {reason}")
    outer = param.partition(".")[0]
    if outer != param and outer in ADAM:
        way = f"write {PARAMS}{outer} as one value, such as {json.dumps(ADAM[outer])}"
        raise said.refuse(field, f"is inside an object: {way}")
    target = _class(said)
    if target is None or (param != "params" and takes(target, param)):
        return
    if param in BOUNDS and path_of(target).endswith(".Lamb"):
        reason = "bounds the trust ratio, which has no bounds here: take it out of the file"
        raise said.refuse(field, reason)
    names = sorted(parameters(target).keys() - {"params"})
    close = get_close_matches(param, names, n=1, cutoff=0.75)
    hint = f", which takes {', '.join(names)}: take it out of the file"
    hint = f"; did you mean {PARAMS}{close[0]}?" if close else hint
    raise said.refuse(field, f"is no parameter of {path_of(target)}{hint}")


def _class(said: Said) -> Callable[..., Any] | None:
    """The optimizer's class; None where there is none of that name, which another rule tells."""
    kind, ours = said.get("optimizer.type"), said.config["optim"]
    try:
        if kind is not None:
            return class_of((COMPRESSED | CLASSES).get(str(kind).lower(), str(kind)), None)
        return class_of(ours.get("name"), ours.get("_target_"))
    except ValueError:
        return None


def scheduler(said: Said) -> Iterator[Claim]:
    """The curve: a linear warm-up, how it falls, and DeepSpeed's defaults."""
    kind = said.get("scheduler.type")
    if kind is not None:
        said.require("scheduler.type", *CURVES)
        yield Claim("scheduler.type", "optim.lr_schedule", CURVES[kind])
        if kind == "WarmupDecayLR":
            yield Claim("scheduler.type", "optim.min_lr_ratio", 0.0, "it falls to 0")
        yield from _implied(said, kind)


def curve(said: Said, field: str) -> Iterator[Claim]:
    """One field of `scheduler.params`."""
    if not field.startswith(CURVE) or (value := said.turned(field, whole)) is None:
        return
    param, kind = field.removeprefix(CURVE), str(said.get("scheduler.type"))
    if param in LACKS.get(kind, ()):
        raise said.refuse(field, f"is no parameter of {kind}: take it away")
    if param in CURVE_KEYS:
        yield Claim(field, CURVE_KEYS[param], value)
    elif param in CURVE_ONLY:
        only, why = CURVE_ONLY[param]
        said.require(field, only, why=why)
        yield Claim(field, None, why=why)


def _implied(said: Said, kind: str) -> Iterator[Claim]:
    """DeepSpeed's defaults of a scheduler."""
    defaults: dict[str, Any] = {"warmup_num_steps": 1000}
    if kind == "WarmupCosineLR":
        defaults["cos_min_ratio"] = 1e-4
    for param, value in defaults.items():
        if CURVE + param not in said.fields:
            yield Claim(CURVE + param, CURVE_KEYS[param], value, implied=True)
    if "warmup_max_lr" not in LACKS[kind] and f"{CURVE}warmup_max_lr" not in said.fields:
        why = "optim.lr is the top, not 0.001, DeepSpeed's default"
        yield Claim(f"{CURVE}warmup_max_lr", None, why=why, implied=True)
    if f"{CURVE}warmup_type" not in said.fields:
        why = "linear; a logarithmic rise, DeepSpeed's default, is not there"
        yield Claim(f"{CURVE}warmup_type", None, why=why, implied=True)


def decides(field: str) -> str | None:
    """The key that decides where an optimizer's or scheduler's field is `"auto"`."""
    if field.startswith(PARAMS):
        return f"optim.{field.removeprefix(PARAMS)}"
    names = {"optimizer.type": "optim.name", "scheduler.type": "optim.lr_schedule"}
    return names.get(field) or CURVE_KEYS.get(field.removeprefix(CURVE))


FIELDS = ["optimizer.type", "scheduler.type", *(CURVE + p for p in (*CURVE_KEYS, *CURVE_ONLY))]
FIELDS += [PARAMS + param for param in (*ADAM, *SWITCHES, "momentum")]
"""For the nearest name; `optimizer.params` may have any other that the class takes."""
