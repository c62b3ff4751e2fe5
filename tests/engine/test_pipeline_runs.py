"""Faults of pipelines that users of other toolkits met: hangs, empty stages, lost losses."""

from __future__ import annotations

import math
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel3d import Engine
from parallel3d.data import TokenFiles
from parallel3d.topology import Grid, Topology
from tests.data.corpus import counting
from tests.engine.trials import (
    Trace,
    Trial,
    assert_equal_to,
    by_engine,
    by_plain_torch,
    engine_of,
    follow,
    named,
    share,
)
from tests.world import RankFailed, run_on

ADAM = partial(torch.optim.AdamW, lr=0.1)


def values(*shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    x, target = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    return x, target


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def layers() -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])


# Outputs and targets that belong together


def distance(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).abs().sum()


def identities() -> nn.Sequential:
    return nn.Sequential(nn.Identity(), nn.Identity(), nn.Identity())


def own_labels(topology: Topology) -> list[float]:
    """Losses of steps and evaluations in turn, in which every sample is its own label."""
    engine = engine_of(topology, Trial(identities, [], distance, options={"num_microbatches": 5}))
    losses = []
    for size in (10, 5, 12):
        samples = torch.arange(float(size), dtype=torch.float64)[:, None].expand(size, 8)
        losses.append(engine.train_step(samples, samples).loss)
        losses.append(engine.eval_step(samples[1:4], samples[1:4]).loss)
    return losses


@pytest.mark.report("deepspeedai/DeepSpeed#5729")
def test_every_output_meets_the_label_of_its_own_sample() -> None:
    assert run_on(Grid(pp=3), own_labels) == [[0.0] * 6] * 3


def next_token_missed(output: Tensor, target: Tensor) -> Tensor:
    return (output + 1 != target).sum().double()


class AsFloat(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.double()


def floats() -> nn.Sequential:
    return nn.Sequential(AsFloat(), nn.Identity())


def count_up(topology: Topology, path: str, folder: str) -> list[float]:
    """Three epochs in shuffled order with a resume; x is read by the first stage's rank alone."""
    data = TokenFiles(Path(path), 4, 4, seed=1, validation_share=0.0)
    trial = Trial(floats, [], next_token_missed, num_items=len, options={"num_microbatches": 2})
    engine, losses = engine_of(topology, trial), []
    for step in range(12):
        if step == 5:
            engine.save(folder)
            engine = engine_of(topology, trial)
            engine.load(folder)
        assert engine.step == step
        x, target = data.train(engine.step, range(4))
        losses.append(engine.train_step(x if topology.pp.rank == 0 else None, target).loss)
    return losses


@pytest.mark.report("NVIDIA/Megatron-LM#441")
def test_inputs_of_the_first_stage_and_targets_of_the_last_stay_in_step(tmp_path: Path) -> None:
    path = counting(tmp_path / "data", [65])
    losses = run_on(Grid(pp=2), count_up, path=str(path), folder=str(tmp_path / "saved"))
    assert losses == [[0.0] * 12] * 2


class Text(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, str]:
        return x, "text"


def with_text() -> nn.Sequential:
    return nn.Sequential(Text(), nn.Identity())


@pytest.mark.report("pytorch/pytorch#183582")
def test_what_cannot_cross_a_border_ends_all_ranks_with_the_stage_in_the_first_error() -> None:
    with pytest.raises(RankFailed, match="stage 0 gives a str to stage 1") as failure:
        by_engine(Grid(pp=2), [Trial(with_text, [values(4, 8)])])
    first, *_ = failure.value.tracebacks.values()
    assert "TypeError: stage 0 gives a str" in first and ">>> 0SEND_F0" in first


# Ties and random numbers


class Tied(nn.Module):
    """An output head that uses another unit's weight."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def tied(place: int) -> nn.Sequential:
    embedding = nn.Embedding(11, 8)
    units = [embedding, nn.Linear(8, 8), nn.Linear(8, 8), nn.Identity()]
    units[place] = nn.Sequential(Tied(embedding), nn.Linear(11, 8))
    return nn.Sequential(*units)


def near() -> nn.Sequential:
    return tied(1)


def fresh_weights(topology: Topology) -> dict[str, Tensor]:
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    sgd = partial(torch.optim.SGD, lr=1.0)
    return Engine(model, topology, loss_fn=nn.MSELoss(), optimizer=sgd).state_dict_whole()


@pytest.mark.report("pytorch/pytorch#139304")
@pytest.mark.report("pytorch/torchtitan#514")
def test_equal_blocks_on_different_stages_start_different_and_as_on_one_process() -> None:
    one, two, four = (run_on(Grid(pp=pp), fresh_weights)[0] for pp in (1, 2, 4))
    assert all(torch.equal(one[key], other[key]) for other in (two, four) for key in one)
    weights = [one[f"{k}.weight"] for k in range(4)]
    assert not any(torch.equal(a, b) for k, a in enumerate(weights) for b in weights[:k])


# Recompute, ties and frozen parts on two stages


def language(first: int = 0) -> nn.Sequential:
    units: list[nn.Module] = [nn.Embedding(10, 8), nn.Linear(8, 8), nn.Linear(8, 8)]
    for unit in units[:first]:
        frozen(unit)
    return nn.Sequential(*units, nn.Linear(8, 8))


def frozen_embedding() -> nn.Sequential:
    return language(1)


def frozen_stage() -> nn.Sequential:
    return language(2)


def dropping() -> nn.Sequential:
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Tanh()) for _ in range(4)]
    )


IDS = torch.arange(16).view(8, 2) % 10, values(8, 2, 8)[1]
FULL = {"num_microbatches": 4, "recompute": "full", "partition": "uniform"}
NONE = {**FULL, "recompute": "none"}
TWO = {
    "tied": Trial(near, [IDS] * 5, optimizer=ADAM, options=NONE),
    "all trained": Trial(language, [IDS] * 2, options=FULL),
    "frozen embedding": Trial(frozen_embedding, [IDS] * 2, options=FULL),
    "frozen stage": Trial(frozen_stage, [IDS] * 2, options=FULL),
    "input without gradient": Trial(layers, [values(8, 8)] * 2, options=FULL),
    "dropout": Trial(dropping, [values(8, 8)] * 5, options=NONE),
    "dropout again": Trial(dropping, [values(8, 8)] * 5, options=FULL),
}


@pytest.fixture(scope="module")
def two() -> dict[str, Trace]:
    return named(Grid(pp=2), TWO)


@pytest.mark.report("uw-syfi/piper#13")
def test_a_tie_inside_a_stage_follows_the_sum_of_its_gradients(two: dict[str, Trace]) -> None:
    assert_equal_to(by_plain_torch(TWO["tied"]), two["tied"], tolerance=1e-8)
    last = two["tied"].weights[-1]
    assert torch.equal(last["0.weight"], last["1.0.weight"])


@pytest.mark.report("huggingface/transformers#21381")
@pytest.mark.report("deepspeedai/DeepSpeed#4118")
@pytest.mark.parametrize(
    "name", ["all trained", "frozen embedding", "frozen stage", "input without gradient"]
)
def test_repeated_units_are_trained_on_every_stage(name: str, two: dict[str, Trace]) -> None:
    reference = by_plain_torch(TWO[name])
    assert_equal_to(reference, two[name])
    moved = {
        key
        for key, weight in two[name].weights[0].items()
        if not torch.equal(weight, two[name].weights[1][key])
    }
    trained = {key for key, p in TWO[name].build().named_parameters() if p.requires_grad}
    assert moved == trained


@pytest.mark.report("allenai/OLMo-core#828")
@pytest.mark.report("openai/guided-diffusion#167")
def test_dropout_and_recompute_give_the_bits_of_dropout(two: dict[str, Trace]) -> None:
    once, again = two["dropout"], two["dropout again"]
    assert once.results == again.results
    assert len({result.loss for result in once.results}) == 5
    assert all(
        torch.equal(once.weights[-1][key], again.weights[-1][key]) for key in again.weights[-1]
    )


# Data parallel


def relu_stage() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU())


def frozen_last() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), frozen(nn.Linear(8, 8)))


def frozen_first() -> nn.Sequential:
    return nn.Sequential(frozen(nn.Linear(8, 8)), nn.Linear(8, 8))


EMPTY = [
    Trial(builder, [values(8, 8)] * 3, optimizer=ADAM, options={"num_microbatches": 2, "zero": z})
    for builder in (relu_stage, frozen_last, frozen_first)
    for z in (0, 1)
]


def train_and_resume(topology: Topology, folder: str) -> list[Trace]:
    """Two steps, a checkpoint, and the third by another engine that has loaded it."""
    traces = []
    for number, trial in enumerate(EMPTY):
        engine = engine_of(topology, trial)
        trace = follow(engine, trial.steps[:2])
        engine.save(f"{folder}/{number}")
        engine = engine_of(topology, trial)
        engine.load(f"{folder}/{number}")
        rest = follow(engine, trial.steps[2:])
        traces.append(Trace(trace.results + rest.results, trace.weights + rest.weights[1:]))
    return traces


@pytest.mark.report("deepspeedai/DeepSpeed#1522")
@pytest.mark.report("deepspeedai/DeepSpeed#5071")
def test_a_stage_with_nothing_to_train_takes_part_in_norm_and_checkpoint(tmp_path: Path) -> None:
    ranks = run_on(Grid(pp=2, dp=2), train_and_resume, folder=str(tmp_path))
    for trial, trace in zip(EMPTY, ranks[0], strict=True):
        assert_equal_to(by_plain_torch(trial), trace, tolerance=1e-8)


def count_reductions(topology: Topology, trials: list[Trial]) -> list[Any]:
    """Of a step: its trace, whether each unit was reduced once, and the parameters held here."""
    found = []
    for trial in trials:
        engine = engine_of(topology, trial)
        ledger = engine.parts.ledger
        trace = follow(engine, [])
        ledger.tracing = True
        x, target = share(trial.steps[0], topology)
        trace.results.append(engine.train_step(x, target))
        ledger.tracing = False
        reduced = Counter(
            event.tag
            for event in ledger.trace
            if (event.axis, event.kind, event.phase) == ("dp", "reduce_scatter", "issue")
        )
        trace.weights.append(engine.state_dict_whole())
        held = {
            f"{unit.name}.{path}": parameter.detach().clone()
            for unit in engine.parts.units
            for path, parameter in unit.module.named_parameters()
        }
        units = [f"unit {unit.number}" for unit in engine.parts.units]
        found.append((trace, dict(reduced) == dict.fromkeys(units, 1), held))
    return found


@pytest.mark.report("huggingface/picotron#5")
@pytest.mark.report("huggingface/picotron#3")
@pytest.mark.report("pytorch/torchtitan#547")
@pytest.mark.report("pytorch/torchtitan#550")
@pytest.mark.parametrize(("pp", "counts"), [(2, (2,)), (4, (2, 4, 8))])
def test_every_stage_sums_its_gradients_over_dp_once_a_step(pp: int, counts: tuple[int]) -> None:
    trials = [
        Trial(layers, [values(16, 8)], options={"num_microbatches": m, "zero": zero})
        for m in counts
        for zero in (0, 1)
    ]
    grid = Grid(pp=pp, dp=2)
    ranks = run_on(grid, count_reductions, trials=trials)
    for at, trial in enumerate(trials):
        assert_equal_to(by_plain_torch(trial), ranks[0][at][0])
        for rank, found in enumerate(ranks):
            trace, once, held = found[at]
            assert once, f"rank {rank}"
            assert trace.results == ranks[0][at][0].results
            stage, _, _ = grid.coordinates(rank)
            twin = ranks[grid.rank(stage, 0, 0)][at][2]
            assert held and all(torch.equal(held[name], twin[name]) for name in held)


@pytest.mark.report("pytorch/torchtitan#1232")
@pytest.mark.report("huggingface/nanotron#422")
def test_every_rank_is_told_the_loss_that_one_process_has() -> None:
    trial = Trial(layers, [values(8, 8), values(12, 8), values(10, 8)])
    (trace,) = by_engine(Grid(pp=2, dp=2, tp=2), [trial])
    assert all(math.isfinite(result.loss) for result in trace.results)
    assert_equal_to(by_plain_torch(trial), trace)


def losses_as_outputs(output: Tensor, target: Tensor) -> Tensor:
    return torch.where(target >= 0, output, 0).sum()


@pytest.mark.report("prajdabre/yanmtt#62")
def test_the_loss_is_that_of_all_items_of_all_replicas() -> None:
    x = torch.tensor([2.0, 2, 2, 6, 9, 9], dtype=torch.float64)[:, None]
    target = torch.tensor([1, 1, 1, 1, -100, -100])[:, None]
    (trace,) = by_engine(Grid(pp=2, dp=2), [Trial(floats, [(x, target)], losses_as_outputs)])
    assert trace.results[0].loss == 3.0 and trace.results[0].num_items == 4
