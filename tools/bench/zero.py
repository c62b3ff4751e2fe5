"""The stages of ZeRO, and torch's own ways, as ratios to plain PyTorch on the same cores.

    python tools/bench/zero.py [sides=ZeRO-1,DDP,...] [pairs=5] [width=256] [num_layers=8]
                               [ffn_width=768] [seq_len=256] [batch=32]

Two ranks of one thread over gloo against one process of two threads, on the workload of
``layouts.py``. In a round each side's step follows one of plain PyTorch; a ratio is taken of each
such pair, and the median of the quiet ones is told: those during which other programs used less
than 12 % of the machine (or of the three quietest, and the JSON says so), with the least and the
largest. The peers train the same units and values; all must tell plain PyTorch's losses.

A side takes two steps in a row, of which the second is timed: so it waits for what the first has
left under way. Bytes of ours are what the ledger counted in a step over both ranks, beside the law
of the stage without padding; those of all sides what passed over the loopback interface, the least
of all pairs, since it carries other programs' too. ``peak`` is the most tensor memory of a rank.
``overlap`` is the share of the gathers and reductions during which a unit computed.
A line of JSON for each side goes to results/.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[2]))

from tools.bench.layouts import QUIET, RESULTS, busy_seconds, wait_until_quiet
from tools.bench.options import circumstances, read_options
from tools.bench.plain import MICRO, VOCAB, Reference, Size
from tools.bench.workers import StepError, ask, started
from tools.bench.zero_sides import PEERS, STAGES, WARMUP, Result, rank_main

RANKS = 2
SIDES = ",".join((*STAGES, *PEERS))
# Ratio to plain PyTorch and MB of a step on the usual workload.
AIMS = {"ZeRO-1": (1.14, 56), "ZeRO-2 last": (1.10, 56), "ZeRO-3 last": (1.05, 84)}


class Round(NamedTuple):
    """Seconds of a step of plain PyTorch and of a side, and the share that others used.

    ``sent`` is by the ledgers of the ranks, ``loopback`` by the interface; bytes of one step.
    """

    plain: float
    side: float
    others: float
    sent: int
    loopback: int


def plain_main(pipe: Connection, threads: int, size: Size) -> None:
    """Step numbers in, seconds, CPU seconds and the loss out."""
    torch.set_num_threads(threads)
    reference = Reference(size)
    while (number := pipe.recv()) is not None:
        began, used = time.perf_counter(), time.process_time()
        loss = reference.step(number)
        pipe.send((time.perf_counter() - began, time.process_time() - used, loss))


class World:
    """Plain PyTorch and the ranks, who take turns."""

    def __init__(self, plain: Any, ranks: list[Any]) -> None:
        self.plain_pipe, self.ranks = plain, ranks

    def plain(self, number: int) -> tuple[float, float, float]:
        """A step of it: seconds, CPU seconds, loss."""
        self.plain_pipe.send(number)
        seconds, cpu, loss = self.plain_pipe.recv()
        return seconds, cpu, loss

    def side(self, name: str, what: str, number: int) -> list[Result]:
        """A step of a side on every rank; StepError if one fails, once all have answered."""
        answers = dict(ask(self.ranks, (name, what, number)))
        for answer in answers.values():
            if isinstance(answer, str):
                raise StepError(answer)
        return [answers[rank] for rank in sorted(answers)]


@contextmanager
def world(size: Size) -> Iterator[World]:
    """Start everybody, and end them whatever they do."""
    with TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        mains: list[Any] = [(plain_main, (RANKS, size))]
        mains += [(rank_main, (rank, RANKS, store, size)) for rank in range(RANKS)]
        with started(mains) as pipes:
            yield World(pipes[0], pipes[1:])


def contest(size: Size, names: Sequence[str], pairs: int) -> list[dict[str, Any]]:
    """A row of each side; rounds go through all of them."""
    rows: dict[str, dict[str, Any]] = {}
    rounds: dict[str, list[Round]] = {name: [] for name in names}
    with world(size) as both:
        truth = [both.plain(number)[2] for number in range(WARMUP)]
        for name in names:
            try:
                warm_up(both, name, truth)
            except StepError as error:
                rows[name] = {"side": name, "not_run": str(error)}
        for number in range(WARMUP, WARMUP + pairs):
            for name in names:
                if name not in rows:
                    rounds[name].append(take(both, name, number))
        for name in names:
            if name not in rows:
                peaks = [result.peak for result in both.side(name, "count", 0)]
                traces = [result.overlap for result in both.side(name, "trace", 1)]
                rows[name] = row_of(name, size, rounds[name], peaks, traces)
    return [rows[name] for name in names]


def warm_up(both: World, name: str, truth: Sequence[float]) -> None:
    """First steps, which must tell the losses that plain PyTorch told."""
    for number, loss in enumerate(truth):
        results = both.side(name, "time", number)
        told = [result.loss for result in results]
        mean = told[0] if name in STAGES else statistics.fmean(told)
        if abs(mean - loss) > 1e-3 * abs(loss):
            raise StepError(f"loss {mean:.5f} of step {number}, but plain PyTorch has {loss:.5f}")


def take(both: World, name: str, number: int) -> Round:
    """A step of plain PyTorch and one of the side."""
    wait_until_quiet()
    busy, began = busy_seconds(), time.perf_counter()
    plain, used, _ = both.plain(number)
    passed = loopback_bytes()
    results = both.side(name, "time", number)
    own = used + sum(result.cpu for result in results)
    capacity = (os.cpu_count() or 1) * (time.perf_counter() - began)
    others = max(0.0, busy_seconds() - busy - own) / capacity
    time.sleep(0.2)  # for what the second step has left under way
    passed = (loopback_bytes() - passed) // 2
    seconds = max(result.seconds for result in results)
    return Round(plain, seconds, others, sum(result.sent for result in results), passed)


def loopback_bytes() -> int:
    """Sent over the loopback interface since the machine started, by any process."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[8])
    return 0


def row_of(
    name: str, size: Size, rounds: Sequence[Round], peaks: list[int], traces: list[tuple[int, int]]
) -> dict[str, Any]:
    """What is told of one side."""
    quiet = [one for one in rounds if one.others < QUIET]
    kept = quiet if len(quiet) >= 3 else sorted(rounds, key=lambda one: one.others)[:3]
    ratios = sorted(one.plain / one.side for one in kept)
    tokens, side = size.batch * size.seq_len, statistics.median(one.side for one in kept)
    row: dict[str, Any] = {
        "side": name,
        "ratio": round(statistics.median(ratios), 3),
        "spread": [round(ratios[0], 3), round(ratios[-1], 3)],
        "best_ratio": round(min(r.plain for r in kept) / min(r.side for r in kept), 3),
        "tokens_per_second": round(tokens / side),
        "plain_tokens_per_second": round(tokens / statistics.median(r.plain for r in kept)),
        "loopback_bytes": min(one.loopback for one in rounds),
        "peak_tensor_bytes": peaks,
        "quiet_pairs": f"{len(quiet)} of {len(rounds)}",
        "others": round(max(one.others for one in kept), 3),
    }
    if name in STAGES:
        over, total = (sum(column) for column in zip(*traces, strict=True))
        row["sent_bytes"] = rounds[-1].sent
        row["law_bytes"] = law_bytes(size, name)
        row["overlap"] = round(over / total, 3)
    if name in AIMS and size == Size():
        ratio, megabytes = AIMS[name]
        row["aim"] = {"ratio": ratio, "MB": megabytes}
        row["met"] = row["ratio"] >= ratio and row["sent_bytes"] <= 1.01e6 * megabytes
    return row


def law_bytes(size: Size, stage: str) -> int:
    """Of a step over both ranks without padding: one gather, and a reduction or one of each."""
    width, layers = size.width, size.num_layers
    matrices = layers * (4 * width * width + 3 * width * size.ffn_width) + 2 * VOCAB * width
    elements = matrices + width * (2 * layers + 1)
    reductions = size.batch // RANKS // MICRO if stage.endswith("each") else 1
    return (RANKS - 1) * elements * 4 * (reductions + 1)


def main(arguments: list[str]) -> None:
    """Measure, print a table, append a line per side."""
    sizes = Size()._asdict()
    options = {"sides": SIDES, "pairs": "5", **{key: str(value) for key, value in sizes.items()}}
    options = read_options(arguments, options, __doc__)
    names = options["sides"].split(",")
    if unknown := [name for name in names if name not in SIDES.split(",")]:
        raise SystemExit(f"sides={unknown[0]} is none; the sides are {SIDES}")
    os.environ["OMP_NUM_THREADS"] = "1"
    size = Size(**{key: int(options[key]) for key in sizes})
    about = circumstances()
    table = Table("dp=2", "ratio", "spread", "tokens/s", "MB", "law", "lo", "peak MB", "overlap")
    RESULTS.mkdir(exist_ok=True)
    for row in contest(size, names, int(options["pairs"])):
        with (RESULTS / "zero.jsonl").open("a") as file:
            file.write(json.dumps({**about, **size._asdict(), **row}) + "\n")
        table.add_row(*cells(row))
    Console(width=120).print(table)


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the table."""
    if "not_run" in row:
        return [row["side"], f"not run: {row['not_run']}", *["-"] * 7]
    ours = "sent_bytes" in row
    aim = (
        f" (aim {row['aim']['ratio']:.2f}: {'met' if row['met'] else 'missed'})"
        if "aim" in row
        else ""
    )
    return [
        row["side"],
        f"{row['ratio']:.2f}{aim}",
        "{:.2f} to {:.2f}".format(*row["spread"]),
        f"{row['tokens_per_second']:,}",
        f"{row['sent_bytes'] / 1e6:.1f}" if ours else "-",
        f"{row['law_bytes'] / 1e6:.1f}" if ours else "-",
        f"{row['loopback_bytes'] / 1e6:.1f}",
        f"{max(row['peak_tensor_bytes']) / 1e6:.0f}",
        f"{row['overlap']:.0%}" if ours else "-",
    ]


if __name__ == "__main__":
    main(sys.argv[1:])
