"""Draw a pipeline schedule and print its times, or what a run did beside what it should do.

    python tools/draw.py schedule=zbv pp=4 num_microbatches=8 [num_chunks=2]
                         [f=1 i=1 w=1 comm=0] [out=x.svg]
    python tools/draw.py run=runs/x [out=x.svg]

f, i and w are the times of forward, input gradient and weight gradient of all stages of a rank,
comm that of one message. A schedule may also be auto, the fastest for these times, or the path of a
program, one line a rank.

A run's timeline is the newest of its trace.json; the simulated one under it takes for each action
of a stage the mean of its measured times. out is a picture (.svg; .png with cairosvg) or a file
for Perfetto and Chrome (.json); theme=light or theme=dark paints the picture's page.
"""

import shutil
import sys
from pathlib import Path

from parallel3d.pipeline import draw, measured, schedules, svg, trace
from parallel3d.pipeline.actions import Program
from parallel3d.pipeline.auto import Choice, choose
from parallel3d.pipeline.costs import UnitCosts
from parallel3d.pipeline.passes import add_communication
from parallel3d.pipeline.program_file import read_program
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
    "run": "",
    "out": "",
    "theme": "auto",
}
OF_A_RUN = {"run", "out", "theme"}
KINDS = (".svg", ".png", ".json")
DIVISIBLE = 12  # units of a rank, so that 1, 2, 3 or 4 chunks have the same
THEMES = ("auto", "light", "dark")


def main(arguments: list[str]) -> None:
    """Print the timeline and its summary, and write ``out`` if it is given."""
    options = _read(arguments)
    (_draw_run if options["run"] else _draw_schedule)(options)


def _draw_schedule(options: dict[str, str]) -> None:
    times = {key: _number(options, key) for key in ("f", "i", "w", "comm")}
    title, program = _schedule(options, times)
    timeline = simulate(program, **times)
    print(draw.text(timeline, _columns()), draw.summary(timeline), sep="\n\n")
    panel = draw.Panel(draw.summary(timeline).replace("  ", " · "), timeline)
    lanes = trace.lanes_of(timeline, "rank")
    _write(options, [panel], title, "", trace.Trace("", 0, title, program, None, lanes))


def _draw_run(options: dict[str, str]) -> None:
    seen = _trace(options["run"])
    did, should = measured.measured(seen), measured.simulated(seen)
    panels = [
        draw.Panel(f"measured · {measured.summary(did)}", did, measured.messages(seen)),
        draw.Panel(f"simulated · {measured.summary(should)}", should),
    ]
    title = measured.title(seen)
    print(title, draw.side_by_side(panels, _columns()), measured.table(did, should), sep="\n\n")
    simulated = trace.lanes_of(should, "simulated rank", measured.start_of(seen))
    _write(options, panels, title, "ms", seen._replace(lanes=[*seen.lanes, *simulated]))


def _trace(run: str) -> trace.Trace:
    path = Path(run, "trace.json")
    if not path.is_file():
        raise ValueError(
            f"run = {run!r} has no trace.json: a run writes it every log.trace steps and at its "
            f"last step, unless log.trace=0"
        )
    try:
        return trace.from_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _write(
    options: dict[str, str], panels: list[draw.Panel], title: str, unit: str, seen: trace.Trace
) -> None:
    if not options["out"]:
        return
    out, theme = Path(options["out"]), options["theme"]
    if out.suffix == ".json":
        out.write_text(trace.to_json(seen), encoding="utf-8")
    elif out.suffix == ".png":
        out.write_bytes(_png(svg.page(panels, title, unit, theme.replace("auto", "light"))))
    else:
        out.write_text(svg.page(panels, title, unit, theme), encoding="utf-8")


def _png(page: str) -> bytes:
    """At twice the size, for screens and slides."""
    try:
        import cairosvg
    except (ImportError, OSError) as error:  # the package, or the cairo that it looks for
        raise ValueError(
            f"out = a .png needs cairosvg ({error}): pip install 'parallel3d[png]', or take .svg"
        ) from error
    png: bytes = cairosvg.svg2png(bytestring=page.encode(), scale=2)
    return png


def _columns() -> int | None:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _read(arguments: list[str]) -> dict[str, str]:
    options = dict(DEFAULTS)
    given = set()
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or key not in DEFAULTS:
            raise ValueError(
                f"{argument!r} is not an argument: write key=value with {', '.join(DEFAULTS)}"
            )
        options[key] = value
        given.add(key)
    if options["run"] and (others := sorted(given - OF_A_RUN)):
        raise ValueError(f"{others[0]} is known of a run: with run= go only out and theme")
    sizes = {"pp", "num_microbatches", "num_chunks"} & given
    if sizes and Path(options["schedule"]).is_file():
        raise ValueError(
            f"{min(sizes)} is known of the program in {options['schedule']}: leave it out"
        )
    if options["out"] and Path(options["out"]).suffix not in KINDS:
        raise ValueError(f"out = {options['out']!r} must end in {', '.join(KINDS)}")
    if options["theme"] not in THEMES:
        raise ValueError(f"theme = {options['theme']!r} is not one of {', '.join(THEMES)}")
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


def _schedule(options: dict[str, str], times: dict[str, float]) -> tuple[str, Program]:
    """A title, and the program with its messages."""
    name, program = options["schedule"], None
    if Path(name).is_file():
        schedule, _, program = read_program(name)
    else:
        sizes = (_integer(options, "pp"), _integer(options, "num_microbatches"))
        chunks = _integer(options, "num_chunks") if options["num_chunks"] else None
        if name == "auto":
            chosen = _choose(*sizes, chunks, times)
            name, schedule = f"auto ({chosen.name})", chosen.make(sizes[1])
        else:
            schedule = schedules.build(name, *sizes, chunks)
    count = 1 + max(action.microbatch for action in schedule.program[0])
    title = f"{Path(name).stem}: {len(schedule.program)} ranks, {count} microbatches"
    if schedule.num_chunks > 1:
        title += f", {schedule.num_chunks} chunks a rank"
    return title, program or add_communication(schedule)


def _choose(pp: int, count: int, chunks: int | None, times: dict[str, float]) -> Choice:
    """The fastest, of stages that all cost the same, however many a rank has."""
    unit = UnitCosts(*(times[key] / DIVISIBLE for key in ("f", "i", "w")))
    return choose([unit] * DIVISIBLE * pp, pp, count, comm=times["comm"], num_chunks=chunks)


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv):
        sys.exit(__doc__)
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as error:
        sys.exit(str(error))
