"""What units keep between forward and backward: no way of it changes a bit, and what each saves."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from parallel3d import ColumnParallelLinear, Engine, RowParallelLinear
from parallel3d.pipeline import offload
from parallel3d.tensor import Dropout
from parallel3d.topology import Grid, Topology
from tests.engine.cases import WIDTH, Tensors, batch, share
from tests.live import Live
from tests.world import run_on

WIDE, ROWS = 12, 3
WAYS: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"recompute": "full"},
    "selective": {"recompute": "selective"},
    "full, every 2": {"recompute": "full", "recompute_every": 2},
    "selective, every 2": {"recompute": "selective", "recompute_every": 2},
    "offload": {"offload": {"activations": "cpu"}},
    "full, offload": {"recompute": "full", "offload": {"activations": "cpu"}},
    "selective, offload": {"recompute": "selective", "offload": {"activations": "cpu"}},
    "selective, every 2, offload": {
        "recompute": "selective",
        "recompute_every": 2,
        "offload": {"activations": "cpu"},
    },
}
CUT = {
    "cut": {"recompute": "full", "recompute_partition": True},
    "cut, every 2": {"recompute": "full", "recompute_every": 2, "recompute_partition": True},
    "cut, offload": {
        "recompute": "full",
        "recompute_partition": True,
        "offload": {"activations": "cpu"},
    },
}


class Masked(nn.Module):
    """A block with a mask in a buffer, attention, dropout and work in place inside.

    x is a pair of activations [b, s, 8] and of booleans [b, s], which pass through.
    """

    def __init__(self, topology: Topology) -> None:
        super().__init__()
        tp = topology.tp
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = ColumnParallelLinear(WIDTH, 3 * WIDTH, axis=tp, blocks=3)
        self.out = RowParallelLinear(WIDTH, WIDTH, axis=tp)
        self.up = ColumnParallelLinear(WIDTH, WIDE, axis=tp)
        self.down = RowParallelLinear(WIDE, WIDTH, bias=False, axis=tp)
        self.register_buffer("seen", torch.empty(ROWS, ROWS, dtype=torch.bool))
        self.dropout, self.inner = Dropout(0.3), Dropout(0.3, axis=tp)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if not self.seen.is_meta:
            self.seen.copy_(torch.ones(ROWS, ROWS, dtype=torch.bool).tril())

    def forward(self, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, keep = given
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, -1)).unbind(-2)
        mask = self.seen & keep[:, None, :]
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.dropout(self.out(y))
        hidden = nn.functional.relu(2 * self.up(x), inplace=True)
        return x + self.down(self.inner(hidden)), keep


class First(nn.Module):
    """x [b, 8] -> [b, s, 8] of integers looked up and added, and booleans [b, s]."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        ids = (x[:, :ROWS] > 0).long() + 2 * (x[:, -ROWS:] > 0).long()
        return self.table(ids) + self.linear(x)[:, None], torch.ones_like(ids, dtype=torch.bool)


class Last(nn.Module):
    """([b, s, 8], booleans) -> [b, 8], with a layer of its own that works in place."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH))

    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        x, keep = given
        return self.head((x * keep[..., None]).sum(1)).tanh_()


def model_of(topology: Topology) -> nn.Sequential:
    with torch.device("meta"):
        return nn.Sequential(First(), *[Masked(topology) for _ in range(3)], Last())


def masked(topology: Topology, model: nn.Sequential | None = None, **options: Any) -> Engine:
    defaults = {
        "loss_fn": nn.MSELoss(reduction="sum"),
        "optimizer": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
        "num_microbatches": 3,
        "precision": "fp64",
    }
    return Engine(model or model_of(topology), topology, **{**defaults, **options})


class Run(NamedTuple):
    """Losses and norms; whole weights; bytes by axis in the last step."""

    results: list[tuple[float, float]]
    weights: Tensors
    sent: dict[str, int]


def run(topology: Topology, ways: dict[str, dict[str, Any]], **options: Any) -> dict[str, Run]:
    offload.LEAST = 1
    found = {}
    for name, way in ways.items():
        of = masked(topology, **options, **way)
        results = []
        for step in range(2):
            of.parts.ledger.reset()
            result = of.train_step(*share(topology, *batch(step, 6, torch.float64)))
            results.append((result.loss, result.grad_norm))
        found[name] = Run(results, of.state_dict_whole(), of.parts.ledger.bytes())
    return found


LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "1x1x1": ("1x1x1", {}),
    "1x1x1 zb-h1": ("1x1x1", {"schedule": "zb-h1"}),
    "2x1x1 1f1b": ("2x1x1", {}),
    "2x1x1 zbv": ("2x1x1", {"schedule": "zbv", "zero": 0}),
    "1x1x2": ("1x1x2", {}),
    "1x2x1": ("1x2x1", {}),
    "2x1x2 zb-h1": ("2x1x2", {"schedule": "zb-h1"}),
    "1x2x1 zero 2": ("1x2x1", {"zero": 2, "schedule": "zb-h1"}),
    "1x2x1 zero 3": ("1x2x1", {"zero": 3, "gather_budget": 0}),
    "2x2x1 zero 3": ("2x2x1", {"zero": 3, "gather_budget": 0, "schedule": "zb-h1"}),
    "1x2x2 zero 3": ("1x2x2", {"zero": 3, "zero_reduce": "last", "gather_budget": 2000}),
}


@pytest.mark.report("allenai/OLMo-core#828")
@pytest.mark.report("openai/guided-diffusion#167")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_way_to_keep_activations_changes_a_bit(layout: str) -> None:
    grid, options = LAYOUTS[layout]
    ways = {**WAYS, **(CUT if grid.endswith("2") else {})}
    ranks = run_on(Grid.parse(grid), run, ways=ways, **options)
    for rank in ranks:
        for name, found in rank.items():
            assert found.results == rank["none"].results, name
    expected = ranks[0]["none"].weights
    for name, found in ranks[0].items():
        assert all(torch.equal(found.weights[key], expected[key]) for key in expected), name


def test_what_is_kept_over_tp_is_not_sent_again() -> None:
    """By the ledger, of the last of two steps, each of 3 microbatches of 2 samples."""
    ways = {name: {**WAYS, **CUT}[name] for name in ("none", "full", "selective", "cut", "offload")}
    message = 2 * ROWS * WIDTH * 8  # bytes of an activation, and of an all-reduce of it by two
    for rank in run_on(Grid(tp=2), run, ways=ways):
        tp = {name: found.sent["tp"] for name, found in rank.items()}
        assert tp["selective"] == tp["offload"] == tp["none"]
        assert tp["full"] - tp["none"] == 3 * 3 * 2 * message, "two all-reduces a block, again"
        assert tp["cut"] - tp["full"] == 3 * 4 * message // 2, "the inputs of all but the first"
        assert "host" not in rank["full"].sent
        assert rank["offload"].sent["host"] > 0


def part_frozen(topology: Topology, ways: dict[str, dict[str, Any]]) -> dict[str, Run]:
    """Frozen units first, then blocks of a frozen and a trained layer."""
    offload.LEAST = 1
    found = {}
    for name, way in ways.items():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(WIDTH, WIDTH).requires_grad_(False),
            nn.Linear(WIDTH, WIDTH).requires_grad_(False),
            nn.Sequential(nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.Linear(WIDTH, WIDTH)),
            nn.Sequential(nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.Linear(WIDTH, WIDTH)),
        ).double()
        of = masked(topology, model, partition="uniform", **way)
        results = []
        for step in range(3):
            result = of.train_step(*share(topology, *batch(step, 6, torch.float64)))
            results.append((result.loss, result.grad_norm))
        found[name] = Run(results, of.state_dict_whole(), {})
    return found


@pytest.mark.report("deepspeedai/DeepSpeed#8130")
@pytest.mark.report("huggingface/transformers#21381")
@pytest.mark.report("deepspeedai/DeepSpeed#4118")
@pytest.mark.parametrize("layout", ["1x2x1", "2x2x1"])
def test_frozen_layers_are_there_when_a_forward_is_repeated(layout: str) -> None:
    ways = {
        f"{zero} {mode} {away}": {
            "zero": zero,
            "zero_reduce": "last",
            "recompute": mode,
            "offload": {"activations": away},
            "gather_budget": 0 if zero == 3 else None,
        }
        for zero in (0, 3)
        for mode in ("none", "full", "selective")
        for away in ("none", "cpu")
    }
    ranks = run_on(Grid.parse(layout), part_frozen, ways=ways)
    first = ranks[0]["0 none none"]
    trained = ["2.1.weight", "2.1.bias", "3.1.weight", "3.1.bias"]
    for name, found in ranks[0].items():
        assert found.results == first.results and found.results[0][1] > 0, name
        assert all(torch.equal(found.weights[key], first.weights[key]) for key in trained), name


def keep_on(topology: Topology) -> tuple[list[int], set[int]]:
    """Bytes that some of 200 steps leave behind, and how many buffers of the host any does."""
    offload.LEAST = 1
    of = masked(topology, num_microbatches=2, **WAYS["selective, every 2, offload"])
    store = of.parts.stages[0].activations.host
    assert store is not None
    left, buffers = [], set()
    for step in range(200):
        with Live() if step in (1, 100, 199) else nullcontext() as live:
            of.train_step(*batch(step, 2, torch.float64))
            if live is not None:
                left.append(live.bytes())
        buffers.add(len(store.buffers))
    return left, buffers


def test_nothing_grows_over_200_steps_with_activations_on_the_host() -> None:
    ((left, buffers),) = run_on(1, keep_on)
    assert len(set(left)) == 1 and buffers == {0}
