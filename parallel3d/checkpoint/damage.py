"""Whether the data files of a checkpoint are there, whole and unchanged."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

from ..comm.collectives import all_gather_objects
from ..topology import Axis
from .files import Files
from .manifest import Manifest
from .names import settled


class Checksums:
    """CRC-32 of each block of a stream of bytes."""

    def __init__(self, block_bytes: int) -> None:
        self.size = 0
        self.blocks: list[int] = []
        self._block_bytes = block_bytes

    def split(self, data: memoryview) -> Iterator[memoryview]:
        """The bytes cut where blocks end, each part counted when it is handed out."""
        while data:
            at = self.size % self._block_bytes
            part = data[: self._block_bytes - at]
            if at == 0:
                self.blocks.append(0)
            self.blocks[-1] = zlib.crc32(part, self.blocks[-1])
            self.size += len(part)
            yield part
            data = data[len(part) :]


def damage(folder: Path, manifest: Manifest, world: Axis, files: Files) -> str | None:
    """What is wrong with the data files, naming one; None where they are sound. Collective.

    Every rank checks every file's size, and reads its share of the blocks.

    Moves   one small message per rank.
    """
    folder = settled(folder)
    try:
        found = wrong_size(folder, manifest, files) or _wrong_block(folder, manifest, world, files)
    except OSError as error:
        found = f"{folder} cannot be read ({error})"
    return next((text for text in all_gather_objects(found, world) if text), None)


def wrong_size(folder: Path, manifest: Manifest, files: Files) -> str | None:
    """The first file that is missing or of another size than it was written with."""
    for name, file in manifest.files.items():
        size = files.size(folder / name)
        if size is None:
            return f"{folder / name} is missing"
        if size != file.size:
            return f"{folder / name} has {size} bytes and was written with {file.size}"
    return None


def _wrong_block(folder: Path, manifest: Manifest, world: Axis, files: Files) -> str | None:
    blocks = [
        (name, index, checksum)
        for name, file in manifest.files.items()
        for index, checksum in enumerate(file.checksums)
    ]
    length = manifest.block_bytes
    for name, index, checksum in blocks[world.rank :: world.size]:
        if zlib.crc32(files.read(folder / name, index * length, length)) != checksum:
            return f"{folder / name} is corrupt: the checksum of its block {index} differs"
    return None
