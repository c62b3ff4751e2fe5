"""Whether W&B goes online, decided before anything is built and without asking anyone."""

from __future__ import annotations

import netrc
import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

_MODES = {
    "online": "online",
    "run": "online",
    "offline": "offline",
    "dryrun": "offline",
    "disabled": "disabled",
}


def check_wandb(mode: str | None, env: Mapping[str, str] = os.environ) -> str:
    """The mode in which W&B will run: ``online``, ``offline`` or ``disabled``.

    None is ``WANDB_MODE``, else online if this machine is logged in, else offline. Call it on the
    rank that logs, before data and model.

    Raises:
        ValueError: a mode that does not exist, or that has several writers.
        RuntimeError: ``online`` where nobody is logged in.
    """
    asked, where = mode or env.get("WANDB_MODE"), "log.wandb.mode" if mode else "WANDB_MODE"
    if not asked:
        return "online" if logged_in(env) else "offline"
    if asked not in _MODES:
        raise ValueError(
            f"{where} = {asked} is not a mode of W&B here: take online, offline or disabled"
        )
    if _MODES[asked] == "online" and not logged_in(env):
        raise RuntimeError(
            f"{where} = {asked}, but no login to W&B was found: "
            f"run `wandb login`, set WANDB_API_KEY, or take log.wandb.mode=offline"
        )
    return _MODES[asked]


def logged_in(env: Mapping[str, str] = os.environ) -> bool:
    """Whether W&B will find a key: in the environment, or in netrc for its server."""
    if env.get("WANDB_API_KEY") or env.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(env.get("WANDB_BASE_URL") or "https://api.wandb.ai").netloc
    path = Path(env.get("NETRC") or "~/.netrc").expanduser()
    try:
        found = netrc.netrc(path).authenticators(host)
    except (OSError, netrc.NetrcParseError):
        return False
    return bool(found and found[2])
