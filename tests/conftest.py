from __future__ import annotations

import os
import sys

import pytest
import torch
from hypothesis import settings

# One thread a process: a world has as many processes as the machine has cores, or more.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("WANDB_MODE", "disabled")
torch.set_num_threads(1)
# A slow machine is no fault of an example, and every run tries the same ones.
settings.register_profile("parallel3d", deadline=None, derandomize=True, database=None)
settings.load_profile("parallel3d")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    without_device = pytest.mark.skip(reason="needs an NVIDIA device, and this machine has none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(without_device)


def pytest_unconfigure() -> None:
    if world := sys.modules.get("tests.world"):
        world.stop_server()


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test sees the machine, never the launcher that it happens to run under."""
    launcher = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    )
    for name in list(os.environ):
        if name in launcher or name.startswith(("SLURM_", "TORCHELASTIC_")):
            monkeypatch.delenv(name)
