from __future__ import annotations

import json
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel3d.checkpoint import LOCAL, Fragment, load, read_manifest, save
from parallel3d.checkpoint.manifest import Manifest
from parallel3d.topology import Axis

WORLD = Axis.single("world")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "step-00000001"
    fragments = [Fragment.whole("weight/a", torch.arange(6.0).view(2, 3))]
    save(folder, fragments, {"step": 1, "loss": 0.1, "betas": (0.9, 0.95), "name": "ü"}, WORLD)
    return folder


def rewrite(checkpoint: Path, **changes: Any) -> None:
    """Change entries and make the checksum right again, as only an adversary would."""
    path = checkpoint / "manifest.json"
    manifest = Manifest.from_json(path.read_text())
    path.write_text(Manifest(**{**vars(manifest), **changes}).to_json())


def test_meta_comes_back_as_it_went_in(checkpoint: Path) -> None:
    meta = load(checkpoint, [Fragment.whole("weight/a", torch.zeros(2, 3))], WORLD)
    assert meta == {"step": 1, "loss": 0.1, "betas": [0.9, 0.95], "name": "ü"}


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"loss": math.nan}, r"meta\['loss'\] is nan; JSON has finite numbers only, use None"),
        ({"a": [{"b": math.inf}]}, r"meta\['a'\]\[0\]\['b'\] is inf"),
        ({"lr": {0: 1.0}}, r"meta\['lr'\] has the key 0; JSON keys are strings"),
        ({"step": torch.tensor(1)}, r"meta\['step'\] is a Tensor; give plain Python values"),
    ],
)
def test_meta_that_json_would_change_is_refused(
    tmp_path: Path, meta: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        save(tmp_path / "a", [], meta, WORLD)
    assert not list(tmp_path.iterdir())


def test_the_manifest_is_strict_json_and_names_every_file(checkpoint: Path) -> None:
    body = json.loads((checkpoint / "manifest.json").read_text())
    assert body["format"] == "parallel3d" and body["version"] == 1
    assert set(body["files"]) == {path.name for path in checkpoint.glob("*.bin")}
    assert body["tensors"]["weight/a"]["shape"] == [2, 3]


def test_every_changed_character_of_the_manifest_is_noticed(checkpoint: Path) -> None:
    path = checkpoint / "manifest.json"
    text = path.read_text()
    for at, character in enumerate(text):
        path.write_text(text[:at] + chr(ord(character) ^ 1) + text[at + 1 :])
        with pytest.raises(RuntimeError, match=r"manifest.json is damaged"):
            read_manifest(checkpoint, LOCAL)


def test_a_cut_manifest_is_refused(checkpoint: Path) -> None:
    path = checkpoint / "manifest.json"
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(RuntimeError, match=r"manifest.json is damaged"):
        read_manifest(checkpoint, LOCAL)


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path("/nonexistent").write_text, ("boom",)


def test_a_pickle_in_place_of_the_manifest_is_refused(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(RuntimeError, match=r"manifest.json is damaged"):
        read_manifest(checkpoint, LOCAL)


def test_a_pickle_in_place_of_data_is_refused_by_name(checkpoint: Path) -> None:
    (checkpoint / "rank-00000.bin").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(RuntimeError, match=r"rank-00000.bin has \d+ bytes"):
        load(checkpoint, [Fragment.whole("weight/a", torch.zeros(2, 3))], WORLD)


def test_no_unpickler_is_ever_reached(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("unpickled")

    (checkpoint / ".metadata").write_bytes(pickle.dumps(Bomb()))
    (checkpoint / "extra.pt").write_bytes(pickle.dumps(Bomb()))
    for owner, name in [
        (pickle, "load"),
        (pickle, "loads"),
        (pickle, "Unpickler"),
        (torch, "load"),
    ]:
        monkeypatch.setattr(owner, name, refuse)
    target = torch.zeros(2, 3)
    load(checkpoint, [Fragment.whole("weight/a", target)], WORLD)
    assert torch.equal(target, torch.arange(6.0).view(2, 3))


def test_a_manifest_cannot_point_outside_its_folder(checkpoint: Path) -> None:
    (checkpoint.parent / "secret").write_bytes(b"x" * 24)
    file = read_manifest(checkpoint, LOCAL).files["rank-00000.bin"]
    rewrite(checkpoint, files={"../secret": file})
    with pytest.raises(RuntimeError, match=r"'../secret' is not the name of a data file"):
        read_manifest(checkpoint, LOCAL)


def test_a_piece_cannot_leave_its_file(checkpoint: Path) -> None:
    manifest = read_manifest(checkpoint, LOCAL)
    file = manifest.files["rank-00000.bin"]
    rewrite(checkpoint, files={"rank-00000.bin": type(file)(file.size - 1, file.checksums)})
    with pytest.raises(RuntimeError, match=r"weight/a leaves the file rank-00000.bin"):
        read_manifest(checkpoint, LOCAL)


def test_a_manifest_of_another_version_is_refused(checkpoint: Path) -> None:
    path = checkpoint / "manifest.json"
    path.write_text(path.read_text().replace('"version":1', '"version":2'))
    with pytest.raises(RuntimeError, match="version 2"):
        read_manifest(checkpoint, LOCAL)
