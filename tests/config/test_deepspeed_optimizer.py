"""The section `optimizer` of a DeepSpeed JSON: which types, which parameters, whose defaults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel3d.config import compose


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
