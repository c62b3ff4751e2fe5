"""Names beside a checkpoint folder: ``NAME.tmp-*`` is garbage, ``NAME.old-*`` a last resort."""

from __future__ import annotations

import re
import secrets
from pathlib import Path

from .files import Files

BESIDE = re.compile(r"\.(tmp|old)-\w+$")


def beside(folder: Path, kind: str, token: str | None = None) -> Path:
    """A fresh ``NAME.kind-TOKEN``: ``tmp`` until it is complete, ``old`` while it is replaced."""
    name = BESIDE.sub("", folder.name)
    return folder.with_name(f"{name}.{kind}-{token or secrets.token_hex(4)}")


def siblings(folder: Path, kind: str) -> list[Path]:
    """Every ``NAME.kind-*`` beside the folder."""
    if not folder.parent.is_dir():
        return []
    start = f"{folder.name}.{kind}-"
    return sorted(path for path in folder.parent.iterdir() if path.name.startswith(start))


def settled(folder: Path) -> Path:
    """The folder, or the one being replaced if the process died between the two renames."""
    old = [] if folder.exists() else siblings(folder, "old")
    return old[0] if old else folder


def discard(folder: Path, files: Files) -> None:
    """Remove a folder so that it is whole under its name, or not there at all."""
    garbage = beside(folder, "tmp")
    files.rename(folder, garbage)
    files.remove_folder(garbage)
