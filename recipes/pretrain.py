"""Train a language model, or any nn.Sequential, under any layout.

    torchrun --nproc-per-node 8 recipes/pretrain.py model=gpt_tiny topology.pp=2 topology.tp=2

Keys and their defaults: conf/pretrain.yaml. SIGINT, SIGTERM and SIGUSR1 end the run at the next
step border, saved, with exit code 0; SIGUSR1 also makes the file that PARALLEL3D_REQUEUE names.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from parallel3d.checkpoint.agree import on_rank_0
from parallel3d.config import Config, naming_fields, read, settle
from parallel3d.data import prepare
from parallel3d.job import Stop, claimed, command, start
from parallel3d.launch import Launch
from parallel3d.log.console import report
from parallel3d.log.login import check_wandb
from parallel3d.topology import Grid, Topology
from parallel3d.train import train


def main(cfg: DictConfig) -> None:
    """Check, then train. Errors until the first step leave no run folder."""
    hydra = HydraConfig.get()
    launch = Launch.from_environment(os.environ)
    tell = report if launch.rank == 0 else None
    config = read(cfg, hydra.overrides.task, launch.world_size, tell)
    degrees = config.topology
    with naming_fields(config, launch.world_size):
        grid = Grid.infer(launch.world_size, degrees.pp, degrees.dp, degrees.tp)
        config = settle(config, grid.pp, grid.dp, grid.tp)
    with (
        Topology.init(grid.pp, grid.dp, grid.tp, timeout=config.train.timeout) as topology,
        Stop() as stop,
    ):
        mode = on_rank_0(topology.world, lambda: check_wandb(config.log.wandb.mode))
        wandb = replace(config.log.wandb, mode=mode)
        config = replace(config, log=replace(config.log, wandb=wandb))
        folder = run(config, hydra.runtime.choices, topology, stop)
    if stop.requested:
        finish_stopped(stop, launch, folder)


def run(config: Config, choices: Mapping[str, str], topology: Topology, stop: Stop) -> Path:
    """Claim the run's folder and train; the folder."""
    with claimed(config, choices["model"], topology.world) as folder:
        config = replace(config, name=folder.name)
        prepare_stdlib(config, choices["data"])
        train(config, topology, folder, lambda: stop.agreed(topology.world))
    return folder


def prepare_stdlib(config: Config, choice: str) -> None:
    """Make the corpus `data=stdlib` where it is absent; a mistyped path makes nothing."""
    path = Path(config.data.path or "")
    is_ours = config.data._target_ == "parallel3d.data.TokenFiles"
    if is_ours and choice == path.name == "stdlib" and not path.exists():
        prepare("stdlib", "bytes", path)


def finish_stopped(stop: Stop, launch: Launch, folder: Path) -> None:
    """Say how to go on, leave the marker for the job script, and end a sweep here."""
    if launch.rank == 0:
        resume = command(launch, f"name={folder.name}", "checkpoint.resume=auto")
        print(f"stopped and saved; to continue:\n  {resume}", flush=True)
        marker = os.environ.get("PARALLEL3D_REQUEUE")
        if marker and stop.requeue:
            Path(marker).touch()
    raise SystemExit(0)


if __name__ == "__main__":
    start(main, Path(__file__).parent.parent / "conf", "pretrain")
