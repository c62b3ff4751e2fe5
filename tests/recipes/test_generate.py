from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from parallel3d.config import compose, settle
from parallel3d.data import load_tokenizer, prepare
from parallel3d.topology import Grid, Topology
from tests.start import ROOT, start
from tests.world import run_on

SIZES = [
    *["model.width=32", "model.num_layers=2", "model.ffn_width=64", "data.seq_len=16"],
    *["data.global_batch_size=8", "train.eval_every=0", "train.steps=40", "optim.lr=1e-2"],
    *["checkpoint.every=0", "log.every=0", "log.wandb.mode=disabled", "optim.warmup_steps=0"],
]
generate = SimpleNamespace(**runpy.run_path(str(ROOT / "recipes/generate.py"), run_name="generate"))


def train_on(topology: Topology, folder: Path, overrides: list[str]) -> None:
    from parallel3d.train import train

    grid = topology.grid
    config = settle(compose(*SIZES, *overrides, folder=ROOT / "conf"), grid.pp, grid.dp, grid.tp)
    folder.mkdir(parents=True, exist_ok=True)
    train(replace(config, name=folder.name), topology, folder)


def written(topology: Topology, arguments: list[str]) -> list[str]:
    """The pieces of text that this rank is given."""
    recipe = runpy.run_path(str(ROOT / "recipes/generate.py"), run_name="generate")
    pieces: list[str] = []
    recipe["generate"](recipe["parse"](arguments), topology, pieces.append)
    return pieces


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`letters`, a small GPT that has learnt the alphabet, and `none`, a run without steps."""
    root = tmp_path_factory.mktemp("runs")
    for number in range(40):
        (root / f"{number}.txt").write_text("abcdefghijklmnopqrstuvwxyz" * 10)
    prepare(f"text:{root}", "bytes", root / "tokens")
    data = f"data.path={root / 'tokens'}"
    run_on(1, train_on, folder=root / "letters", overrides=[data])
    (root / "none").mkdir()
    (root / "none/config.yaml").write_text((root / "letters/config.yaml").read_text())
    return root


@pytest.mark.parametrize("grid", ["1x1x1", "2x1x2", "1x2x1"])
def test_greedy_text_is_the_same_under_any_layout(grid: str, runs: Path) -> None:
    arguments = [f"run={runs / 'letters'}", "prompt=abc", "num_tokens=40"]
    for pieces in run_on(Grid.parse(grid), written, arguments=arguments):
        assert "".join(pieces) == ("abcdefghijklmnopqrstuvwxyz" * 2)[:43]
        assert len(pieces) >= 40  # as they come


def test_drawn_text_depends_on_the_seed_and_on_no_layout(runs: Path) -> None:
    arguments = [f"run={runs / 'letters'}", "prompt=abc", "num_tokens=20", "temperature=3"]
    (one,) = run_on(1, written, arguments=[*arguments, "seed=1"])
    (other,) = run_on(1, written, arguments=[*arguments, "seed=2"])
    assert one != other
    assert run_on(Grid(tp=2), written, arguments=[*arguments, "seed=1"]) == [one, one]


def test_only_rank_0_writes_and_only_the_text(runs: Path) -> None:
    (checkpoint,) = (runs / "letters/checkpoints").iterdir()
    arguments = [f"run={runs / 'letters'}", "prompt=x", "num_tokens=4", "topology.tp=2"]
    arguments.append(f"checkpoint={checkpoint}")
    ended = start([str(ROOT / "recipes/generate.py"), *arguments], 2)
    assert (ended.code, ended.output) == (0, "xyzab\n")


def test_a_character_waits_for_all_of_its_bytes(runs: Path) -> None:
    tokenizer = load_tokenizer(runs / "tokens")
    tokens = [*"é€".encode(), 0xFF]
    pieces = list(generate.texts(tokenizer, tokenizer.encode("ä"), tokens))
    assert [piece for piece in pieces if piece] == ["ä", "é", "€", "\ufffd"]


def test_an_end_of_document_ends_the_text() -> None:
    class Words:
        end_of_document = 0

        def decode(self, ids: list[int]) -> str:
            return "".join("<abc"[each] for each in ids)

    assert "".join(generate.texts(Words(), [1], iter([2, 3, 0, 1]))) == "abc"


WRONG = {
    "prompt=a": r"run= is missing: give run=runs/NAME prompt=TEXT",
    "run=letters": r"prompt= is missing",
    "run=letters prompt=": r"prompt = '' has nothing to go on from",
    "run=letters promt=a": r"promt is not a key; did you mean prompt\?",
    "run=letters prompt=a topology.tpp=2": r"did you mean topology\.tp\?",
    "run=letters prompt": r"prompt has no value: write prompt=VALUE",
    "run=letters prompt=a num_tokens=x": r"num_tokens = 'x' is not a whole number",
    "run=letters prompt=a num_tokens=-1": r"num_tokens = -1 must be 0 or more",
    "run=letters prompt=a temperature=-1": r"temperature = -1\.0 must be finite and at least 0",
    "run=letters prompt=a temperature=hot": r"temperature = 'hot' is not a number",
    "run=letter prompt=a": r"'.*letter' is no run, .*: did you mean run=.*letters\?",
    "run=none prompt=a": r"'.*none' has no checkpoint",
    "run=letters prompt=a topology.tp=3": r"= 3, which does not divide .*: 1 process was.*change",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_input_is_refused_with_the_way_out(line: str, runs: Path) -> None:
    arguments: list[Any] = [each.replace("run=", f"run={runs}/") for each in line.split(" ")]
    with pytest.raises(ValueError, match=WRONG[line]):
        generate.main(arguments)
