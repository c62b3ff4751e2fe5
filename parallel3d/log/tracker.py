"""Weights & Biases: one run, fed by a thread of its own, that can never stop the training."""

from __future__ import annotations

import json
import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .jsonl import replace
from .plain import flatten

_logger = logging.getLogger(__name__)


class Tracker:
    """A W&B run in ``run_folder/wandb``.

    All calls to W&B are made by one thread, in order, so a slow ``init`` or upload costs the
    training nothing. The first that raises, or lasts longer than ``timeout`` seconds, gives one
    warning and turns W&B off; the run goes on, and ``metrics.jsonl`` has everything.

    The x-axis is the row's own ``step``. W&B's internal counter takes rising values only, and drops
    what comes below without a word (wandb/wandb#4482); so it runs ahead of ``step`` by as many
    steps as all resumes of the run went back.

    Args:
        run_folder: the run's folder; the run's id lies in it, so a resumed run keeps it.
        config: becomes ``{"topology.pp": 2, ...}``, plain JSON (ValueError for what is not).
        mode: ``online`` or ``offline``.
        rewound: logged steps that a resume dropped.
        timeout: seconds that one call may last, and that ``close`` waits in all.
    """

    def __init__(
        self,
        run_folder: Path,
        config: Mapping[str, Any],
        *,
        mode: str,
        project: str,
        entity: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        rewound: int = 0,
        timeout: float = 60.0,
    ) -> None:
        identity, resumed = _identity(run_folder / "wandb" / "run.json", rewound)
        self._ahead = identity.ahead
        self._timeout = timeout
        self._off = False
        self._lock = threading.Lock()
        self._began: float | None = None
        self._calls: queue.SimpleQueue[tuple[str, Callable[[], object]] | None] = (
            queue.SimpleQueue()
        )
        self._run: Any = None
        init = {
            "dir": str(run_folder),
            "id": identity.id,
            "name": run_folder.name,
            "config": flatten(config),
            "allow_val_change": True,  # a resumed run may have another layout
            "mode": mode,
            "project": project,
            "entity": entity,
            "group": group,
            "tags": list(tags),
            # Offline there is no server to ask: the id alone joins the files when they are synced.
            "resume": "allow" if resumed and mode == "online" else None,
        }
        self._calls.put(("init", lambda: self._init(init)))
        self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
        self._thread.start()

    def write(self, row: Mapping[str, Any]) -> None:
        """Send one row, which has ``step``; returns at once."""
        self._check()
        if not self._off:
            copy, at = dict(row), row["step"] + self._ahead
            self._calls.put(("log", lambda: self._run.log(copy, step=at, commit=True)))

    def close(self, failed: bool = False) -> None:
        """Finish the run, as failed or not; waits ``timeout`` seconds at most."""
        if not self._off:
            self._calls.put(("finish", lambda: self._run.finish(exit_code=int(failed))))
            self._calls.put(None)
            self._thread.join(self._timeout)
            if self._thread.is_alive():
                self._give_up(f"did not finish in {self._timeout:g} s")

    def _work(self) -> None:
        while not self._off and (call := self._calls.get()) is not None:
            name, fn = call
            self._began = time.monotonic()
            try:
                fn()
            except (Exception, SystemExit) as error:
                reason = str(error).partition("\n")[0]
                self._give_up(f"{name} failed: {type(error).__name__}: {reason}")
            self._began = None

    def _init(self, arguments: Mapping[str, Any]) -> None:
        if arguments["mode"] == "offline":
            # Else W&B 0.31 posts statistics of itself when the process ends, and where packets are
            # dropped without a word, as on many compute nodes, that costs 10 s.
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb  # takes long, and most processes never need it

        settings = wandb.Settings(
            silent=True,  # the run has a console of its own
            console="off",
            init_timeout=self._timeout,
            symlink=False,
            x_disable_stats=True,  # memory and time are measured by the run itself
        )
        self._run = wandb.init(**arguments, settings=settings, reinit="create_new")
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def _check(self) -> None:
        began = self._began
        if began is not None and time.monotonic() - began > self._timeout:
            self._give_up(f"did not answer in {self._timeout:g} s")

    def _give_up(self, why: str) -> None:
        with self._lock:  # both threads may come here, and one warning is enough
            if not self._off:
                _logger.warning("W&B %s; the run goes on without it, see metrics.jsonl", why)
                self._off = True


class _Identity(NamedTuple):
    """Of a run, over all its resumes: its id, and how far W&B's counter runs ahead of ``step``."""

    id: str
    ahead: int


def _identity(path: Path, rewound: int) -> tuple[_Identity, bool]:
    """The run's identity, kept in ``path``, and whether it is an older one."""
    resumed = path.exists()
    before = _Identity(**json.loads(path.read_text())) if resumed else None
    identity = (
        _Identity(before.id, before.ahead + rewound)
        if before
        else _Identity(secrets.token_hex(8), 0)
    )
    path.parent.mkdir(exist_ok=True)
    replace(path, json.dumps(identity._asdict()).encode())
    return identity, resumed
