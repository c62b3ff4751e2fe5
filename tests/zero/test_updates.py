"""The thread on which updates are made."""

from __future__ import annotations

import threading

import pytest
import torch

from parallel3d.comm.host import host_axis
from parallel3d.zero.store import Store
from parallel3d.zero.updates import HostUpdates


@pytest.mark.parametrize("name", ["cuda:3", "cpu"])
def test_updates_are_made_on_the_rank_s_own_device(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[tuple[torch.device, str]] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(
        torch.cuda,
        "set_device",
        lambda device: entered.append((device, threading.current_thread().name)),
    )
    device = torch.device(name)
    host = HostUpdates({}, Store(), host_axis(0), device)
    thread = host._worker.submit(threading.current_thread).result()
    assert entered == ([] if name == "cpu" else [(device, thread.name)])
