"""A store on disk: a file a unit, mapped into memory, of which few units are resident at a time.

[Note: three units] The unit that is being updated, the one after it, which is read ahead, and the
one before it, which is written behind: the memory of no other is resident. Files are made at their
full size, so a disk that is too small is an error at the start and never a dead process later.

[Note: scratch] The files are worth nothing without the process that maps them: a checkpoint has
copies. Each process has a folder of its own and holds a lock on it for as long as it lives. A
folder whose lock is free, or that has none, was left by one that was killed, and the next run
removes it. Folders are made, and those left are removed, by one process at a time, so none is seen
before it has its lock.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import secrets
import shutil
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor

from .store import Store

LOCK = "lock"
FOLDER = re.compile(r"rank-[0-9]{5}-[0-9a-f]{8}")


class DiskStore(Store):
    """As ``Store``, in files under ``path``.

    Args:
        path: a folder on a local disk; made if it is not there. Runs may share it.
        rank: names this process's folder in it, ``rank-00003-<token>``.

    Raises OSError where the folder cannot be made or the disk has not enough space.
    """

    def __init__(self, path: Path, rank: int) -> None:
        super().__init__()
        try:
            path.mkdir(parents=True, exist_ok=True)
            with _alone(path):
                remove_stale(path)
                self.folder, lock = _claim(path, rank)
        except OSError as error:
            raise OSError(
                error.errno,
                f"{error.strerror}: offload.path = {path} cannot be used: set it to a folder on a "
                f"local disk that may be written to, or offload.optimizer=cpu",
            ) from error
        self.close = weakref.finalize(self, _remove, self.folder, lock, os.getpid())
        self._files: dict[int, tuple[int, mmap.mmap]] = {}
        # Apart, so that reading ahead does not wait for what is written behind.
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="disk-read")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="disk-write")
        self._writing: Future[None] | None = None

    def fetch(self, unit: int) -> None:
        """Have the kernel read a unit's file, in the background."""
        if unit in self._files:
            self._reader.submit(_advise, self._files[unit][1], mmap.MADV_WILLNEED)

    def release(self, unit: int) -> None:
        """Write a unit's file and let go of its memory, in the background, one unit at a time."""
        self.settle()
        if unit in self._files:
            self._writing = self._writer.submit(_write, *self._files[unit])

    def let_go(self, unit: int) -> None:
        """Keep no memory of a unit's file; what was written to it stays with the kernel."""
        if unit in self._files:
            _advise(self._files[unit][1], mmap.MADV_DONTNEED)

    def settle(self) -> None:
        """Wait until nothing is being written. Raises OSError if it could not be."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def _block(self, unit: int, size: int) -> Tensor:
        if size == 0:
            return super()._block(unit, size)
        path = self.folder / f"unit-{unit:05d}.bin"
        handle = _allocate(path, size)
        weakref.finalize(self, os.close, handle)
        mapped = mmap.mmap(handle, size)
        self._files[unit] = (handle, mapped)
        return torch.frombuffer(mapped, dtype=torch.uint8)


def remove_stale(path: Path) -> None:
    """Remove the folders of processes that were killed."""
    for folder in filter(lambda each: FOLDER.fullmatch(each.name), path.iterdir()):
        with suppress(OSError):  # another process may be removing it
            handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(handle)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Wait for others that make or remove folders here, and keep them out."""
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _claim(path: Path, rank: int) -> tuple[Path, int]:
    """A folder of this process, and the handle of its lock."""
    folder = path / f"rank-{rank:05d}-{secrets.token_hex(4)}"
    folder.mkdir()
    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(handle, fcntl.LOCK_EX)
    return folder, handle


def _allocate(path: Path, size: int) -> int:
    """A new file of this size, with all its blocks; the open handle."""
    free = shutil.disk_usage(path.parent).free
    try:
        if free < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(handle, 0, size)
        except OSError:
            os.close(handle)
            path.unlink()
            raise
    except OSError as error:
        raise OSError(
            error.errno,
            f"{error.strerror}: {path} needs {size:,} bytes and the disk has {free:,} left: set "
            f"offload.path to a larger disk, or offload.optimizer=cpu",
        ) from error
    return handle


def _remove(folder: Path, lock: int, process: int) -> None:
    if os.getpid() == process:  # and not a forked child, which ends earlier
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _advise(mapped: mmap.mmap, advice: int) -> None:
    mapped.madvise(advice)


def _write(handle: int, mapped: mmap.mmap) -> None:
    os.fdatasync(handle)
    mapped.madvise(mmap.MADV_DONTNEED)
    # What the kernel keeps of the file counts for the job's memory limit too.
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
