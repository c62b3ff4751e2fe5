from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from parallel3d.checkpoint import Files, Fragment, differences, load, save
from parallel3d.placement import Rectangle
from parallel3d.topology import Axis, Topology
from tests.checkpoint.cuttings import damage_file, fragment_of
from tests.world import run_on

WORLD = Axis.single("world")


@pytest.fixture
def three_layers(tmp_path: Path) -> Path:
    layers = [Fragment.whole(f"weight/{i}", torch.full((4,), i + 1.0)) for i in range(3)]
    save(tmp_path / "a", layers, {"step": 1}, WORLD)
    return tmp_path / "a"


def load_two(
    topology: Topology, folder: str, keys: list[str], dtype: torch.dtype
) -> tuple[str, object]:
    """Rank r wants keys[r] only; what strict loading raises, and the differences."""
    mine = [Fragment.whole(keys[topology.rank], torch.zeros(4, dtype=dtype))]
    try:
        load(Path(folder), mine, topology.world)
    except ValueError as error:
        assert not mine[0].data.any(), "filled before the error"
        return str(error), differences(Path(folder), mine, topology.world)
    return "", None


@pytest.mark.report("pytorch/pytorch#148252")
@pytest.mark.parametrize(
    ("keys", "dtype", "message"),
    [
        (["weight/0", "weight/1"], torch.float32, "unexpected: weight/2"),
        (
            ["weight/0", "weight/new"],
            torch.float32,
            "missing: weight/new; unexpected: weight/1, weight/2",
        ),
        (
            ["weight/0", "weight/1"],
            torch.bfloat16,
            "unexpected: weight/2; dtypes: weight/0 is saved as float32 and wanted as bfloat16, "
            "weight/1 is saved as float32 and wanted as bfloat16",
        ),
    ],
    ids=["extra", "missing", "dtype"],
)
def test_differences_are_listed_by_name_and_the_same_on_all_ranks(
    three_layers: Path, keys: list[str], dtype: torch.dtype, message: str
) -> None:
    one, two = run_on(2, load_two, folder=str(three_layers), keys=keys, dtype=dtype)
    assert one == two
    assert message in one[0] and str(one[1]) == message


def test_not_strict_loads_what_fits_and_says_what_does_not(three_layers: Path) -> None:
    kept = torch.full((4,), 7.0)
    wanted = [
        Fragment.whole("weight/0", torch.zeros(4, dtype=torch.bfloat16)),
        Fragment.whole("weight/new", kept),
    ]
    with pytest.warns(
        UserWarning, match=r"missing: weight/new; unexpected: weight/1, weight/2; dt"
    ):
        load(three_layers, wanted, WORLD, strict=False)
    assert wanted[0].data.tolist() == [1.0] * 4 and kept.tolist() == [7.0] * 4


def test_another_shape_is_an_error_also_when_not_strict(three_layers: Path) -> None:
    wanted = [Fragment.whole("weight/0", torch.zeros(2, 2))]
    with pytest.raises(ValueError, match=r"weight/0 is saved as \[4\] and wanted as \[2, 2\]"):
        load(three_layers, wanted, WORLD, strict=False)


def test_convert_allows_another_dtype_and_nothing_else(three_layers: Path) -> None:
    wanted = [Fragment.whole(f"weight/{i}", torch.zeros(4, dtype=torch.float64)) for i in range(3)]
    load(three_layers, wanted, WORLD, convert=True)
    assert [fragment.data[0].item() for fragment in wanted] == [1.0, 2.0, 3.0]
    with pytest.raises(ValueError, match="unexpected: weight/2"):
        load(three_layers, wanted[:2], WORLD, convert=True)


@pytest.mark.report("deepspeedai/DeepSpeed#5439")
def test_weights_without_optimiser_state_are_saved_and_wanted_like_others(tmp_path: Path) -> None:
    parts = [
        Fragment.whole("weight/0", torch.full((3,), 9.0)),
        Fragment.whole("weight/1", torch.ones(3)),
    ]
    save(tmp_path / "a", [*parts, Fragment.whole("exp_avg/1", torch.ones(3))], {}, WORLD)
    fresh = [Fragment.whole(key, torch.zeros(3)) for key in ("weight/0", "weight/1", "exp_avg/1")]
    load(tmp_path / "a", fresh, WORLD)
    assert fresh[0].data.tolist() == [9.0] * 3
    unfrozen = [*fresh, Fragment.whole("exp_avg/0", torch.zeros(3))]
    with pytest.raises(ValueError, match="missing: exp_avg/0"):
        load(tmp_path / "a", unfrozen, WORLD)


def load_damaged(topology: Topology, folder: str) -> str:
    wanted = [Fragment.whole(f"weight/{i}", torch.zeros(4)) for i in range(3)]
    try:
        load(Path(folder), wanted, topology.world)
    except RuntimeError as error:
        assert not any(fragment.data.any() for fragment in wanted), "filled before the error"
        return str(error)
    return "no error"


@pytest.mark.report("deepspeedai/DeepSpeed#7628")
@pytest.mark.parametrize("how", ["missing", "truncated", "corrupt"])
def test_a_damaged_file_is_named_on_all_ranks(three_layers: Path, how: str) -> None:
    damage_file(three_layers, how)
    texts = {
        "missing": "is missing",
        "truncated": "has 47 bytes and was written with 48",
        "corrupt": "is corrupt: the checksum of its block 0 differs",
    }
    errors = run_on(2, load_damaged, folder=str(three_layers))
    path = three_layers / "rank-00000.bin"
    assert errors == [f"{path} {texts[how]}; load another checkpoint"] * 2


def test_sizes_are_checked_also_when_contents_are_not(three_layers: Path) -> None:
    damage_file(three_layers, "truncated")
    wanted = [Fragment.whole(f"weight/{i}", torch.zeros(4)) for i in range(3)]
    with pytest.raises(RuntimeError, match="has 47 bytes"):
        load(three_layers, wanted, WORLD, verify=False)


def test_a_folder_that_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"no-such does not exist; load another checkpoint"):
        load(tmp_path / "no-such", [], WORLD)
    with pytest.raises(RuntimeError, match=r"has no manifest.json: its save never ended"):
        load(tmp_path, [], WORLD)


class Unreadable(Files):
    """A disk on which nothing can be mapped."""

    def map(self, path: Path) -> np.ndarray:
        raise OSError(5, "Input/output error", str(path))


def load_from_a_bad_disk(topology: Topology, folder: str) -> str:
    files = Unreadable() if topology.rank == 1 else Files()
    wanted = [Fragment.whole(f"weight/{i}", torch.zeros(4)) for i in range(3)]
    try:
        load(Path(folder), wanted, topology.world, files=files)
    except (RuntimeError, OSError) as error:
        return str(error)
    return "no error"


@pytest.mark.report("InternLM/xtuner#1852")
def test_an_error_while_one_rank_loads_is_raised_on_all(three_layers: Path) -> None:
    other, failed = run_on(2, load_from_a_bad_disk, folder=str(three_layers))
    assert failed.startswith("[Errno 5] Input/output error") and other == f"rank 1: {failed}"


@pytest.mark.report("huggingface/lerobot#4009")
def test_a_fragment_stays_on_its_own_device(three_layers: Path) -> None:
    wanted = fragment_of("weight/0", torch.zeros(4), [Rectangle(0, 0, 4, 1)], True)
    place = (wanted.data.device, wanted.data.data_ptr())
    with pytest.warns(UserWarning, match="unexpected"):
        load(three_layers, [wanted], WORLD, strict=False)
    assert (wanted.data.device, wanted.data.data_ptr()) == place
    assert "cuda" not in (three_layers / "manifest.json").read_text()
