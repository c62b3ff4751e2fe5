"""What the server that ranks are forked from imports, so that no rank does: all of ours.

Frozen, it is left alone by the ranks' garbage collectors, and its pages stay shared.
"""

from __future__ import annotations

import gc
import importlib
import pkgutil

import models
import parallel3d

for package in (parallel3d, models):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
gc.collect()
gc.freeze()
