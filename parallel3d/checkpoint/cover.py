"""Rectangles of one tensor: do they cover it, and where do two sets of them meet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from ..placement import Rectangle


def covers_once(view: tuple[int, int], rectangles: Iterable[Rectangle]) -> bool:
    """Whether every cell of a ``rows x cols`` view is in exactly one of the rectangles.

    The number of rectangles over a cell is a function with finite support, and such a function
    is known from its mixed difference, which a rectangle gives at its four corners only. So
    signed corners are compared, never cells: O(number of rectangles).
    """
    corners: Counter[tuple[int, int]] = Counter()
    rows, cols = view
    for sign, place in [(-1, Rectangle(0, 0, rows, cols)), *((1, r) for r in rectangles)]:
        if place.area == 0:
            continue
        top, left, bottom, right = (
            place.row,
            place.col,
            place.row + place.rows,
            place.col + place.cols,
        )
        corners[top, left] += sign
        corners[top, right] -= sign
        corners[bottom, left] -= sign
        corners[bottom, right] += sign
    return not any(corners.values())


def meetings(place: Rectangle, others: np.ndarray) -> Iterator[tuple[int, Rectangle]]:
    """Every part that ``place`` shares with one of ``others`` [n, 4], as (index, part)."""
    top = np.maximum(others[:, 0], place.row)
    left = np.maximum(others[:, 1], place.col)
    rows = np.minimum(others[:, 0] + others[:, 2], place.row + place.rows) - top
    cols = np.minimum(others[:, 1] + others[:, 3], place.col + place.cols) - left
    for index in np.flatnonzero((rows > 0) & (cols > 0)).tolist():
        yield index, Rectangle(*(int(side[index]) for side in (top, left, rows, cols)))
