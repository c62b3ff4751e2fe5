"""The optimizer's state on the host or on disk: the same bits, in every layout, and in files."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel3d import Grid, Topology
from tests.engine import state_cases
from tests.engine.cases import WIDTH, batch, blocks, engine, same, train
from tests.engine.offload_cases import made, places, run_of
from tests.world import run_on


def as_on_the_device(topology: Topology, folder: Path, cases: list[dict[str, Any]]) -> None:
    for case in cases:
        told, weights = run_of(made(topology, **case))
        for place in places(folder):
            other, found = run_of(made(topology, offload=place, **case))
            assert other == told, (case, place)
            assert same(found, weights), (case, place)


CASES = [
    {"zero": zero, "precision": precision, "state_dtype": narrow}
    for zero, precision, narrow in [
        (1, "fp32", None),
        (1, "fp64", None),
        (1, "bf16", None),
        (0, "bf16", None),
        (2, "fp32", None),
        (3, "fp32", None),
        (3, "bf16", None),
        (0, "fp32", "bf16"),
        (3, "bf16", "bf16"),
    ]
]
CASES += [
    {"zero": 3, "precision": "bf16", "gather_budget": 1},
    {"zero": 2, "precision": "fp32", "zero_reduce": "last"},
    {"zero": 3, "precision": "fp16", "shard_size": 1},
    {"zero": 3, "precision": "bf16", "tied": [("0.up.weight", "3.up.weight")]},
]


@pytest.mark.parametrize("layout", ["1x1x1", "1x2x1", "2x1x2", "2x2x1"])
def test_offload_changes_no_bit(layout: str, tmp_path: Path) -> None:
    run_on(Grid.parse(layout), as_on_the_device, folder=tmp_path, cases=CASES)


def of_padding(topology: Topology, folder: Path) -> None:
    """The norm's 64 elements are the first rank's: the second one's shard of that unit is padding,
    but the gather of it has its turn among the others'."""
    for zero in (1, 2, 3):
        for precision in ("fp64", "bf16"):
            found = []
            for place in (None, *places(folder)):
                with torch.device("meta"):
                    units = nn.Linear(WIDTH, 64), nn.RMSNorm(64), nn.Linear(64, WIDTH)
                options = {"zero": zero, "precision": precision, "offload": place}
                found.append(run_of(made(topology, nn.Sequential(*units), **options)))
            for told, weights in found[1:]:
                assert told == found[0][0], (zero, precision)
                assert same(weights, found[0][1]), (zero, precision)


def test_offload_where_a_rank_holds_nothing_but_padding_of_a_unit(tmp_path: Path) -> None:
    run_on(Grid(dp=2), of_padding, folder=tmp_path)


OPTIMIZERS: list[Any] = [
    partial(torch.optim.Adam, amsgrad=True),
    partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    partial(torch.optim.SGD, lr=0.1),
    partial(torch.optim.Adagrad, initial_accumulator_value=0.1),
    torch.optim.NAdam,
    partial(torch.optim.AdamW, lr=torch.tensor(1e-2)),
]


def test_offload_changes_no_bit_of_any_optimizer(tmp_path: Path) -> None:
    cases = [{"optimizer": make} for make in OPTIMIZERS]
    with Topology.init() as topology:
        as_on_the_device(topology, tmp_path, cases)


def owned(topology: Topology, folder: Path) -> None:
    for place in places(folder):
        for precision, narrow in (("fp32", None), ("bf16", "bf16")):
            mine = made(topology, offload=place, precision=precision, state_dtype=narrow)
            host = mine.parts.shards.host
            assert host is not None
            trained = mine.parts.shards.trained()
            assert all(host.store.owns(flat.master) for flat in trained)
            train(mine, 2)
            mine.parts.shards.settle()
            for part, state in zip(
                mine.parts.optimizer.parts(), mine.parts.optimizer.states(), strict=True
            ):
                moments = [state[name] for name in ("exp_avg", "exp_avg_sq")]
                assert all(moment.shape == part.parameter.shape for moment in moments)
                assert all(host.store.owns(tensor) for tensor in (part.parameter, *moments))
                expected = torch.bfloat16 if narrow else torch.float32
                assert {moment.dtype for moment in moments} == {expected}
                assert state["step"] == 2
            lengths = sum(len(flat.master) for flat in trained)
            width = 4 + 2 * (2 if narrow else 4)
            assert lengths * width <= host.store.nbytes < lengths * width + 4096 * 5 * 4
            assert not host.store.owns(trained[0].data)


def test_masters_and_moments_lie_in_the_store(tmp_path: Path) -> None:
    run_on(Grid(dp=2), owned, folder=tmp_path)


def counted(topology: Topology, folder: Path) -> None:
    for place in places(folder):
        for precision, wide, narrow in (("fp32", 4, 4), ("bf16", 4, 2), ("fp64", 8, 8)):
            mine = made(topology, offload=place, precision=precision)
            train(mine, 1)
            mine.parts.ledger.reset()
            train(mine, [1])
            owned = sum(flat.owned[1] - flat.owned[0] for flat in mine.parts.shards.trained())
            assert mine.parts.ledger.bytes()["host"] == owned * (wide + narrow)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_copies_the_owned_gradients_down_and_the_owned_values_up(
    ranks: int, tmp_path: Path
) -> None:
    run_on(Grid(dp=ranks), counted, folder=tmp_path)


def save_each(topology: Topology, folder: Path) -> Any:
    """Three steps on the device, on the host and on disk; each saved, and two more steps."""
    found = []
    for name, place in (("device", None), *zip(("cpu", "disk"), places(folder), strict=True)):
        mine = state_cases.engine(topology, offload=place)
        state_cases.train(mine, 3)
        mine.save(folder / name)
        state = state_cases.whole(mine)
        found.append((state, state_cases.train(mine, 2), state_cases.whole(mine)))
    assert all(same(state, found[0][0]) for state, _, _ in found)
    assert all(same(state, found[0][2]) for _, _, state in found)
    return found[0]


def load_each(topology: Topology, folder: Path) -> Any:
    found = []
    for name in ("device", "cpu", "disk"):
        for place in (None, *places(folder)):
            mine = state_cases.engine(topology, offload=place)
            state_cases.train(mine, 1)  # what is there already must go
            mine.load(folder / name)
            state = state_cases.whole(mine)
            assert state_cases.step_counts(mine) <= {3.0}
            found.append((state, state_cases.train(mine, 2)))
    return found


@pytest.mark.parametrize("layout", ["1x2x1", "2x1x2"])
def test_a_checkpoint_knows_nothing_of_where_state_was(layout: str, tmp_path: Path) -> None:
    state, losses, _ = run_on(Grid(dp=2), save_each, folder=tmp_path)[0]
    for loaded, again in run_on(Grid.parse(layout), load_each, folder=tmp_path)[0]:
        assert same(loaded, state)
        torch.testing.assert_close(again, losses, rtol=1e-12, atol=0)


def narrow_state(topology: Topology, folder: Path) -> None:
    """Moments in bf16 go on where they were, under either place and ZeRO stage."""
    first = made(topology, state_dtype="bf16", precision="fp32")
    train(first, 3)
    first.save(folder / "narrow")
    expected = train(first, [3, 4]), first.state_dict_whole()
    for zero in (0, 1):
        for place in (None, *places(folder)):
            options = {"state_dtype": "bf16", "precision": "fp32", "offload": place}
            mine = made(topology, zero=zero, **options)
            mine.load(folder / "narrow")
            kept = mine.parts.optimizer.states()[0]["exp_avg"]
            assert kept.dtype == torch.bfloat16 and kept.any()
            assert train(mine, [3, 4]) == expected[0]
            assert same(mine.state_dict_whole(), expected[1])
    wide = made(topology, precision="fp32")
    wide.load(folder / "narrow")  # widened, and from here on other numbers
    assert train(wide, [3])[0] == expected[0][0]
    assert wide.parts.optimizer.states()[0]["exp_avg"].dtype == torch.float32


def test_moments_in_bf16_resume_exactly(tmp_path: Path) -> None:
    run_on(Grid(dp=2), narrow_state, folder=tmp_path)


def test_a_checkpoint_that_does_not_fit_leaves_state_as_it_was(tmp_path: Path) -> None:
    with Topology.init() as topology:
        other = made(topology, blocks(topology, 2))
        train(other, 1)
        other.save(tmp_path / "other")
        for place in places(tmp_path):
            mine, twin = made(topology, offload=place), made(topology)
            train(mine, 2), train(twin, 2)
            with pytest.raises(ValueError, match="does not fit"):
                mine.load(tmp_path / "other")
            assert train(mine, [2, 3]) == train(twin, [2, 3])
            assert same(mine.state_dict_whole(), twin.state_dict_whole())


def test_a_checkpoint_of_before_the_first_step_starts_from_nothing(tmp_path: Path) -> None:
    with Topology.init() as topology:
        made(topology).save(tmp_path / "zero")
        fresh = made(topology)
        expected = train(fresh, 2)
        for place in places(tmp_path):
            mine = made(topology, offload=place)
            train(mine, 3)
            mine.load(tmp_path / "zero")
            assert train(mine, 2) == expected
            assert same(mine.state_dict_whole(), fresh.state_dict_whole())


def test_an_evaluation_and_a_step_that_failed_come_while_the_update_goes_on(
    tmp_path: Path,
) -> None:
    def fails(output: Tensor, target: Tensor) -> Tensor:
        if target.isnan().any():
            raise RuntimeError("no such target")
        return nn.functional.mse_loss(output, target, reduction="sum")

    with Topology.init() as topology:
        twin = made(topology)
        train(twin, 2)
        x, target = batch(7, dtype=torch.float64)
        expected = twin.eval_step(x, target).loss, train(twin, 2)
        for place in places(tmp_path):
            mine = made(topology, offload=place, loss_fn=fails)
            train(mine, 2)
            with pytest.raises(RuntimeError, match="no such target"):
                mine.train_step([(x, target), (x, target * torch.nan)])
            assert (mine.eval_step(x, target).loss, train(mine, 2)) == expected
            assert same(mine.state_dict_whole(), twin.state_dict_whole())


def test_offload_on_a_rank_that_trains_nothing() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH)).requires_grad_(False)
    with Topology.init() as topology:
        mine = engine(topology, model.double(), offload={"optimizer": "cpu"})
        assert train(mine, 2)[0][1] == 0.0
