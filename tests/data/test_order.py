"""Orders and splits: permutations, complete and disjoint."""

from __future__ import annotations

import numpy as np
import pytest

from parallel3d.data.order import permute, split


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 63, 64, 65, 1000])
def test_every_size_is_permuted(size: int) -> None:
    assert sorted(permute(np.arange(size), size, "k", 3).tolist()) == list(range(size))


def test_one_position_is_mapped_as_the_whole_order_maps_it() -> None:
    whole = permute(np.arange(100), 100, "k", 1)
    alone = [int(permute(np.array([i]), 100, "k", 1)[0]) for i in range(100)]
    assert whole.tolist() == alone


def test_positions_are_spread_evenly() -> None:
    # 12 items, 6000 keys: each item should land on each place 500 times (standard deviation 21).
    counts = np.zeros((12, 12), dtype=int)
    for key in range(6000):
        counts[np.arange(12), permute(np.arange(12), 12, key)] += 1
    assert abs(counts - 500).max() < 120


@pytest.mark.report("keras-team/keras#23202")
@pytest.mark.report("bigscience-workshop/Megatron-DeepSpeed#143")
@pytest.mark.parametrize("share", [0, 0.05, 0.1, 0.5, 0.999])
def test_a_split_is_disjoint_complete_and_never_without_training(share: float) -> None:
    for n in range(1, 51):
        train, validation = split(n, share, seed=3)
        assert sorted([*train, *validation]) == list(range(n))
        assert len(train) >= 1
        assert len(validation) == min(round(share * n), n - 1)
        assert all(map(np.array_equal, split(n, share, seed=3), (train, validation)))


@pytest.mark.report("keras-team/keras#23202")
def test_a_share_that_rounds_to_nothing_holds_out_nothing() -> None:
    train, validation = split(12, 0.04, seed=0)
    assert (len(train), len(validation)) == (12, 0)


@pytest.mark.parametrize("share", [-0.1, 1, 1.5])
def test_a_share_that_leaves_no_training_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match=r"data.validation_share = .* less than 1"):
        split(10, share, seed=0)
