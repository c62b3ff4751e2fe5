"""Hydra's composition, with the keys it lacks left to our own schema."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

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
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException

    folder = Path(folder).absolute()
    arguments = allow_new_keys(overrides, folder)
    try:
        with initialize_config_dir(str(folder), version_base="1.3"):
            cfg = hydra_compose(name, arguments)
    except HydraException as error:
        raise ValueError(str(error)) from error
    return read(cfg, arguments)
