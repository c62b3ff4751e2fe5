"""The layers as the author of another library uses them: with own groups, in DDP, in FSDP2."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from parallel3d.placement import cut, placements
from parallel3d.tensor import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelLinear,
    vocab_parallel_cross_entropy,
)
from parallel3d.topology import Axis, Grid, Topology
from tests.tensor.whole import TOLERANCE, drawn, error
from tests.world import run_on

VOCABULARY, WIDTH, SAMPLES = 11, 8, 4


class GatedBlock(nn.Module):
    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = ColumnParallelLinear(WIDTH, 2 * WIDTH, axis=axis, blocks=2)
        self.down = RowParallelLinear(WIDTH, WIDTH, axis=axis)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(self.norm(x)).chunk(2, -1)
        return x + self.down(torch.sigmoid(gate) * up)


class Network(nn.Module):
    """Every kind of layer, a replicated norm between them, and the cut loss."""

    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self.axis = axis
        self.embedding = VocabParallelEmbedding(VOCABULARY, WIDTH, axis=axis)
        self.block = GatedBlock(axis)
        self.mix = ColumnParallelLinear(WIDTH, WIDTH, axis=axis, gather_output=True)
        self.head = VocabParallelLinear(WIDTH, VOCABULARY, axis=axis)

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        logits = self.head(self.mix(self.block(self.embedding(ids))))
        return vocab_parallel_cross_entropy(logits, target, axis=self.axis, reduction="mean")


def whole_values() -> dict[str, Tensor]:
    return {
        name: drawn(*value.shape, seed=seed)
        for seed, (name, value) in enumerate(Network(Axis.single()).state_dict().items())
    }


def network(axis: Axis) -> Network:
    """On every rank the cut of the same whole network."""
    module = Network(axis).double()
    placed = placements(module)
    module.load_state_dict({n: cut(v, placed[n], axis) for n, v in whole_values().items()})
    return module


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(VOCABULARY, (SAMPLES, 6), generator=generator)
    return ids, ids.roll(1, -1)


def reference() -> tuple[float, dict[str, Tensor]]:
    """Loss and every gradient of the whole batch on one process, whole weights."""
    module = network(Axis.single())
    loss = module(*batch())
    loss.backward()
    return float(loss.detach()), {
        n: p.grad for n, p in module.named_parameters() if p.grad is not None
    }


def errors(
    module: nn.Module, axis: Axis, loss: Tensor, gradient: Callable[[Tensor], Tensor]
) -> dict[str, float]:
    expected_loss, expected = reference()
    placed = placements(network(axis))
    assert [name for name, _ in module.named_parameters()] == list(expected)
    found = {"loss": abs(float(loss) - expected_loss)}
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        found[name] = error(gradient(parameter.grad), cut(expected[name], placed[name], axis))
    return found


def in_ddp(topology: Topology) -> dict[str, float]:
    """DDP averages the gradients of the two halves of the batch."""
    tp = Axis.from_group(topology.tp.group)
    module = DistributedDataParallel(network(tp), process_group=topology.dp.group)
    own = slice(2 * topology.dp.rank, 2 * topology.dp.rank + 2)
    loss = module(*(part[own] for part in batch()))
    loss.backward()
    torch.distributed.all_reduce(mean := loss.detach() / 2, group=topology.dp.group)
    return errors(module.module, tp, mean, lambda grad: grad)


def in_fsdp(topology: Topology) -> dict[str, float]:
    """The block is gathered around its use; parameters and gradients are DTensors over dp."""
    mesh = topology.mesh
    tp = Axis.from_mesh(mesh["tp"])
    module = network(tp)
    fully_shard(module.block, mesh=mesh["dp"], reshard_after_forward=True)
    fully_shard(module, mesh=mesh["dp"])
    own = slice(2 * topology.dp.rank, 2 * topology.dp.rank + 2)
    loss = module(*(part[own] for part in batch()))
    loss.backward()
    torch.distributed.all_reduce(mean := loss.detach() / 2, group=topology.dp.group)

    def whole(grad: Tensor) -> Tensor:
        assert isinstance(grad, DTensor)
        return grad.full_tensor()

    return errors(module, tp, mean, whole)


def from_meta_in_fsdp(topology: Topology) -> None:
    """Built on meta, sharded, then drawn: still cuts of one whole layer."""
    mesh = topology.mesh
    tp = Axis.from_mesh(mesh["tp"])
    with torch.device("meta"):
        layer = ColumnParallelLinear(8, 140, axis=tp)
    fully_shard(layer, mesh=mesh["dp"])
    layer.to_empty(device="cpu")
    torch.manual_seed(7)
    layer.reset_parameters()
    torch.manual_seed(7)
    whole = ColumnParallelLinear(8, 140, axis=Axis.single())
    for name, parameter in layer.named_parameters():
        assert isinstance(parameter, DTensor)
        expected = cut(whole.get_parameter(name).detach(), layer.placements()[name], tp)
        assert torch.equal(parameter.full_tensor(), expected)


@pytest.mark.parametrize("wrapped", [in_ddp, in_fsdp], ids=["DDP", "FSDP2"])
@pytest.mark.report("NVIDIA/Megatron-LM#906")
def test_inside_another_library_s_data_parallelism_gradients_equal_one_process(
    wrapped: Callable[[Topology], dict[str, float]],
) -> None:
    for found in run_on(Grid(dp=2, tp=2), wrapped):
        assert len(found) == 11 and not {n: e for n, e in found.items() if e > TOLERANCE}


def test_layers_built_on_meta_and_sharded_by_fsdp_are_drawn_as_cuts_of_one_whole_layer() -> None:
    run_on(Grid(dp=2, tp=2), from_meta_in_fsdp)
