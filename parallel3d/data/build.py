"""Text to token files: once on a machine, whole or not at all."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from .sources import Source, open_source
from .store import TokenStore, TokenWriter, sync
from .tokenizer import Tokenizer, make_tokenizer


def prepare(source: str, tokenizer: str, out: str | Path, progress: bool = True) -> TokenStore:
    """Make the folder ``out`` of token files, unless it is there already, and open it.

    Every process may call it: on each machine one of them builds, under a lock that ends with its
    process, and the others wait and open the result. The folder appears whole, by one rename. With
    ``progress`` the builder shows a bar on the terminal.

    Args:
        source: ``stdlib``, ``text:PATH``, ``jsonl:PATH`` or ``hf:NAME_OR_FOLDER``.
        tokenizer: ``bytes``, ``bpe:SIZE`` or ``hf:NAME_OR_FOLDER``.
        out: the folder.
        progress: whether to show it.

    Raises ValueError for a wrong name, for a source without text, and for an ``out`` that holds
    something else, also the tokens of another source, tokenizer or state of the files.
    """
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with _locked(out.parent / f".{out.name}.lock"):
        opened = open_source(source)
        if out.exists() and not (out.is_dir() and not any(out.iterdir())):
            return _reuse(out, opened, tokenizer)
        # The lock is ours, so whatever has this name was left by a process that was killed.
        partial = out.parent / f".{out.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        try:
            _build(opened, tokenizer, partial, out.name if progress else None)
            partial.rename(out)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        sync(out.parent)
    return TokenStore(out)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a file's lock. The kernel gives it back when its process ends, however it ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _reuse(out: Path, source: Source, tokenizer: str) -> TokenStore:
    store = TokenStore(out)
    made = (store.meta.get("source"), store.meta.get("tokenizer"))
    if made != (source.spec, tokenizer):
        raise ValueError(
            f"{out} holds source={made[0]} tokenizer={made[1]}, not source={source.spec} "
            f"tokenizer={tokenizer}: choose another out=, or remove the folder"
        )
    if store.meta.get("source_state") != source.state:
        raise ValueError(
            f"{out} was made from source={source.spec} before its files changed: choose another "
            f"out=, or remove the folder to make it again"
        )
    return store


def _build(source: Source, tokenizer: str, folder: Path, shown_as: str | None) -> None:
    with _bars(shown_as) as bar:
        trains = tokenizer.startswith("bpe:")
        learn = bar("training the tokenizer", source) if trains else source.texts
        made = make_tokenizer(tokenizer, learn)
        with TokenWriter(folder, made.vocab_size) as writer:
            for text in bar("writing tokens", source)():
                if text:
                    writer.add(_document(made, text))
            if writer.num_tokens == 0:
                raise ValueError(f"source={source.spec} has no text")
            made.save(folder)
            _sync_all(folder)
            writer.finish(tokenizer=tokenizer, source=source.spec, source_state=source.state)


def _document(tokenizer: Tokenizer, text: str) -> list[int]:
    if tokenizer.end_of_document is not None:
        return [*tokenizer.encode(text), tokenizer.end_of_document]
    return tokenizer.encode(text if text.endswith("\n") else text + "\n")


def _sync_all(folder: Path) -> None:
    for place, _, names in os.walk(folder):
        for name in (*names, ""):
            sync(Path(place) / name)


@contextmanager
def _bars(name: str | None) -> Iterator[Callable[[str, Source], Callable[[], Iterator[str]]]]:
    """Gives ``bar(what, source)``: the texts of a source, whose reading moves a new bar."""
    columns = (
        TextColumn(f"{name}: {{task.description}}"),
        BarColumn(),
        TextColumn("{task.fields[documents]} documents"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=name is None) as progress:

        def bar(what: str, source: Source) -> Callable[[], Iterator[str]]:
            def texts() -> Iterator[str]:
                task = progress.add_task(what, total=source.size, documents=0)
                for number, text in enumerate(source.texts(), 1):
                    yield text
                    progress.update(
                        task, advance=len(text.encode(errors="replace")), documents=number
                    )

            return texts

        yield bar
