"""What a benchmark is asked on its command line, and on what it was measured."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import torch


def read_options(
    arguments: Sequence[str], defaults: Mapping[str, str], about: str | None
) -> dict[str, str]:
    """``key=value`` over the defaults. ``--help`` prints ``about`` and ends."""
    if {"-h", "--help"} & set(arguments):
        print(about)
        raise SystemExit(0)
    options = dict(defaults)
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key not in options:
            near = get_close_matches(key, options, n=1)
            hint = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(options)}"
            raise SystemExit(f"{key} is not a key; {hint}")
        options[key] = value
    return options


def circumstances() -> dict[str, Any]:
    """The day, the machine and the code."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "torch": torch.__version__,
        "commit": subprocess.getoutput("git rev-parse --short HEAD"),
    }
