"""How a rank ends when its main thread cannot."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from threading import Thread

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


def end(said: str, reported: str) -> None:
    """Print ``said``, leave ``reported`` where a launcher of torchelastic looks, exit with 1.

    Nothing here may wait for the main thread, which may hold any lock.
    """
    _write_error_file(reported)
    flushing = Thread(target=_flush, daemon=True)
    flushing.start()
    flushing.join(1.0)
    with suppress(OSError):
        os.write(2, f"\n{said}\n".encode(errors="replace"))
    os._exit(1)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


def _write_error_file(text: str) -> None:
    """What ``torch.distributed.elastic`` writes of an exception; its summary shows the text."""
    path = os.environ.get(ERROR_FILE)
    if not path:
        return
    about = {"py_callstack": text, "timestamp": str(int(time.time()))}
    with suppress(OSError), Path(path).open("x") as file:
        json.dump({"message": {"message": text, "extraInfo": about}}, file)
