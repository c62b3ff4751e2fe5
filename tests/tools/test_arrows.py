from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
arrows = runpy.run_path(str(ROOT / "tools/arrows.py"))["main"]


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, source in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return root


@pytest.mark.parametrize(
    ("file", "source", "fault"),
    [
        ("parallel3d/comm/p2p.py", "from ..engine import Engine", "comm -> engine points up"),
        ("parallel3d/topology.py", "import parallel3d.comm.ledger", "topology -> comm points up"),
        (
            "parallel3d/zero/flat.py",
            "from .. import tensor",
            "zero -> tensor points up or sideways",
        ),
        (
            "parallel3d/optim/norm.py",
            "from ..log import meters",
            "optim -> log points up or sideways",
        ),
        (
            "parallel3d/placement.py",
            "from .launch import Launch",
            "placement may import topology only",
        ),
        (
            "parallel3d/engine.py",
            "from .config import read",
            "report, resume, train know the options",
        ),
        ("parallel3d/config.py", "from .topology import Grid", "config imports nothing of ours"),
        ("parallel3d/train.py", "from .verify import verify", "imported by nobody"),
        ("parallel3d/train.py", "from parallel3d import Engine", "public names stand above"),
        ("parallel3d/misc.py", "import os", "misc.py: no room of this name"),
        (
            "parallel3d/train.py",
            "def f():\n    from .verify import x",
            "train.py:2: train -> verify",
        ),
        ("parallel3d/pipeline/draw.py", "import torch", "planned on paper, without torch"),
        (
            "parallel3d/pipeline/draw.py",
            "from .stage import Stage",
            "planned on paper, without parallel3d.p",
        ),
        (
            "parallel3d/engine.py",
            "from omegaconf import OmegaConf",
            "only config imports omegaconf",
        ),
        ("parallel3d/zero/flat.py", "from torch.distributed import all_reduce", "only comm calls"),
        (
            "parallel3d/optim/norm.py",
            "import torch.distributed as d\nd.all_reduce(x)",
            "norm.py:2: only comm",
        ),
        (
            "parallel3d/optim/norm.py",
            "from torch import distributed as d\nd.barrier()",
            "only comm calls",
        ),
        (
            "parallel3d/optim/norm.py",
            "import torch\ntorch.distributed.new_group()",
            "make process groups",
        ),
        (
            "models/gpt/model.py",
            "from parallel3d.comm import p2p",
            "models import torch, einops and",
        ),
        ("models/gpt/model.py", "import numpy as np", "models import torch, einops and"),
    ],
)
def test_a_wrong_import_is_named_with_its_line(
    file: str, source: str, fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert arrows(tree(tmp_path, {file: source})) == 1
    out = capsys.readouterr().out
    assert f"{file}:" in out and fault in out


def test_arrows_that_point_down_pass_and_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {
        "parallel3d/__init__.py": "from .engine import Engine",
        "parallel3d/train.py": "from .engine import Engine\nfrom . import config",
        "parallel3d/engine.py": "from .assemble import x\nfrom parallel3d.topology import Grid",
        "parallel3d/verify.py": "from .engine import Engine",
        "parallel3d/rng.py": "from .placement import Shard",
        "parallel3d/comm/collectives.py": "import torch.distributed as dist\ndist.all_reduce(x)",
        "parallel3d/comm/__init__.py": "from .collectives import all_reduce",
        "parallel3d/topology.py": "from torch.distributed import DeviceMesh\ntorch.gather(x)",
        "parallel3d/pipeline/draw.py": "from .actions import Op\nfrom itertools import chain",
        "parallel3d/pipeline/stage.py": "import torch\nfrom ..comm.p2p import Channel",
        "parallel3d/config/read.py": "from omegaconf import OmegaConf\nfrom .schema import Config",
        "models/gpt/model.py": "import math, einops\nfrom parallel3d.tensor import X",
    }
    assert arrows(tree(tmp_path, files)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "every arrow points down"
    assert "engine -> assemble, topology" in lines and "pipeline -> comm" in lines


def test_this_package_has_no_arrow_that_points_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert arrows(ROOT) == 0, capsys.readouterr().out
