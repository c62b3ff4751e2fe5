"""Tokens per second of each layout as a ratio to plain PyTorch on the same cores.

    python tools/bench/layouts.py [layouts=1x2x1,2x1x1,...] [pairs=5] [zero=1] [schedule=1f1b]

Ranks of one thread against one process of as many threads as this machine has cores. The two take
turns within one run: a step of plain PyTorch, a step of the layout, again and again; a ratio is
taken of each pair, and the median of the quiet pairs is reported: those during which other programs
used less than 12 % of the machine (or of the three quietest, and the JSON says so). Bytes are what
the ledger counted in a step, over all ranks, beside the lower bound without padding. The layout
``alone`` is plain PyTorch in one process per core, on shares and without any exchange. A line of
JSON goes to results/.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[2]))

from models import llama
from parallel3d import Engine, Grid, Topology, vocab_parallel_cross_entropy
from tools.bench.options import circumstances, read_options
from tools.bench.peak import PeakBytes
from tools.bench.plain import (
    BATCH,
    FFN,
    HEADS,
    LAYERS,
    MICRO,
    SEQ,
    VOCAB,
    WIDTH,
    Reference,
    batch,
)

LAYOUTS = "alone,1x2x1,2x1x1,1x1x2,2x2x1,1x2x2,2x1x2,2x2x2"
RESULTS = Path(__file__).parent / "results"
QUIET = 0.12  # share of the machine; a pair during which others used more is left out


def reference_main(pipe: Connection) -> None:
    """Wait for a step number, do the step, answer its seconds."""
    torch.set_num_threads(os.cpu_count() or 1)
    reference = Reference()
    while (number := pipe.recv()) is not None:
        began, used = time.perf_counter(), time.process_time()
        loss = reference.step(number)
        pipe.send((time.perf_counter() - began, time.process_time() - used, loss))


def alone_main(pipe: Connection, rank: int, ranks: int) -> None:
    """A rank of plain PyTorch on its share, without any exchange: what no layout can pass."""
    torch.set_num_threads(1)
    reference = Reference()
    while (number := pipe.recv()) is not None:
        began, used = time.perf_counter(), time.process_time()
        loss = reference.step(abs(number), rank, ranks)
        pipe.send((time.perf_counter() - began, time.process_time() - used, loss, {}, 0))


def rank_main(
    pipe: Connection, rank: int, grid: Grid, store: str, zero: int, schedule: str
) -> None:
    """One rank of a layout: step numbers in, seconds, losses and counts out."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(grid.size), "LOCAL_RANK": str(rank)}
    os.environ["LOCAL_WORLD_SIZE"] = str(grid.size)
    torch.set_num_threads(1)
    with Topology.init(grid.pp, grid.dp, grid.tp, init_method=store) as topology:
        engine = make_engine(topology, zero, schedule)
        while (number := pipe.recv()) is not None:
            share = [torch.tensor_split(t, grid.dp)[topology.dp.rank] for t in batch(abs(number))]
            engine.parts.ledger.reset()
            began, used = time.perf_counter(), time.process_time()
            if number >= 0:
                loss, peak = engine.train_step(*share).loss, 0
            else:
                with PeakBytes(resident(engine)) as counted:
                    loss = engine.train_step(*share).loss
                peak = counted.peak
            seconds, used = time.perf_counter() - began, time.process_time() - used
            pipe.send((seconds, used, loss, engine.parts.ledger.bytes(), peak))


def make_engine(topology: Topology, zero: int, schedule: str) -> Engine:
    """The same model and optimizer as the reference's."""
    with torch.device("meta"):
        model = llama.build(
            topology,
            vocab_size=VOCAB,
            width=WIDTH,
            num_layers=LAYERS,
            num_heads=HEADS,
            ffn_width=FFN,
            max_seq_len=SEQ,
            num_kv_heads=HEADS,
        )
    return Engine(
        model,
        topology,
        loss_fn=partial(vocab_parallel_cross_entropy, axis=topology.tp),
        optimizer=partial(torch.optim.AdamW, lr=3e-4, fused=True),
        num_microbatches=BATCH // topology.dp.size // MICRO,
        zero=zero,
        schedule=schedule,
        max_grad_norm=1.0,
    )


def resident(engine: Engine) -> list[torch.Tensor]:
    """What lives between two steps."""
    shards, optimizer = engine.parts.shards, engine.parts.optimizer
    kept: list[Any] = [
        t for f in shards.all() for t in (f.data, f.shard, f.grad, f.owned_grad, f.master)
    ]
    kept += [value for state in optimizer.states() for value in state.values()]
    return [tensor for tensor in kept if isinstance(tensor, torch.Tensor)]


def lower_bound(grid: Grid) -> dict[str, int]:
    """Bytes of a step over all ranks, without padding, from the sizes alone."""
    matrices = LAYERS * (4 * WIDTH * WIDTH + 3 * WIDTH * FFN) + 2 * VOCAB * WIDTH
    vectors = WIDTH * (2 * LAYERS + 1)
    dp = 2 * (grid.dp - 1) * (matrices + vectors * grid.tp) * 4
    activations = BATCH * SEQ * WIDTH * 4
    # Forward and backward of each block: two all-reduces each; then the embedding's output and
    # the head's input gradient; then three numbers a token for the loss.
    reduced = (4 * LAYERS + 2) * activations + 3 * BATCH * SEQ * 4
    return {
        "pp": 2 * (grid.pp - 1) * activations * grid.tp,
        "dp": dp,
        "tp": 2 * (grid.tp - 1) * reduced,
    }


def measure(layout: str, pairs: int, zero: int, schedule: str) -> dict[str, Any]:
    """Ratios of one layout, its bytes and its peak."""
    cores, context = os.cpu_count() or 1, get_context("spawn")
    grid = Grid(dp=cores) if layout == "alone" else Grid.parse(layout)
    os.environ["OMP_NUM_THREADS"] = "1"
    with TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        targets = [(reference_main, ())]
        if layout == "alone":
            targets += [(alone_main, (rank, cores)) for rank in range(cores)]
        else:
            targets += [(rank_main, (r, grid, store, zero, schedule)) for r in range(grid.size)]
        workers, pipes = [], []
        for target, arguments in targets:
            ours, theirs = context.Pipe()
            workers.append(context.Process(target=target, args=(theirs, *arguments), daemon=True))
            workers[-1].start()
            pipes.append(ours)
        plain, ranks = pipes[0], pipes[1:]
        turn([plain], 0), turn(ranks, 0)
        rows = take_pairs(plain, ranks, pairs)
        counted = turn(ranks, -1)
        for pipe in pipes:
            pipe.send(None)
        for worker in workers:
            worker.join(30)
    quiet = [row for row in rows if row.others < QUIET]
    kept = quiet if len(quiet) >= 3 else sorted(rows, key=lambda row: row.others)[:3]
    times = [(row.plain, row.ours) for row in kept]
    bytes_of = {axis: sum(rank[3].get(axis, 0) for rank in counted) for axis in ("pp", "dp", "tp")}
    return {
        "layout": layout,
        "ratio": round(statistics.median(one / many for one, many in times), 3),
        "ratios": [round(one / many, 3) for one, many in times],
        "best_ratio": round(min(t[0] for t in times) / min(t[1] for t in times), 3),
        "tokens_per_second": round(BATCH * SEQ / statistics.median(t[1] for t in times)),
        "plain_tokens_per_second": round(BATCH * SEQ / statistics.median(t[0] for t in times)),
        "bytes": bytes_of,
        "lower_bound": lower_bound(Grid() if layout == "alone" else grid),
        "peak_tensor_bytes": [rank[4] for rank in counted],
        "quiet_pairs": f"{len(quiet)} of {len(rows)}",
        "others": round(max(row.others for row in kept), 3),
    }


class Pair(NamedTuple):
    """Seconds of a step of both, and the share of the machine that others used meanwhile."""

    plain: float
    ours: float
    others: float


def take_pairs(plain: Any, ranks: list[Any], wanted: int) -> list[Pair]:
    """Pairs until enough were quiet, or twice as many were taken."""
    rows: list[Pair] = []
    while len(rows) < 2 * wanted and sum(row.others < QUIET for row in rows) < wanted:
        wait_until_quiet()
        busy, began = busy_seconds(), time.perf_counter()
        (one,) = turn([plain], len(rows) + 1)
        many = turn(ranks, len(rows) + 1)
        own = one[1] + sum(rank[1] for rank in many)
        capacity = (os.cpu_count() or 1) * (time.perf_counter() - began)
        others = max(0.0, busy_seconds() - busy - own) / capacity
        rows.append(Pair(one[0], max(rank[0] for rank in many), others))
    return rows


def busy_seconds() -> float:
    """CPU seconds that all processes of the machine have used."""
    ticks = [int(part) for part in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def wait_until_quiet(limit: float = 5.0) -> None:
    """Wait, at most so many seconds, until others leave the machine alone."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        busy = busy_seconds()
        time.sleep(0.25)
        if (busy_seconds() - busy) / (0.25 * (os.cpu_count() or 1)) < QUIET:
            return


def turn(pipes: list[Any], number: int) -> list[Any]:
    """One step of the one or the other."""
    for pipe in pipes:
        pipe.send(number)
    return [pipe.recv() for pipe in pipes]


def main(arguments: list[str]) -> None:
    """Measure, print a table, append a line per layout."""
    options = {"layouts": LAYOUTS, "pairs": "5", "zero": "1", "schedule": "1f1b"}
    options = read_options(arguments, options, __doc__)
    table = Table(
        "layout", "ratio", "best", "tokens/s", "MB pp", "MB dp", "MB tp", "bound", "peak MB"
    )
    RESULTS.mkdir(exist_ok=True)
    about = {
        **circumstances(),
        "zero": int(options["zero"]),
        "schedule": options["schedule"],
    }
    for layout in options["layouts"].split(","):
        row = measure(layout, int(options["pairs"]), int(options["zero"]), options["schedule"])
        with (RESULTS / "layouts.jsonl").open("a") as file:
            file.write(json.dumps({**about, **row}) + "\n")
        sent = [f"{row['bytes'][axis] / 1e6:.1f}" for axis in ("pp", "dp", "tp")]
        bound = " + ".join(f"{row['lower_bound'][axis] / 1e6:.1f}" for axis in ("pp", "dp", "tp"))
        table.add_row(
            layout,
            f"{row['ratio']:.2f}",
            f"{row['best_ratio']:.2f}",
            f"{row['tokens_per_second']:,}",
            *sent,
            bound,
            f"{max(row['peak_tensor_bytes']) / 1e6:.0f}",
        )
        print(json.dumps(row), file=sys.stderr, flush=True)
    Console(width=110).print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
