"""How a recipe starts: composed by Hydra, its errors told to torchrun.

Note [errors of a recipe]
torchrun ends with a summary of the first failure, which it reads from a file that `record` writes
from an exception. Hydra, outside `record`, would print the exception and end with SystemExit, and
`record` would see nothing; inside, it never runs for an error of composition. So `record` stands
outside, HYDRA_FULL_ERROR makes Hydra raise its own errors, and the task's errors pass through Hydra
as a BaseException, which also ends a sweep at its first failing job, on every rank alike.
"""

from __future__ import annotations

import dis
import os
import shlex
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from torch.distributed.elastic.multiprocessing.errors import record

from ..config import allow_new_keys, explain
from ..launch import Launch

OURS = ("parallel3d", "models", "recipes", "__main__")


class _TaskFailed(BaseException):
    def __init__(self, error: Exception) -> None:
        self.error = error


def start(task: Callable[[Any], None], folder: Path, name: str) -> None:
    """Run `task` with the configuration `folder/name.yaml` and the command line's overrides.

    `task` is given what Hydra composed, an omegaconf DictConfig. The working directory is
    importable, for a `_target_` of the user's own. Call it from `if __name__ == "__main__"`.
    """
    sys.path.insert(0, str(Path.cwd()))
    # argparse takes overrides from one place only: `name=a -m seed=1,2` needs them together.
    arguments = sorted(sys.argv[1:], key=_is_override)
    sys.argv[1:] = allow_new_keys(arguments, folder)
    os.environ["HYDRA_FULL_ERROR"] = "1"
    tell(_run, task, folder, name)


def tell(program: Callable[..., None], *arguments: Any) -> None:
    """Run a program, with its errors told to torchrun.

    Of one whose message says all, the user sees the message and not the way to it.
    """
    plain: list[Exception] = []

    def run() -> None:
        try:
            program(*arguments)
        except Exception as error:
            if not _says_all(error):
                raise
            plain.append(error)
            raise error.with_traceback(None) from None

    try:
        record(run)()
    except ValueError as error:
        if error not in plain:
            raise
        sys.exit(f"{type(error).__name__}: {error}")


def _run(task: Callable[[Any], None], folder: Path, name: str) -> None:
    @wraps(task)
    def job(cfg: Any) -> None:
        try:
            task(cfg)
        except Exception as error:
            raise _TaskFailed(error) from error

    try:
        hydra.main(str(folder.resolve()), name, "1.3")(job)()
    except HydraException as composition:
        raise explain(composition) from None
    except _TaskFailed as failed:
        raise failed.error from None


def _is_override(argument: str) -> bool:
    return argument.startswith("~") or ("=" in argument and not argument.startswith("-"))


def _says_all(error: Exception) -> bool:
    """Whether the message is ours and for the user."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or not isinstance(error, ValueError):
        return False
    # Not what min([]) or int("x") raise where we call them.
    frame = trace.tb_frame
    raises = frame.f_code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return raises and frame.f_globals.get("__name__", "").partition(".")[0] in OURS


def command(launch: Launch, *changes: str) -> str:
    """The command line that started this job, with `key=value` changes, ready to paste.

    Inside a sweep it is that of the one job.
    """
    keys = {change.split("=")[0] for change in changes}
    given = [override.lstrip("+") for override in HydraConfig.get().overrides.task]
    kept = [override for override in given if override.split("=")[0] not in keys]
    nodes = launch.world_size // launch.local_world_size
    script = Path(sys.argv[0])
    if nodes > 1:
        program = f"sbatch -N {nodes} {script.parent / 'slurm' / script.stem}.sbatch"
    elif launch.world_size > 1:
        program = f"{_program('torchrun')} --nproc-per-node {launch.world_size} {script}"
    else:
        program = f"{_program('python')} {script}"
    return " ".join([program, *(shlex.quote(each) for each in (*kept, *changes))])


def _program(name: str) -> str:
    """A program of this Python's folder: by its name where the user's shell finds that one."""
    path = Path(sys.executable).with_name(name)
    if os.environ.get("VIRTUAL_ENV") == str(path.parent.parent) or sys.prefix == sys.base_prefix:
        return name
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
