"""Every two choices of schedule, layout, ZeRO, ties and recompute meet in a case that is proved.

The cases are those of ``suite=quick`` (a greedy pairwise choice, ``verify/covering.py``), over the
six layouts that cut a pipeline, of a narrower model of as many units. Microbatches are uneven.
"""

from __future__ import annotations

import pytest

from parallel3d.verify.proof import prove
from parallel3d.verify.suites import Choices, quick
from parallel3d.verify.trace import Setting
from tests.verify.subjects import DEEP

LAYOUTS = "2x1x1 2x2x1 2x1x2 4x1x1 2x2x2 4x2x1".split()
WORK = quick(Choices(model=tuple(DEEP), layouts=LAYOUTS))


@pytest.mark.parametrize("model", DEEP)
def test_the_covering_set_keeps_every_promise(model: str) -> None:
    rows = list(prove(DEEP[model], WORK[model], Setting(steps=2), 1e-12))
    assert [(row.case, row.failures) for row in rows] == [(case, []) for case in WORK[model]]
    firsts = [row for row in rows if row.bits is None]
    assert len(firsts) == len({case.family for case in WORK[model]}) < len(rows)
