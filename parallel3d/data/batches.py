"""Batches from token files, as a pure function of (seed, step, slot)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from .order import permute, split
from .store import TokenStore

IGNORED = -100  # a target that counts neither in the loss nor among its items
NO_WINDOW = -1  # in the place of a window's number: a row of padding
CHUNK = 1 << 20  # tokens counted at a time


class TokenFiles:
    """Language-model batches from a folder that ``tools/prepare_data.py`` wrote.

    The documents are split into training and validation; each part is read as one sequence of
    tokens and cut into windows of ``seq_len + 1`` that overlap by one token, so that every token
    but the first is a target once in an epoch. Sample ``step * global_batch_size + slot`` of
    training is a window of epoch ``sample // num_train``, and each epoch has its own permutation:
    any process can make any batch, at once, and the number of processes or a resume changes
    nothing. No batch is short: one that reaches the end of an epoch goes on in the next.

    With ``documents`` the windows are the same, and each token has the number of its document. A
    document's first token is no target, as nothing that a model may see comes before it. Where a
    window starts inside a document, what it holds of it stands alone.

    Args:
        path: the folder.
        seq_len: tokens a sample; ValueError names the largest that works.
        global_batch_size: samples a step over all ranks; slots count from 0 to it.
        seed: of the split and of the order.
        validation_share: the share of the documents held out, 0 <= share < 1.
        documents: x is (tokens, documents), both int64 ``[n, seq_len]``; a token's document is its
            number in the folder, ascending along a row. A target of another document is -100.
    """

    def __init__(
        self,
        path: str | Path,
        seq_len: int,
        global_batch_size: int,
        seed: int = 0,
        validation_share: float = 0.05,
        documents: bool = False,
    ) -> None:
        for name, value in (("seq_len", seq_len), ("global_batch_size", global_batch_size)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"data.{name} = {value!r} must be a whole number of at least 1")
        self.store = TokenStore(path)
        self.vocab_size = self.store.vocab_size
        self.seq_len = seq_len
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.validation_share = validation_share
        self.documents = documents
        train, held_out = split(self.store.num_documents, validation_share, seed)
        self._train = Documents(self.store, train)
        self._validation = Documents(self.store, held_out)
        if self.num_train < 1:
            raise ValueError(
                f"data.seq_len = {seq_len} needs {seq_len + 1} tokens, but the training part of "
                f"{path} has {len(self._train)}: data.seq_len may be at most "
                f"{len(self._train) - 1}, or prepare more text"
            )

    @property
    def num_train(self) -> int:
        """Windows of an epoch of training."""
        return (len(self._train) - 1) // self.seq_len

    @property
    def num_validation(self) -> int:
        """Windows of validation; 0 if too few documents, or tokens, are held out for one."""
        return max(0, (len(self._validation) - 1) // self.seq_len)

    @property
    def fingerprint(self) -> str:
        """A hash of the tokens and of every argument that the batches depend on."""
        parts = (self.seq_len, self.global_batch_size, self.seed, self.validation_share)
        text = " ".join([self.store.meta["content"], *map(repr, parts)])
        if self.documents:
            text += " documents"
        return hashlib.sha256(text.encode()).hexdigest()

    def train(self, step: int, slots: Sequence[int]) -> tuple[Any, Tensor]:
        """The training samples of these slots of a step (from 0).

        Returns (x, target), int64 ``[len(slots), seq_len]``; target is x one token later. With
        ``documents``, x is a pair of such tensors.
        """
        sample = self._samples(step, slots)
        epoch, index = np.divmod(sample, self.num_train)
        window = np.empty_like(index)
        for number in np.unique(epoch):
            now = epoch == number
            window[now] = permute(index[now], self.num_train, "train", self.seed, int(number))
        return self._batch(self._train, window)

    def sample_microbatch(self, size: int) -> tuple[Any, Tensor]:
        """``size`` samples as of a step, by which the cost of a microbatch is told at the start."""
        return self.train(0, range(size))

    def validation(self, step: int, slots: Sequence[int]) -> tuple[Any, Tensor]:
        """The validation samples of these slots of an evaluation step (from 0).

        Shaped as ``train``. Each window comes once, in one fixed shuffled order. Rows past the
        last window hold the token 0 and targets of -100, so every rank has a batch of the same
        shape and the loss per item is the mean over exactly the windows there are.
        """
        sample = self._samples(step, slots)
        there = sample < self.num_validation
        window = np.full_like(sample, NO_WINDOW)
        window[there] = permute(sample[there], self.num_validation, "validation", self.seed)
        return self._batch(self._validation, window)

    def unigram_entropy(self, part: Literal["validation", "train"] = "validation") -> float:
        """Entropy of the token frequencies of a part, in nats per token; NaN if it is empty.

        No model that ignores the context has a lower mean cross entropy on that part.
        """
        counts = {"validation": self._validation, "train": self._train}[part].counts()
        share = counts[counts > 0] / max(1, counts.sum())
        return float(-(share * np.log(share)).sum()) if len(share) else math.nan

    def _samples(self, step: int, slots: Sequence[int]) -> np.ndarray:
        slot = np.asarray(slots, dtype=np.int64).reshape(-1)
        if step < 0 or (slot < 0).any() or (slot >= self.global_batch_size).any():
            raise ValueError(
                f"step = {step}, slots = {list(slots)}: steps count from 0, and slots from 0 to "
                f"data.global_batch_size - 1 = {self.global_batch_size - 1}"
            )
        return step * self.global_batch_size + slot

    def _batch(self, part: Documents, windows: np.ndarray) -> tuple[Any, Tensor]:
        shape = (len(windows), self.seq_len + 1)
        tokens, documents = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        for row, window in enumerate(windows.tolist()):
            if window != NO_WINDOW:
                at = window * self.seq_len
                part.read(at, tokens[row], documents[row] if self.documents else None)
        target = tokens[:, 1:].copy()
        target[windows == NO_WINDOW] = IGNORED
        target[documents[:, 1:] != documents[:, :-1]] = IGNORED
        x = torch.from_numpy(tokens[:, :-1].copy())
        if self.documents:
            return (x, torch.from_numpy(documents[:, :-1].copy())), torch.from_numpy(target)
        return x, torch.from_numpy(target)


class Documents:
    """Some documents of a store, read as one sequence of tokens.

    Neighbours in the store are one piece, so that reading touches few of them.
    """

    def __init__(self, store: TokenStore, documents: np.ndarray) -> None:
        self._store = store
        first = np.flatnonzero(np.diff(documents, prepend=-2) != 1)
        last = np.append(first[1:], len(documents))[: len(first)] - 1
        self._begin = np.asarray(store.offsets[documents[first]])
        self._starts = starts(store.offsets[documents[last] + 1] - self._begin)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, at: int, out: np.ndarray, documents: np.ndarray | None = None) -> None:
        """Copy the tokens from position ``at`` on into ``out``.

        The numbers of their documents in the store go into ``documents``, of the same length.
        """
        piece = int(np.searchsorted(self._starts, at, side="right")) - 1
        done = 0
        while done < len(out):
            skip = at + done - int(self._starts[piece])
            length = min(len(out) - done, self._length(piece) - skip)
            begin = int(self._begin[piece]) + skip
            out[done : done + length] = self._store.tokens[begin : begin + length]
            if documents is not None:
                documents[done : done + length] = self._document_of(begin, length)
            done += length
            piece += 1

    def counts(self) -> np.ndarray:
        """How often each token id occurs, int64 ``[vocab_size]``."""
        total = np.zeros(self._store.vocab_size, dtype=np.int64)
        for at in range(0, len(self), CHUNK):
            part = np.empty(min(CHUNK, len(self) - at), dtype=np.int64)
            self.read(at, part)
            total += np.bincount(part, minlength=len(total))
        return total

    def _document_of(self, begin: int, length: int) -> np.ndarray:
        """The documents of tokens that follow each other in the store; empty ones have none."""
        places = np.arange(begin, begin + length)
        return np.searchsorted(self._store.offsets, places, side="right") - 1

    def _length(self, piece: int) -> int:
        return int(self._starts[piece + 1] - self._starts[piece])


def starts(sizes: Any) -> np.ndarray:
    """Where each of some pieces starts when they lie end to end, then the whole length; int64.

    The sum is taken in int64 whatever the dtype of ``sizes``.
    """
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])
