"""Batches made ahead are the batches made in time, and nobody's random numbers move."""

from __future__ import annotations

import gc
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from parallel3d.data import Prefetch, TokenFiles

from .corpus import counting

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*fork.*:DeprecationWarning", "ignore:This DataLoader will create:UserWarning"
)
WORKERS = pytest.mark.parametrize("workers", [0, 2])


def draws(step: int, slots: Sequence[int]) -> tuple[float, float, float]:
    """What a data set with random augmentation would draw."""
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def broken(step: int, slots: Sequence[int]) -> None:
    raise ValueError(f"step {step} is bad")


@WORKERS
@pytest.mark.report("wyim-pgl/transgenic#59")
@pytest.mark.report("NVIDIA/Megatron-LM#441")
def test_steps_come_in_order_and_a_resume_continues(tmp_path: Path, workers: int) -> None:
    data = TokenFiles(counting(tmp_path / "a", [257]), 4, 8, validation_share=0)
    whole = [data.train(step, range(4)) for step in range(12)]
    ahead = Prefetch(data.train, range(4), 5, 12, workers=workers)
    assert len(ahead) == 7
    for (x, target), batch in zip(whole[5:], ahead, strict=True):
        assert isinstance(batch, tuple)
        assert torch.equal(batch[0], x)
        assert torch.equal(batch[1], target)


@WORKERS
@pytest.mark.report("NVIDIA/Megatron-LM#206")
def test_the_callers_generators_are_untouched(workers: int) -> None:
    before = draws_after(lambda: None)
    assert draws_after(lambda: list(Prefetch(draws, [0], 0, 3, workers=workers))) == before


@pytest.mark.report("huggingface/transformers#37932")
@pytest.mark.report("facebookresearch/fairseq#1383")
def test_random_numbers_depend_on_seed_step_and_slots_alone() -> None:
    def drawn(slots: Sequence[int], workers: int, seed: int = 0) -> list[tuple[float, ...]]:
        return list(Prefetch(draws, slots, 0, 4, seed=seed, workers=workers))

    first, second = drawn([0, 1], 2), drawn([2, 3], 2)
    values = [value for batch in first + second for value in batch]
    assert len(set(values)) == len(values)
    assert drawn([0, 1], 0) == drawn([0, 1], 1) == first
    assert drawn([0, 1], 0, seed=1) != first


def test_an_error_in_a_worker_is_raised_with_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    # After an error torch gives its workers 5 s to end, then ends them: here it need not wait.
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.1)
    with pytest.raises(ValueError, match="step 3 is bad"):
        list(Prefetch(broken, [0], 3, 5, workers=1))
    gc.collect()


def test_a_negative_number_of_workers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"data.workers = -1"):
        Prefetch(draws, [0], 0, 1, workers=-1)


def draws_after(action: object) -> tuple[float, float, float]:
    """The first numbers of the default generators, seeded, after an action."""
    assert callable(action)
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        action()
        return draws(0, [])
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
