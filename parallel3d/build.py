"""From the configuration to the things a run is made of: data, model, engine, meter."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from torch import nn

from .assemble.plan import reason_to_look
from .config import Config, call, locate, optimizer_class, optimizer_keys, takes
from .engine import Engine
from .log.cost import device, flops_per_token, matmul_parameters
from .log.meters import Meter
from .optim.muon import Muon
from .optim.schedule import lr_curve
from .topology import Axis, Topology

FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


def build_data(config: Config) -> Any:
    """What ``data._target_`` names: ``train(step, slots)``, ``validation(step, slots)``."""
    about = config.data
    offered = {
        "path": about.path,
        "seq_len": about.seq_len,
        "global_batch_size": about.global_batch_size,
        "seed": config.seed,
    }
    return call({"_target_": about._target_, **about.extra}, "data", **offered)


def build_model(config: Config, topology: Topology, data: Any) -> nn.Module:
    """What ``model._target_`` names, on meta; a null ``vocab_size`` is the data's."""
    group = dict(config.model)
    needed = getattr(data, "vocab_size", None)
    if "vocab_size" in group:
        if group["vocab_size"] is None:
            group["vocab_size"] = needed
        elif needed is not None and group["vocab_size"] < needed:
            raise ValueError(
                f"model.vocab_size = {group['vocab_size']} is smaller than the data's {needed}: "
                f"set model.vocab_size=null"
            )
    with torch.device("meta"):
        model: nn.Module = call(group, "model", topology=topology)
    return model


def build_loss(config: Config, tp: Axis) -> Any:
    """What ``loss._target_`` names, with its keys, and with ``axis`` where it takes that."""
    target = locate(config.loss["_target_"], "loss._target_")
    keys = {key: value for key, value in config.loss.items() if key != "_target_"}
    if takes(target, "axis"):
        keys["axis"] = tp
    made: Any = target(**keys) if inspect.isclass(target) else partial(target, **keys)
    return made


def build_engine(config: Config, topology: Topology, model: nn.Module, data: Any = None) -> Engine:
    """The engine as the configuration says; ``data`` is asked where units have to be measured."""
    optim = config.optim
    target = optimizer_class(optim)
    keys = optimizer_keys(optim)
    if target in FUSED and not {"fused", "foreach"} & set(optim.extra):
        keys["fused"] = True
    decays = "weight_decay" in keys

    units = list(model._modules)

    def groups(name: str, parameter: nn.Parameter) -> dict[str, Any]:
        options: dict[str, Any] = {
            "weight_decay": optim.weight_decay if parameter.ndim >= 2 else 0.0
        }
        if target is Muon:
            # Embedding and head are matrices too, but their rows are apart: AdamW is for them.
            inner = name.split(".")[0] not in (units[0], units[-1])
            options["muon"] = inner and parameter.ndim == 2
        return options

    return Engine(
        model,
        topology,
        loss_fn=build_loss(config, topology.tp),
        optimizer=partial(target, **keys),
        param_groups=groups if decays else None,
        lr_schedule=lr_curve(
            optim.lr_schedule, config.train.steps, optim.warmup_steps, optim.min_lr_ratio
        ),
        schedule=config.pipeline.schedule,
        num_microbatches=config.pipeline.num_microbatches or 1,
        num_chunks=config.pipeline.num_chunks,
        partition=config.pipeline.partition,
        memory_limit=config.pipeline.memory_limit,
        sample=None if data is None else sample_of(config, topology, data),
        zero=config.zero.stage,
        zero_reduce=config.zero.reduce,
        gather_budget=config.zero.gather_budget,
        shard_size=config.zero.shard_size,
        reduce_dtype=config.zero.reduce_dtype,
        precision=config.precision,
        fp16=vars(config.fp16) if config.precision == "fp16" else None,
        recompute=config.recompute.mode,
        recompute_every=config.recompute.every,
        recompute_partition=config.recompute.partition,
        offload=vars(config.offload),
        state_dtype=optim.state_dtype,
        max_grad_norm=config.train.max_grad_norm or None,
        max_bad_steps=config.train.max_bad_steps or None,
        compile=config.compile,
        timeout=config.train.timeout,
        seed=config.seed,
    )


def sample_of(config: Config, topology: Topology, data: Any) -> Any:
    """One microbatch, by which what the units cost is counted or measured; None to do neither.

    Data of the user's own is read out of turn only where the schedule or the cut depends on it.
    """
    about = config.pipeline
    local = config.data.global_batch_size // topology.dp.size
    size = local // (about.num_microbatches or 1)
    if reason_to_look(about.schedule, about.partition, about.memory_limit) is not None:
        return data.train(0, list(range(size)))
    return data.sample_microbatch(size) if hasattr(data, "sample_microbatch") else None


def build_meter(config: Config, topology: Topology, model: nn.Module, tokens: int) -> Meter:
    """The clock of the steps; call before the engine has cut the model."""
    peak = device(topology.device).peak_flops
    sizes = config.model
    flops = flops_per_token(
        matmul_parameters(model),
        num_layers=sizes.get("num_layers", 0) if "num_heads" in sizes else 0,
        width=sizes.get("width", 0),
        seq_len=config.data.seq_len,
    )
    return Meter(
        tokens=tokens,
        flops_per_token=flops,
        peak_flops=peak and peak * topology.grid.size,
    )
