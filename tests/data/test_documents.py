"""Batches that say which document each token is of."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel3d.config import check_resume, compose, to_plain
from parallel3d.data import Prefetch, TokenFiles, prepare
from parallel3d.data.order import split

from .corpus import counting, write

SEQ = 4


def files(path: Path, **arguments: Any) -> TokenFiles:
    given = {"seq_len": SEQ, "global_batch_size": 1, "seed": 1, "validation_share": 0.0}
    return TokenFiles(path, **{**given, "documents": True, **arguments})


def windows(data: TokenFiles) -> dict[int, tuple[list[int], list[int], list[int]]]:
    """By first token, of an epoch of training: tokens, documents, targets."""
    seen = {}
    for step in range(data.num_train):
        (tokens, documents), target = data.train(step, [0])
        for each in (tokens, documents, target):
            assert each.shape == (1, SEQ) and each.dtype == torch.int64 and each.is_contiguous()
        seen[int(tokens[0, 0])] = (tokens[0].tolist(), documents[0].tolist(), target[0].tolist())
    return seen


@pytest.mark.parametrize(
    ("sizes", "start", "documents", "target"),
    [
        pytest.param([2, 7], 0, [0, 0, 1, 1], [1, -100, 3, 4], id="a border inside"),
        pytest.param([4, 5], 0, [0, 0, 0, 0], [1, 2, 3, -100], id="a border at the end"),
        pytest.param([4, 5], 4, [1, 1, 1, 1], [5, 6, 7, 8], id="a border at the start"),
        pytest.param([5, 4], 0, [0, 0, 0, 0], [1, 2, 3, 4], id="the last target ends one"),
        pytest.param([5, 4], 4, [0, 1, 1, 1], [-100, 6, 7, 8], id="one token of the first"),
        pytest.param([13, 1], 4, [0, 0, 0, 0], [5, 6, 7, 8], id="longer than the window"),
        pytest.param([1, 1, 1, 1, 1], 0, [0, 1, 2, 3], [-100] * 4, id="single tokens"),
        pytest.param([1, 0, 0, 2, 2], 0, [0, 3, 3, 4], [-100, 2, -100, 4], id="empty ones"),
    ],
)
def test_a_target_is_the_next_token_of_the_same_document(
    tmp_path: Path, sizes: list[int], start: int, documents: list[int], target: list[int]
) -> None:
    seen = windows(files(counting(tmp_path / "a", sizes)))
    assert seen[start] == (list(range(start, start + SEQ)), documents, target)


def test_every_token_but_the_first_of_a_document_is_a_target_once(tmp_path: Path) -> None:
    sizes = [5, 9, 2, 7, 11, 0, 3, 8, 6, 1]
    data = files(counting(tmp_path / "a", sizes), validation_share=0.4)
    ends = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    training = split(len(sizes), 0.4, seed=1)[0].tolist()
    tokens = [(i, t) for i in training for t in range(ends[i], ends[i + 1])]
    used = tokens[: data.num_train * SEQ + 1]
    expected = [(i, t) for (i, t), (before, _) in zip(used[1:], used, strict=False) if i == before]
    seen = [
        (document, target)
        for _, documents, targets in windows(data).values()
        for document, target in zip(documents, targets, strict=True)
        if target != -100
    ]
    assert sorted(seen) == expected


def test_documents_change_neither_the_windows_nor_their_order(tmp_path: Path) -> None:
    path = counting(tmp_path / "a", [30, 1, 1, 40, 25])
    apart, plain = (
        files(path, global_batch_size=4),
        files(path, global_batch_size=4, documents=False),
    )
    for step in range(12):
        (tokens, documents), target = apart.train(step, range(4))
        x, true = plain.train(step, range(4))
        assert torch.equal(tokens, x)
        assert torch.equal(target[target != -100], true[target != -100])
        assert all(a <= b for row in documents.tolist() for a, b in pairwise(row))


def test_rows_past_the_last_window_of_validation_count_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "a", [[1] * (2 * SEQ + 1)] * 2, 2)
    data = files(path, global_batch_size=4, validation_share=0.5)
    (tokens, documents), target = data.validation(0, range(4))
    assert tokens.shape == documents.shape == target.shape == (4, SEQ)
    assert (target != -100).sum(1).tolist() == [SEQ, SEQ, 0, 0]
    assert not tokens[2:].any() and not documents[2:].any()


def test_borders_are_those_of_the_text_without_a_token_for_them(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for name in ("a", "b"):
        (tmp_path / "text" / name).write_text(name * 5)  # 5 bytes, and a new line at the end
    prepare(f"text:{tmp_path / 'text'}", "bytes", tmp_path / "out", progress=False)
    data = files(tmp_path / "out", seq_len=11)
    (tokens, documents), target = data.train(0, [0])
    assert documents.tolist() == [[0] * 6 + [1] * 5]
    assert bytes(tokens[0].tolist()) == b"aaaaa\nbbbbb"
    assert bytes(t for t in target[0].tolist() if t != -100) == b"aaaa\nbbbb\n"


def test_workers_hand_on_the_same_pairs(tmp_path: Path) -> None:
    data = files(counting(tmp_path / "a", [9, 20, 16]), global_batch_size=4)
    direct, ahead = (
        list(Prefetch(data.train, [0, 2], 1, 4, workers=workers)) for workers in (0, 2)
    )
    for (x, target), (y, other) in zip(direct, ahead, strict=True):
        assert isinstance(y, tuple)
        assert all(torch.equal(a, b) for a, b in zip((*x, target), (*y, other), strict=True))


def test_the_fingerprint_is_the_old_one_without_documents_and_another_with(tmp_path: Path) -> None:
    path = counting(tmp_path / "a", [20, 20])
    plain = files(path, global_batch_size=8, documents=False).fingerprint
    # Of a run that began before there were documents.
    assert plain == "2235bf96ac595947a0909b64db7a20b3686472a339bebfc132bfb913cef1e54b"
    assert files(path, global_batch_size=8).fingerprint != plain


def test_the_key_is_data_documents_and_a_run_goes_on_only_with_its_own() -> None:
    plain, apart = compose(), compose("data.documents=true")
    assert "documents" not in to_plain(plain)["data"]
    assert to_plain(apart)["data"]["documents"] is True
    with pytest.raises(ValueError, match=r"data\.documents = true, but the run to resume has null"):
        check_resume(plain, apart)
    with pytest.raises(ValueError, match=r"data\.documents = 'some' is not true or false"):
        compose("data.documents=some")
    with pytest.raises(ValueError, match=r"did you mean data\.documents\?"):
        compose("data.document=true")
