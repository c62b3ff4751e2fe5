"""The most bytes of each kind that a rank keeps in a step, by storages, against the formulas.

With ``n`` elements of parameters on ``d`` ranks, in fp32 under AdamW (Rajbhandari et al., 2020):

    stage   parameters   gradients     optimizer
    0       4 n          4 n           8 n
    1       4 n          4 n           8 n / d
    2       4 n          4 n / d       8 n / d
    3       4 n / d      4 n / d       8 n / d

In bf16 with masters parameters take half, and the optimizer half as much again. Beside those live
the sums that are under way, at most two, each with a buffer to receive in and from stage 2 on one
to send from; whole gradients, if they are reduced once a step of several microbatches; and what is
gathered.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from parallel3d import Engine, Topology
from parallel3d.assemble.accounts import Account, account
from tests.live import Live
from tests.world import run_on

UNITS, WIDTH, ROWS, MICROBATCHES = 48, 64, 64, 2
UNIT = 4 * WIDTH * WIDTH  # bytes of a unit's parameters, which need no padding
MESSAGE = 4 * ROWS * WIDTH
BUDGET = 5 * UNIT
PATIENCE = 50


class Kinds(Live):
    """Storages by what was going on when they were made, and the peak of each kind."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.kind = "activations"
        self.expected = account(engine.parts).gradients
        self.kinds: dict[StorageWeakRef, str] = {}
        self.peaks: dict[str, int] = {}
        self.flats = engine.parts.shards.all()
        for flat in self.flats:
            self.know("parameters", flat.shard if flat.stage == 3 else flat.data)
            self.know("gradients", flat.owned_grad if flat.stage >= 2 else flat.grad)
            self.know("optimizer", flat.master)
        shards, optimizer = engine.parts.shards, engine.parts.optimizer
        for name in ("before", "reduce", "finish"):
            self.during("gradients", shards.gradients, name)
        self.during("optimizer", optimizer, "step")

    def know(self, kind: str, tensor: Tensor | None) -> None:
        """What lives already; the first kind counts."""
        if tensor is not None:
            storage = StorageWeakRef(tensor.untyped_storage())
            self._sizes[storage] = tensor.untyped_storage().nbytes()
            self.kinds.setdefault(storage, kind)

    def during(self, kind: str, owner: Any, name: str) -> None:
        """What is made in a method is of this kind."""
        run = getattr(owner, name)

        def kept(*args: Any) -> Any:
            before, self.kind = self.kind, kind
            try:
                return run(*args)
            finally:
                self.kind = before

        setattr(owner, name, kept)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for storage in self._sizes:
            self.kinds.setdefault(storage, self.kind)
        found = self.count()
        for _ in range(PATIENCE):  # gloo lets go of what was sent a moment later
            if found["gradients"] <= self.expected:
                break
            time.sleep(1e-4)
            found = self.count()
        for kind, size in found.items():
            self.peaks[kind] = max(self.peaks.get(kind, 0), size)
        return result

    def count(self) -> dict[str, int]:
        """What is kept now, by kind."""
        self.bytes()
        found = dict.fromkeys(("parameters", "gradients", "optimizer", "activations"), 0)
        for storage, size in self._sizes.items():
            found[self.kinds[storage]] += size
        whole = [flat.data for flat in self.flats if flat.stage == 3]
        found["gathered"] = sum(data.untyped_storage().nbytes() for data in whole)
        return found


def peaks(topology: Topology, cases: list[dict[str, Any]]) -> list[tuple[dict[str, int], Account]]:
    """Of the second step of each case."""
    found = []
    for options in cases:
        engine = Engine(
            nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(UNITS)]),
            topology,
            loss_fn=nn.MSELoss(reduction="sum"),
            optimizer=partial(torch.optim.AdamW, fused=True),
            num_microbatches=MICROBATCHES,
            **options,
        )
        x = torch.ones(MICROBATCHES * ROWS, WIDTH)
        engine.train_step(x, x)
        kinds = Kinds(engine)
        for state in engine.parts.optimizer.states():
            for value in state.values():
                kinds.know("optimizer", value)
        with kinds:
            engine.train_step(x, x)
        found.append((kinds.peaks, account(engine.parts)))
    return found


CASES: list[dict[str, Any]] = [
    {"zero": 0},
    {"zero": 1},
    {"zero": 1, "precision": "bf16"},
    {"zero": 2, "zero_reduce": "last"},
    {"zero": 2, "zero_reduce": "each"},
    {"zero": 3, "zero_reduce": "last", "gather_budget": 2**28},
    {"zero": 3, "zero_reduce": "each", "gather_budget": BUDGET},
    {"zero": 3, "zero_reduce": "each", "gather_budget": BUDGET, "precision": "bf16"},
]


def expected(case: dict[str, Any], d: int) -> dict[str, float]:
    """Bytes by the formulas."""
    stage, all_, value = case["zero"], UNITS * UNIT, 0.5 if "precision" in case else 1.0
    whole = stage < 2 or case["zero_reduce"] == "last"
    gradients = all_ * whole + all_ / d * (stage >= 2)
    under_way = (4 if stage >= 2 and not whole else 2) * UNIT
    master = 1 if "precision" in case else 0
    return {
        "parameters": value * all_ / (d if stage == 3 else 1),
        "gradients": gradients + under_way,
        "optimizer": (2 + master) * all_ / (d if stage > 0 else 1),
        "gathered": min(case["gather_budget"], value * all_) if stage == 3 else 0,
        # Each unit's output; the gradients of one unit's output, input and weight, and that of the
        # weight in fp32; the loss.
        "activations": value * (UNITS + 4 + 2 * master) * MESSAGE,
    }


@pytest.mark.parametrize("d", [2, 4])
def test_peaks_of_each_kind_are_those_of_the_formulas(d: int) -> None:
    for found in run_on(d, peaks, cases=CASES):
        for case, (kept, paper) in zip(CASES, found, strict=True):
            for kind, size in expected(case, d).items():
                assert kept[kind] == pytest.approx(size, rel=0.02), (case, kind)
            assert paper.gradients == expected(case, d)["gradients"], case
            assert paper.gathered == kept["gathered"], case
