"""The main job: a small GPT on real text, under the layout that this machine allows.

    python tools/main_job.py [key=value ...]     further keys go to recipes/pretrain.py

Each call is a new run. Ctrl-C saves it and prints what continues it.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

import torch

from parallel3d.config import Config, compose
from parallel3d.data import TokenFiles

ROOT = Path(__file__).resolve().parents[1]
LAYOUTS = {
    1: ["topology.pp=1", "topology.tp=1"],
    2: ["topology.pp=1", "topology.tp=2"],
    3: ["topology.pp=3", "topology.tp=1"],
    4: ["topology.pp=2", "topology.tp=2"],
}
PACE = ["optim.lr=3e-3", "train.steps=300"]  # 1.2 million tokens: a minute or two on two cores
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(arguments: Sequence[str]) -> int:
    """Train, then say how good it is and how to go on; the exit code."""
    ranks = min(4, torch.cuda.device_count()) or 4
    given = ["model=gpt_tiny", *LAYOUTS[ranks], *PACE, *arguments]
    if not any(argument.startswith("name=") for argument in given):
        given.insert(0, f"name=main-{time.strftime('%Y%m%d-%H%M%S')}")
    try:
        config = compose(*given, folder=ROOT / "conf")
    except ValueError as error:
        print(f"ValueError: {error}", file=sys.stderr)
        return 1
    code = train(ranks, given)
    return code or report(config, ranks, given)


def train(ranks: int, given: Sequence[str]) -> int:
    """Run the recipe on so many processes; its exit code, 130 where it was stopped by Ctrl-C."""
    threads = max(1, (os.cpu_count() or 1) // ranks)
    command = [sys.executable, "-m", *launcher("torch.distributed.run", ranks)]
    print(f"starting {ranks} processes", flush=True)
    # A session of its own: what a terminal sends to all of its processes comes from here alone.
    with subprocess.Popen(
        [*command, str(ROOT / "recipes/pretrain.py"), *given],
        env={"OMP_NUM_THREADS": str(threads), **os.environ},
        start_new_session=True,
    ) as process:
        received = hand_on(process)
        code = process.wait()
    return 130 if signal.SIGINT in received else code if code >= 0 else 128 - code


def hand_on(process: subprocess.Popen[bytes]) -> list[int]:
    """Hand signals on to the run; the list returned tells which have come.

    The first Ctrl-C goes to the ranks, which save at the next step and end. Whatever comes next, or
    any other signal, goes to the launcher, once: it leaves them 30 seconds.
    """
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if received == [signal.SIGINT]:
            print("\nstopping at the next step", flush=True)
            for rank in children(process.pid) or [process.pid]:
                with suppress(ProcessLookupError):
                    os.kill(rank, number)
        elif received[:-1] in ([], [signal.SIGINT]):
            process.send_signal(signal.SIGTERM)

    for each in PASSED_ON:
        if signal.getsignal(each) is not signal.SIG_IGN:  # as under nohup
            signal.signal(each, handle)
    return received


def children(pid: int) -> list[int]:
    """The processes that a process has started, where the system tells."""
    with suppress(OSError):
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def report(config: Config, ranks: int, given: Sequence[str]) -> int:
    """Compare the last validation loss with what a model without context can reach."""
    folder = Path(config.run_root, str(config.name))
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    losses = [row["val_loss"] for row in rows if row.get("val_loss") is not None]
    if not losses:
        print(f"no validation: train.eval_every = {config.train.eval_every}, see {folder}")
        return 1
    data = config.data
    entropy = TokenFiles(
        str(data.path), data.seq_len, data.global_batch_size, config.seed
    ).unigram_entropy()
    better = losses[-1] < entropy
    relation = "below" if better else "NOT below"
    print(
        f"\nvalidation loss {losses[-1]:.3f} is {relation} the unigram entropy of the corpus, "
        f"{entropy:.3f} (nats per token)\n"
        f"run folder  {folder}\n"
        f"sample      {shlex.join(sampling(folder))}\n"
        f"continue    {shlex.join(continuing(ranks, given, 2 * config.train.steps))}"
    )
    return 0 if better else 1


def sampling(folder: Path) -> list[str]:
    """The command line that continues a prompt."""
    python, script = nearby(Path(sys.executable)), nearby(ROOT / "recipes/generate.py")
    return [python, script, f"run={folder}", "prompt=def ", "num_tokens=200", "temperature=0.8"]


def continuing(ranks: int, given: Sequence[str], steps: int) -> list[str]:
    """The command line that trains on, to another last step."""
    torchrun = nearby(Path(sys.executable).with_name("torchrun"))
    kept = [each for each in given if not each.startswith(("train.steps=", "checkpoint.resume="))]
    more = ["checkpoint.resume=auto", f"train.steps={steps}"]
    return [*launcher(torchrun, ranks), nearby(ROOT / "recipes/pretrain.py"), *kept, *more]


def launcher(program: str, ranks: int) -> list[str]:
    """torchrun for so many processes on this machine."""
    return [program, "--standalone", "--nproc-per-node", str(ranks)]


def nearby(path: Path) -> str:
    """A path as one would type it from the working directory."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
