"""Step times of the schedules: against torch's own schedules, and against the simulation.

    python tools/bench/pipeline.py [pp=2] [num_microbatches=4,8,16] [schedules=gpipe,1f1b,...]
                                   [rounds=7] [width=256] [num_layers=8] [seq_len=256]

One thread a rank. In a round each schedule's step is taken by the engine and by
``torch.distributed.pipelining``, on the same stages of the same Llama (there of plain torch.nn),
microbatches, loss and optimizer, in the same processes; who is first changes from round to round.
``ratio`` is the median of ours over the median of torch's, ``spread`` the least and the largest of
the rounds, ``cpu`` the ratio of the CPU seconds of all ranks, which other programs disturb less. A
round during which other programs used more than 12 % of the machine is left out (or
all but the three quietest, and the JSON says so). Losses of both sides must agree.

The simulation runs the same program with the median times of each stage's forwards and backwards
(input and weight gradients where they are split), taken in steps before, and of one message. The
bubble is the idle share of the rank that waits most, from the first compute to the last.
``of 1f1b`` is a schedule's step over 1F1B's, the median of the rounds, and simulated.
A line of JSON for each row goes to results/.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[2]))

from parallel3d.pipeline.actions import Op, Program
from parallel3d.pipeline.passes import lower
from parallel3d.pipeline.schedules import NAMES, build
from parallel3d.pipeline.simulate import Timeline, simulate
from tools.bench.layouts import QUIET, RESULTS, busy_seconds, wait_until_quiet
from tools.bench.options import circumstances, read_options
from tools.bench.pipeline_sides import TORCHS, Result, Work, rank_main
from tools.bench.workers import StepError, ask, started

WARMUP = 4  # steps of each side before the rounds; the last two are timed
CORES = os.cpu_count() or 1
COLUMNS = (
    "pp m schedule ours,ms torch,ms ratio spread cpu pipeline simulated bubble simulated of,1f1b "
    "simulated"
)
DEFAULTS = {
    "pp": "2",
    "num_microbatches": "4,8,16",
    "schedules": ",".join(NAMES),
    "rounds": "7",
    "width": "256",
    "num_layers": "8",
    "seq_len": "256",
}


class SideError(RuntimeError):
    """A side could not do a step of a schedule; the reason."""

    def __init__(self, side: str, schedule: str, reason: str) -> None:
        super().__init__(f"{side}, {schedule}: {reason}")
        self.side, self.schedule, self.reason = side, schedule, reason


class World:
    """The ranks of a benchmark."""

    def __init__(self, pipes: list[Any]) -> None:
        self.pipes = pipes
        self.message: float = max(pipe.recv() for pipe in pipes)

    def step(self, side: str, schedule: str, number: int) -> list[Result]:
        """A step of one side on every rank; raises SideError, at once if a rank fails."""
        answers: dict[int, Any] = {}
        try:
            for rank, answer in ask(self.pipes, (side, schedule, number)):
                if isinstance(answer, str):  # the others may wait for it for ever
                    raise StepError(answer)
                answers[rank] = answer
        except StepError as error:
            raise SideError(side, schedule, str(error)) from error
        return [answers[rank] for rank in sorted(answers)]


@contextmanager
def world(work: Work) -> Iterator[World]:
    """Start the ranks, and end them whatever they do."""
    with TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        ranks = [(rank_main, (rank, store, work)) for rank in range(work.pp)]
        with started(ranks) as pipes:
            yield World(pipes)


class Round(NamedTuple):
    """A step of both on every rank, and the share of the machine that other programs used."""

    ours: list[Result]
    torchs: list[Result] | None
    others: float


def seconds(results: list[Result]) -> float:
    """Of a step: those of its slowest rank."""
    return max(result.seconds for result in results)


def cpu_seconds(results: list[Result]) -> float:
    """Of a step, over all ranks."""
    return sum(result.cpu for result in results)


def contest(work: Work, schedules: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """A row for each schedule; those that torch fails at are tried again without it."""
    reasons = {name: "torch has none" for name in schedules if name not in TORCHS}
    while True:
        try:
            with world(work) as ranks:
                warm = {name: warm_up(ranks, name, reasons) for name in schedules}
                taken = take_rounds(ranks, schedules, rounds, reasons)
                return [
                    row_of(work, name, warm[name], taken, ranks.message, reasons.get(name))
                    for name in schedules
                ]
        except SideError as error:
            if error.side != "torch":
                raise
            reasons[error.schedule] = error.reason


def warm_up(ranks: World, schedule: str, reasons: dict[str, str]) -> list[list[Result]]:
    """First steps of both sides; those of ours that are timed. Losses must agree."""
    kept = []
    for number in range(WARMUP):
        mine = ranks.step("ours", schedule, number)
        kept.append(mine)
        if schedule not in reasons:
            theirs = ranks.step("torch", schedule, number)
            (loss,) = {result.loss for result in theirs} - {None}
            if abs(loss - (mine[0].loss or 0.0)) > 1e-3 * loss:
                raise SideError("torch", schedule, f"loss {loss}, ours {mine[0].loss}")
    return kept[-2:]


def take_rounds(
    ranks: World, schedules: Sequence[str], wanted: int, reasons: dict[str, str]
) -> dict[str, list[Round]]:
    """Rounds until enough were quiet, or twice as many were taken."""
    taken: dict[str, list[Round]] = {name: [] for name in schedules}
    for at in range(2 * wanted):
        quiet = [sum(r.others < QUIET for r in rounds) for rounds in taken.values()]
        if min(quiet) >= wanted:
            break
        for name in schedules:
            sides = ["ours"] if name in reasons else ["ours", "torch"][:: 1 if at % 2 else -1]
            wait_until_quiet()
            busy, began = busy_seconds(), time.perf_counter()
            found = {side: ranks.step(side, name, WARMUP + at) for side in sides}
            own = sum(map(cpu_seconds, found.values()))
            capacity = CORES * (time.perf_counter() - began)
            others = max(0.0, busy_seconds() - busy - own) / capacity
            taken[name].append(Round(found["ours"], found.get("torch"), others))
    return taken


def row_of(
    work: Work,
    schedule: str,
    warm: list[list[Result]],
    taken: dict[str, list[Round]],
    message: float,
    reason: str | None,
) -> dict[str, Any]:
    """What is told of one schedule."""
    rounds = taken[schedule]
    kept = quietest(rounds)
    ours = statistics.median(seconds(one.ours) for one in kept)
    paper = on_paper(work, schedule, warm, message)
    windows = [measured(one.ours) for one in kept]
    row = {
        "schedule": schedule,
        "ours_seconds": round(ours, 4),
        "pipeline_seconds": round(statistics.median(window for window, _ in windows), 4),
        "simulated_seconds": round(paper.makespan, 4),
        "bubble": round(statistics.median(bubble for _, bubble in windows), 4),
        "simulated_bubble": round(paper.bubble / paper.makespan, 4),
        "message_seconds": round(message, 5),
        "quiet_rounds": f"{sum(one.others < QUIET for one in rounds)} of {len(rounds)}",
        "others": round(max(one.others for one in kept), 3),
    }
    pairs = [(one.ours, one.torchs) for one in kept if one.torchs is not None]
    if reason or not pairs:
        return {**row, "not_run": reason}
    theirs = statistics.median(seconds(torchs) for _, torchs in pairs)
    ratios = sorted(seconds(mine) / seconds(torchs) for mine, torchs in pairs)
    work_ratio = statistics.median(cpu_seconds(a) / cpu_seconds(b) for a, b in pairs)
    return {
        **row,
        "torch_seconds": round(theirs, 4),
        "ratio": round(ours / theirs, 3),
        "spread": [round(ratios[0], 3), round(ratios[-1], 3)],
        "cpu_ratio": round(work_ratio, 3),
    }


def quietest(rounds: list[Round]) -> list[Round]:
    """The quiet ones, or the three that are nearest to it."""
    quiet = [one for one in rounds if one.others < QUIET]
    return quiet if len(quiet) >= 3 else sorted(rounds, key=lambda one: one.others)[:3]


def measured(results: list[Result]) -> tuple[float, float]:
    """Seconds from the first compute to the last, and the largest idle share of a rank."""
    spans = [span for result in results for span in result.spans]
    window = max(span.end for span in spans) - min(span.start for span in spans)
    busy = [sum(span.end - span.start for span in result.spans) for result in results]
    return window, 1 - min(busy) / window


def on_paper(work: Work, schedule: str, warm: list[list[Result]], message: float) -> Timeline:
    """The program with measured unit times. A backward in one piece counts as input gradient."""
    times: dict[tuple[int, Op], list[float]] = {}
    for result in (result for step in warm for result in step):
        for action, start, end in result.spans:
            times.setdefault((action.stage, action.op), []).append(end - start)
    program: Program = lower(build(schedule, work.pp, work.num_microbatches))
    stages = range(1 + max(stage for stage, _ in times))

    def of(*ops: Op) -> list[float]:
        found = [[t for op in ops for t in times.get((stage, op), [])] for stage in stages]
        return [statistics.median(each) if each else 0.0 for each in found]

    return simulate(
        program,
        f=of(Op.FORWARD),
        i=of(Op.BACKWARD, Op.INPUT_GRAD),
        w=of(Op.WEIGHT_GRAD),
        comm=message,
    )


def compare(rows: list[dict[str, Any]]) -> None:
    """Put each schedule's step beside that of 1F1B."""
    base = next((row for row in rows if row["schedule"] == "1f1b"), None)
    for row in rows if base else ():
        row["of_1f1b"] = round(row["ours_seconds"] / base["ours_seconds"], 3)
        simulated = row["simulated_seconds"] / base["simulated_seconds"]
        row["simulated_of_1f1b"] = round(simulated, 3)


def main(arguments: list[str]) -> None:
    """Measure, print a table, append a line per row."""
    options = read_options(arguments, DEFAULTS, __doc__)
    os.environ["OMP_NUM_THREADS"] = "1"
    about = circumstances()
    sizes = {key: int(options[key]) for key in ("pp", "width", "num_layers", "seq_len")}
    table = Table()
    for name in COLUMNS.split():
        table.add_column(name.replace(",", "\n"), no_wrap=name != "torch,ms")
    RESULTS.mkdir(exist_ok=True)
    for count in map(int, options["num_microbatches"].split(",")):
        work = Work(num_microbatches=count, **sizes)
        rows = contest(work, options["schedules"].split(","), int(options["rounds"]))
        compare(rows)
        for row in rows:
            with (RESULTS / "pipeline.jsonl").open("a") as file:
                file.write(json.dumps({**about, **work._asdict(), **row}) + "\n")
            table.add_row(*cells(work, row))
    Console(width=150).print(table)


def cells(work: Work, row: dict[str, Any]) -> list[str]:
    """A row of the table; times in milliseconds."""
    run = "ratio" in row
    return [
        str(work.pp),
        str(work.num_microbatches),
        row["schedule"],
        f"{1e3 * row['ours_seconds']:.0f}",
        f"{1e3 * row['torch_seconds']:.0f}" if run else f"not run: {row['not_run']}",
        f"{row['ratio']:.2f}" if run else "-",
        "{:.2f} to {:.2f}".format(*row["spread"]) if run else "-",
        f"{row['cpu_ratio']:.2f}" if run else "-",
        f"{1e3 * row['pipeline_seconds']:.0f}",
        f"{1e3 * row['simulated_seconds']:.0f}",
        f"{row['bubble']:.1%}",
        f"{row['simulated_bubble']:.1%}",
        f"{row.get('of_1f1b', 1.0):.2f}",
        f"{row.get('simulated_of_1f1b', 1.0):.2f}",
    ]


if __name__ == "__main__":
    main(sys.argv[1:])
