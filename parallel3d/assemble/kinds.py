"""Whether the engine was passed the kinds of things that it takes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral
from typing import Any, get_type_hints

import torch
from torch import nn

from ..config.schema import Fp16
from ..config.shared import check_mapping
from ..config.values import convert
from ..topology import Topology
from .options import Options

NUMBERS = (int, float, int | None, float | None)
PLAIN = (*NUMBERS, str, bool, str | None)
FUNCTIONS = ("param_groups", "lr_schedule", "init", "num_items")


def check_first(topology: Any, timeout: Any) -> None:
    """Raise ValueError for what is needed to tell other ranks of anything."""
    if not isinstance(topology, Topology):
        raise ValueError(f"topology = {topology!r} is not a Topology: pass Topology.init()")
    if convert(timeout, float, "timeout") <= 0:
        raise ValueError(f"timeout = {timeout} must be above 0 seconds")


def check_kinds(model: Any, given: Mapping[str, Any]) -> None:
    """Raise ValueError for an argument that is something else than the engine takes."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model = {model!r} is not a module: pass an nn.Sequential of units")
    check_mapping("fp16", {} if given["fp16"] is None else given["fp16"], vars(Fp16()))
    _check_loss(given["loss_fn"])
    _check_optimizer(given["optimizer"])
    for name in FUNCTIONS:
        if given[name] is not None and not callable(given[name]):
            raise ValueError(f"{name} = {given[name]!r} is not a function, or None")
    hints = {**get_type_hints(Options), "max_grad_norm": float | None, "max_bad_steps": int | None}
    for name, hint in hints.items():
        value = given[name]
        whole = hint in NUMBERS and isinstance(value, Integral) and type(value) is not bool
        no_limit = hint in NUMBERS and value == math.inf
        if hint in PLAIN and not whole and not no_limit:  # numpy's whole numbers too
            convert(value, hint, name)
    for name, least in (("num_microbatches", 1), ("max_bad_steps", 0)):
        if given[name] is not None and given[name] < least:
            raise ValueError(f"{name} = {given[name]} is below {least}: the least is {least}")
    norm = given["max_grad_norm"]
    if norm is not None and not norm > 0:
        raise ValueError(f"max_grad_norm = {norm} must be above 0, or None for no clipping")


def _check_loss(loss_fn: Any) -> None:
    if isinstance(loss_fn, type) or not callable(loss_fn):
        name = loss_fn.__name__ if isinstance(loss_fn, type) else repr(loss_fn)
        raise ValueError(f"loss_fn = {name} is not a function: pass an object, nn.MSELoss()")


def _check_optimizer(optimizer: Any) -> None:
    made = isinstance(optimizer, torch.optim.Optimizer)
    if made or not callable(optimizer):
        raise ValueError(
            f"optimizer = {type(optimizer).__name__ if made else repr(optimizer)} is not what "
            f"makes an optimizer, which the engine calls with its parameters: pass a class, or "
            f"functools.partial(torch.optim.AdamW, lr=1e-3)"
        )
