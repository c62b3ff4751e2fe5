"""DeepSpeed's JSON as keys of ours, whether they are built or not."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from parallel3d.config import compose, deepspeed, to_plain
from parallel3d.config.deepspeed import Mapped, leaves

EXAMPLES = Path(__file__).parent / "deepspeed"


@cache
def defaults() -> dict[str, Any]:
    """The configuration without a file, as nested groups."""
    plain: dict[str, Any] = to_plain(compose())
    return plain


def mapped(
    file: Path | dict[str, Any], tmp_path: Path, world_size: int | None = 8, **given: Any
) -> tuple[Mapped, dict[str, Any]]:
    """What the file makes of the defaults and of these keys (`optim__lr=1`), by dotted key."""
    if isinstance(file, dict):
        path = tmp_path / "ds.json"
        path.write_text(json.dumps(file))
        file = path
    plain = deepcopy(defaults())
    plain["deepspeed"] = str(file)
    for name, value in given.items():
        group, _, key = name.partition("__")
        plain[group] = value if not key else {**plain[group], key: value}
    found = deepspeed.apply(plain, {name.replace("__", ".") for name in given}, world_size)
    return found, dict(leaves(plain))


WHOLE = {
    "data.global_batch_size": 64,
    "data.microbatch_size": 4,
    "pipeline.num_microbatches": 8,
    "log.every": 50,
    "train.max_grad_norm": 0.5,
    "zero.reduce_dtype": "fp32",
    "optim.name": "adamw",
    "optim.lr": 3e-4,
    "optim.betas": [0.9, 0.98],
    "optim.eps": 1e-6,
    "optim.weight_decay": 0.01,
    "optim.lr_schedule": "cosine",
    "optim.warmup_steps": 100,
    "optim.min_lr_ratio": 0.05,
    "train.steps": 1000,
    "precision": "fp16",
    "fp16.scale": None,
    "fp16.initial_scale": 4096,
    "fp16.window": 500,
    "fp16.hysteresis": 3,
    "fp16.min_scale": 2,
    "zero.stage": 3,
    "zero.gather_budget": 2_000_000_000,
    "zero.shard_size": 8,
    "offload.optimizer": "disk",
    "offload.path": "/local_nvme",
    "offload.parameters": "cpu",
    "offload.activations": "cpu",
    "recompute.mode": "full",
    "recompute.every": 2,
    "recompute.partition": True,
    "pipeline.partition": "uniform",
    "topology.pp": 2,
    "topology.tp": 2,
    "log.wandb.mode": "disabled",
    "log.wandb.project": "mine",
    "log.wandb.group": "a",
    "log.wandb.entity": "ours",
}


def test_every_key_of_a_whole_file_is_taken_over(tmp_path: Path) -> None:
    found, keys = mapped(EXAMPLES / "whole.json", tmp_path)
    assert {key: keys[key] for key in WHOLE} == WHOLE
    assert found.claims.keys() == WHOLE.keys()


def test_every_key_of_a_whole_file_is_one_of_the_schema_and_of_its_type() -> None:
    found = dict(leaves(to_plain(compose(f"deepspeed={EXAMPLES / 'whole.json'}", "topology.dp=2"))))
    assert {key: found[key] for key in WHOLE} == WHOLE


def test_a_file_is_the_same_as_its_keys_on_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    fields = {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 2.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 7}},
        "zero_optimization": {"stage": 0},
    }
    path.write_text(json.dumps(fields))
    keys = ["data.global_batch_size=16", "data.microbatch_size=2", "train.max_grad_norm=2.0"]
    keys += ["optim.name=sgd", "optim.lr=0.1", "optim.momentum=0.9", "optim.weight_decay=0"]
    keys += ["optim.lr_schedule=linear", "optim.warmup_steps=7", "optim.min_lr_ratio=0"]
    keys += ["zero.stage=0"]
    found = compose(f"deepspeed={path}")
    assert found == replace(compose(*keys), deepspeed=str(path))


def test_every_field_has_a_row_with_its_key_or_the_reason_why_it_needs_none(tmp_path: Path) -> None:
    for path in sorted(EXAMPLES.glob("*.json")):
        found, _ = mapped(path, tmp_path)
        fields = dict(leaves(json.loads(path.read_text())))
        assert {row[0] for row in found.rows} >= fields.keys()
        for field, value, key, ours, why in found.rows[1:]:
            assert field not in fields or value == json.dumps(fields[field])
            assert (key != "-" and ours) or why, f"{field} of {path.name} says nothing"


EXAMPLE_KEYS: dict[str, dict[str, Any]] = {
    "start": {"optim.name": "adamw", "optim.lr": 1e-3, "precision": "fp32"},
    "stage": {"zero.stage": 3},
    "batch": {"data.global_batch_size": 32, "train.max_grad_norm": 1.0},
    "bf16": {"precision": "fp32"},
    "gather": {"zero.stage": 3},
    "buckets": {"zero.stage": 2},
    "offload": {"zero.stage": 3, "offload.optimizer": "cpu", "offload.parameters": "cpu"},
    "optimizer": {
        "optim.betas": [0.9, 0.95],
        "optim.lr_schedule": "linear",
        "optim.warmup_steps": 20,
        "optim.min_lr_ratio": 0.0,
        "train.steps": 300,
    },
    "cpu_optimizer": {},
}


@pytest.mark.parametrize("name", EXAMPLE_KEYS)
def test_an_example_changes_only_what_it_says(name: str, tmp_path: Path) -> None:
    found, keys = mapped(EXAMPLES / f"{name}.json", tmp_path)
    assert {key: keys[key] for key in EXAMPLE_KEYS[name]} == EXAMPLE_KEYS[name]
    before = dict(leaves(defaults()))
    changed = {key for key in keys if keys[key] != before[key]} - {"deepspeed"}
    assert changed <= found.claims.keys()


def test_precision_is_left_open_where_one_of_the_two_is(tmp_path: Path) -> None:
    file: dict[str, Any] = {"fp16": {"enabled": "auto", "hysteresis": 4}}
    file["bf16"] = {"enabled": False}
    for precision, hysteresis in (("fp64", 2), ("fp16", 4)):
        _, keys = mapped(file, tmp_path, precision=precision)
        assert (keys["precision"], keys["fp16.hysteresis"]) == (precision, hysteresis)


def test_a_field_that_is_there_counts_before_a_default_of_another(tmp_path: Path) -> None:
    file = {"optimizer": {"type": "AdamW"}, "scheduler": {"params": {"warmup_max_lr": 0.5}}}
    assert mapped(file, tmp_path)[1]["optim.lr"] == 0.5


def test_auto_leaves_the_key_to_the_command_line_and_the_table_shows_it(tmp_path: Path) -> None:
    found, keys = mapped(EXAMPLES / "optimizer.json", tmp_path, optim__lr=0.5, optim__betas=[0, 0])
    assert keys["optim.lr"] == 0.5 and keys["optim.betas"] == [0, 0]
    assert (
        "optimizer.params.lr",
        '"auto"',
        "optim.lr",
        "0.5",
        "left to this configuration",
    ) in found.rows


CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    # Adam decouples the weight decay there, unless it is told not to.
    ({"optimizer": {"type": "Adam"}}, {"optim.name": "adamw", "optim.weight_decay": 0.0}),
    (
        {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False, "bias_correction": True}}},
        {"optim.name": "adam", "optim.betas": [0.9, 0.999], "optim.lr": 1e-3},
    ),
    (
        {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True}}},
        {"optim.name": "sgd", "optim.momentum": 0.9, "optim.nesterov": True, "optim.lr": 0.1},
    ),
    ({"optimizer": {"type": "Lamb", "params": {"eps": 1}}}, {"optim.name": "lamb", "optim.eps": 1}),
    ({"optimizer": {"type": "Muon"}}, {"optim.name": "muon", "optim.momentum": 0.95}),
    ({"optimizer": {"type": "Adagrad"}}, {"optim.name": "adagrad", "optim.weight_decay": 0}),
    ({"optimizer": {"params": {"lr": 0.5}}}, {"optim.name": "adamw", "optim.lr": 0.5}),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.5, "warmup_min_lr": 0}}},
        {"optim.lr_schedule": "constant", "optim.lr": 0.5, "optim.warmup_steps": 1000},
    ),
    (
        {"scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 5}}},
        {"optim.lr_schedule": "cosine", "optim.min_lr_ratio": 1e-4, "optim.warmup_steps": 5},
    ),
    ({"fp16": {"enabled": False}}, {"precision": "fp32"}),
    ({"bfloat16": {"enabled": True}, "fp16": {"enabled": "auto"}}, {"precision": "bf16"}),
    ({"bf16": {"enabled": "auto"}, "fp16": {"enabled": False}}, {"precision": "fp32"}),
    ({"fp16": {"enabled": True, "loss_scale": 128}}, {"precision": "fp16", "fp16.scale": 128}),
    ({"bf16": {"bf16_optimizer_states": True}}, {"optim.state_dtype": "bf16"}),
    ({"bf16": {"bf16_optimizer_states": False}}, {"precision": "fp32"}),
    ({"communication_data_type": "bfp16"}, {"zero.reduce_dtype": "bf16"}),
    ({"communication_data_type": None}, {"zero.reduce_dtype": None}),
    ({"fp32_allreduce": True}, {"zero.reduce_dtype": "fp32"}),
    (
        {"fp32_allreduce": False, "communication_data_type": "fp16"},
        {"zero.reduce_dtype": "fp16"},
    ),
    ({"zero_optimization": {"cpu_offload": True}}, {"offload.optimizer": "cpu"}),
    ({"zero_optimization": {"mics_shard_size": -1}}, {"zero.shard_size": None}),
    ({"zero_optimization": {"stage3_max_live_parameters": 10}}, {"zero.gather_budget": 40}),
    (
        {"zero_optimization": {"stage3_max_live_parameters": 10}, "bf16": {"enabled": True}},
        {"zero.gather_budget": 20},
    ),
    (
        {"zero_optimization": {"offload_optimizer": {"device": "none", "nvme_path": "/nvme"}}},
        {"offload.optimizer": "none", "offload.path": None},
    ),
    (
        {"activation_checkpointing": {"cpu_checkpointing": True}},
        {"offload.activations": "cpu", "recompute.mode": "full"},
    ),
    (
        {"activation_checkpointing": {"partition_activations": False, "number_checkpoints": None}},
        {"recompute.partition": False, "recompute.mode": "none"},
    ),
    (
        {"pipeline": {"activation_checkpoint_interval": 0, "partition": "profile"}},
        {"recompute.mode": "none", "pipeline.partition": "measure"},
    ),
    ({"pipeline": {"stages": "auto"}}, {"topology.pp": 1}),
    ({"tensor_parallel": {"autotp_size": 0}}, {"topology.tp": 1}),
    ({"wandb": {"enabled": True, "project": "p"}}, {"log.wandb.mode": None}),
    ({"wandb": {}, "amp": {"enabled": False, "opt_level": "O1"}, "autotuning": {}}, {}),
]


@pytest.mark.parametrize(("file", "expected"), CASES)
def test_a_field_gives_its_key(
    file: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    _, keys = mapped(file, tmp_path)
    assert {key: keys[key] for key in expected} == expected


BATCHES: list[tuple[tuple[Any, Any, Any], tuple[Any, Any, Any]]] = [
    # total, micro, accumulation over dp 8: global batch, microbatch, number of microbatches
    ((64, 2, 4), (64, 2, 4)),
    ((64, None, None), (64, None, 4)),
    ((64, 2, None), (64, 2, 4)),
    ((64, None, 2), (64, None, 2)),
    ((None, 2, 4), (64, 2, 4)),
    (("auto", 2, 4), (64, 2, 4)),
    ((None, 2, None), (16, 2, 4)),  # DeepSpeed accumulates nothing where nothing is said
    (("auto", 2, "auto"), (32, 2, 4)),
    (("auto", "auto", "auto"), (32, None, 4)),
]


@pytest.mark.report("OpenRLHF/OpenRLHF#1291")
@pytest.mark.parametrize(("said", "expected"), BATCHES)
def test_the_batch_is_micro_times_accumulation_times_dp(
    said: tuple[Any, ...], expected: tuple[Any, ...], tmp_path: Path
) -> None:
    names = ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"]
    file = {name: value for name, value in zip(names, said, strict=True) if value is not None}
    _, keys = mapped(file, tmp_path)
    ours = ("data.global_batch_size", "data.microbatch_size", "pipeline.num_microbatches")
    assert tuple(keys[key] for key in ours) == expected


def test_dp_is_what_the_other_degrees_leave_of_the_processes(tmp_path: Path) -> None:
    file = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    degrees = {"pipeline": {"stages": 2}, "tensor_parallel": {"autotp_size": 2}}
    assert mapped(file, tmp_path)[1]["data.global_batch_size"] == 8
    assert mapped(file | degrees, tmp_path)[1]["data.global_batch_size"] == 2
    _, keys = mapped(file, tmp_path, None, topology={"pp": None, "dp": 3, "tp": 1})
    assert keys["data.global_batch_size"] == 3


@pytest.mark.parametrize(
    ("topology", "world_size", "is_cut"),
    [
        ({"pp": 1, "dp": None, "tp": 1}, 8, False),
        ({"pp": 1, "dp": None, "tp": 2}, 8, True),
        ({"pp": 2, "dp": 4, "tp": None}, 8, False),
        ({"pp": 2, "dp": 2, "tp": None}, 8, True),
        ({"pp": 2, "dp": 2, "tp": None}, None, True),  # not known yet
    ],
)
def test_activations_are_partitioned_where_there_is_something_to_cut_over(
    topology: dict[str, Any], world_size: int | None, is_cut: bool, tmp_path: Path
) -> None:
    field = "activation_checkpointing.partition_activations"
    file = {"activation_checkpointing": {"partition_activations": True}}
    found, keys = mapped(file, tmp_path, world_size, topology=topology)
    assert (keys["recompute.partition"], keys["recompute.mode"]) == (is_cut, "full")
    row = (field, "true", "-", "", "topology.tp = 1: nothing to cut over")
    assert (row in found.rows) != is_cut


def test_the_table_tells_defaults_of_deepspeed_from_what_the_command_line_says(
    tmp_path: Path,
) -> None:
    found, _ = mapped({"optimizer": {"type": "AdamW"}}, tmp_path, optim__eps=0.5)
    absent = {field: rest for field, shown, *rest in found.rows if shown == "-"}
    assert absent["optimizer.params.lr"] == ["optim.lr", "0.001", "DeepSpeed's default"]
    assert absent["optimizer.params.eps"] == ["optim.eps", "0.5", "the command line says it"]
    again, _ = mapped({"activation_checkpointing": {"cpu_checkpointing": True}}, tmp_path)
    assert {row[4] for row in again.rows[1:]} == {""}


@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
def test_the_table_tells_where_a_warm_up_differs(kind: str, tmp_path: Path) -> None:
    curve, _ = mapped({"scheduler": {"type": kind}}, tmp_path)
    notes = {field: rest for field, shown, *rest in curve.rows if shown == "-"}
    assert notes["scheduler.params.warmup_type"][2].startswith("linear")
    top = notes.get("scheduler.params.warmup_max_lr")
    if kind == "WarmupCosineLR":  # it rises to the optimizer's lr there too
        assert top is None
    else:
        assert top == ["-", "", "optim.lr is the top, not 0.001, DeepSpeed's default"]
    said, _ = mapped({"scheduler": {"type": kind, "params": {"warmup_max_lr": "auto"}}}, tmp_path)
    assert "optim.lr is the top" not in str(said.rows)


def test_how_often_is_logged_is_the_command_lines_to_say(tmp_path: Path) -> None:
    found, keys = mapped({"steps_per_print": 2000}, tmp_path, log__every=5)
    assert keys["log.every"] == 5
    assert ("steps_per_print", "2000", "log.every", "5", "the command line says it") in found.rows
    found, keys = mapped({"steps_per_print": 2000}, tmp_path)
    assert keys["log.every"] == 2000
    assert ("steps_per_print", "2000", "log.every", "2000", "") in found.rows


def test_a_default_gives_way_to_what_the_command_line_says_of_the_batch(tmp_path: Path) -> None:
    file = {"train_micro_batch_size_per_gpu": 2}
    found, keys = mapped(file, tmp_path, data__global_batch_size=64)
    assert keys["data.global_batch_size"] == 64
    assert found.rows[-1][3:] == ("64", "the command line says it")
