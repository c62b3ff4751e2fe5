"""What a checkpoint says of itself: ``manifest.json``, written last and read first.

    {"crc32": of the rest, "format": "parallel3d", "version": 1, "meta": {...}, "block_bytes": n,
     "files":   {"rank-00000.bin": {"bytes": n, "crc32": [one per block of block_bytes]}},
     "tensors": {KEY: {"shape": [...], "dtype": "float32", "pieces": [
                 {"file": NAME, "offset": BYTES, "rectangles": [[row, col, rows, cols], ...]}]}}}

A data file holds raw little-endian elements and nothing else; a piece's rectangles lie in it one
after the other, each row-major. Strict JSON: a pickle is never read, NaN is refused.
"""

from __future__ import annotations

import json
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..placement import Rectangle, view_2d
from .cover import covers_once
from .files import Files
from .fragment import DTYPES, check_inside
from .names import settled

NAME = "manifest.json"
FORMAT = {"format": "parallel3d", "version": 1}
BLOCK_BYTES = 16 * 2**20
DATA_FILE = re.compile(r"rank-\d{5,}\.bin")


@dataclass(frozen=True)
class Piece:
    """Rectangles that lie one after the other in a data file, from byte ``offset`` on."""

    file: str
    offset: int
    rectangles: list[Rectangle]


@dataclass(frozen=True)
class TensorEntry:
    """One whole tensor and where its parts are."""

    shape: tuple[int, ...]
    dtype: str
    pieces: list[Piece]

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class DataFile:
    """Size of a data file in bytes, and the CRC-32 of each of its blocks."""

    size: int
    checksums: list[int]


@dataclass(frozen=True)
class Manifest:
    """Tensors by key, data files by name, and the caller's ``meta``."""

    meta: dict[str, Any]
    tensors: dict[str, TensorEntry]
    files: dict[str, DataFile]
    block_bytes: int = BLOCK_BYTES

    def check(self) -> None:
        """Raise ValueError unless every element of every tensor is saved exactly once."""
        for key, entry in self.tensors.items():
            places = [place for piece in entry.pieces for place in piece.rectangles]
            check_inside(key, entry.shape, places)
            view = view_2d(entry.shape)
            if not covers_once(view, places):
                total, saved = view[0] * view[1], sum(place.area for place in places)
                raise ValueError(
                    f"{key} has {total} elements and its fragments {saved}: every element must be "
                    f"in exactly one fragment of one rank, and some are in none or in several"
                )

    def to_json(self) -> str:
        """The text of the file."""
        body = {
            **FORMAT,
            "meta": self.meta,
            "block_bytes": self.block_bytes,
            "files": {n: {"bytes": f.size, "crc32": f.checksums} for n, f in self.files.items()},
            "tensors": {
                key: {
                    "shape": list(entry.shape),
                    "dtype": entry.dtype,
                    "pieces": [
                        {"file": p.file, "offset": p.offset, "rectangles": p.rectangles}
                        for p in entry.pieces
                    ],
                }
                for key, entry in self.tensors.items()
            },
        }
        return _dump({"crc32": zlib.crc32(_dump(body).encode()), **body})

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """The inverse of ``to_json``; ValueError (or KeyError, TypeError) for anything else."""
        body = json.loads(text, parse_constant=_refuse)
        checksum = body.pop("crc32")
        if {name: body[name] for name in FORMAT} != FORMAT:
            raise ValueError(f"format {body['format']!r}, version {body['version']!r} are not ours")
        if zlib.crc32(_dump(body).encode()) != checksum:
            raise ValueError("its checksum differs from its content")
        files = {n: DataFile(f["bytes"], f["crc32"]) for n, f in body["files"].items()}
        tensors = {
            key: TensorEntry(
                tuple(entry["shape"]),
                entry["dtype"],
                [
                    Piece(p["file"], p["offset"], [Rectangle(*r) for r in p["rectangles"]])
                    for p in entry["pieces"]
                ],
            )
            for key, entry in body["tensors"].items()
        }
        manifest = cls(body["meta"], tensors, files, body["block_bytes"])
        manifest._check_files()
        manifest.check()
        return manifest

    def _check_files(self) -> None:
        for name in self.files:
            if not DATA_FILE.fullmatch(name):
                raise ValueError(f"{name!r} is not the name of a data file")
        for key, entry in self.tensors.items():
            if entry.dtype not in DTYPES:
                raise ValueError(f"{key} has the unknown dtype {entry.dtype!r}")
            for piece in entry.pieces:
                end = piece.offset + entry.itemsize * sum(r.area for r in piece.rectangles)
                if not 0 <= piece.offset <= end <= self.files[piece.file].size:
                    raise ValueError(f"{key} leaves the file {piece.file}")


def read_manifest(folder: Path, files: Files) -> Manifest:
    """The manifest of a checkpoint; RuntimeError where there is none or it is damaged."""
    folder = settled(folder)
    path = folder / NAME
    if files.size(path) is None:
        found = f"has no {NAME}: its save never ended" if folder.is_dir() else "does not exist"
        raise RuntimeError(f"checkpoint {folder} {found}")
    try:
        return Manifest.from_json(files.read(path).decode())
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise RuntimeError(f"{path} is damaged ({type(error).__name__}: {error})") from error


def check_meta(meta: dict[str, Any]) -> None:
    """Raise ValueError unless ``meta`` comes back from JSON as it went in (tuples as lists)."""
    _check_plain(meta, "meta")


def _check_plain(value: Any, where: str) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{where} has the key {key!r}; JSON keys are strings")
            _check_plain(item, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_plain(item, f"{where}[{index}]")
    elif isinstance(value, float) and value - value != 0:
        raise ValueError(f"{where} is {value}; JSON has finite numbers only, use None")
    elif not isinstance(value, str | int | float | None):
        raise ValueError(f"{where} is a {type(value).__name__}; give plain Python values")


def _dump(body: dict[str, Any]) -> str:
    return json.dumps(body, allow_nan=False, separators=(",", ":"))


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
