"""Checkpoints that any layout can write and any other layout can read.

Reading order: ``fragment`` (what a rank holds), ``manifest`` (what a checkpoint says of itself),
``save``, ``load``, ``retention`` (which checkpoint to resume from, which to delete). ``files`` is
the only door to the file system, ``agree`` the only one to the other ranks' errors.
"""

from .damage import damage
from .files import LOCAL, Files
from .fragment import Fragment
from .load import Differences, differences, load
from .manifest import Manifest, read_manifest
from .retention import latest_valid, list_checkpoints, prune, step_folder, step_of
from .save import save

__all__ = [
    "LOCAL",
    "Differences",
    "Files",
    "Fragment",
    "Manifest",
    "damage",
    "differences",
    "latest_valid",
    "list_checkpoints",
    "load",
    "prune",
    "read_manifest",
    "save",
    "step_folder",
    "step_of",
]
