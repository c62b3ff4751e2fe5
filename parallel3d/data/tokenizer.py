"""Tokenizers: bytes, byte-pair encoding trained on the corpus itself, and Hugging Face's.

What encoded a corpus is saved beside it, so that a trained model's output can be decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from .optional import require
from .store import read_meta

END_OF_DOCUMENT = "<|endoftext|>"


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def spec(self) -> str:
        """How ``make_tokenizer`` names it."""

    @property
    def vocab_size(self) -> int:
        """Ids are 0..vocab_size-1."""

    @property
    def end_of_document(self) -> int | None:
        """The id that ends a document; None: there is none, and documents end in a new line."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without an end of document."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; bytes that are no UTF-8 become U+FFFD."""

    def save(self, folder: Path) -> None:
        """Write what ``load_tokenizer`` needs to make it again."""


class ByteTokenizer:
    """A token is a byte of the text in UTF-8."""

    spec = "bytes"
    vocab_size = 256
    end_of_document = None

    def encode(self, text: str) -> list[int]:
        """The bytes of ``text``; what UTF-8 cannot say (a lone surrogate) becomes ``?``."""
        return list(text.encode("utf-8", errors="replace"))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of bytes; a part that is no UTF-8 becomes U+FFFD."""
        return bytes(map(int, ids)).decode("utf-8", errors="replace")

    def save(self, folder: Path) -> None:
        """Nothing: there is nothing to keep."""


class BpeTokenizer:
    """Byte-level byte-pair encoding (Sennrich et al., arXiv:1508.07909) by `tokenizers`."""

    end_of_document = 0

    def __init__(self, spec: str, inner: Any) -> None:
        self.spec = spec
        self.inner = inner
        # A document that spells the end of a document is text, and stays text.
        inner.encode_special_tokens = True
        self.vocab_size: int = inner.get_vocab_size()

    @classmethod
    def train(cls, size: int, texts: Iterator[str]) -> BpeTokenizer:
        """Learn at most ``size`` tokens from ``texts``; fewer if there is too little text.

        Raises ValueError where ``size`` leaves no room for the 256 bytes and an end of document.
        """
        if size < 257:
            raise ValueError(
                f"tokenizer=bpe:{size} is too small: 256 bytes and the end of a document need 257"
            )
        library = _tokenizers(f"tokenizer=bpe:{size}")
        inner = library.Tokenizer(library.models.BPE())
        inner.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = library.decoders.ByteLevel()
        trainer = library.trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=[END_OF_DOCUMENT],
            initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        inner.train_from_iterator(texts, trainer)
        return cls(f"bpe:{size}", inner)

    @classmethod
    def load(cls, spec: str, folder: Path) -> BpeTokenizer:
        """Read what ``save`` wrote."""
        library = _tokenizers(f"the tokenizer of {folder}")
        return cls(spec, library.Tokenizer.from_file(str(folder / "tokenizer.json")))

    def encode(self, text: str) -> list[int]:
        """The ids of ``text``; what UTF-8 cannot say (a lone surrogate) becomes ``?``."""
        sound = text.encode("utf-8", errors="replace").decode("utf-8")
        return self.inner.encode(sound).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, an end of document included."""
        return self.inner.decode(list(ids), skip_special_tokens=False)

    def save(self, folder: Path) -> None:
        """Write ``tokenizer.json``."""
        self.inner.save(str(folder / "tokenizer.json"))


class HfTokenizer:
    """A Hugging Face tokenizer, by the name of its repository or its folder."""

    def __init__(self, spec: str, where: str) -> None:
        library = require("transformers", f"tokenizer={spec}")
        self.spec = spec
        try:
            self.inner = library.AutoTokenizer.from_pretrained(where)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"tokenizer={spec} was not loaded: {where} must be a tokenizer's name on the "
                f"Hugging Face hub or a folder that save_pretrained wrote ({error})"
            ) from error
        # len counts the added tokens too; the attribute vocab_size does not.
        self.vocab_size = len(self.inner)
        self.end_of_document: int | None = self.inner.eos_token_id

    def encode(self, text: str) -> list[int]:
        """The ids of ``text``, with no special tokens added."""
        return self.inner.encode(text, add_special_tokens=False, verbose=False)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included."""
        return self.inner.decode(list(ids), clean_up_tokenization_spaces=False)

    def save(self, folder: Path) -> None:
        """Write the folder ``tokenizer``, so that the hub is not asked again."""
        self.inner.save_pretrained(str(folder / "tokenizer"))


def make_tokenizer(spec: str, texts: Callable[[], Iterator[str]]) -> Tokenizer:
    """The tokenizer that ``bytes``, ``bpe:SIZE`` or ``hf:NAME_OR_FOLDER`` names.

    ``texts`` gives the documents that a BPE is trained on. Raises ValueError for another spelling
    and RuntimeError where an optional package is not installed.
    """
    kind, _, value = spec.partition(":")
    if spec == "bytes":
        return ByteTokenizer()
    if kind == "bpe" and value.isdecimal():
        return BpeTokenizer.train(int(value), texts())
    if kind == "hf" and value:
        return HfTokenizer(spec, value)
    raise ValueError(f"tokenizer={spec} must be bytes, bpe:SIZE or hf:NAME_OR_FOLDER")


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer that encoded the token files in the folder ``path``."""
    folder = Path(path)
    spec = read_meta(folder).get("tokenizer", "")
    if spec == "bytes":
        return ByteTokenizer()
    if spec.startswith("bpe:"):
        return BpeTokenizer.load(spec, folder)
    if spec.startswith("hf:"):
        return HfTokenizer(spec, str(folder / "tokenizer"))
    raise ValueError(f"{folder}/meta.json names the tokenizer {spec!r}, which is unknown here")


def _tokenizers(asked: str) -> ModuleType:
    return require("tokenizers", asked)
