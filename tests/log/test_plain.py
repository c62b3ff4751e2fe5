import json
from enum import Enum
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue

from parallel3d.log.plain import flatten


class Colour(Enum):
    RED = "red"


@pytest.mark.report("wandb/wandb#1233")
@pytest.mark.report("ashleve/lightning-hydra-template#615")
@pytest.mark.report("Trainy-ai/pluto#114")
def test_a_configuration_becomes_plain_json_without_interpolations() -> None:
    config = OmegaConf.create(
        {
            "width": 8,
            "model": {"width": "${width}", "inner": {"ffn": "${model.width}", "none": None}},
            "betas": [0.9, "${width}", {"deep": "${width}"}],
            "path": Path("a/b"),
            "colour": Colour.RED,
            "empty": {},
            "inf": float("inf"),
        }
    )
    flat = flatten(config)
    assert flat == {
        "width": 8,
        "model.width": 8,
        "model.inner.ffn": 8,
        "model.inner.none": None,
        "betas": [0.9, 8, {"deep": 8}],
        "path": "a/b",
        "colour": "red",
        "empty": {},
        "inf": "inf",
    }
    text = json.dumps(flat, allow_nan=False)
    assert json.loads(text) == flat and "${" not in text


@pytest.mark.report("wandb/wandb#1233")
@pytest.mark.parametrize("value", ["???", "${model.width}", "x-${width}"])
def test_a_value_that_is_missing_or_unresolved_is_named(value: str) -> None:
    with pytest.raises(ValueError, match=r"model\.sizes\[1\] = .* has no value yet"):
        flatten({"model": {"sizes": [1, value]}})


def test_omegaconf_names_a_missing_value_itself() -> None:
    with pytest.raises(MissingMandatoryValue, match="width"):
        flatten(OmegaConf.create({"model": {"width": "???"}}))
