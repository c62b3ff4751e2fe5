from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from models import gpt
from parallel3d.assemble.state import load_weights
from parallel3d.engine import Engine
from parallel3d.predict import continuation, next_logits
from parallel3d.tensor import vocab_parallel_cross_entropy
from parallel3d.topology import Grid, Topology
from tests.world import run_on

VOCAB = 65  # no multiple of tp, so the last rank's logits are padded
SIZES = {
    "vocab_size": VOCAB,
    "width": 16,
    "num_layers": 2,
    "num_heads": 2,
    "ffn_width": 32,
    "max_seq_len": 12,
}
TOKENS = torch.arange(24).view(2, 12) * 7 % VOCAB


def make(topology: Topology, seed: int = 0, frozen: bool = False, **options: object) -> Engine:
    tied = bool(options.pop("tied", False))
    with torch.device("meta"):
        model = gpt.build(topology, **SIZES, tied=tied)
    return Engine(
        model.requires_grad_(not frozen),
        topology,
        loss_fn=partial(vocab_parallel_cross_entropy, axis=topology.tp),
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        seed=seed,
        **options,
    )


def against_reference(topology: Topology) -> tuple[Tensor, dict[str, Tensor]]:
    engine = make(topology)
    before = torch.get_rng_state()
    logits = next_logits(engine, TOKENS, VOCAB)
    assert torch.equal(torch.get_rng_state(), before)
    return logits, engine.state_dict_whole()


@pytest.mark.parametrize("grid", ["1x1x1", "2x1x2", "2x2x1"])
def test_every_rank_has_the_logits_of_the_plain_model(grid: str) -> None:
    (logits, state), *others = run_on(Grid.parse(grid), against_reference)
    plain = gpt.reference(**SIZES)
    plain.load_state_dict(state)
    torch.testing.assert_close(logits, plain(TOKENS)[:, -1])
    assert all(torch.equal(other, logits) for other, _ in others)


def frozen_from_trained(topology: Topology, folder: Path, tied: bool) -> tuple[Tensor, Tensor]:
    trained = make(topology, tied=tied)
    share = TOKENS.tensor_split(topology.dp.size)[topology.dp.rank]
    for _ in range(2):
        trained.train_step(share, share)
    trained.save(folder)
    looking = make(topology, seed=1, frozen=True, tied=tied)
    assert not looking.parts.shards.all()  # no gradients, no masters
    load_weights(looking.parts, folder)
    return next_logits(trained, TOKENS, VOCAB), next_logits(looking, TOKENS, VOCAB)


@pytest.mark.parametrize(("grid", "tied"), [("1x1x2", False), ("1x2x1", True)])
def test_a_frozen_engine_takes_the_weights_alone(grid: str, tied: bool, tmp_path: Path) -> None:
    ranks = run_on(Grid.parse(grid), frozen_from_trained, folder=tmp_path / "c", tied=tied)
    for trained, loaded in ranks:
        assert torch.equal(trained, loaded)


def continued(topology: Topology, temperature: float) -> list[int]:
    tokens = continuation(
        make(topology),
        [1, 2],
        vocab_size=VOCAB,
        num_ids=5,
        context=SIZES["max_seq_len"],
        temperature=temperature,
    )
    return [next(tokens) for _ in range(20)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_text_longer_than_the_context_goes_on_within_the_ids(temperature: float) -> None:
    (tokens,) = run_on(1, continued, temperature=temperature)
    assert len(tokens) == 20 and set(tokens) <= set(range(5))
    assert run_on(Grid(pp=2, tp=2), continued, temperature=temperature) == [tokens] * 4
