"""Sources of text give their documents in one order."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from parallel3d.data.sources import open_source


def test_stdlib_is_library_source_in_a_fixed_order() -> None:
    source = open_source("stdlib")
    texts = source.texts()
    first = [next(texts) for _ in range(5)]
    again = source.texts()
    assert first == [next(again) for _ in range(5)]
    assert source.size is not None and source.size > 5_000_000


def test_a_folder_is_a_document_a_file_sorted_without_hidden_ones(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    for name in ("b.txt", "a.txt", "sub/c.txt", ".hidden", ".git/config"):
        (tmp_path / name).write_text(name)
    source = open_source(f"text:{tmp_path}")
    assert list(source.texts()) == ["a.txt", "b.txt", "sub/c.txt"]


def test_the_pieces_of_a_single_file_are_the_file(tmp_path: Path) -> None:
    text = "".join(f"line {i} is här\n" for i in range(2000)) + "no line end"
    path = tmp_path / "book.txt"
    path.write_text(text, encoding="utf-8")
    pieces = list(open_source(f"text:{path}").texts())
    assert "".join(pieces) == text
    assert len(pieces) > 5
    assert all(piece.endswith("\n") for piece in pieces[:-1])


def test_jsonl_gives_the_field_text_of_each_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one\\n", "id": 1}\n\n{"text": "två"}\n', encoding="utf-8")
    assert list(open_source(f"jsonl:{path}").texts()) == ["one\n", "två"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{oops", r"a.jsonl:2 is not JSON"),
        ('{"body": "x", "id": 3}', r'a.jsonl:2 .* field "text" .* has: body, id'),
        ('{"text": 5}', r"a.jsonl:2 .* holds a string"),
        ("[1]", r"a.jsonl:2 .* has: list"),
    ],
)
def test_a_bad_line_is_refused_by_number(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(ValueError, match=message):
        list(open_source(f"jsonl:{path}").texts())


@pytest.mark.parametrize("form", ["file", "folder"])
def test_a_file_that_is_no_text_is_refused_by_name(tmp_path: Path, form: str) -> None:
    path = tmp_path / "image.txt"
    path.write_bytes(b"\xff\xd8\xff")
    with pytest.raises(ValueError, match=r"image.txt is not UTF-8 text"):
        list(open_source(f"text:{path if form == 'file' else tmp_path}").texts())


@pytest.mark.parametrize("spec", ["stdlb", "text:", "text", "csv:a", "", "jsonl:"])
def test_another_spelling_is_refused_with_the_four_there_are(spec: str) -> None:
    with pytest.raises(ValueError, match="must be stdlib, text:PATH, jsonl:PATH or hf:NAME"):
        open_source(spec)


def test_a_path_that_is_not_there_and_a_folder_without_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no"):
        open_source(f"text:{tmp_path / 'no'}")
    with pytest.raises(ValueError, match="has no file to read"):
        open_source(f"jsonl:{tmp_path}")


@pytest.mark.report("axolotl-ai-cloud/axolotl#3690")
def test_the_state_changes_with_a_files_size_time_and_name(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")
    os.utime(path, ns=(0, 0))

    def state() -> str:
        return open_source(f"text:{tmp_path}").state

    states = [state()]
    path.write_text("longer")
    os.utime(path, ns=(0, 0))
    states.append(state())
    os.utime(path, ns=(1, 1))
    states.append(state())
    path.rename(tmp_path / "b.txt")
    states.append(state())
    assert len(set(states)) == 4
    assert state() == states[-1]


def test_a_local_folder_of_the_hubs_format_is_read_by_its_train_split(tmp_path: Path) -> None:
    for name, text in (("train", "one"), ("validation", "not this")):
        line = json.dumps({"text": text, "url": "x"}) + "\n"
        (tmp_path / f"{name}.jsonl").write_text(line * 2)
    source = open_source(f"hf:{tmp_path}")
    assert list(source.texts()) == ["one", "one"]


def test_a_data_set_without_text_is_refused_by_its_fields(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"body": "one"}\n')
    with pytest.raises(ValueError, match=r'record 0 .* field "text" .* has: body'):
        list(open_source(f"hf:{tmp_path}").texts())


def test_a_missing_package_is_named_with_the_way_to_install_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from parallel3d.data import optional

    def absent(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(optional.importlib, "import_module", absent)
    with pytest.raises(RuntimeError, match=r"datasets, which is not .* 'parallel3d\[hf\]'"):
        open_source(f"hf:{tmp_path}")
