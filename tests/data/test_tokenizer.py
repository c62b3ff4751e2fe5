"""Tokenizers give back the text that they were given, also after they were saved."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallel3d.data import Tokenizer, load_tokenizer, make_tokenizer, prepare

TEXTS = ["the cat sat on the mat\n", "  def f(x):\n\treturn x\n", "grün 猫 🙂\n", ""]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.mkdir()
    for number, content in enumerate([*TEXTS, "the cat and the hat\n" * 20]):
        (path / f"{number}.txt").write_text(content, encoding="utf-8")
    return path


@pytest.fixture
def hf_folder(tmp_path: Path) -> Path:
    """A tokenizer as ``save_pretrained`` writes it; it begins with </s> unless told not to."""
    import tokenizers
    import transformers

    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(TEXTS, trainer)
    inner.add_special_tokens(["</s>"])
    end = ("</s>", inner.token_to_id("</s>"))
    inner.post_processor = tokenizers.processors.TemplateProcessing("</s> $A", None, [end])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")
    fast.save_pretrained(str(tmp_path / "hf"))
    return tmp_path / "hf"


def assert_round_trips(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert all(0 <= i < tokenizer.vocab_size for i in ids)


def test_bytes_are_the_text_in_utf_8(text: Path, tmp_path: Path) -> None:
    prepare(f"text:{text}", "bytes", tmp_path / "out", progress=False)
    tokenizer = load_tokenizer(tmp_path / "out")
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (256, None)
    assert tokenizer.encode("aé") == [97, 195, 169]
    assert_round_trips(tokenizer)


def test_half_a_character_is_decoded_and_not_an_error() -> None:
    tokenizer = make_tokenizer("bytes", lambda: iter(()))
    assert tokenizer.decode([97, 195]) == "a\ufffd"
    assert tokenizer.encode("\ud800") == [ord("?")]


def test_a_bpe_learns_merges_and_ends_each_document(text: Path, tmp_path: Path) -> None:
    store = prepare(f"text:{text}", "bpe:280", tmp_path / "out", progress=False)
    tokenizer = load_tokenizer(tmp_path / "out")
    assert tokenizer.vocab_size == store.vocab_size == 280
    assert len(tokenizer.encode("the cat")) < 7
    assert_round_trips(tokenizer)
    ends = store.tokens[store.offsets[1:] - 1]
    assert (ends == tokenizer.end_of_document).all()
    assert tokenizer.decode(store.tokens[: store.offsets[1] - 1].tolist()) == TEXTS[0]


def test_text_that_spells_an_end_of_document_stays_text(text: Path, tmp_path: Path) -> None:
    prepare(f"text:{text}", "bpe:257", tmp_path / "out", progress=False)
    tokenizer = load_tokenizer(tmp_path / "out")
    ids = tokenizer.encode("a<|endoftext|>b")
    assert tokenizer.end_of_document not in ids
    assert tokenizer.decode(ids) == "a<|endoftext|>b"


def test_a_bpe_trained_twice_is_the_same(text: Path, tmp_path: Path) -> None:
    one, two = (
        prepare(f"text:{text}", "bpe:290", tmp_path / name, progress=False).meta["content"]
        for name in ("one", "two")
    )
    assert one == two


def test_a_hugging_face_tokenizer_is_kept_beside_the_tokens(
    text: Path, hf_folder: Path, tmp_path: Path
) -> None:
    store = prepare(f"text:{text}", f"hf:{hf_folder}", tmp_path / "out", progress=False)
    hf_folder.rename(tmp_path / "gone")
    tokenizer = load_tokenizer(tmp_path / "out")
    assert tokenizer.vocab_size == store.vocab_size
    assert tokenizer.end_of_document == tokenizer.vocab_size - 1
    assert_round_trips(tokenizer)


@pytest.mark.parametrize("spec", ["byte", "bpe", "bpe:", "bpe:-3", "bpe:many", "hf:", ""])
def test_another_spelling_is_refused_with_the_three_there_are(spec: str) -> None:
    with pytest.raises(ValueError, match="must be bytes, bpe:SIZE or hf:NAME_OR_FOLDER"):
        make_tokenizer(spec, lambda: iter(TEXTS))


def test_a_bpe_without_room_for_the_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="bpe:256 is too small"):
        make_tokenizer("bpe:256", lambda: iter(TEXTS))


def test_a_folder_that_is_no_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"tokenizer=hf:{tmp_path} was not loaded"):
        make_tokenizer(f"hf:{tmp_path}", lambda: iter(TEXTS))
