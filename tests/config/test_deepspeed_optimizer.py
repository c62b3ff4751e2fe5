"""The section `optimizer` of a DeepSpeed JSON: which types, which parameters, whose defaults."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from parallel3d.config import compose, read, to_yaml
from parallel3d.config.schema import Config


class Open(torch.optim.SGD):
    """An optimizer that takes any parameter."""

    def __init__(self, params: Any, lr: float = 1, **_: Any) -> None:
        super().__init__(params, lr)


OPEN = f"optim._target_={__name__}.Open"


def write(folder: Path, kind: Any = None, **params: Any) -> str:
    """The override that names a file with this optimizer."""
    path = folder / "ds.json"
    section = {"params": params} if kind is None else {"type": kind, "params": params}
    path.write_text(json.dumps({"optimizer": section}))
    return f"deepspeed={path}"


def told(file: str, *keys: str) -> tuple[Config, list[Sequence[object]]]:
    """The configuration, and the rows of the table that the start prints."""
    rows: list[Sequence[object]] = []
    cfg = OmegaConf.create(to_yaml(compose(*keys)))
    cfg.deepspeed = file.partition("=")[2]
    found = read(cfg, [file, *keys], 1, lambda _, table: rows.extend(table))
    return found, rows


@pytest.mark.parametrize("name", ["lr", "betas", "eps", "weight_decay"])
@pytest.mark.parametrize("value", [{"a": 1}, {}])
def test_an_object_where_a_number_belongs_is_refused_by_its_field(
    name: str, value: dict[str, Any], tmp_path: Path
) -> None:
    message = rf"^optimizer\.params\.{name}.* in ds\.json is inside an object"
    if not value:
        message = rf"optim\.{name} = \{{\}} is not .* optimizer\.params\.{name} = \{{\}} in ds"
    for kind, *keys in (("AdamW",), (None,), (None, OPEN)):
        with pytest.raises(ValueError, match=message):
            compose(write(tmp_path, kind, **{name: value}), *keys)


def test_an_object_names_what_belongs_there(tmp_path: Path) -> None:
    message = (
        r"^optimizer\.params\.lr\.a = 1 in ds\.json is inside an object: "
        r"write optimizer\.params\.lr as one value, such as 0\.001$"
    )
    with pytest.raises(ValueError, match=message):
        compose(write(tmp_path, lr={"a": 1}))
    with pytest.raises(ValueError, match=r"betas as one value, such as \[0\.9, 0\.999\]$"):
        compose(write(tmp_path, betas={"a": 1}))


OURS = ["warmup_steps", "state_dtype", "_target_", "name", "lr_schedule", "min_lr_ratio"]


@pytest.mark.parametrize("name", OURS)
def test_a_key_of_this_configuration_is_no_parameter_of_an_optimizer(
    name: str, tmp_path: Path
) -> None:
    for value, spelt in ((1, "1"), ("auto", '"auto"'), (None, "null")):
        for kind, *keys in (("AdamW",), ("SGD",), (None, OPEN)):
            message = (
                rf"^optimizer\.params\.{name} = {spelt} in ds\.json is no parameter of an "
                rf"optimizer: take it out of the file, or set optim\.{name} on the command line$"
            )
            with pytest.raises(ValueError, match=message):
                compose(write(tmp_path, kind, **{name: value}), *keys)


def test_a_parameter_that_is_left_open_is_one_of_the_class(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r'params\.betas = "auto" .* no parameter of .*\.SGD,'):
        compose(write(tmp_path, "SGD", betas="auto"))
    found = compose(write(tmp_path, None, momentum=0.5, betas="auto"), OPEN)
    assert found.optim.extra == {"momentum": 0.5}


@pytest.mark.parametrize(
    ("kind", "meant"),
    [("FusedAdam", "Adam"), ("DeepSpeedCPUAdam", "Adam"), ("fusedlamb", "Lamb")],
)
def test_a_class_of_deepspeed_is_answered_with_the_type_that_means_it(
    kind: str, meant: str, tmp_path: Path
) -> None:
    message = (
        rf'^optimizer\.type = "{kind}" in ds\.json is what "{meant}" means in DeepSpeed: '
        rf'write "{meant}"$'
    )
    with pytest.raises(ValueError, match=message):
        compose(write(tmp_path, kind, lr=1))


@pytest.mark.parametrize(
    ("kind", "spelt", "near"),
    [("Lion", '"Lion"', ""), (3, "3", ""), ("Adamm", '"Adamm"', r"; did you mean \"Adam\"\?")],
)
def test_an_unknown_type_is_answered_with_those_that_are_known(
    kind: Any, spelt: str, near: str, tmp_path: Path
) -> None:
    message = rf"^optimizer\.type = {spelt} in ds\.json is not one of Adadelta, .*SGD, .*{near}$"
    with pytest.raises(ValueError, match=message) as caught:
        compose(write(tmp_path, kind, lr=1))
    assert {"Lamb,", "Muon,", "RMSprop,"} <= set(str(caught.value).split())
    assert "optim." not in str(caught.value).replace("torch.optim", "")


TORCH = [
    ("Adagrad", {"lr": 0.01, "eps": 1e-10, "weight_decay": 0}),
    ("RMSprop", {"lr": 0.01, "eps": 1e-8, "weight_decay": 0}),
    ("Adamax", {"lr": 0.002, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0}),
    ("SGD", {"lr": 1e-3, "weight_decay": 0}),
    ("Adafactor", {"lr": 0.01, "weight_decay": 0}),  # its eps is a pair of other numbers
    ("Rprop", {"lr": 0.01}),
]


@pytest.mark.parametrize(("kind", "defaults"), TORCH)
def test_what_the_file_leaves_out_of_a_class_of_torch_is_the_classs_default(
    kind: str, defaults: dict[str, Any], tmp_path: Path
) -> None:
    found, rows = told(write(tmp_path, kind))
    assert {name: getattr(found.optim, name) for name in defaults} == defaults
    implied = {row[0]: row[2:] for row in rows if row[1] == "-"}
    assert implied.keys() == {f"optimizer.params.{name}" for name in defaults}
    for name in defaults:
        key, _, why = implied[f"optimizer.params.{name}"]
        assert (key, why) == (f"optim.{name}", "torch's default")


def test_what_is_said_comes_before_the_default_of_a_class(tmp_path: Path) -> None:
    found, rows = told(write(tmp_path, "Adagrad", lr=0.5), "optim.eps=0.25")
    assert (found.optim.lr, found.optim.eps, found.optim.weight_decay) == (0.5, 0.25, 0)
    whys = {row[0]: row[4] for row in rows}
    assert whys["optimizer.params.eps"] == "the command line says it"
    assert whys["optimizer.params.weight_decay"] == "torch's default"


def test_torch_adam_has_the_defaults_of_torch(tmp_path: Path) -> None:
    for kind, params, decay in (
        ("AdamW", {"torch_adam": True}, 0.01),
        ("Adam", {"torch_adam": True}, 0.01),
        ("Adam", {"torch_adam": True, "adam_w_mode": False}, 0),
        ("AdamW", {"torch_adam": False}, 0),
    ):
        assert compose(write(tmp_path, kind, **params)).optim.weight_decay == decay
