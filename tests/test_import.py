from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NEW_MODULES = """
import sys, torch, einops
before = set(sys.modules)
import parallel3d
print(*{name.split(".")[0] for name in set(sys.modules) - before} - {"parallel3d"})
"""
PUBLIC_NAMES = """
import parallel3d
for name in parallel3d.__all__:
    assert getattr(parallel3d, name).__name__ == name
assert set(parallel3d.__all__) <= set(dir(parallel3d))
"""
CONTRACT = set(
    "Axis ColumnParallelLinear Engine Grid RowParallelLinear Topology VocabParallelEmbedding "
    "vocab_parallel_cross_entropy".split()
)


def python(*arguments: str, cwd: Path = ROOT, executable: str = sys.executable) -> str:
    command = [executable, *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_package_imports_torch_and_einops_and_nothing_else() -> None:
    third_party = set(python("-c", NEW_MODULES).split()) - sys.stdlib_module_names
    assert not third_party


def test_every_public_name_loads_on_use() -> None:
    import parallel3d

    assert set(parallel3d.__all__) >= CONTRACT
    python("-W", "error", "-c", PUBLIC_NAMES)
    with pytest.raises(AttributeError, match="has no attribute 'Motor'"):
        _ = parallel3d.Motor


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project as a builder sees it: files that git would clone, and a folder of each kind."""
    copy = tmp_path_factory.mktemp("project")
    for name in "pyproject.toml setup.py README.md LICENSE parallel3d models tests tools".split():
        (copy / name).symlink_to(ROOT / name)
    return copy


def build(kind: str, source: Path, out: Path) -> zipfile.ZipFile:
    """A wheel made by the hook that pip calls."""
    python(
        "-c", f"from setuptools import build_meta as b; b.build_{kind}({str(out)!r})", cwd=source
    )
    (wheel,) = out.glob("*.whl")
    return zipfile.ZipFile(wheel)


def test_the_wheel_ships_parallel3d_only(source: Path, tmp_path: Path) -> None:
    with build("wheel", source, tmp_path) as wheel:
        top = {name.split("/")[0] for name in wheel.namelist()}
        assert {name for name in top if not name.endswith(".dist-info")} == {"parallel3d"}
        assert {"parallel3d/py.typed", "parallel3d/comm/ledger.py"} <= set(wheel.namelist())


def test_an_editable_install_also_exposes_models_and_nothing_else(
    source: Path, tmp_path: Path
) -> None:
    python("-m", "venv", "--without-pip", str(tmp_path / "venv"))
    venv = str(tmp_path / "venv/bin/python")
    site = python("-c", "import site; print(site.getsitepackages()[0])", executable=venv).strip()
    (tmp_path / "wheel").mkdir()
    with build("editable", source, tmp_path / "wheel") as wheel:
        wheel.extractall(site)
    names = ["parallel3d", "models", "models.gpt", "tests", "tools", "conf", "recipes"]
    found = f"from importlib.util import find_spec as f; print(*[n for n in {names} if f(n)])"
    assert python("-c", found, cwd=tmp_path, executable=venv).split() == names[:3]
