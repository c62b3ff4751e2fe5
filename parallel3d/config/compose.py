"""Hydra's composition, with the keys it lacks left to our own schema."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.errors import HydraException, MissingConfigException, OverrideParseException

from .read import read
from .schema import Config


def allow_new_keys(arguments: Sequence[str], folder: Path) -> list[str]:
    """Write `key=value` as `++key=value`, so that Hydra passes on a key that conf/ lacks.

    Hydra would refuse it before the recipe starts, and without a nearest key; `read` judges all
    keys alike, and an open group (`optim.momentum=0.9`) needs no `+`. Names of groups stay.
    """
    groups = {path.name for path in folder.iterdir() if path.is_dir()}

    def rewrite(argument: str) -> str:
        key = re.match(r"([A-Za-z_][\w.]*)=", argument)
        keep = key is None or key[1] in groups or key[1].split(".")[0] == "hydra"
        return argument if keep else f"++{argument}"

    return [rewrite(argument) for argument in arguments]


def compose(*overrides: str, folder: Path | str = "conf", name: str = "pretrain") -> Config:
    """The configuration that a recipe would read from these `key=value` overrides.

    Raises:
        ValueError: as `read`, and for a group's value that does not exist.
    """
    folder = Path(folder).absolute()
    arguments = allow_new_keys(overrides, folder)
    try:
        with initialize_config_dir(str(folder), version_base="1.3"):
            cfg = hydra_compose(name, arguments)
    except HydraException as error:
        raise explain(error) from error
    return read(cfg, arguments)


def explain(error: Exception) -> ValueError:
    """An error of Hydra's composition as one of ours: value, rule and way out."""
    if isinstance(error, MissingConfigException) and error.options:
        group, _, value = (error.missing_cfg_file or "").rpartition("/")
        close = get_close_matches(value, error.options, n=1)
        hint = f"; did you mean {group}={close[0]}?" if close else ""
        return ValueError(f"{group} = {value!r} is not one of {', '.join(error.options)}{hint}")
    if isinstance(error, OverrideParseException):
        return ValueError(
            f"{error.override.lstrip('+')!r} cannot be read: write key=value, "
            f"with quotes around a value that has special characters, such as name='a=b'"
        )
    said = " ".join(str(error).split())
    return ValueError(f"the configuration cannot be composed: {said}")
