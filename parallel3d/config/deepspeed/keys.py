"""Fields that each decide one key.

The fields are those of https://www.deepspeed.ai/docs/config-json/; what is read together is in
`rules` and `training`, what decides nothing here in `silent`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

ZERO = "zero_optimization"
CHECKPOINTING = "activation_checkpointing"
NO_SWITCH = "is neither true nor false"


class Target(NamedTuple):
    """The key that a field decides, how its value is turned, and what to know about it."""

    key: str
    turn: Callable[[Any], Any] = lambda value: value
    why: str = ""


def number(value: Any) -> Any:
    """The value as it is; refuses a number in quotes."""
    if isinstance(value, str) and re.fullmatch(r"-?\d+(\.\d+)?([eE][+-]?\d+)?", value):
        raise ValueError(f"is a text: write {value}")
    return value


def whole(value: Any) -> Any:
    """Sizes such as `2e8`, which JSON reads as a fraction, as whole numbers."""
    value = number(value)
    if isinstance(value, bool):
        raise ValueError("is not a number")
    return int(value) if isinstance(value, float) and value.is_integer() else value


def named(**names: Any) -> Callable[[Any], Any]:
    """What each text means here; null is `none`."""

    def turn(value: Any) -> Any:
        spelt = "none" if value is None else value
        if not isinstance(spelt, str) or spelt not in names:
            raise ValueError(f"is not one of {', '.join(names)}")
        return names[spelt]

    return turn


def either(on: Any, off: Any) -> Callable[[Any], Any]:
    """What `true` and `false` mean here."""

    def turn(value: Any) -> Any:
        if not isinstance(value, bool):
            raise ValueError(f"{NO_SWITCH}: write true or false")
        return on if value else off

    return turn


device = named(none="none", cpu="cpu", nvme="disk")


def device_of_parameters(value: Any) -> Any:
    """Where parameters lie; not on disk yet."""
    if value == "nvme":
        raise ValueError('is not built yet: write "cpu", the nearest that works')
    return device(value)


to_cpu = either("cpu", "none")
dtype = named(fp32="fp32", fp16="fp16", bf16="bf16", bfp16="bf16", none=None)
method = named(parameters="parameters", uniform="uniform", profile="measure", best="parameters")

KEYS: dict[str, Target] = {
    "train_batch_size": Target("data.global_batch_size", whole),
    "train_micro_batch_size_per_gpu": Target("data.microbatch_size", whole),
    "gradient_accumulation_steps": Target("pipeline.num_microbatches", whole),
    "steps_per_print": Target("log.every", whole),
    "gradient_clipping": Target("train.max_grad_norm", number, "0: off"),
    "communication_data_type": Target("zero.reduce_dtype", dtype),
    "fp32_allreduce": Target("zero.reduce_dtype", either("fp32", None)),
    "tensor_parallel.autotp_size": Target("topology.tp", lambda size: whole(size) or 1),
    f"{ZERO}.stage": Target("zero.stage", whole),
    f"{ZERO}.mics_shard_size": Target("zero.shard_size", lambda n: None if n == -1 else whole(n)),
    f"{ZERO}.offload_optimizer.device": Target("offload.optimizer", device),
    f"{ZERO}.offload_param.device": Target("offload.parameters", device_of_parameters),
    f"{ZERO}.cpu_offload": Target("offload.optimizer", to_cpu),
    f"{ZERO}.cpu_offload_params": Target("offload.parameters", to_cpu),
    f"{CHECKPOINTING}.cpu_checkpointing": Target("offload.activations", to_cpu),
    "pipeline.stages": Target("topology.pp", whole),
    "pipeline.partition": Target("pipeline.partition", method),
    "wandb.project": Target("log.wandb.project"),
    "wandb.group": Target("log.wandb.group"),
    "wandb.team": Target("log.wandb.entity"),
}

GIVES_WAY = ("log.every",)
"""Keys that change no number: the command line may say them differently."""
