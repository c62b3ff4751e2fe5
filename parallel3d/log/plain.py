"""A configuration as a flat dictionary of plain JSON values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any


def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys as the user types them (``topology.pp``), values that JSON has; lists stay lists.

    Paths and other objects become their text, enums their value, not-finite numbers their name.

    Raises:
        ValueError: a value that is missing (``???``) or still has an interpolation (``${...}``).

    Example:
        >>> flatten({"topology": {"pp": 2}, "optim": {"betas": (0.9, 0.95)}, "name": None})
        {'topology.pp': 2, 'optim.betas': [0.9, 0.95], 'name': None}
    """
    return dict(_leaves(config, ""))


def _leaves(config: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{name}.")
        else:
            yield name, _plain(value, name)


def _plain(value: Any, name: str) -> Any:
    if isinstance(value, Enum):
        return _plain(value.value, name)
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(item, f"{name}[{index}]") for index, item in enumerate(value)]
    text = str(value)
    if text == "???" or "${" in text:
        raise ValueError(
            f"{name} = {text} has no value yet: set it, e.g. {name}=... on the command line"
        )
    return text
