from __future__ import annotations

import pytest
import torch

from parallel3d.checkpoint import Fragment
from parallel3d.placement import Rectangle


def test_a_fragment_of_another_length_than_its_rectangles_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"weight/a: its rectangles have 4 elements and data has 5"
    ):
        Fragment("weight/a", (2, 2), [Rectangle(0, 0, 2, 2)], torch.zeros(5))


@pytest.mark.parametrize("place", [(0, 0, 3, 1), (1, 2, 1, 1), (-1, 0, 1, 1), (0, 0, 1, -1)])
def test_a_rectangle_outside_the_tensor_is_refused(place: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"weight/a: .* leaves the 2 x 2 view of shape \[2, 2\]"):
        Fragment("weight/a", (2, 2), [Rectangle(*place)], torch.zeros(1))


def test_a_dtype_that_cannot_be_saved_is_refused_with_those_that_can() -> None:
    with pytest.raises(ValueError, match=r"dtype complex64; .*float32, bfloat16"):
        Fragment.whole("weight/a", torch.zeros(2, dtype=torch.complex64))


def test_data_that_is_not_flat_is_refused() -> None:
    with pytest.raises(ValueError, match="2 dims; give a flat tensor"):
        Fragment("weight/a", (2, 2), [Rectangle(0, 0, 2, 2)], torch.zeros(2, 2))


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 3, 4), (0, 3)])
def test_a_whole_fragment_shares_the_memory_of_its_tensor(shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(shape)
    Fragment.whole("weight/a", tensor).data.fill_(1)
    assert torch.equal(tensor, torch.ones(shape))
