"""The proof that no layout changes the numbers: every layout against plain PyTorch.

``verify`` is for a program, ``python -m parallel3d.verify`` for the command line. What is measured,
and against what:

    loss, norm    of every step under SGD
    gradient      of every parameter in the first step, reduced, before clipping
    sgd, adamw    every weight after all steps, under SGD with momentum and under AdamW
    bits          everything above, of layouts that promise equal bits

The reference (``reference.py``) is one process of torch.nn, one backward over the whole batch,
``clip_grad_norm_`` and ``torch.optim``, and no class of this package.
"""

from .cases import LAYOUTS, Case, product
from .compare import Cell
from .proof import Row, verify
from .ranks import RankError
from .subject import Subject

__all__ = ["LAYOUTS", "Case", "Cell", "RankError", "Row", "Subject", "product", "verify"]
