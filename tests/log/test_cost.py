from types import SimpleNamespace

import pytest
import torch
from torch import nn

from parallel3d.log.cost import Device, device, flops_per_token, matmul_parameters, peak_flops
from parallel3d.placement import Placement, Shard


class Cut(nn.Linear):
    """A linear layer that declares its weight as one rank's cut of a whole of `rows` rows."""

    def __init__(self, local: int, rows: tuple[int, ...]) -> None:
        super().__init__(8, local)
        self.rows = rows
        self.axis = SimpleNamespace(size=2)

    def placements(self) -> dict[str, Placement]:
        return {"weight": Shard(0, self.rows), "bias": Shard(0, self.rows)}


def test_flops_are_those_of_korthikanti() -> None:
    batch, layers, seq, width, vocab = 3, 4, 32, 16, 100
    matmuls = layers * 12 * width**2 + vocab * width
    step = batch * seq * flops_per_token(matmuls, num_layers=layers, width=width, seq_len=seq)
    paper = 72 * batch * layers * seq * width**2
    assert step == pytest.approx(
        paper * (1 + seq / (6 * width) + vocab / (12 * width * layers)), rel=1e-12
    )


def test_lookups_and_vectors_are_no_matmuls() -> None:
    model = nn.Sequential(nn.Embedding(10, 8), nn.LayerNorm(8), nn.Linear(8, 6))
    assert matmul_parameters(model) == 48


def test_a_tied_head_counts_once_and_a_module_used_twice_twice() -> None:
    embedding, head, linear = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False), nn.Linear(8, 8)
    head.weight = embedding.weight
    assert matmul_parameters(nn.Sequential(embedding, linear, linear, head)) == 64 + 64 + 80


def test_a_cut_layer_counts_as_the_whole_without_its_padding() -> None:
    assert matmul_parameters(nn.Sequential(Cut(local=4, rows=(7,)))) == 56
    assert matmul_parameters(nn.Sequential(Cut(local=9, rows=(8, 4, 5)))) == 136


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA TITAN Z", None),
        ("cpu", None),
    ],
)
def test_the_peak_is_of_the_device_that_was_named(name: str, peak: float | None) -> None:
    assert peak_flops(name) == peak


def test_a_cpu_has_a_name_and_no_peak() -> None:
    assert device(torch.device("cpu")) == ("cpu", None)
    assert str(device(torch.device("cpu"))) == "cpu (peak not known, so no mfu)"
    assert str(Device("NVIDIA H200", 989e12)) == "NVIDIA H200 (989 TFLOP/s dense bf16)"
