"""Batches are a pure function of (seed, step, slot)."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from parallel3d.data import TokenFiles
from parallel3d.data.order import split

from .corpus import counting, write

SEQ = 4


@pytest.fixture
def sixty_four(tmp_path: Path) -> Path:
    """64 windows of 4 tokens in documents of many sizes; a window is named by its first token."""
    return counting(tmp_path / "a", [100, 1, 1, 1, 50, 3, 0, 101])


def files(path: Path, batch: int = 8, seed: int = 1, share: float = 0.0) -> TokenFiles:
    return TokenFiles(path, SEQ, batch, seed=seed, validation_share=share)


def ids(data: TokenFiles, steps: range, slots: range | None = None) -> list[int]:
    """The numbers of the windows in the order they come."""
    slots = slots or range(data.global_batch_size)
    return [int(row[0]) // SEQ for step in steps for row in data.train(step, slots)[0]]


def test_a_sample_is_a_window_and_its_target_the_next_tokens(sixty_four: Path) -> None:
    x, target = files(sixty_four).train(3, [5, 0])
    assert x.shape == target.shape == (2, SEQ)
    assert x.dtype == target.dtype == torch.int64
    assert x.is_contiguous() and target.is_contiguous()
    assert torch.equal(target, x + 1)
    assert torch.equal(x, x[:, :1] + torch.arange(SEQ))


@pytest.mark.report("wyim-pgl/transgenic#59")
@pytest.mark.report("modelscope/ms-swift#10050")
@pytest.mark.report("pytorch/pytorch#31771")
def test_each_epoch_is_another_permutation_and_a_resume_continues_it(sixty_four: Path) -> None:
    whole = ids(files(sixty_four), range(24))
    epochs = [whole[:64], whole[64:128], whole[128:]]
    assert all(sorted(epoch) == list(range(64)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    for stop in (3, 11):
        resumed = ids(files(sixty_four), range(stop, 24))
        assert resumed == whole[8 * stop :]


@pytest.mark.report("pytorch/torchtitan#816")
@pytest.mark.report("pytorch/pytorch#31771")
@pytest.mark.parametrize("dp", [2, 4, 8])
def test_another_dp_size_from_any_step_on_repeats_and_drops_nothing(
    sixty_four: Path, dp: int
) -> None:
    # 24 of the 64 samples by one rank; then each of the others reads its slots on its own.
    seen = ids(files(sixty_four), range(3))
    share = 8 // dp
    for rank in range(dp):
        slots = range(rank * share, (rank + 1) * share)
        part = ids(files(sixty_four), range(3, 8), slots)
        whole = ids(files(sixty_four), range(3, 8))
        assert part == [whole[8 * step + slot] for step in range(5) for slot in slots]
        seen += part
    assert sorted(seen) == list(range(64))


@pytest.mark.report("deepspeedai/DeepSpeed#326")
@pytest.mark.report("awslabs/slapo#19")
def test_a_batch_past_the_end_of_an_epoch_goes_on_in_the_next(tmp_path: Path) -> None:
    data = files(counting(tmp_path / "a", [10 * SEQ + 1]), batch=4)
    assert data.num_train == 10
    seen = ids(data, range(5))
    assert [sorted(seen[:10]), sorted(seen[10:])] == [list(range(10))] * 2


def test_another_seed_is_another_order(sixty_four: Path) -> None:
    one, two = (ids(files(sixty_four, seed=seed), range(8)) for seed in (1, 2))
    assert one != two
    assert sorted(one) == sorted(two)


@pytest.mark.report("keras-team/keras#23202")
def test_no_document_is_in_both_parts(tmp_path: Path) -> None:
    # Document i holds only the token i.
    path = write(tmp_path / "a", [[i] * 9 for i in range(40)], 40)
    data = files(path, batch=4, share=0.25)
    train = {int(token) for step in range(20) for token in data.train(step, range(4))[0].flatten()}
    x, target = data.validation(0, range(4))
    held_out = {int(token) for token in x[target != -100]}
    assert len(held_out) > 0
    assert not train & held_out


def test_windows_run_on_over_the_documents_of_their_part(tmp_path: Path) -> None:
    sizes = [5, 9, 2, 7, 11, 0, 3, 8, 6, 1]
    data = files(counting(tmp_path / "a", sizes), batch=1, share=0.4)
    documents = torch.arange(sum(sizes)).split(sizes)
    tokens = torch.cat([documents[i] for i in split(10, 0.4, seed=1)[0]])
    expected = {tuple(row) for row in tokens.unfold(0, SEQ + 1, SEQ).tolist()}
    pairs = [data.train(step, [0]) for step in range(data.num_train)]
    seen = {(*x[0].tolist(), int(target[0, -1])) for x, target in pairs}
    assert seen == expected
    assert len(expected) == data.num_train > 4


@pytest.mark.report("Lightning-AI/litgpt#2319")
@pytest.mark.parametrize("num_windows", [0, 3])
def test_validation_comes_once_and_the_rest_is_masked(tmp_path: Path, num_windows: int) -> None:
    # Documents of one length, of which one is held out, or none.
    path = write(tmp_path / "a", [[1] * (3 * SEQ + 1)] * 2, 2)
    data = files(path, batch=4, share=0.5 if num_windows else 0.0)
    assert data.num_validation == num_windows
    for step in range(2):
        rows = [data.validation(step, [slot]) for slot in range(4)]
        counted = sum(int((target != -100).sum()) for _, target in rows)
        assert counted == (num_windows * SEQ if step == 0 else 0)
        assert all(x.shape == target.shape == (1, SEQ) for x, target in rows)


def test_a_sequence_longer_than_the_text_is_refused_with_the_longest_that_works(
    tmp_path: Path,
) -> None:
    path = counting(tmp_path / "a", [7, 3])
    with pytest.raises(ValueError, match=r"data.seq_len = 10 .* at most 9"):
        TokenFiles(path, 10, 1, validation_share=0)
    assert TokenFiles(path, 9, 1, validation_share=0).num_train == 1


@pytest.mark.parametrize(
    ("key", "value"), [("seq_len", 0), ("global_batch_size", 0), ("seq_len", 2.5)]
)
def test_wrong_sizes_are_refused_by_key(sixty_four: Path, key: str, value: object) -> None:
    arguments = {"seq_len": 4, "global_batch_size": 8} | {key: value}
    with pytest.raises(ValueError, match=rf"data.{key} = {value} must be"):
        TokenFiles(sixty_four, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(("step", "slot"), [(-1, 0), (0, 8), (0, -1)])
def test_a_slot_of_another_batch_is_refused(sixty_four: Path, step: int, slot: int) -> None:
    with pytest.raises(ValueError, match=r"data\.global_batch_size - 1 = 7"):
        files(sixty_four).train(step, [slot])


def test_unigram_entropy_is_that_of_the_frequencies(tmp_path: Path) -> None:
    path = write(tmp_path / "a", [[0] * 6 + [1] * 2] * 4, 3)
    data = files(path, share=0.5)
    expected = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert data.unigram_entropy() == pytest.approx(expected)
    assert data.unigram_entropy("train") == pytest.approx(expected)
    assert math.isnan(files(path).unigram_entropy())


@pytest.mark.report("axolotl-ai-cloud/axolotl#3690")
@pytest.mark.report("NVIDIA/Megatron-LM#725")
def test_the_fingerprint_changes_with_every_input(tmp_path: Path) -> None:
    path = counting(tmp_path / "a", [20, 20])
    other = counting(tmp_path / "b", [20, 21])
    moved = counting(tmp_path / "c", [21, 19])
    same = {"path": path, "seq_len": 4, "global_batch_size": 8, "seed": 1, "validation_share": 0.0}
    changes: list[dict[str, object]] = [
        {"path": other},
        {"path": moved},
        {"seq_len": 5},
        {"global_batch_size": 4},
        {"seed": 2},
        {"validation_share": 0.5},
    ]
    prints = [TokenFiles(**(same | change)).fingerprint for change in [{}, *changes]]  # type: ignore[arg-type]
    assert len(set(prints)) == len(prints)
    assert TokenFiles(**same).fingerprint == prints[0]  # type: ignore[arg-type]
