"""The one door to the file system: everything a checkpoint writes, moves, reads or removes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np


class Files:
    """The local file system. A subclass may count, refuse, or die at any of these operations."""

    def make_folder(self, folder: Path) -> None:
        """Make ``folder``, which must not exist, and the parents that do not, for good."""
        if not folder.parent.is_dir():
            self.make_folder(folder.parent)
        folder.mkdir()
        self.fsync_folder(folder.parent)

    @contextmanager
    def create(self, path: Path) -> Iterator[BinaryIO]:
        """A new file, open for ``write`` and ``fsync``; unbuffered, so that a write is a write."""
        with path.open("xb", buffering=0) as file:
            yield file

    def write(self, file: BinaryIO, data: memoryview) -> None:
        """Append all of ``data``, flat bytes."""
        while data:
            data = data[file.write(data) :]

    def fsync(self, file: BinaryIO) -> None:
        """Return when the file's bytes are on the device."""
        os.fsync(file.fileno())

    def fsync_folder(self, folder: Path) -> None:
        """Return when the folder's entries (names made, moved, removed) are on the device."""
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def rename(self, source: Path, target: Path) -> None:
        """Move a folder to a name that nothing has."""
        source.rename(target)

    def remove(self, path: Path) -> None:
        """Remove one file or one empty folder."""
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink()

    def remove_folder(self, folder: Path) -> None:
        """Remove a folder and all that is in it."""
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                self.remove_folder(path)
            else:
                self.remove(path)
        self.remove(folder)

    def size(self, path: Path) -> int | None:
        """Bytes of a regular file; None where there is none."""
        return path.stat().st_size if path.is_file() else None

    def read(self, path: Path, offset: int = 0, length: int = -1) -> bytes:
        """``length`` bytes from ``offset`` on (-1: to the end); fewer where the file ends."""
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            return file.readall() if length < 0 else _exactly(file, length)

    def map(self, path: Path) -> np.ndarray:
        """A file that is not empty as bytes [size], of which only what is copied is read."""
        return np.memmap(path, dtype=np.uint8, mode="r")

    def copy(self, source: np.ndarray, target: np.ndarray) -> None:
        """Read a part of a mapped file into memory of the same shape."""
        target[...] = source


def _exactly(file: BinaryIO, length: int) -> bytes:
    parts = []
    while length and (part := file.read(length)):
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


LOCAL = Files()
