"""Draw a pipeline schedule and print its times.

    python tools/draw.py schedule=zbv pp=4 num_microbatches=8 [num_chunks=2]
                         [f=1 i=1 w=1 comm=0] [out=x.svg]

f, i and w are the times of forward, input gradient and weight gradient of all stages of a rank,
comm that of one message. A schedule may also be the path of a program, one line a rank.
"""

import shutil
import sys
from pathlib import Path

from parallel3d.pipeline import draw, schedules
from parallel3d.pipeline.actions import Schedule, parse
from parallel3d.pipeline.passes import add_communication
from parallel3d.pipeline.simulate import simulate

DEFAULTS = {
    "schedule": "1f1b",
    "pp": "4",
    "num_microbatches": "8",
    "num_chunks": "",
    "f": "1",
    "i": "1",
    "w": "1",
    "comm": "0",
    "out": "",
}


def main(arguments: list[str]) -> None:
    """Print the timeline and its summary, and write ``out`` if it is given."""
    options = _read(arguments)
    name = options["schedule"]
    schedule = _schedule(options)
    times = {key: _number(options, key) for key in ("f", "i", "w", "comm")}
    timeline = simulate(add_communication(schedule), **times)
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print(draw.text(timeline, columns), draw.summary(timeline), sep="\n\n")
    if options["out"]:
        num_ranks = len(schedule.program)
        num_microbatches = 1 + max(action.microbatch for action in schedule.program[0])
        title = f"{Path(name).stem}: {num_ranks} ranks, {num_microbatches} microbatches"
        if schedule.num_chunks > 1:
            title += f", {schedule.num_chunks} chunks a rank"
        Path(options["out"]).write_text(draw.svg(timeline, title), encoding="utf-8")


def _read(arguments: list[str]) -> dict[str, str]:
    options = dict(DEFAULTS)
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or key not in DEFAULTS:
            raise ValueError(
                f"{argument!r} is not an argument: write key=value with {', '.join(DEFAULTS)}"
            )
        options[key] = value
    return options


def _number(options: dict[str, str], key: str) -> float:
    try:
        value = float(options[key])
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ValueError(f"{key} = {options[key]!r}: a time is a number, 0 or more")
    return value


def _integer(options: dict[str, str], key: str) -> int:
    try:
        return int(options[key])
    except ValueError:
        raise ValueError(f"{key} = {options[key]!r}: a count is a whole number") from None


def _schedule(options: dict[str, str]) -> Schedule:
    name = options["schedule"]
    if Path(name).is_file():
        return schedules.from_program(parse(Path(name).read_text(encoding="utf-8")))
    return schedules.build(
        name,
        _integer(options, "pp"),
        _integer(options, "num_microbatches"),
        _integer(options, "num_chunks") if options["num_chunks"] else None,
    )


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv):
        sys.exit(__doc__)
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as error:
        sys.exit(str(error))
