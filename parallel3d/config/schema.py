"""The configuration as typed objects, a class for each group; the defaults are in conf/."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from . import options


@dataclass(frozen=True)
class Degrees:
    """Degrees of the grid; at most one is None and is inferred from the number of processes."""

    pp: int | None
    dp: int | None
    tp: int | None


@dataclass(frozen=True)
class Pipeline:
    """The schedule; `num_microbatches` is None where `data.microbatch_size` decides.

    `memory_limit` is bytes of activations on one rank.
    """

    schedule: str
    num_microbatches: int | None
    num_chunks: int | None
    partition: options.Partition | list[int]
    memory_limit: float | None


@dataclass(frozen=True)
class Zero:
    """What is sharded over dp; `gather_budget` in bytes."""

    stage: options.ZeroStage
    reduce: options.ZeroReduce
    shard_size: int | None
    gather_budget: int
    reduce_dtype: options.ReduceDtype | None


@dataclass(frozen=True)
class Fp16:
    """How the loss of `precision=fp16` is scaled; `scale` is a fixed one."""

    initial_scale: float = 65536.0
    window: int = 1000
    hysteresis: int = 2
    min_scale: float = 1.0
    scale: float | None = None


@dataclass(frozen=True)
class Recompute:
    """Which activations are computed again in the backward.

    Those of every `every`-th unit; `partition` cuts the inputs that are kept over tp.
    """

    mode: options.RecomputeMode
    every: int
    partition: bool


@dataclass(frozen=True)
class Offload:
    """What leaves the device, and where to."""

    optimizer: options.OffloadTo
    parameters: options.OffloadTo
    activations: options.OffloadTo
    path: str | None


@dataclass(frozen=True)
class Data:
    """Sizes are in sequences; `extra` are the target's own keys."""

    _target_: str
    path: str | None
    seq_len: int
    global_batch_size: int
    microbatch_size: int | None
    workers: int
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Optim:
    """`name` is a class of torch.optim in any case; `_target_` names any other class instead.

    Both take `lr`, and of `betas`, `eps` and `weight_decay` what they know; `extra` are further
    keys of the class. `state_dtype` is that of its state between updates, None for fp32 or wider.
    """

    name: str | None
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    lr_schedule: options.LrSchedule
    warmup_steps: int
    min_lr_ratio: float
    state_dtype: options.StateDtype | None = None
    _target_: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Train:
    """Steps and seconds; 0 is never or off."""

    steps: int
    eval_every: int
    eval_batches: int
    max_grad_norm: float
    max_bad_steps: int
    timeout: float


@dataclass(frozen=True)
class Checkpoint:
    """`resume` is never, auto or a path."""

    every: int
    resume: str
    keep: int


@dataclass(frozen=True)
class Wandb:
    """`mode` None: WANDB_MODE, else online if logged in, else offline."""

    mode: options.WandbMode | None
    project: str
    entity: str | None
    group: str | None
    tags: list[str]


@dataclass(frozen=True)
class Log:
    """Steps between two lines of the console, between two measured timelines, and W&B."""

    every: int
    wandb: Wandb
    trace: int = 100


@dataclass(frozen=True)
class Config:
    """The whole configuration. `model` and `loss` are a `_target_` and the keys that it takes."""

    name: str | None
    run_root: str
    seed: int
    topology: Degrees
    pipeline: Pipeline
    zero: Zero
    precision: options.Precision
    recompute: Recompute
    offload: Offload
    model: dict[str, Any]
    loss: dict[str, Any]
    data: Data
    optim: Optim
    train: Train
    checkpoint: Checkpoint
    log: Log
    compile: bool
    deepspeed: str | None
    fp16: Fp16 = field(default_factory=Fp16)
