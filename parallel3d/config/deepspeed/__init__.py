"""A DeepSpeed JSON as keys of this configuration.

What the file says counts as if it stood in `conf/`; what it leaves out or open (`"auto"`) stays as
it is here. Where the file names an optimizer or a scheduler, DeepSpeed's defaults for it hold too,
unless the command line has the key. A disagreement, inside the file or with the command line, is an
error, and so is a field that is not known; how often is logged is the command line's to say.
"""

from .mapping import Mapped, apply
from .said import leaves

__all__ = ["Mapped", "apply", "leaves"]
