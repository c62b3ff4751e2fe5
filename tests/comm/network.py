"""A world on a network of its own, so that an interface's counters are its alone."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import pickle
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from parallel3d.topology import Grid
from tests import world

ROOT = Path(__file__).resolve().parents[2]
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1


def run_on_own_network(grid: Grid, fn: Callable[..., Any], **kwargs: Any) -> list[Any]:
    """`run_on` in a new network namespace, where nobody else uses the loopback interface."""
    done = subprocess.run(
        [*namespace(), sys.executable, "-m", "tests.comm.network"],
        input=pickle.dumps((grid, fn, kwargs)),
        capture_output=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr.decode()
    return pickle.loads(done.stdout)


@cache
def namespace() -> tuple[str, ...]:
    """The command that enters one: as root, or as root of a user namespace of its own."""
    ways = ("unshare", "--net"), ("unshare", "--map-root-user", "--net")
    for way in ways:
        if subprocess.run([*way, "true"], capture_output=True).returncode == 0:
            return way
    raise RuntimeError(f"this machine allows neither {' nor '.join(map(' '.join, ways))}")


def bytes_on_the_wire() -> int:
    """What the loopback interface has carried, TCP's own overhead included."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "lo":
            return int(counts.split()[8])
    raise RuntimeError("this machine has no loopback interface")


def raise_loopback() -> None:
    """`ip link set lo up`, on machines without iproute2 too."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket, SIOCGIFFLAGS, struct.pack("16sh14x", b"lo", 0))
        flags = struct.unpack("16sh14x", answer)[1] | IFF_UP
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags))


if __name__ == "__main__":
    raise_loopback()
    # This process has done nothing but import, so its ranks can be forked from itself.
    world.CONTEXT = multiprocessing.get_context("fork")  # type: ignore[assignment]
    grid, fn, kwargs = pickle.load(sys.stdin.buffer)
    sys.stdout.buffer.write(pickle.dumps(world.run_on(grid, fn, **kwargs)))
