"""Imports point one way: fails on one that points up, and on a room that does another's work."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Set
from pathlib import Path
from typing import NamedTuple

PACKAGE = "parallel3d"
# Lowest first. A room imports rooms of lower layers and itself, never a neighbour of its layer.
LAYERS = (
    {"launch", "config", "meeting"},
    {"topology"},
    {"placement"},
    {"rng"},
    {"comm"},
    {"tensor", "pipeline", "zero"},
    {"optim", "checkpoint", "log", "data", "plan", "batch", "watch"},
    {"assemble"},
    {"engine", "memory"},
    {"build", "job", "predict", "resume"},
    {"report"},
    {"train", "verify"},
)
LAYER_OF = {room: layer for layer, rooms in enumerate(LAYERS) for room in rooms}
NARROWER = {"placement": {"topology"}, "rng": {"topology", "placement"}}
USERS_OF_CONFIG = {"assemble", "build", "job", "report", "resume", "train"}
# Files of pipeline that plan on numbers alone: no torch, nothing of ours but each other.
PAPER = set(
    "actions auto check costs cut dependencies draw filling greedy measured memory partition "
    "passes program_file rhythm schedules simulate svg trace walk".split()
)
MODELS_MAY = {"torch", "einops", "models", f"{PACKAGE}.tensor"}
COLLECTIVES = set(
    "all_reduce all_gather all_gather_into_tensor all_gather_single all_gather_object all_to_all "
    "all_to_all_single barrier batch_isend_irecv broadcast broadcast_object_list gather "
    "gather_object irecv isend monitored_barrier P2POp recv reduce reduce_scatter "
    "reduce_scatter_single reduce_scatter_tensor scatter scatter_object_list send".split()
)
CLOSING = ("topology", "barrier")  # nobody leaves before all are done
GROUP_MAKERS = set(
    "init_process_group init_device_mesh new_group new_subgroups split_group DeviceMesh".split()
)


class Use(NamedTuple):
    """One name that a file imports or takes from torch.distributed, by its full dotted name."""

    name: str
    line: int


def main(root: Path) -> int:
    """Print what each room imports, then every fault; the exit code."""
    faults: list[str] = []
    arrows: dict[str, set[str]] = {}
    for path in sorted([*root.glob(f"{PACKAGE}/**/*.py"), *root.glob("models/**/*.py")]):
        file = path.relative_to(root)
        if file.parts[0] == PACKAGE and home_of(file) not in {*LAYER_OF, "__init__"}:
            faults.append(f"{file}: no room of this name has a layer in tools/arrows.py")
            continue
        for use in uses(path.read_text(), file):
            faults += [f"{file}:{use.line}: {fault}" for fault in check(file, use)]
            if file.parts[0] == PACKAGE and (target := room_of(use.name)):
                arrows.setdefault(home_of(file), set()).add(target)
    for room in sorted(arrows, key=lambda room: LAYER_OF.get(room, 99)):
        if others := arrows[room] - {room}:
            print(f"{room} -> {', '.join(sorted(others))}")
    print("\n".join(faults) or "every arrow points down")
    return 1 if faults else 0


def check(file: Path, use: Use) -> Iterator[str]:
    """What is wrong with one use in one file."""
    if file.parts[0] == "models":
        if not _within(use.name, MODELS_MAY | sys.stdlib_module_names):
            yield f"models import torch, einops and {PACKAGE}.tensor, not {use.name}"
        return
    room = home_of(file)
    if room == "__init__":  # the public names
        return
    if _within(use.name, {PACKAGE}):
        yield from _arrow(room, use)
    if room == "pipeline" and file.stem in PAPER:
        yield from _on_paper(use)
    yield from _monopolies(room, use)


def _arrow(room: str, use: Use) -> Iterator[str]:
    target = room_of(use.name)
    if target == room:
        return
    if not target:
        yield f"{room} -> {use.name}: not a room, and the public names stand above every room"
    elif target == "config":
        if room not in USERS_OF_CONFIG:
            yield f"{room} -> config: only {', '.join(sorted(USERS_OF_CONFIG))} know the options"
    elif target == "verify":
        yield f"{room} -> verify: the proof is imported by nobody"
    elif room == "config":
        yield f"config -> {target}: config imports nothing of ours"
    elif LAYER_OF[target] >= LAYER_OF[room]:
        yield f"{room} -> {target} points up or sideways"
    elif target not in NARROWER.get(room, LAYER_OF):
        yield f"{room} -> {target}: {room} may import {' and '.join(sorted(NARROWER[room]))} only"


def _on_paper(use: Use) -> Iterator[str]:
    ours = use.name.split(".")
    elsewhere = ours[0] == PACKAGE and (ours[1] != "pipeline" or ours[2] not in PAPER)
    if elsewhere or _within(use.name, {"torch"}):
        yield f"a program is planned on paper, without {use.name}"


def _monopolies(room: str, use: Use) -> Iterator[str]:
    if _within(use.name, {"omegaconf"}) and room != "config":
        yield "only config imports omegaconf"
    if _within(use.name, {"torch.distributed"}):
        last = use.name.rpartition(".")[2]
        if last in COLLECTIVES and room != "comm" and (room, last) != CLOSING:
            yield f"only comm calls collectives: {last}"
        if last in GROUP_MAKERS and room not in {"comm", "topology"}:
            yield f"only topology and comm make process groups: {last}"


def uses(source: str, file: Path) -> Iterator[Use]:
    """Every import of a file, and every `dist.name` where `dist` is torch.distributed."""
    nodes = list(ast.walk(ast.parse(source, str(file))))
    aliases = {"torch.distributed"}
    for node in nodes:
        for use, known_as in _imports(node, file):
            yield use
            if use.name == "torch.distributed":
                aliases.add(known_as)
    for node in nodes:
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in aliases:
            yield Use(f"torch.distributed.{node.attr}", node.lineno)


def _imports(node: ast.AST, file: Path) -> Iterator[tuple[Use, str]]:
    """What a statement imports, and the name it has from then on."""
    prefix = ""
    if isinstance(node, ast.ImportFrom):
        above = file.parts[: -node.level] if node.level else ()
        prefix = ".".join([*above, node.module or ""]).rstrip(".") + "."
    if isinstance(node, ast.Import | ast.ImportFrom):
        for alias in node.names:
            yield Use(prefix + alias.name, node.lineno), alias.asname or alias.name


def home_of(file: Path) -> str:
    """The room that a file of the package belongs to."""
    return file.parts[1].removesuffix(".py")


def room_of(name: str) -> str:
    """``parallel3d.comm.ledger`` -> ``comm``; a public name or another package -> ``""``."""
    first, _, rest = name.partition(".")
    room = rest.split(".")[0]
    return room if first == PACKAGE and room in LAYER_OF else ""


def _within(name: str, packages: Set[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:n]) in packages for n in range(1, len(parts) + 1))


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parents[1]))
