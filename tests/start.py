"""Scripts for tests: a recipe or a tool on several ranks, with its output and exit codes."""

from __future__ import annotations

import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from tests.world import CONTEXT, environment

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Finished:
    """Exit code (the first that is not 0), by rank where known, and what was printed."""

    code: int
    output: str
    codes: tuple[int, ...] = ()


def start(
    argv: Sequence[str],
    ranks: int = 1,
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
    timeout: float = 60.0,
    grace: float | None = None,
) -> Finished:
    """Run a Python script on `ranks` processes with torchrun's variables, without its seconds.

    Each rank's output comes one after the other. Ranks still running at the time-out, or `grace`
    seconds after one has failed (as a launcher would), are killed; their code is -9.
    """
    with tempfile.TemporaryDirectory(prefix="start-") as folder:
        logs = [Path(folder, str(rank)) for rank in range(ranks)]
        port = str(free_port())
        started = []
        try:
            for rank, log in enumerate(logs):
                variables = {**environment(rank, ranks), "MASTER_PORT": port, **(env or {})}
                args = (list(map(str, argv)), variables, str(cwd), str(log))
                started.append(CONTEXT.Process(target=_script, args=args))
                started[-1].start()
            _wait(started, timeout, grace)
        finally:
            for process in started:
                process.kill()
                process.join()
        codes = tuple(process.exitcode or 0 for process in started)
        output = "".join(log.read_text(errors="replace") for log in logs if log.exists())
    return Finished(next((code for code in codes if code), 0), output, codes)


def _script(argv: list[str], env: dict[str, str], cwd: str, log: str) -> None:
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    os.environ.update(env)
    os.chdir(cwd)
    torch.set_num_threads(1)
    sys.argv = argv
    sys.path[:0] = [str(Path(argv[0]).resolve().parent), str(ROOT)]
    runpy.run_path(argv[0], run_name="__main__")


def _wait(ranks: Sequence[BaseProcess], timeout: float, grace: float | None) -> None:
    deadline = time.monotonic() + timeout
    running = list(ranks)
    while running and (left := deadline - time.monotonic()) > 0:
        connection.wait([process.sentinel for process in running], left)
        ended = [process for process in running if not process.is_alive()]
        running = [process for process in running if process.is_alive()]
        if grace is not None and any(process.exitcode for process in ended):
            deadline = min(deadline, time.monotonic() + grace)


def torchrun(
    argv: Sequence[str],
    ranks: int,
    *,
    options: Sequence[str] = ("--standalone",),
    env: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
    timeout: float = 120.0,
) -> Finished:
    """Run a script under the real torchrun (seconds a start): for what the launcher itself does."""
    command = [sys.executable, "-m", "torch.distributed.run", *options]
    command += ["--nproc-per-node", str(ranks), *map(str, argv)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **(env or {})}
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(
            command, cwd=cwd, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        ) as process,
    ):
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = -signal.SIGKILL
            kill_tree(process.pid)
        log.seek(0)
        return Finished(code, log.read())


def kill_tree(pid: int) -> None:
    """End `pid`, all that it started and all that they started, also in sessions of their own."""
    tree = [pid]
    for one in tree:
        tree += [child for child, parent in _parents().items() if parent == one]
    for one in tree:
        with suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while set(tree[1:]) & set(_parents()) and time.monotonic() < deadline:
        time.sleep(0.01)


def running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    return pid in _parents()


def _parents() -> dict[int, int]:
    """Parent of every process that still runs (a zombie does not)."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # ended meanwhile
            state, parent, *_ = stat.read_text().rpartition(")")[2].split()
            if state != "Z":
                parents[int(stat.parent.name)] = int(parent)
    return parents


def free_port() -> int:
    """A port of the loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
