"""Published sizes, first values, and what a wrong size is told."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

import models.gpt
import models.llama
import models.mlp
from parallel3d.topology import Axis

CONF = Path(__file__).parents[2] / "conf" / "model"
FILES = sorted(path.stem for path in CONF.glob("*.yaml"))
ONE = SimpleNamespace(tp=Axis.single())
GPT = {"vocab_size": 9, "width": 24, "num_layers": 1, "num_heads": 6, "ffn_width": 24}
GPT["max_seq_len"] = 4
LLAMA = {**GPT, "num_kv_heads": 3}
MLP = {"in_features": 2, "out_features": 1, "width": 8, "num_layers": 1, "ffn_width": 8}


def on(tp: int) -> Any:
    """A topology of which nothing but the sizes of tp is real."""
    return SimpleNamespace(tp=Axis("tp", tp, 0, tuple(range(tp))))


def read(name: str) -> tuple[Any, dict[str, Any]]:
    values = OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml"))
    assert isinstance(values, dict)
    package, function = str(values.pop("_target_")).rsplit(".", 1)
    assert function == "build"
    sizes = {str(key): value for key, value in values.items()}
    if "vocab_size" in sizes and sizes["vocab_size"] is None:
        sizes["vocab_size"] = 256
    return {"models.gpt": models.gpt, "models.llama": models.llama, "models.mlp": models.mlp}[
        package
    ], sizes


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_every_model_group_is_here() -> None:
    gpts, llamas = ["gpt2_124m", "gpt_tiny"], ["llama3_70b", "llama3_8b", "llama_1b", "llama_tiny"]
    assert set(FILES) == {"bench_7m", *gpts, *llamas, "mlp"}


@pytest.mark.parametrize("name", FILES)
def test_a_file_spells_out_every_argument_of_its_builder(name: str) -> None:
    package, sizes = read(name)
    assert ["topology", *sizes] == list(inspect.signature(package.build).parameters)


@pytest.mark.parametrize("name", FILES)
def test_build_and_reference_have_the_same_names_and_whole_shapes(name: str) -> None:
    package, sizes = read(name)
    with torch.device("meta"):
        ours, whole = package.build(ONE, **sizes), package.reference(**sizes)
    shapes = {key: value.shape for key, value in whole.state_dict().items()}
    assert {key: value.shape for key, value in ours.state_dict().items()} == shapes
    for module in whole.modules():
        assert not type(module).__module__.startswith("parallel3d")


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt2_124m", 124_439_808),
        ("llama_1b", 1_235_814_400),
        ("llama3_8b", 8_030_261_248),
        ("llama3_70b", 70_553_706_496),
        ("bench_7m", 6_951_168),
    ],
)
def test_published_models_have_their_published_number_of_parameters(
    name: str, parameters: int
) -> None:
    package, sizes = read(name)
    with torch.device("meta"):
        assert count(package.build(ONE, **sizes)) == parameters


def test_llama3_70b_is_cut_evenly_over_8() -> None:
    package, sizes = read("llama3_70b")
    with torch.device("meta"):
        part = count(package.build(on(8), **sizes))
    norms = (2 * sizes["num_layers"] + 1) * sizes["width"]
    assert (part - norms) * 8 + norms == 70_553_706_496


def test_tied_models_share_one_parameter() -> None:
    for package, sizes in ((models.gpt, GPT), (models.llama, LLAMA)):
        for model in (
            package.build(ONE, **sizes, tied=True),
            package.reference(**sizes, tied=True),
        ):
            assert model[0].token.weight is model[-1].logits.weight
        apart = package.build(ONE, **sizes)
        assert apart[0].token.weight is not apart[-1].logits.weight


def test_weights_start_normal_branches_narrower_biases_zero() -> None:
    sizes = {"vocab_size": 99, "width": 64, "num_layers": 8, "num_heads": 4, "ffn_width": 128}
    sizes["max_seq_len"] = 50
    built = (
        models.gpt.build(ONE, **sizes),
        models.gpt.reference(**sizes),
        models.llama.build(ONE, **sizes, num_kv_heads=2, qkv_bias=True),
        models.llama.reference(**sizes, num_kv_heads=2, qkv_bias=True),
    )
    for model in built:
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                assert not parameter.any(), name
            elif "norm" in name:
                assert (parameter == 1).all(), name
            else:
                std = 0.02 / 4 if name.endswith(("out.weight", "down.weight")) else 0.02
                assert abs(parameter.std().item() / std - 1) < 0.08, name


@pytest.mark.report("pytorch/torchtitan#2577")
@pytest.mark.parametrize(
    ("package", "sizes", "tp", "said", "legal"),
    [
        (models.gpt, {**GPT, "num_heads": 3}, 4, "model.num_heads = 3", "1, 3"),
        (models.gpt, GPT, 4, "model.num_heads = 6", "1, 2, 3, 6"),
        (models.gpt, {**GPT, "ffn_width": 10}, 3, "model.ffn_width = 10", "1, 2"),
        (models.llama, LLAMA, 2, "model.num_kv_heads = 3", "1, 3"),
        (models.llama, {**LLAMA, "ffn_width": 10}, 3, "model.ffn_width = 10", "1"),
        (models.mlp, MLP, 3, "model.ffn_width = 8", "1, 2, 4, 8"),
    ],
)
def test_what_tp_cannot_cut_is_refused_with_the_degrees_that_can(
    package: Any, sizes: dict[str, int], tp: int, said: str, legal: str
) -> None:
    with pytest.raises(ValueError, match=f"topology.tp = {tp} ") as refused, torch.device("meta"):
        package.build(on(tp), **sizes)
    assert str(refused.value).startswith(said)
    assert str(refused.value).endswith(f"topology.tp = {legal}")
    for degree in map(int, legal.split(", ")):
        with torch.device("meta"):
            package.build(on(degree), **sizes)


@pytest.mark.parametrize(
    ("package", "sizes", "said"),
    [
        (models.gpt, {**GPT, "vocab_size": None}, "model.vocab_size = null .* of the data"),
        (models.gpt, {**GPT, "num_layers": 0}, "model.num_layers = 0 must be"),
        (models.gpt, {**GPT, "width": "24"}, "model.width = '24' must be"),
        (models.gpt, {**GPT, "num_heads": 5}, "model.width = 24 .*num_heads = 5: use 20 or 25"),
        (models.llama, {**LLAMA, "num_heads": 24}, "multiple of 2 .* = 48: use 48"),
        (models.llama, {**LLAMA, "num_kv_heads": 4}, "num_heads = 6 .* = 4: use 4 or 8"),
        (models.mlp, {**MLP, "in_features": 0}, "model.in_features = 0 must be"),
    ],
)
def test_sizes_that_make_no_model_are_refused_by_name(
    package: Any, sizes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        package.build(ONE, **sizes)
    with pytest.raises(ValueError, match=said):
        package.reference(**sizes)


def test_a_sequence_longer_than_the_model_is_refused_with_the_way_out() -> None:
    said = "5 tokens exceeds model.max_seq_len = 4: .* model.max_seq_len=5"
    for model in (models.gpt.reference(**GPT), models.llama.reference(**LLAMA)):
        with pytest.raises(ValueError, match=said):
            model(torch.zeros(1, 5, dtype=torch.long))
