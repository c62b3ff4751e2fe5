"""A rank's part of one named tensor, as a checkpoint sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..placement import Rectangle, view_2d

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}


@dataclass(frozen=True, eq=False)
class Fragment:
    """Rectangles of a whole tensor, and the flat memory in which they lie one after the other.

        key          one per whole tensor, the same under every layout: ``weight/3.up.weight``
        shape        of the whole tensor; ``()`` is a scalar
        rectangles   of its 2-D view ``(shape[0], prod(shape[1:]))``, in the order of ``data``
        data         [sum of the rectangles' areas], on any device; each rectangle row-major
        let_go       called each time that ``data`` has been read or filled

    Several fragments may share a key. A rank that holds nothing of a tensor gives no fragment, or
    one without rectangles. Raises ValueError where the parts do not fit together.
    """

    key: str
    shape: tuple[int, ...]
    rectangles: list[Rectangle]
    data: Tensor
    let_go: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(
                f"{self.key} has dtype {self.dtype}; a checkpoint holds {', '.join(DTYPES)}"
            )
        if self.data.ndim != 1:
            raise ValueError(f"{self.key}: data has {self.data.ndim} dims; give a flat tensor")
        check_inside(self.key, self.shape, self.rectangles)
        area = sum(rectangle.area for rectangle in self.rectangles)
        if area != self.data.numel():
            raise ValueError(
                f"{self.key}: its rectangles have {area} elements and data has "
                f"{self.data.numel()}; they must be the same"
            )

    @classmethod
    def whole(cls, key: str, tensor: Tensor) -> Fragment:
        """All of a contiguous tensor; ``data`` shares its memory."""
        rows, cols = view_2d(tuple(tensor.shape))
        rectangles = [Rectangle(0, 0, rows, cols)] if tensor.numel() else []
        return cls(key, tuple(tensor.shape), rectangles, tensor.detach().view(-1))

    @property
    def dtype(self) -> str:
        """The dtype's name without ``torch.``."""
        return str(self.data.dtype).removeprefix("torch.")


def check_inside(key: str, shape: tuple[int, ...], rectangles: list[Rectangle]) -> None:
    """Raise ValueError for a rectangle that leaves the 2-D view of ``shape``."""
    rows, cols = view_2d(shape)
    for place in rectangles:
        if min(place) < 0 or place.row + place.rows > rows or place.col + place.cols > cols:
            raise ValueError(
                f"{key}: {place} leaves the {rows} x {cols} view of shape {list(shape)}"
            )
