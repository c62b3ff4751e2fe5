"""The main job: a small GPT on real text under the layout that this machine allows.

python tools/main_job.py [key=value ...]     further overrides go to recipes/pretrain.py
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

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


def main(arguments: list[str]) -> int:
    """Train, then say how good it is and how to go on; the exit code."""
    ranks = min(4, torch.cuda.device_count()) or 4
    given = ["model=gpt_tiny", *LAYOUTS[ranks], *arguments]
    if not any(argument.startswith("name=") for argument in given):
        given.insert(0, f"name=main-{time.strftime('%Y%m%d-%H%M%S')}")
    config = compose(*given, folder=ROOT / "conf")
    code = train(ranks, given)
    if code:
        return code
    return report(config, Path(config.run_root, str(config.name)), ranks, given)


def launcher(ranks: int) -> list[str]:
    """The start of a command line for so many processes."""
    return ["torchrun", "--standalone", "--nproc-per-node", str(ranks)]


def train(ranks: int, given: list[str]) -> int:
    """Run the recipe; Ctrl-C reaches it too, and it saves before it ends."""
    threads = max(1, (os.cpu_count() or 1) // ranks)
    env = {"OMP_NUM_THREADS": str(threads), **os.environ}
    recipe = [
        "-m",
        "torch.distributed.run",
        *launcher(ranks)[1:],
        str(ROOT / "recipes/pretrain.py"),
    ]
    with subprocess.Popen([sys.executable, *recipe, *given], env=env) as process:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                continue


def report(config: Config, folder: Path, ranks: int, given: list[str]) -> int:
    """Compare the last validation loss with what a model without context can reach."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    losses = [row["val_loss"] for row in rows if row.get("val_loss") is not None]
    if not losses:
        print(f"no validation: train.eval_every = {config.train.eval_every}, see {folder}")
        return 0
    data = config.data
    entropy = TokenFiles(
        str(data.path), data.seq_len, data.global_batch_size, config.seed
    ).unigram_entropy()
    better = losses[-1] < entropy
    kept = [each for each in given if not each.startswith(("train.steps=", "checkpoint.resume="))]
    more = ["checkpoint.resume=auto", f"train.steps={2 * config.train.steps}"]
    resume = [*launcher(ranks), "recipes/pretrain.py", *kept, *more]
    sample = ["python", "recipes/generate.py", f"run={folder}", "prompt=def ", "num_tokens=200"]
    sign, verdict = ("<", "the model uses context") if better else (">=", "no better than counting")
    print(
        f"\nvalidation loss {losses[-1]:.3f} {sign} {entropy:.3f} nats per token, the unigram "
        f"entropy of the corpus: {verdict}\n"
        f"run folder  {folder}\n"
        f"sample      {shlex.join(sample)}\n"
        f"continue    {shlex.join(resume)}\n"
        f"(after: source .venv/bin/activate)"
    )
    return 0 if better else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
