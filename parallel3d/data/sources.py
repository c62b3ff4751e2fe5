"""Where text comes from: a source is a fixed sequence of documents that can be read again."""

from __future__ import annotations

import hashlib
import json
import platform
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .optional import require

NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
PIECE = 4096  # characters; a single text file is cut at the first line end after so many


@dataclass(frozen=True)
class Source:
    """Documents of text, in the same order whenever they are asked for."""

    spec: str
    texts: Callable[[], Iterator[str]]
    size: int | None
    """Bytes to read; None where nobody knows before the end."""
    state: str
    """Changes when a file is added, removed or touched."""


def open_source(spec: str) -> Source:
    """The source that ``stdlib``, ``text:PATH``, ``jsonl:PATH`` or ``hf:NAME_OR_FOLDER`` names.

    ``stdlib`` is the Python standard library's own source without its tests, a document a file;
    ``text`` a document for each file of a folder, or a file cut into pieces at line ends; ``jsonl``
    the field "text" of each line. Raises ValueError for another spelling or nothing to read.
    """
    kind, _, value = spec.partition(":")
    if spec == "stdlib":
        # By version: the same text may lie elsewhere, with other times, on another machine.
        return replace(_files(spec, _stdlib(), _whole), state=platform.python_version())
    if kind == "text" and value:
        path = _existing(spec, value)
        return _files(spec, _listed(path), _pieces if path.is_file() else _whole)
    if kind == "jsonl" and value:
        return _files(spec, _listed(_existing(spec, value), "*.jsonl"), _lines)
    if kind == "hf" and value:
        return _hugging_face(spec, value)
    raise ValueError(f"source={spec} must be stdlib, text:PATH, jsonl:PATH or hf:NAME_OR_FOLDER")


def _files(spec: str, files: list[Path], read: Callable[[Path], Iterable[str]]) -> Source:
    if not files:
        raise ValueError(f"source={spec} has no file to read")

    def texts() -> Iterator[str]:
        for path in files:
            yield from read(path)

    size = sum(path.stat().st_size for path in files)
    return Source(spec, texts, size, _state(files))


def _state(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        stat = path.stat()
        digest.update(f"{path} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _existing(spec: str, value: str) -> Path:
    path = Path(value)
    if not path.exists():
        raise ValueError(f"source={spec}: there is no {path} in {Path.cwd()}")
    return path


def _listed(path: Path, pattern: str = "*") -> list[Path]:
    """A file, or the files of a folder and of those in it, sorted; hidden ones are left out."""
    if path.is_file():
        return [path]
    found = [file for file in path.rglob(pattern) if file.is_file()]
    return sorted(
        file
        for file in found
        if not any(part.startswith(".") for part in file.relative_to(path).parts)
    )


def _stdlib() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    return sorted(
        path
        for path in root.rglob("*.py")
        if not NOT_LIBRARY & set(path.relative_to(root).parts[:-1])
    )


def _whole(path: Path) -> Iterator[str]:
    try:
        yield path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise _not_text(path, error) from error


def _pieces(path: Path) -> Iterator[str]:
    """A text file in pieces of whole lines: together the file, and enough of them to split."""
    piece: list[str] = []
    length = 0
    for line in _text_lines(path):
        piece.append(line)
        length += len(line)
        if length >= PIECE:
            yield "".join(piece)
            piece, length = [], 0
    yield "".join(piece)


def _lines(path: Path) -> Iterator[str]:
    for number, line in enumerate(_text_lines(path), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number} is not JSON: {error}") from error
        yield _text_of(record, f"{path}:{number}")


def _text_lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as file:
        try:
            yield from file
        except UnicodeDecodeError as error:
            raise _not_text(path, error) from error


def _not_text(path: Path, error: UnicodeDecodeError) -> ValueError:
    return ValueError(f"{path} is not UTF-8 text ({error}): convert it, or leave it out")


def _text_of(record: Any, where: str) -> str:
    text = record.get("text") if isinstance(record, dict) else None
    if isinstance(text, str):
        return text
    found = ", ".join(map(str, record)) if isinstance(record, dict) else type(record).__name__
    raise ValueError(f'{where} must have a field "text" that holds a string; it has: {found}')


def _hugging_face(spec: str, value: str) -> Source:
    """The split "train" of a data set of the hub, or of a folder laid out like one."""
    datasets = require("datasets", f"source={spec}")
    local = Path(value).is_dir()

    def texts() -> Iterator[str]:
        try:
            # Streamed, so that nothing but the tokens is kept on the disk.
            records = datasets.load_dataset(value, split="train", streaming=True)
        except (OSError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"source={spec} was not loaded: {value} must be a data set's name on the Hugging "
                f'Face hub, or a folder of its format, with a split "train" ({error})'
            ) from error
        for number, record in enumerate(records):
            yield _text_of(record, f"source={spec}, record {number}")

    return Source(spec, texts, None, _state(_listed(Path(value))) if local else value)
