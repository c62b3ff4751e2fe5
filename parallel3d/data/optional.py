"""Packages that only some corpora need."""

from __future__ import annotations

import importlib
from types import ModuleType


def require(package: str, asked: str) -> ModuleType:
    """Import an optional package, or say what asked for it and how it is installed."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise RuntimeError(
            f"{asked} needs the package {package}, which is not installed: "
            f"pip install 'parallel3d[hf]'"
        ) from error
