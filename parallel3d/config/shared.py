"""Rules that hold for the recipe and for the engine alone, in the words of the configuration.

Plain Python. A number of ranks is None where it is not known yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, get_args

from . import options
from .schema import Fp16
from .values import spell

LARGEST_SCALE = 2.0**64  # that of optim.scaler


def check_one_of(key: str, value: Any, closed: Any) -> None:
    """Raise ValueError for a value that a closed set has not."""
    known = get_args(closed)
    if value not in known:
        raise ValueError(f"{key} = {spell(value)} is not one of {', '.join(map(str, known))}")


def check_mapping(name: str, asked: Any, known: Mapping[str, Any]) -> None:
    """Raise ValueError for what is no mapping, and for a key that is not known."""
    if not isinstance(asked, Mapping):
        raise ValueError(f"{name} = {asked!r} is not a mapping like {dict(known)}")
    for key in asked:
        if key not in known:
            close = get_close_matches(str(key), known, n=1, cutoff=0.0)
            raise ValueError(f"{name}.{key} is not a key; did you mean {name}.{close[0]}?")


def check_precision(precision: str, reduce_dtype: str | None) -> None:
    """Raise ValueError for a dtype that does not exist."""
    check_one_of("precision", precision, options.Precision)
    if reduce_dtype is not None:
        check_one_of("zero.reduce_dtype", reduce_dtype, options.ReduceDtype)


def check_loss_scale(precision: str, asked: Mapping[str, Any]) -> None:
    """Raise ValueError for a scale out of range, of another precision, or fixed and moving."""
    default = vars(Fp16())
    values = {**default, **asked}
    for key in ("window", "hysteresis"):
        if values[key] < 1:
            raise ValueError(f"fp16.{key} = {values[key]} is below 1: the least is fp16.{key}=1")
    for key in ("min_scale", "initial_scale", "scale"):
        if values[key] is not None and not 0 < values[key] <= LARGEST_SCALE:
            raise ValueError(
                f"fp16.{key} = {values[key]} is not in 0 < fp16.{key} <= 2^64: use a power of "
                f"two, such as 65536"
            )
    if values["initial_scale"] < values["min_scale"]:
        raise ValueError(
            f"fp16.initial_scale = {values['initial_scale']} is below fp16.min_scale = "
            f"{values['min_scale']}: raise the one or lower the other"
        )
    changed = [key for key, value in values.items() if value != default[key]]
    if changed and precision != "fp16":
        raise ValueError(
            f"fp16.{changed[0]} = {spell(values[changed[0]])} is of precision=fp16, but precision "
            f"= {precision}: leave it {spell(default[changed[0]])}, or set precision=fp16"
        )
    moving = [key for key in changed if key != "scale"]
    if moving and values["scale"] is not None:
        raise ValueError(
            f"fp16.{moving[0]} = {spell(values[moving[0]])} is of a scale that moves, but "
            f"fp16.scale = {values['scale']} is a fixed one: leave it null, or fp16.{moving[0]} "
            f"{spell(default[moving[0]])}"
        )


def check_zero(
    stage: int, reduce: str, gather_budget: int | None, shard_size: int | None, dp: int | None
) -> None:
    """Raise ValueError for a stage that does not exist, and for what is not sharded so."""
    check_one_of("zero.stage", stage, options.ZeroStage)
    check_one_of("zero.reduce", reduce, options.ZeroReduce)
    if gather_budget is not None and gather_budget < 0:
        raise ValueError(f"zero.gather_budget = {gather_budget} is a number of bytes, 0 or more")
    if dp is None or shard_size is None:
        return
    if shard_size < 1 or dp % shard_size:
        sizes = [size for size in range(1, dp + 1) if dp % size == 0]
        raise ValueError(
            f"zero.shard_size = {shard_size} does not divide topology.dp = {dp}: set "
            f"zero.shard_size={min(sizes, key=lambda size: abs(size - shard_size))}, or null for "
            f"all of dp"
        )
    if shard_size != dp and stage == 0:
        raise ValueError(
            f"zero.shard_size = {shard_size} says over how many ranks is sharded, but zero.stage "
            f"= 0 shards nothing: set zero.stage=1 or more, or zero.shard_size=null"
        )


def check_offload(offload: Mapping[str, Any], stage: int) -> None:
    """Raise ValueError for a place that does not exist, is not built, or is not needed."""
    for key in ("optimizer", "parameters", "activations"):
        check_one_of(f"offload.{key}", offload[key], options.OffloadTo)
        if key != "optimizer" and offload[key] == "disk":
            raise ValueError(
                f"offload.{key} = disk is not built yet: the nearest that works is offload.{key}="
                f"cpu"
            )
    if offload["optimizer"] == "disk" and offload["path"] is None:
        raise ValueError(
            "offload.optimizer = disk, but offload.path is null: set it to a folder on a local "
            "disk, or offload.optimizer=cpu"
        )
    if offload["optimizer"] != "disk" and offload["path"] is not None:
        raise ValueError(
            f"offload.path = {offload['path']}, but nothing goes to disk: set "
            f"offload.optimizer=disk, or offload.path=null"
        )
    if offload["path"] == "":
        raise ValueError("offload.path is empty: set it to a folder on a local disk")
    if offload["parameters"] == "cpu" and stage != 3:
        raise ValueError(
            f"offload.parameters = cpu, but zero.stage = {stage} keeps parameters whole on the "
            f"device: set zero.stage=3, or offload.parameters=none"
        )


def check_recompute(mode: str, every: int, partition: bool, compiled: bool, tp: int | None) -> None:
    """Raise ValueError for ways to recompute that contradict each other."""
    check_one_of("recompute.mode", mode, options.RecomputeMode)
    if every < 1:
        raise ValueError(f"recompute.every = {every} is below 1: the least is recompute.every=1")
    if every > 1 and mode == "none":
        raise ValueError(
            f"recompute.every = {every}, but recompute.mode = none repeats no unit: set "
            f"recompute.mode=full, or recompute.every=1"
        )
    if partition and mode != "full":
        raise ValueError(
            f"recompute.partition = true cuts what recompute.mode = full keeps, but that is "
            f"{mode}: set recompute.mode=full, or recompute.partition=false"
        )
    if partition and tp == 1:
        raise ValueError(
            "recompute.partition = true cuts over tp, but topology.tp = 1: set "
            "recompute.partition=false, or topology.tp=2"
        )
    if compiled and mode == "selective":
        raise ValueError(
            "recompute.mode = selective looks at every operation, which a compiled unit hides: "
            "set recompute.mode=full, or compile=false"
        )
