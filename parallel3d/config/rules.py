"""The rules between fields, before and after the number of processes is known."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from pathlib import PurePath
from typing import Any, get_args

from . import options
from .optimizer import check_optimizer
from .schema import Config, Degrees
from .shared import check_loss_scale, check_offload, check_precision, check_recompute, check_zero
from .targets import check_keys, locate, takes
from .values import spell

AT_LEAST: dict[str, float] = {
    "topology.pp": 1,
    "topology.dp": 1,
    "topology.tp": 1,
    "pipeline.num_microbatches": 1,
    "pipeline.num_chunks": 1,
    "pipeline.memory_limit": 1,
    "data.seq_len": 1,
    "data.global_batch_size": 1,
    "data.microbatch_size": 1,
    "data.workers": 0,
    "optim.lr": 0,
    "optim.eps": 0,
    "optim.weight_decay": 0,
    "optim.warmup_steps": 0,
    "optim.min_lr_ratio": 0,
    "train.steps": 1,
    "train.eval_every": 0,
    "train.eval_batches": 1,
    "train.max_grad_norm": 0,
    "train.max_bad_steps": 0,
    "train.timeout": 1,
    "checkpoint.every": 0,
    "checkpoint.keep": 1,
    "log.every": 0,
    "log.trace": 0,
}
MODEL_SUPPLIED = ("topology", "vocab_size")


def get(config: Any, key: str) -> Any:
    """The value at a dotted key."""
    for name in key.split("."):
        config = config[name] if isinstance(config, dict) else getattr(config, name)
    return config


def check(config: Config) -> None:
    """Every rule that needs no process. ValueError gives value, rule and way out."""
    for key, least in AT_LEAST.items():
        value = get(config, key)
        if value is not None and value < least:
            raise ValueError(f"{key} = {value} is below {least}: the least is {key}={least}")
    for rule in (
        _degrees,
        _names,
        _schedule,
        _optim,
        _targets,
        _sequence,
        _microbatches,
    ):
        rule(config)
    _shared(config)


def settle(config: Config, pp: int, dp: int, tp: int) -> Config:
    """Fill in the degrees of the real grid and the number of microbatches; check what needs them.

    Raises:
        ValueError: the global batch, the model's heads or ``zero.shard_size`` do not divide.
    """
    heads = config.model.get("num_heads")
    if isinstance(heads, int) and heads % tp:
        raise ValueError(
            f"model.num_heads = {heads} is not a multiple of topology.tp = {tp}: "
            f"set model.num_heads={-(-heads // tp) * tp}, or a topology.tp that divides {heads}"
        )
    _shared(config, dp, tp)
    return replace(
        config,
        topology=Degrees(pp, dp, tp),
        pipeline=replace(config.pipeline, num_microbatches=_settled_microbatches(config, dp)),
    )


def check_resume(saved: Config, config: Config) -> None:
    """Refuse to resume a run with a difference that would make it another run.

    The layout and what does not change the numbers may differ.

    Raises:
        ValueError: names the key, both values and the way out.
    """
    may_change = {"name", "run_root", "compile", "precision", "fp16", "deepspeed"}
    may_change |= {"topology", "pipeline", "zero", "recompute", "offload", "checkpoint", "log"}
    may_change |= {"train.steps", "train.eval_every", "train.eval_batches"}
    may_change |= {"train.timeout", "train.max_bad_steps", "data.workers"}
    before, now = _flat(saved), _flat(config)
    for key in before | now:
        if key in may_change or key.split(".")[0] in may_change:
            continue
        if before.get(key) != now.get(key):
            raise ValueError(
                f"{key} = {spell(now.get(key))}, but the run to resume has "
                f"{spell(before.get(key))}: go back to that, or start a new run with another name"
            )


def _settled_microbatches(config: Config, dp: int) -> int:
    batch, size, count = (
        config.data.global_batch_size,
        config.data.microbatch_size,
        config.pipeline.num_microbatches,
    )
    if size is None:
        assert count is not None
        _require_multiple(batch, dp * count, f"pipeline.num_microbatches = {dp} * {count}")
        return count
    _require_multiple(batch, dp * size, f"data.microbatch_size = {dp} * {size}")
    counted = batch // (dp * size)
    if count not in (None, counted):
        raise ValueError(
            f"pipeline.num_microbatches = {count}, but data.global_batch_size / (topology.dp * "
            f"data.microbatch_size) = {batch} / ({dp} * {size}) = {counted}: "
            f"set one of them to null, or pipeline.num_microbatches={counted}"
        )
    return counted


def _require_multiple(batch: int, of: int, product: str) -> None:
    if batch % of:
        legal = [str(near) for near in (batch // of * of, batch // of * of + of) if near]
        raise ValueError(
            f"data.global_batch_size = {batch} is not a multiple of topology.dp * {product} = "
            f"{of}: set data.global_batch_size={' or '.join(legal)}"
        )


def _degrees(config: Config) -> None:
    empty = [item.name for item in fields(Degrees) if get(config.topology, item.name) is None]
    if len(empty) > 1:
        raise ValueError(
            f"topology.{' and topology.'.join(empty)} are null: at most one degree is inferred "
            f"from the number of processes, set topology.{empty[-1]}=1"
        )


def _names(config: Config) -> None:
    name = config.name
    if name is not None and (not name.strip() or PurePath(name).name != name or name == ".."):
        raise ValueError(
            f"name = {name!r} is not the plain name of a folder: it must have no path in it, "
            f"which is run_root={config.run_root}"
        )


def _schedule(config: Config) -> None:
    name, names = config.pipeline.schedule, get_args(options.ScheduleName)
    if name not in names and PurePath(name).suffix == "":
        raise ValueError(
            f"pipeline.schedule = {name!r} is not one of {', '.join(names)}, or a file of actions"
        )
    cuts = config.pipeline.partition
    if isinstance(cuts, list) and (sorted(set(cuts)) != cuts or min(cuts, default=1) < 1):
        raise ValueError(
            f"pipeline.partition = {cuts}: cuts are the first units of the stages after the "
            f"first, ascending from 1, for example [2,4]"
        )


def _optim(config: Config) -> None:
    optim = config.optim
    for beta in optim.betas:
        if not 0 <= beta < 1:
            raise ValueError(f"optim.betas = {list(optim.betas)}: each must be in 0 <= beta < 1")
    if optim.min_lr_ratio > 1:
        raise ValueError(
            f"optim.min_lr_ratio = {optim.min_lr_ratio} is above 1: it is the last learning rate "
            f"as a share of optim.lr"
        )
    check_optimizer(optim)


def _targets(config: Config) -> None:
    for group, supplied in (("model", MODEL_SUPPLIED), ("loss", ("axis",))):
        keys: dict[str, Any] = dict(get(config, group))
        if "_target_" not in keys:
            raise ValueError(f"{group}._target_ is missing: it names the callable, module.name")
        target = locate(keys.pop("_target_"), f"{group}._target_")
        check_keys(group, target, keys, supplied=supplied, partial=group == "loss")
    if "seed" in config.data.extra:
        raise ValueError("data.seed is not a key; did you mean seed? It orders the data too")
    target = locate(config.data._target_, "data._target_")
    known = {item.name for item in fields(config.data)} - {"extra", "_target_"}
    ours = {name for name in (*known, "seed") if takes(target, name)}
    check_keys("data", target, config.data.extra, known=known, supplied=ours)


def _sequence(config: Config) -> None:
    longest = config.model.get("max_seq_len")
    if isinstance(longest, int) and config.data.seq_len > longest:
        raise ValueError(
            f"data.seq_len = {config.data.seq_len} is above model.max_seq_len = {longest}: "
            f"set data.seq_len={longest} or less, or model.max_seq_len={config.data.seq_len}"
        )


def _microbatches(config: Config) -> None:
    if config.pipeline.num_microbatches is None and config.data.microbatch_size is None:
        raise ValueError(
            "pipeline.num_microbatches and data.microbatch_size are both null: "
            "set one of them, for example pipeline.num_microbatches=4"
        )


def _shared(config: Config, dp: int | None = None, tp: int | None = None) -> None:
    zero, again = config.zero, config.recompute
    check_precision(config.precision, zero.reduce_dtype)
    check_loss_scale(config.precision, vars(config.fp16))
    check_zero(zero.stage, zero.reduce, zero.gather_budget, zero.shard_size, dp)
    check_offload(vars(config.offload), zero.stage)
    check_recompute(again.mode, again.every, again.partition, config.compile, tp)


def _flat(config: Any, path: str = "") -> dict[str, Any]:
    items: dict[str, Any] = config if isinstance(config, dict) else vars(config)
    flat: dict[str, Any] = {}
    for key, value in items.items():
        inner = path if key == "extra" else f"{path}.{key}".lstrip(".")
        nested = is_dataclass(value) or isinstance(value, dict)
        flat |= _flat(value, inner) if nested else {inner: value}
    return flat
