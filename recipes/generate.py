"""Continue a prompt with the model of a run, under any layout.

    python recipes/generate.py run=runs/NAME prompt="def " num_tokens=200

    run          the folder of the run
    prompt       the text to go on from
    num_tokens   how many tokens to add (200); an end of document ends earlier
    temperature  0 (the default): always the most probable token; 1: drawn as the model says
    seed         of the draws (0)
    checkpoint   another than the run's newest one
    topology.pp, topology.dp, topology.tp    the layout (1, what is left, 1), under torchrun

The text goes to standard output, nothing else does. The model sees the last data.seq_len tokens,
as it did in training.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any

from parallel3d.assemble.state import load_weights
from parallel3d.build import build_engine, build_model
from parallel3d.checkpoint import latest_valid
from parallel3d.config import Config, load
from parallel3d.data import Tokenizer, load_tokenizer
from parallel3d.engine import Engine
from parallel3d.job.entry import tell
from parallel3d.launch import Launch
from parallel3d.predict import continuation
from parallel3d.topology import Axis, Grid, Topology


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    run: Path
    prompt: str
    num_tokens: int = 200
    temperature: float = 0.0
    seed: int = 0
    checkpoint: Path | None = None
    pp: int = 1
    dp: int | None = None
    tp: int = 1

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("prompt = '' has nothing to go on from: give it a character or more")
        if self.num_tokens < 0:
            raise ValueError(f"num_tokens = {self.num_tokens} must be 0 or more")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature = {self.temperature} must be finite and at least 0")
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed = {self.seed} must fit in 64 bits")


KEYS: dict[str, Callable[[str], Any]] = {
    "run": Path,
    "prompt": str,
    "num_tokens": int,
    "temperature": float,
    "seed": int,
    "checkpoint": Path,
    "topology.pp": int,
    "topology.dp": int,
    "topology.tp": int,
}


def parse(arguments: Sequence[str]) -> Request:
    """The request of ``key=value`` arguments; ValueError says which is wrong, and the way out."""
    values: dict[str, Any] = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if key not in KEYS:
            near = get_close_matches(key, KEYS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(KEYS)}"
            raise ValueError(f"{key} is not a key; {hint}")
        if not equals:
            raise ValueError(f"{argument} has no value: write {key}=VALUE")
        try:
            values[key.removeprefix("topology.")] = KEYS[key](text)
        except ValueError:
            kind = "a whole number" if KEYS[key] is int else "a number"
            raise ValueError(f"{key} = {text!r} is not {kind}") from None
    for key in ("run", "prompt"):
        if key not in values:
            raise ValueError(f"{key}= is missing: give run=runs/NAME prompt=TEXT")
    return Request(**values)


def read_run(folder: Path) -> Config:
    """The configuration of a run; ValueError with the nearest name where there is none."""
    path = folder / "config.yaml"
    if path.is_file():
        return load(path)
    runs = [each.parent.name for each in folder.parent.glob("*/config.yaml")]
    near = get_close_matches(folder.name, runs, n=1, cutoff=0.4) or sorted(runs)[-1:]
    hint = f"did you mean run={folder.parent / near[0]}?" if near else "train one first"
    raise ValueError(f"run = {str(folder)!r} is no run, it has no config.yaml: {hint}")


def checkpoint_of(request: Request, world: Axis) -> Path:
    """The checkpoint to load, the same on every rank. Collective."""
    if request.checkpoint is not None:
        return request.checkpoint
    found = latest_valid(request.run / "checkpoints", world)
    if found is None:
        raise ValueError(
            f"run = {str(request.run)!r} has no checkpoint: it saves the first after "
            f"checkpoint.every steps"
        )
    return found


def build(config: Config, topology: Topology, tokenizer: Tokenizer) -> Engine:
    """An engine that only looks: frozen, so it holds no gradients, masters or optimizer state."""
    plain = replace(
        config.pipeline,
        schedule="gpipe",
        num_microbatches=1,
        num_chunks=None,
        partition="parameters",
    )
    config = replace(config, pipeline=plain, compile=False)
    model = build_model(config, topology, tokenizer).requires_grad_(False)
    return build_engine(config, topology, model)


def texts(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Iterable[int]) -> Iterator[str]:
    """The prompt, then what each token adds; a character whose bytes are not all there waits."""
    known = list(prompt)
    shown = tokenizer.decode(known)
    yield shown
    for token in tokens:
        if token == tokenizer.end_of_document:
            break
        known.append(token)
        text = tokenizer.decode(known).rstrip("\ufffd")
        if len(text) > len(shown):
            yield text[len(shown) :]
            shown = text
    yield tokenizer.decode(known)[len(shown) :]


def generate(request: Request, topology: Topology, write: Callable[[str], object]) -> None:
    """Load the run and hand each piece of text to ``write``, as it comes. Collective."""
    config = read_run(request.run)
    tokenizer = load_tokenizer(config.data.path or "")
    engine = build(config, topology, tokenizer)
    load_weights(engine.parts, checkpoint_of(request, topology.world))
    prompt = tokenizer.encode(request.prompt)
    tokens = continuation(
        engine,
        prompt,
        vocab_size=config.model.get("vocab_size") or tokenizer.vocab_size,
        num_ids=tokenizer.vocab_size,
        context=config.data.seq_len,
        temperature=request.temperature,
        seed=request.seed,
    )
    for text in texts(tokenizer, prompt, islice(tokens, request.num_tokens)):
        write(text)


def main(arguments: Sequence[str]) -> None:
    """Write the prompt and what follows it to standard output, on rank 0."""
    request = parse(arguments)
    launch = Launch.from_environment(os.environ)
    grid = Grid.infer(launch.world_size, request.pp, request.dp, request.tp)
    with Topology.init(grid.pp, grid.dp, grid.tp) as topology:
        first = topology.rank == 0
        generate(request, topology, show if first else len)
        if first:
            show("\n")


def show(text: str) -> None:
    """To standard output, at once."""
    print(text, end="", flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path.cwd()))
    if len(sys.argv) == 1 or {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
    else:
        tell(main, sys.argv[1:])
