"""Fields that are read together: precision, batch, budget, path."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from .keys import CHECKPOINTING, ZERO, whole
from .said import AUTO, Claim, Said

BYTES = {"bf16": 2, "fp16": 2, "fp64": 8}
SCALE = {
    "fp16.loss_scale": "fp16.scale",
    "fp16.initial_scale_power": "fp16.initial_scale",
    "fp16.loss_scale_window": "fp16.window",
    "fp16.hysteresis": "fp16.hysteresis",
    "fp16.min_loss_scale": "fp16.min_scale",
}
POWERS = range(65)
ENABLED = {"fp16.enabled": "fp16", "bf16.enabled": "bf16", "bfloat16.enabled": "bf16"}
BATCH = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
TOTAL = "train_batch_size"
LIVE = f"{ZERO}.stage3_max_live_parameters"
OFFLOAD = f"{ZERO}.offload_optimizer"
MOMENTS = "bf16.bf16_optimizer_states"
INTERVAL = "pipeline.activation_checkpoint_interval"
PARTITION = f"{CHECKPOINTING}.partition_activations"
SWITCHES = (*ENABLED, MOMENTS, PARTITION, "wandb.enabled")
DEGREES = {"pp": "pipeline.stages", "tp": "tensor_parallel.autotp_size"}
DECIDES: dict[str, str] = {
    **dict.fromkeys(ENABLED, "precision"),
    **SCALE,
    LIVE: "zero.gather_budget",
    f"{OFFLOAD}.nvme_path": "offload.path",
    INTERVAL: "recompute.every",
    PARTITION: "recompute.partition",
    "wandb.enabled": "log.wandb.mode",
    MOMENTS: "optim.state_dtype",
}
"""The fields of this file, and the key that decides where one is `"auto"`."""


def switch(said: Said, field: str) -> Iterator[Claim]:
    """A field that is true or false; what it claims is another rule's."""
    if field in SWITCHES:
        said.require(field, True, False)
    yield from ()


def precision(said: Said) -> Iterator[Claim]:
    """`fp16.enabled` and `bf16.enabled`; both off is fp32."""
    fields = [field for field in ENABLED if field in said.fields]
    on = [field for field in fields if said.get(field) is True]
    is_open = any(said.fields[field] == AUTO for field in fields)
    for field in fields:
        if field in on:
            yield Claim(field, "precision", ENABLED[field])
        elif said.get(field) is False and (on or is_open):
            yield Claim(field, None, why="precision says it")
        elif said.get(field) is False:
            yield Claim(field, "precision", "fp32")


def _precision(said: Said) -> str:
    claims = [claim.value for claim in precision(said) if claim.key]
    return str(claims[0] if claims else said.config.get("precision"))


def loss_scale(said: Said, field: str) -> Iterator[Claim]:
    """A detail of fp16, which files have also where it is off."""
    if field not in SCALE or (value := said.turned(field, whole)) is None:
        return
    if _precision(said) != "fp16":
        yield Claim(field, None, why="of precision=fp16 only")
    elif field == "fp16.initial_scale_power":
        if value not in POWERS:
            raise said.refuse(field, f"is not a power of 2, from 0 to {POWERS[-1]}")
        yield Claim(field, SCALE[field], 2**value, "2 to this power")
    elif field == "fp16.loss_scale" and value == 0:
        yield Claim(field, SCALE[field], None, "dynamic")
    else:
        yield Claim(field, SCALE[field], value)


def batch(said: Said) -> Iterator[Claim]:
    """`train_batch_size` is micro batch times accumulation times dp, and so is ours."""
    micro, times = (said.whole(field) for field in BATCH)
    total, dp = said.whole(TOTAL), _degree(said, "dp")
    if micro is None:
        return
    if times is None:
        if dp is not None and not {TOTAL, BATCH[1]} & said.fields.keys():
            why = "no accumulation, as none is said"
            yield Claim(TOTAL, "data.global_batch_size", micro * dp, why, implied=True)
        return
    name = f"{' * '.join(BATCH)} * topology.dp"
    if dp is not None and total is None:
        yield Claim(name, "data.global_batch_size", micro * times * dp)
    elif dp is not None and total != micro * times * dp:
        raise ValueError(
            f"{said.spell(TOTAL)}, but {name} = {micro} * {times} * {dp} = {micro * times * dp}: "
            f'change one of them, or write "{AUTO}" for one in the file'
        )
    elif total is None and said.world_size is None:
        raise said.refuse(BATCH[0], f"is of one dp rank: set topology.dp, or {TOTAL} in the file")


def _degree(said: Said, axis: str) -> int | None:
    """A degree of the grid, where it is known: said, or what the others leave of the ranks."""
    degrees = dict(said.config["topology"])
    for name, field in DEGREES.items():
        degrees[name] = said.whole(field) or degrees[name]
    degree = degrees.pop(axis)
    if isinstance(degree, int):
        return degree
    if said.world_size is None or not all(isinstance(other, int) for other in degrees.values()):
        return None
    return max(1, said.world_size // max(1, prod(degrees.values())))


def budget(said: Said) -> Iterator[Claim]:
    """Parameters there are bytes here."""
    if (live := said.whole(LIVE)) is not None:
        size = BYTES.get(_precision(said), 4)
        yield Claim(LIVE, "zero.gather_budget", live * size, f"bytes, {size} a parameter")


def path(said: Said) -> Iterator[Claim]:
    """`nvme_path`, which files have also where nothing is on disk."""
    field = f"{OFFLOAD}.nvme_path"
    if said.get(field) is not None and said.get(f"{OFFLOAD}.device") == "nvme":
        yield Claim(field, "offload.path", said.get(field))
    elif said.get(field) is not None:
        yield Claim(field, None, why='of "device": "nvme" only')


def recomputing(said: Said) -> Iterator[Claim]:
    """What turns recomputing on, and what is cut of the inputs that it keeps."""
    if (every := said.whole(INTERVAL)) is not None:
        yield Claim(INTERVAL, "recompute.mode", "full" if every else "none")
        if every:
            yield Claim(INTERVAL, "recompute.every", every)
    for field in (PARTITION, f"{CHECKPOINTING}.cpu_checkpointing"):
        if said.get(field) is True:
            yield Claim(field, "recompute.mode", "full", implied=True)
    is_cut = said.get(PARTITION)
    if is_cut is True and _degree(said, "tp") == 1:
        yield Claim(PARTITION, None, why="topology.tp = 1: nothing to cut over")
    elif is_cut is not None:
        yield Claim(PARTITION, "recompute.partition", is_cut)


def others(said: Said) -> Iterator[Claim]:
    """The moments, and W&B."""
    if said.get(MOMENTS) is not None:
        narrow = Claim(MOMENTS, "optim.state_dtype", "bf16", "masters stay fp32")
        yield narrow if said.get(MOMENTS) else Claim(MOMENTS, None, why="optim.state_dtype says it")
    if said.get("wandb.enabled") is False:
        yield Claim("wandb.enabled", "log.wandb.mode", "disabled")
    elif said.get("wandb.enabled") is not None:
        yield Claim("wandb.enabled", None, why="log.wandb.mode says how")
