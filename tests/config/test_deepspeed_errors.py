"""What a DeepSpeed JSON may not say, and what the message names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from parallel3d import config
from parallel3d.config import compose, naming_fields, read, settle


def write(folder: Path, fields: Any) -> str:
    """The override that names a file with these fields, an object or a text."""
    path = folder / "ds.json"
    path.write_text(fields if isinstance(fields, str) else json.dumps(fields))
    return f"deepspeed={path}"


def optim(**params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": "AdamW", "params": params}}


def warmup(kind: str = "WarmupLR", **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": kind, "params": params}}


def zero(**fields: Any) -> dict[str, Any]:
    return {"zero_optimization": fields}


# What only counts as true or false is neither; nor are true and false numbers.
LOOSE: list[tuple[Any, str]] = [
    ({"fp16": {"enabled": 0}}, r"fp16\.enabled = 0 in ds\.json is neither .*: write true or false"),
    ({"fp16": {"enabled": None}}, r"fp16\.enabled = null in .* nor false: write true or false"),
    ({"bf16": {"enabled": 1}}, r"bf16\.enabled = 1 in ds\.json is neither true nor false: write"),
    ({"wandb": {"enabled": 1}}, r"wandb\.enabled = 1 in ds\.json is neither true nor false: write"),
    (
        {"amp": {"enabled": 0}},
        r"amp\.enabled = 0 in ds\.json is neither true nor false: write false",
    ),
    ({"sparse_gradients": 0}, r"sparse_gradients = 0 in .* neither .*: write false"),
    (zero(offload_optimizer={"ratio": True}), r"ratio = true in ds\.json has no .*: write 1$"),
    (zero(cpu_offload="true"), r'cpu_offload = "true" in .* nor false: write true or false'),
    ({"fp32_allreduce": "false"}, r'allreduce = "false" in .* nor false: write true or false'),
    ({"fp16": {"enabled": True, "loss_scale": False}}, r"loss_scale = false in .* not a number"),
    (
        {"fp16": {"enabled": True, "initial_scale_power": True}},
        r"initial_scale_power = true in ds\.json is not a number",
    ),
    (optim(adam_w_mode=0), r"adam_w_mode = 0 in ds\.json is neither .*: write true or false"),
    (optim(adam_w_mode="false"), r'adam_w_mode = "false" in .* nor false: write true or false'),
    (optim(adam_w_mode=None), r"adam_w_mode = null in .* nor false: write true or false"),
    (optim(torch_adam=0), r"torch_adam = 0 in ds\.json is neither .*: write true or false"),
]

WRONG: list[tuple[Any, str]] = [
    ('{"steps_per_print": 1,}', r"deepspeed = '.*ds\.json' is not plain JSON: .*line 1"),
    ("[]", r"holds no object of fields"),
    ('{"zero_optimization": {"stage": 1, "stage": 2}}', r"stage is there twice, 1 and 2"),
    # Not known.
    ({"train_batchsize": 4}, r"train_batchsize in ds\.json .* did you mean train_batch_size\?"),
    (zero(stge=2), r"zero_optimization\.stge .* did you mean zero_optimization\.stage\?"),
    ({"stage": 2}, r"stage in ds\.json .* did you mean zero_optimization\.stage\?"),
    ({"lr": 1}, r"lr in ds\.json .* did you mean optimizer\.params\.lr\?"),
    ({"zzz": {}}, r"zzz in ds\.json is not a field that is known; take it away"),
    (
        {"zero_optimization.stage": 3, **zero(stage=1)},
        r'^"zero_optimization\.stage" in ds\.json is not a field that is known; '
        r'nest it: write "zero_optimization": {"stage": 3}$',
    ),
    ({"optimizer": {"params.lr": 1}}, r'nest it: write "optimizer": {"params": {"lr": 1}}$'),
    ({"a.b": {"c": 1}}, r'^"a\.b"\.c in ds\.json is not .*: write "a": {"b": {"c": 1}}$'),
    ({"optimizer": {"params": {"lr.a": 1}}}, r'^optimizer\.params\."lr\.a" = 1 .* no parameter'),
    ({"optimizer": "Adam"}, r'optimizer = "Adam" .* its fields, such as optimizer\.type'),
    (zero(offload_optimizer=True), r"offload_optimizer = true .* is no section"),
    (warmup(warmup_steps=1), r"scheduler\.params\.warmup_steps .*mean .*warmup_num_steps\?"),
    # Without a counterpart.
    ({"optimizer": {"type": "OneBitAdam"}}, r'type = "OneBitAdam" in ds\.json .*: write "Adam"'),
    ({"optimizer": {"type": "OneBitLamb"}}, r'type = "OneBitLamb" in ds\.json .*: write "Lamb"'),
    (
        {"optimizer": {"type": "ZeroOneAdam", "params": {"lr": 1, "local_step_clipper": 16}}},
        r"^ds\.json has 2 faults:\n  .*local_step_clipper = 16 .* no parameter .*\n.*write \"Adam",
    ),
    ({"sparse_attention": {"mode": "fixed", "block": 16}}, r"^sparse_attention in .* not built"),
    ({"sparse_attention": {}}, r"^sparse_attention in ds\.json is not built .*: take the section"),
    (warmup("OneCycle"), r'"OneCycle" .* no counterpart: write "WarmupLR" or "WarmupDecayLR" or'),
    (warmup(warmup_type="log"), r'warmup_type = "log" .*warm-up is linear\): write "linear"'),
    (warmup(warmup_min_lr=0.1), r"warmup_min_lr = 0\.1 in ds\.json has no counterpart .*write 0"),
    (warmup(cos_min_ratio=0), r"cos_min_ratio = 0 .* is no parameter of WarmupLR: take it away"),
    (warmup("WarmupCosineLR", warmup_max_lr=1), r"max_lr = 1 .* no parameter of WarmupCosineLR"),
    (zero(zero_quantized_weights=True), r"zero_quantized_weights = true .*: write false"),
    (zero(offload_optimizer={"ratio": 0.5}), r"ratio = 0\.5 .*: write 1"),
    ({"elasticity": {"enabled": True}}, r"elasticity\.enabled = true .*: write false"),
    ({"amp": {"enabled": True}}, r"amp\.enabled = true in ds\.json has no counterpart"),
    ({"gradient_allreduce_op": "sum"}, r'gradient_allreduce_op = "sum" .*: write "mean"'),
    # Not of the type.
    (zero(offload_param={"device": "ssd"}), r'device = "ssd" in ds\.json is not one of none, cpu'),
    ({"communication_data_type": "fp8"}, r'"fp8" in ds\.json is not one of fp32, fp16, bf16'),
    ({"communication_data_type": [1]}, r"\[1\] in ds\.json is not one of fp32"),
    ({"pipeline": {"stages": 1.5}}, r"pipeline\.stages = 1\.5 in ds\.json is not a whole number"),
    ({"pipeline": {"stages": True}}, r"pipeline\.stages = true in ds\.json is not a number"),
    (
        {"fp16": {"enabled": True, "initial_scale_power": 999}},
        r"initial_scale_power = 999 in ds\.json is not a power of 2, from 0 to 64",
    ),
    ({"fp16": {"enabled": "yes"}}, r'fp16\.enabled = "yes" .*: write true or false'),
    ({"train_batch_size": "32"}, r'^train_batch_size = "32" in ds\.json is a text: write 32$'),
    ({"train_micro_batch_size_per_gpu": "4"}, r'per_gpu = "4" in ds\.json is a text: write 4'),
    ({"gradient_clipping": "0.5"}, r'gradient_clipping = "0\.5" in .* is a text: write 0\.5'),
    (optim(lr="1e-3"), r'params\.lr = "1e-3" in ds\.json is a text: write 1e-3'),
    (warmup(warmup_num_steps="9"), r'num_steps = "9" in ds\.json is a text: write 9'),
    (
        {"steps_per_print": "often"},
        r"log\.every = 'often' is not a whole number \(log\.every comes from steps_per_print = "
        r'"often" in ds\.json: make the change in the file\)$',
    ),
    (optim(lr=-1), r"optim\.lr = -1\.0 is below 0.*from optimizer\.params\.lr = -1 in ds\.json"),
    (
        optim(amsgrat=True),
        r"params\.amsgrat = true in ds\.json is no parameter of torch\.optim\.adamw\.AdamW; "
        r"did you mean optimizer\.params\.amsgrad\?",
    ),
    (
        {"optimizer": {"type": "Lamb", "params": {"max_grad_norm": 1}}},
        r"params\.max_grad_norm = 1 in .* is no parameter of parallel3d\.optim\.lamb\.Lamb, "
        r"which takes betas, eps, lr, weight_decay: take it out of the file",
    ),
    (
        optim(max_coeff=1),
        r"params\.max_coeff = 1 in ds\.json is no parameter of torch.*AdamW, which",
    ),
    ({"optimizer": {"type": "SGD", "params": {"eps": 1}}}, r"params\.eps = 1 in .* no parameter"),
    (
        {"optimizer": {"type": "Lamb", "params": {"max_coeff": 10, "min_coeff": 0.01}}},
        r"params\.max_coeff = 10 in ds\.json bounds the trust ratio, which has no bounds here: "
        r"take it out of the file\n  optimizer\.params\.min_coeff = 0\.01 in ds\.json bounds",
    ),
    # In disagreement with itself.
    (
        {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
        r"fp16\.enabled = true in .* and bf16\.enabled = true in .* disagree, both are precision",
    ),
    (
        optim(lr=0.1) | warmup(warmup_max_lr=0.2),
        r"params\.lr = 0\.1 in .* and .*warmup_max_lr = 0\.2 in .* disagree, both are optim\.lr",
    ),
    (
        zero(cpu_offload=True, offload_optimizer={"device": "none"}),
        r"disagree, both are offload\.optimizer",
    ),
    (
        {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2}
        | {"gradient_accumulation_steps": 4},
        r"train_batch_size = 32 in ds\.json, but train_micro_batch_size_per_gpu \* "
        r"gradient_accumulation_steps \* topology\.dp = 2 \* 4 \* 2 = 16: change one",
    ),
    (
        warmup(warmup_type="linear", warmup_num_steps=0) | {"steps_per_print": -1},
        r"log\.every = -1 is below 0.*steps_per_print = -1 in ds\.json",
    ),
]


@pytest.mark.report("MakazhanAlpamys/Soup#627")
@pytest.mark.report("deepspeedai/DeepSpeed#17")
@pytest.mark.parametrize(("fields", "message"), [*LOOSE, *WRONG])
def test_a_wrong_file_is_refused_by_field_value_and_way_out(
    fields: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        compose(write(tmp_path, fields), "topology.dp=2")


@pytest.mark.report("MakazhanAlpamys/Soup#627")
def test_all_that_a_file_may_not_say_is_told_at_once(tmp_path: Path) -> None:
    fields = {
        "train_batchsize": 4,
        "train_micro_batch_size_per_gpu": "4",
        "fp16": {"enabled": "yes", "auto_cast": True},
        "zero_optimization": {"stge": 2, "offload_optimizer": {"device": "ssd"}},
        **optim(bias_correction=False, torch_adam=1.5),
        **warmup(warmup_type="log", warmup_steps=1),
    }
    with pytest.raises(ValueError) as caught:
        compose(write(tmp_path, fields))
    title, *lines = str(caught.value).split("\n  ")
    assert title == "ds.json has 10 faults:"
    for line, name in zip(
        lines,
        (
            *("train_batchsize", "train_micro_batch_size_per_gpu", "fp16.enabled"),
            *("fp16.auto_cast", "zero_optimization.stge"),
            *("zero_optimization.offload_optimizer.device", "optimizer.params.bias_correction"),
            *("optimizer.params.torch_adam", "scheduler.params.warmup_type"),
            "scheduler.params.warmup_steps",
        ),
        strict=True,
    ):
        assert line.startswith(f"{name} ")


@pytest.mark.parametrize("name", ["3", "1.5", "2e3"])
def test_a_file_with_a_number_for_a_name_is_not_ignored(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text('{"steps_per_print": 7}')
    folder = Path(__file__).parents[2] / "conf"
    message = r"^deepspeed = [\d.]+ is a number, not the path of a file: write \./ before the name$"
    with pytest.raises(ValueError, match=message):
        compose(f"deepspeed={name}", folder=folder)
    assert compose(f"deepspeed=./{name}", folder=folder).log.every == 7


def test_parameters_are_those_of_the_class_that_the_command_line_names(tmp_path: Path) -> None:
    file = write(tmp_path, {"optimizer": {"params": {"lr": 0.1, "momentum": 0.9}}})
    assert compose(file, "optim.name=sgd").optim.extra == {"momentum": 0.9}
    with pytest.raises(
        ValueError, match=r"params\.momentum = 0\.9 .* no parameter of torch.*AdamW"
    ):
        compose(file)
    with pytest.raises(
        ValueError, match=r"params\.momentum = 0\.9 .* no parameter of torch.*Adam,"
    ):
        compose(file, "optim._target_=torch.optim.Adam")


DISAGREE = [
    (
        optim(lr=0.1),
        "optim.lr=0.2",
        r"optim\.lr = 0\.2 on the command line, but optimizer\.params\.lr",
    ),
    (optim(lr=0.1), "optim={lr:0.2}", r"optim\.lr = 0\.2 on the command line, but optimizer"),
    (optim(), "optim.name=sgd", r"'sgd' on the command line, but optimizer\.type = \"AdamW\" in"),
    (optim(), "optim._target_=torch.optim.SGD", r"optim\._target_ = torch\.optim\.SGD, but optim"),
    (zero(stage=1), "zero.stage=0", r"zero\.stage = 0 .* but zero_optimization\.stage = 1 in ds"),
    ({"bf16": {"enabled": True}}, "precision=fp32", r"'fp32' .* but bf16\.enabled = true in ds"),
    (warmup("WarmupDecayLR"), "optim.min_lr_ratio=0.1", r"but scheduler\.type = \"WarmupDecayLR\""),
    ({"pipeline": {"stages": 1}}, "topology.pp=2", r"topology\.pp = 2 .* pipeline\.stages = 1 in"),
    ({"train_batch_size": 8}, "data.global_batch_size=9", r"= 9 on .* train_batch_size = 8 in ds"),
    (
        {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4},
        "data.global_batch_size=32",
        r"= 32 on .*per_gpu \* gradient_accumulation_steps \* topology\.dp = 16 of ds\.json",
    ),
    ({"gradient_clipping": 1}, "train.max_grad_norm=0", r"max_grad_norm = 0 .*gradient_clipping"),
]


@pytest.mark.parametrize(("fields", "override", "message"), DISAGREE)
def test_the_command_line_and_the_file_may_not_disagree(
    fields: dict[str, Any], override: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=rf"{message}.*take one of them away, or write \"auto\""):
        compose(write(tmp_path, fields), override, "topology.dp=2")


def test_the_command_line_may_repeat_the_file_and_replaces_what_the_file_implies(
    tmp_path: Path,
) -> None:
    file = write(tmp_path, optim(lr=0.1) | warmup("WarmupCosineLR"))
    found = compose(file, "optim.lr=1e-1", "optim.weight_decay=0.2", "optim.warmup_steps=3")
    assert (found.optim.lr, found.optim.weight_decay, found.optim.warmup_steps) == (0.1, 0.2, 3)
    assert (found.optim.eps, found.optim.min_lr_ratio) == (1e-8, 1e-4)


def test_parameters_on_disk_are_refused_with_what_to_write_in_the_file(tmp_path: Path) -> None:
    fields = zero(stage=3, offload_param={"device": "nvme"})
    message = (
        r'^zero_optimization\.offload_param\.device = "nvme" in ds\.json is not built yet: '
        r'write "cpu", the nearest that works$'
    )
    with pytest.raises(ValueError, match=message):
        compose(write(tmp_path, fields))


def test_a_batch_of_one_rank_needs_the_number_of_ranks(tmp_path: Path) -> None:
    fields = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
    with pytest.raises(ValueError, match=r"per_gpu = 2 .*: set topology\.dp, or train_batch_size"):
        compose(write(tmp_path, fields))


SETTLED = [
    (
        {"train_batch_size": 10, "train_micro_batch_size_per_gpu": 2},
        (1, 2, 2),
        r"global_batch_size = 10 is .*from train_batch_size = 10 in ds\.json.* in the file\)$",
    ),
    (
        {"tensor_parallel": {"autotp_size": 4}},
        (1, 1, 4),
        r"topology\.tp = 4: .*topology\.tp comes from tensor_parallel\.autotp_size = 4 in ds\.json",
    ),
    (
        zero(mics_shard_size=3),
        (1, 4, 1),
        r"shard_size = 3 does not .*from zero_optimization\.mics_shard_size = 3 in ds\.json: make",
    ),
]


@pytest.mark.parametrize(("fields", "grid", "message"), SETTLED)
def test_what_the_ranks_do_not_allow_names_the_field_too(
    fields: dict[str, Any], grid: tuple[int, int, int], message: str, tmp_path: Path
) -> None:
    found = compose(write(tmp_path, fields), "model.num_heads=6")
    with pytest.raises(ValueError, match=message), naming_fields(found, 4):
        settle(found, *grid)


def test_the_fields_of_a_file_that_is_gone_are_not_named(tmp_path: Path) -> None:
    found = compose(write(tmp_path, zero(mics_shard_size=3)))
    (tmp_path / "ds.json").unlink()
    for config_ in (found, compose("zero.shard_size=3")):
        with (
            pytest.raises(ValueError, match=r"^zero\.shard_size = 3 does not .*for all of dp$"),
            naming_fields(config_, 4),
        ):
            settle(config_, 1, 4, 1)


def test_a_key_of_the_command_line_is_not_said_to_come_from_the_file(tmp_path: Path) -> None:
    found = compose(
        write(tmp_path, {"train_micro_batch_size_per_gpu": 1}), "data.global_batch_size=9"
    )
    with (
        pytest.raises(ValueError, match=r"batch_size = 9 is .*\(data\.microbatch_size comes"),
        naming_fields(found, 4),
    ):
        settle(found, 1, 4, 1)


def test_the_table_is_told_once_and_the_run_keeps_its_values_when_the_file_is_gone(
    tmp_path: Path,
) -> None:
    override = write(tmp_path, optim(lr=0.25) | {"train_micro_batch_size_per_gpu": 4})
    told: list[Any] = []
    cfg = OmegaConf.create(config.to_yaml(compose()))
    cfg.deepspeed = override.partition("=")[2]
    found = read(cfg, [override], 2, lambda title, rows: told.append((title, rows)))
    assert found.optim.lr == 0.25 and found.deepspeed == cfg.deepspeed
    assert settle(found, 1, 2, 1).pipeline.num_microbatches == 1
    title, rows = told[0]
    assert len(told) == 1
    assert title.startswith(cfg.deepspeed) and ("optimizer.params.lr", "0.25") in [
        r[:2] for r in rows
    ]
    read(OmegaConf.create(cfg), [write(tmp_path, {})], 2, lambda *table: told.append(table))
    assert told[1:] == [(f"{cfg.deepspeed} says nothing: all keys are as configured here", [])]
    (tmp_path / "config.yaml").write_text(config.to_yaml(found))
    (tmp_path / "ds.json").unlink()
    assert config.load(tmp_path / "config.yaml") == found
