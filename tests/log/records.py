"""A record to start from, a W&B that only remembers, and a reader of W&B's own files."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from parallel3d.log.meters import Record


def record(step: int, **changes: Any) -> Record:
    fields: dict[str, Any] = {
        "loss": 2.0 / step,
        "grad_norm": 0.5,
        "lr": 1e-3,
        "skipped": False,
        "tokens": 100 * step,
        "tokens_per_second": 1000.0,
        "step_seconds": 0.1,
        "peak_memory_bytes": 7,
        "memory_parameters": 4,
        "memory_gradients": 2,
        "memory_optimizer": 1,
        "mfu": None,
        "bytes_pp": 1,
        "bytes_dp": 2,
        "bytes_tp": 3,
    }
    return Record(step=step, **(fields | changes))


class FakeWandb(ModuleType):
    """Stands in for the module `wandb`; `on(name)` runs at each call and may raise or sleep."""

    def __init__(self, on: Callable[[str], None] = lambda name: None) -> None:
        super().__init__("wandb")
        self.on = on
        self.inits: list[dict[str, Any]] = []
        self.rows: list[tuple[int, dict[str, Any]]] = []
        self.metrics: list[tuple[str, str | None]] = []
        self.exit_codes: list[int] = []
        self.threads: set[str] = set()

    def Settings(self, **settings: Any) -> SimpleNamespace:  # noqa: N802 - W&B's name
        return SimpleNamespace(**settings)

    def init(self, **arguments: Any) -> FakeWandb:
        self.threads.add(threading.current_thread().name)
        self.on("init")
        self.inits.append(arguments)
        return self

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.metrics.append((name, step_metric))

    def log(self, row: dict[str, Any], step: int, commit: bool) -> None:
        self.on("log")
        if not self.rows or step > self.rows[-1][0]:  # W&B drops the others without a word
            self.rows.append((step, row))

    def finish(self, exit_code: int) -> None:
        self.on("finish")
        self.exit_codes.append(exit_code)


def wandb_records(path: Path) -> Iterator[Any]:
    """The protobuf records of a `.wandb` file: a leveldb log, whose blocks are of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record as Message

    content, at, parts = path.read_bytes(), 7, b""
    assert content[:4] == b":W&B"
    while at + 7 <= len(content):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + 7])
        if kind == 0:
            return
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last of several parts
            message = Message()
            message.ParseFromString(parts)
            yield message
            parts = b""


def wandb_history(path: Path) -> list[dict[str, Any]]:
    """The rows that were logged into a `.wandb` file."""
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
        for items in (
            message.history.item
            for message in wandb_records(path)
            if message.WhichOneof("record_type") == "history"
        )
    ]
