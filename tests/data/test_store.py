"""Token files: what is written is read back, and nothing else is."""

from __future__ import annotations

import json
import pickle
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from parallel3d.data import TokenStore, TokenWriter
from parallel3d.data.batches import starts
from parallel3d.data.store import fingerprint

from .corpus import counting, write


def test_documents_are_read_back(tmp_path: Path) -> None:
    documents = [[1, 2, 3], [], [4], [5, 6]]
    store = TokenStore(write(tmp_path / "a", documents, 7))
    assert store.offsets.tolist() == [0, 3, 3, 4, 6]
    assert store.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert (store.num_documents, store.num_tokens, store.vocab_size) == (4, 6, 7)


@pytest.mark.report("huggingface/transformers#2825")
@pytest.mark.report("princeton-nlp/LLM-Shearing#65")
@pytest.mark.parametrize(("vocab_size", "bytes_each"), [(65536, 2), (65537, 4), (70001, 4)])
def test_ids_at_the_16_bit_border_do_not_wrap(
    tmp_path: Path, vocab_size: int, bytes_each: int
) -> None:
    ids = [1, 65535, vocab_size - 1]
    store = TokenStore(write(tmp_path / "a", [ids], vocab_size))
    assert store.tokens.tolist() == ids
    assert store.tokens.dtype.itemsize == bytes_each


@pytest.mark.report("huggingface/transformers#2825")
@pytest.mark.parametrize("wrong", [65536, 70000, -1])
def test_an_id_outside_the_vocabulary_is_refused_by_value(tmp_path: Path, wrong: int) -> None:
    with TokenWriter(tmp_path / "a", 65536) as writer:
        writer.add([1, 2])
        with pytest.raises(ValueError, match=rf"document 1 .* token id {wrong}"):
            writer.add([1, wrong])
        assert writer.num_tokens == 2


@pytest.mark.report("NVIDIA/Megatron-LM#1672")
@pytest.mark.report("facebookresearch/fairseq#5532")
def test_offsets_of_int32_sizes_are_summed_in_int64() -> None:
    sizes = np.array([1_500_000_000] * 3, dtype=np.int32)
    assert starts(sizes).tolist() == [0, 1_500_000_000, 3_000_000_000, 4_500_000_000]
    merged = starts(np.concatenate([sizes, sizes]))
    assert merged.dtype == np.int64
    assert merged[-1] == 9_000_000_000


@pytest.mark.report("NVIDIA/Megatron-LM#1672")
def test_tokens_past_four_gigabytes_are_read(tmp_path: Path) -> None:
    # Three documents of 1.5e9 tokens in a sparse file: 9 GB long, a few blocks on the disk.
    size = 1_500_000_000
    folder = write(tmp_path / "a", [[0]] * 3, 65536)
    np.array([0, size, 2 * size, 3 * size], dtype=np.int64).tofile(folder / "offsets.bin")
    with (folder / "tokens.bin").open("r+b") as file:
        file.truncate(2 * 3 * size)
        file.seek(2 * 2 * size)
        file.write(np.array([11, 22], dtype=np.uint16).tobytes())
    describe_again(folder, num_tokens=3 * size)
    store = TokenStore(folder)
    begin = store.offsets[2]
    assert begin * store.tokens.dtype.itemsize == 6_000_000_000
    assert store.tokens[begin : begin + 2].tolist() == [11, 22]


@pytest.mark.report("bigcode-project/Megatron-LM#34")
def test_two_million_documents_of_one_token_stay_under_200_megabytes(tmp_path: Path) -> None:
    before, peak = resident_memory(), 0

    def documents() -> Iterator[list[int]]:
        nonlocal peak
        for number in range(2_000_000):
            yield [7]
            if number % 100_000 == 0:
                peak = max(peak, resident_memory())

    write(tmp_path / "a", documents(), 256)
    assert max(peak, resident_memory()) - before < 200e6
    store = TokenStore(tmp_path / "a")
    assert store.offsets.dtype == np.int64
    assert np.array_equal(store.offsets, np.arange(2_000_001))


@pytest.mark.parametrize("name", ["tokens.bin", "offsets.bin"])
def test_a_truncated_file_is_refused_by_name(tmp_path: Path, name: str) -> None:
    folder = counting(tmp_path / "a", [5, 5])
    with (folder / name).open("r+b") as file:
        file.truncate(8)
    with pytest.raises(RuntimeError, match=f"{name} has 8 bytes"):
        TokenStore(folder)


@pytest.mark.parametrize("name", ["tokens.bin", "offsets.bin"])
def test_a_foreign_file_of_the_right_size_is_refused_by_name(tmp_path: Path, name: str) -> None:
    folder, other = counting(tmp_path / "a", [4, 6]), write(tmp_path / "b", [[9] * 5] * 2, 10)
    (folder / name).write_bytes((other / name).read_bytes())
    with pytest.raises(RuntimeError, match=f"{name} is not the file"):
        TokenStore(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "does not describe token files"),
        ({"version": 99}, "format version 99"),
        ({"fingerprints": None}, "lacks fingerprints"),
        (None, "has no meta.json"),
        ("{", "meta.json is damaged"),
    ],
)
def test_a_foreign_or_damaged_description_is_refused(
    tmp_path: Path, change: dict[str, object] | str | None, message: str
) -> None:
    path = counting(tmp_path / "a", [5]) / "meta.json"
    if isinstance(change, dict):
        meta = json.loads(path.read_text()) | change
        path.write_text(json.dumps({key: value for key, value in meta.items() if value}))
    elif change is None:
        path.unlink()
    else:
        path.write_text(change)
    with pytest.raises((ValueError, RuntimeError), match=message):
        TokenStore(path.parent)


def test_a_writer_that_did_not_finish_leaves_nothing_that_opens(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), TokenWriter(tmp_path / "a", 10) as writer:
        writer.add([1, 2])
        raise KeyboardInterrupt
    with pytest.raises(ValueError, match=r"has no meta\.json"):
        TokenStore(tmp_path / "a")


def test_a_pickled_store_carries_its_path_and_not_its_tokens(tmp_path: Path) -> None:
    store = TokenStore(counting(tmp_path / "a", [5000]))
    message = pickle.dumps(store)
    assert len(message) < 1000
    assert pickle.loads(message).tokens.tolist() == store.tokens.tolist()


def resident_memory() -> int:
    """Bytes of this process in memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def describe_again(folder: Path, **changes: int) -> None:
    """Make ``meta.json`` fit files that a test replaced."""
    path = folder / "meta.json"
    prints = {name: fingerprint(folder / name) for name in ("tokens.bin", "offsets.bin")}
    path.write_text(json.dumps(json.loads(path.read_text()) | changes | {"fingerprints": prints}))
