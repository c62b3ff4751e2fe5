"""The token files of one corpus: written as a stream, read through a memory map.

A folder holds ``tokens.bin`` (the ids of all documents, one after another), ``offsets.bin`` (int64:
where each document starts, and the end of the last) and ``meta.json``. The last is written last and
describes the others, so that a truncated or foreign file is noticed when the folder is opened.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

FORMAT = "parallel3d-tokens"
VERSION = 1
EDGE = 1 << 20  # bytes at either end of a file that are hashed whenever it is opened
FLUSH = 1 << 18  # tokens, or documents, held in memory by a writer


def dtype_for(vocab_size: int) -> np.dtype[Any]:
    """The smallest dtype, uint16 or uint32, that holds every id of a vocabulary."""
    if not 1 <= vocab_size <= 1 << 32:
        raise ValueError(f"vocab_size = {vocab_size} must be from 1 to {1 << 32}")
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def fingerprint(path: Path) -> str:
    """A hash of a file's size, its first MiB and its last: cheap however large the file is."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        digest.update(file.read(EDGE))
        file.seek(max(EDGE, size - EDGE))
        digest.update(file.read(EDGE))
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class TokenWriter:
    """Writes documents into a folder as they come; memory does not grow with their number.

    Use as a context manager around ``add``, then call ``finish`` inside it. A writer that is left
    without ``finish`` leaves no ``meta.json``, and such a folder does not open.
    """

    def __init__(self, folder: str | Path, vocab_size: int) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.vocab_size = vocab_size
        self.dtype = dtype_for(vocab_size)
        self.num_tokens = 0
        self.num_documents = 0
        # Machine integers: 2 and 8 bytes each, where a list of Python's would take 36.
        self._tokens = array("H" if self.dtype.itemsize == 2 else "I")
        self._ends = array("q", [0])
        self._digest = hashlib.sha256()
        self._tokens_file = (self.folder / "tokens.bin").open("wb")
        self._offsets_file = (self.folder / "offsets.bin").open("wb")

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._tokens_file.close()
        self._offsets_file.close()

    def add(self, ids: Sequence[int]) -> None:
        """Append one document.

        Raises ValueError for an id outside 0..vocab_size-1, and then appends nothing.
        """
        if len(ids) and (min(ids) < 0 or max(ids) >= self.vocab_size):
            wrong = next(i for i in ids if not 0 <= i < self.vocab_size)
            raise ValueError(
                f"document {self.num_documents} has the token id {wrong}, outside "
                f"0..{self.vocab_size - 1}: write it with vocab_size = {max(ids) + 1} or more, "
                f"or check that the tokenizer is the one whose vocabulary this is"
            )
        self._tokens.extend(ids)
        self.num_tokens += len(ids)
        self.num_documents += 1
        self._ends.append(self.num_tokens)
        if len(self._tokens) >= FLUSH:
            self._flush(self._tokens, self._tokens_file)
        if len(self._ends) >= FLUSH:
            self._flush(self._ends, self._offsets_file)

    def finish(self, **about: Any) -> None:
        """Write what is left and ``meta.json``, with ``about`` in it, and wait for the disk."""
        self._flush(self._tokens, self._tokens_file)
        self._flush(self._ends, self._offsets_file)
        files = {name: self.folder / name for name in ("tokens.bin", "offsets.bin")}
        meta = {
            "format": FORMAT,
            "version": VERSION,
            "dtype": self.dtype.name,
            "vocab_size": self.vocab_size,
            "num_tokens": self.num_tokens,
            "num_documents": self.num_documents,
            "content": self._digest.hexdigest(),
            "fingerprints": {name: fingerprint(path) for name, path in files.items()},
            **about,
        }
        for path in files.values():
            sync(path)
        path = self.folder / "meta.json"
        path.write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
        sync(path)
        sync(self.folder)

    def _flush(self, values: array[int], file: BinaryIO) -> None:
        if sys.byteorder == "big":
            values.byteswap()
        self._digest.update(values)
        file.write(values)
        file.flush()
        del values[:]


class TokenStore:
    """A folder of token files, memory-mapped.

        tokens   [num_tokens]         uint16 or uint32
        offsets  [num_documents + 1]  int64; document i is tokens[offsets[i]:offsets[i + 1]]

    Raises ValueError for a folder that is not there or holds something else, and RuntimeError for
    one that was damaged, each naming the file.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.meta = read_meta(self.folder)
        self.vocab_size = int(self.meta["vocab_size"])
        self.num_tokens = int(self.meta["num_tokens"])
        self.num_documents = int(self.meta["num_documents"])
        self.tokens = self._map("tokens.bin", dtype_for(self.vocab_size), self.num_tokens)
        self.offsets = self._map("offsets.bin", np.dtype("<i8"), self.num_documents + 1)

    def __reduce__(self) -> tuple[type[TokenStore], tuple[Path]]:
        # A pickled memory map would carry the whole corpus to a worker process.
        return (TokenStore, (self.folder,))

    def _map(self, name: str, dtype: np.dtype[Any], length: int) -> np.ndarray:
        path = self.folder / name
        advice = "remove the folder and prepare it again with tools/prepare_data.py"
        if not path.is_file():
            raise RuntimeError(f"{path} is missing: {advice}")
        expected, found = length * dtype.itemsize, path.stat().st_size
        if found != expected:
            raise RuntimeError(
                f"{path} has {found} bytes where meta.json says {length} x {dtype.itemsize} = "
                f"{expected}, so it was cut or is another's: {advice}"
            )
        if fingerprint(path) != self.meta["fingerprints"][name]:
            raise RuntimeError(
                f"{path} is not the file that meta.json describes (its contents differ): {advice}"
            )
        if length == 0:
            return np.empty(0, dtype)
        return np.memmap(path, dtype, "r", shape=(length,))


def read_meta(folder: Path) -> dict[str, Any]:
    """The description of a corpus; ValueError where the folder holds none of this format."""
    path = folder / "meta.json"
    if not path.is_file():
        what = "has no meta.json" if folder.is_dir() else "is not a folder"
        raise ValueError(
            f"{folder} {what}, so it holds no token files: prepare it with "
            f"`python tools/prepare_data.py source=stdlib tokenizer=bytes out={folder}`"
        )
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise RuntimeError(f"{path} is damaged ({error}): prepare the folder again") from error
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise ValueError(f"{path} does not describe token files (its format is not {FORMAT!r})")
    if meta.get("version") != VERSION:
        raise ValueError(
            f"{path} has format version {meta.get('version')}, this version of parallel3d reads "
            f"{VERSION}: prepare the folder again"
        )
    missing = {"vocab_size", "num_tokens", "num_documents", "content", "fingerprints"} - meta.keys()
    if missing:
        raise RuntimeError(f"{path} lacks {', '.join(sorted(missing))}: prepare the folder again")
    return meta
