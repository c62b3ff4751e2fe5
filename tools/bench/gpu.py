"""One GPU: a model in bf16, eager and compiled: tokens per second, MFU, peak memory.

    python tools/bench/gpu.py [model=llama_1b] [steps=10] [batch=8] [microbatches=8] [seq_len=2048]

The two take turns, a step each, so that a machine that slows down slows both. MFU counts model
FLOPs only, not recomputed ones, against the dense bf16 peak of the device named. A line of JSON
goes to results/.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[2]))

from parallel3d import Engine, Topology, vocab_parallel_cross_entropy
from parallel3d.build import build_model
from parallel3d.config import Config, compose
from parallel3d.log.cost import device, flops_per_token, matmul_parameters
from tools.bench.options import read_options

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"


def make(
    config: Config, topology: Topology, microbatches: int, compile: bool
) -> tuple[Engine, int]:
    """The engine, and the model's FLOPs per token."""
    model = build_model(config, topology, None)
    flops = flops_per_token(
        matmul_parameters(model),
        num_layers=config.model["num_layers"],
        width=config.model["width"],
        seq_len=config.data.seq_len,
    )
    engine = Engine(
        model,
        topology,
        loss_fn=partial(vocab_parallel_cross_entropy, axis=topology.tp),
        optimizer=partial(torch.optim.AdamW, lr=3e-4, fused=True),
        num_microbatches=microbatches,
        precision="bf16",
        max_grad_norm=1.0,
        compile=compile,
    )
    return engine, flops


def timed_step(engine: Engine, tokens: torch.Tensor) -> tuple[float, int]:
    """Seconds and peak bytes of one step."""
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.synchronize()
    began = time.perf_counter()
    engine.train_step(tokens[:, :-1], tokens[:, 1:])
    torch.cuda.synchronize()
    return time.perf_counter() - began, torch.cuda.max_memory_allocated()


def main(arguments: list[str]) -> None:
    """Measure both, print a table, append a line for each."""
    options = {"model": "llama_1b", "steps": "10", "batch": "8", "microbatches": "8"}
    options |= {"seq_len": "2048", "vocab_size": "128256"}
    options = read_options(arguments, options, __doc__)
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device here: this benchmark measures one GPU")
    overrides = [f"model={options['model']}", f"data.seq_len={options['seq_len']}"]
    config = compose(*overrides, f"model.vocab_size={options['vocab_size']}", folder=ROOT / "conf")
    batch, steps = int(options["batch"]), int(options["steps"])
    shape = (batch, config.data.seq_len + 1)
    with Topology.init() as topology:
        tokens = torch.randint(int(options["vocab_size"]), shape, device=topology.device)
        engines = {
            name: make(config, topology, int(options["microbatches"]), name == "compiled")
            for name in ("eager", "compiled")
        }
        for engine, _ in engines.values():
            timed_step(engine, tokens)
            timed_step(engine, tokens)
        rows: dict[str, list[tuple[float, int]]] = {name: [] for name in engines}
        for _ in range(steps):
            for name, (engine, _) in engines.items():
                rows[name].append(timed_step(engine, tokens))
        write(rows, engines, topology, options, batch * config.data.seq_len)


def write(
    rows: dict[str, list[tuple[float, int]]],
    engines: dict[str, tuple[Engine, int]],
    topology: Topology,
    options: dict[str, str],
    tokens: int,
) -> None:
    """The table and the lines of JSON."""
    about = device(topology.device)
    table = Table("", "tokens/s", "MFU", "peak GB", title=f"{options['model']} bf16 on {about}")
    RESULTS.mkdir(exist_ok=True)
    for name, taken in rows.items():
        rate = tokens / statistics.median(seconds for seconds, _ in taken)
        mfu = about.peak_flops and rate * engines[name][1] / about.peak_flops
        peak = max(bytes_ for _, bytes_ in taken)
        row: dict[str, Any] = {**options, "device": about.name, "mode": name, "mfu": mfu}
        row |= {"tokens_per_second": rate, "peak_bytes": peak, "torch": torch.__version__}
        with (RESULTS / "gpu.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        table.add_row(name, f"{rate:,.0f}", f"{mfu:.1%}" if mfu else "-", f"{peak / 1e9:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
