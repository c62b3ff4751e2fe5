"""The costs of every unit, from a sample of the input: the same answer on all ranks.

Each rank takes one unit after another through a microbatch, so none needs room for more than one.
Units that are alike, of equal modules and inputs, are taken once: equal blocks cost the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from ..comm.collectives import all_gather_objects
from ..comm.p2p import Channel, Edge, open_channels
from ..pipeline.costs import UnitCosts
from ..pipeline.criterion import SumLoss, as_sum
from ..pipeline.gauge import REPEATS, Gauged, Read, flops, gauge, seconds
from ..pipeline.runtime import Criterion
from ..pipeline.stage import Unit
from ..rng import materialise
from ..topology import Topology
from .keeping import activations_of
from .model import DTYPES, twin
from .options import Options

FORTH, BACK = "activations", "gradients"


class Measured(NamedTuple):
    """The units' costs, and ``comm``, the time of the largest message between two ranks."""

    units: list[UnitCosts]
    comm: float


def measure(
    units: list[Unit], topology: Topology, options: Options, split: bool = True
) -> Measured:
    """Times in seconds; with ``split`` those of a backward that is split.

    Collective over the world; ranks' times are averaged.
    """
    with seconds(topology.device) as read:
        mine = _costs(units, topology, options, read, split, options.compile)
    found = all_gather_objects(mine, topology.world)
    costs = [_joined(ranks) for ranks in zip(*found, strict=True)]
    size = max(cost.output for cost in costs)
    return Measured(costs, _transfer(size, topology, options.timeout))


def count_flops(units: list[Unit], topology: Topology, options: Options) -> Measured:
    """FLOPs of one rank in the place of times; a message costs none. Collective."""
    with flops() as read:
        return Measured(_costs(units, topology, options, read, split=True, compiled=False), 0.0)


def _joined(ranks: tuple[UnitCosts, ...]) -> UnitCosts:
    """The mean of the times, the most of the bytes."""
    forward, input_grad, weight_grad, *sizes = zip(*ranks, strict=True)
    return UnitCosts(fmean(forward), fmean(input_grad), fmean(weight_grad), *map(max, sizes))


def _costs(
    units: list[Unit],
    topology: Topology,
    options: Options,
    read: Read,
    split: bool,
    compiled: bool,
) -> list[UnitCosts]:
    assert options.sample is not None
    x, target = (_placed(part, topology, options.precision) for part in options.sample)
    end = SumLoss(as_sum(options.loss_fn))
    end.begin([target], lambda: torch.ones((), device=topology.device))
    activations = activations_of(options, topology)
    known: dict[str, Gauged] = {}
    costs = []
    devices = [topology.device] if topology.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        for unit in units:
            last = end if unit is units[-1] else None
            key = _key(unit, x, activations.repeats(unit), last)
            # An attribute may differ on one rank only; all must measure, or none.
            if not all(all_gather_objects(key in known, topology.world)):
                copy = _copy(unit, topology.device, DTYPES[options.precision])
                known[key] = gauge(
                    copy,
                    x,
                    read,
                    activations=activations,
                    end=last,
                    split=split,
                    compiled=compiled,
                )
            costs.append(known[key].costs)
            x = known[key].output
    return costs


def _copy(unit: Unit, device: torch.device, dtype: torch.dtype) -> Unit:
    """With values of its own, which go when it is done."""
    module = twin(unit.module)
    made: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    fresh = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                    made[id(parameter)] = fresh
                part._parameters[name] = made[id(parameter)]
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = buffer.clone()
    materialise([(unit.name, module)], seed=0, check=False)
    module.to(device)
    for parameter in module.parameters():
        if parameter.is_floating_point():
            _fit(parameter, dtype)
    return unit._replace(module=module)


def _fit(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """The parameter in ``dtype``, with a gradient no narrower than fp32."""
    wide = torch.promote_types(dtype, torch.float32)
    # Without a reset_parameters() the memory is as it was found: numbers of any size, and slow.
    parameter.data = torch.nan_to_num(parameter.data, 0.0, 0.0, 0.0).clamp(-1, 1).to(dtype)
    if parameter.requires_grad:
        if wide != dtype:
            parameter.grad_dtype = wide
        parameter.grad = torch.zeros_like(parameter, dtype=wide)


def _placed(tree: Any, topology: Topology, precision: str) -> Any:
    def place(tensor: Tensor) -> Tensor:
        dtype = DTYPES[precision] if tensor.is_floating_point() else tensor.dtype
        return tensor.detach().to(topology.device, dtype, copy=True)

    return tree_map_only(Tensor, place, tree)


def _key(unit: Unit, x: Any, repeats: bool, end: Criterion | None) -> str:
    """What is the same for units that cost the same: structure, sizes, input, recompute, loss."""
    leaves, spec = tree_flatten(x)
    sizes = [(name, tuple(p.shape), p.requires_grad) for name, p in unit.module.named_parameters()]
    options = [_plain(module) for module in unit.module.modules()]
    given = [
        (tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
        for leaf in leaves
    ]
    return repr((repr(unit.module), sizes, options, spec, given, repeats, end is None))


def _plain(module: nn.Module) -> list[tuple[str, Any]]:
    """What a module's own attributes say, as far as they can be compared."""
    kinds = (int, float, str, tuple, type(None))
    return [
        (name, value if isinstance(value, kinds) else getattr(value, "__qualname__", ""))
        for name, value in vars(module).items()
        if isinstance(value, kinds) or callable(value)
    ]


def _transfer(size: int, topology: Topology, timeout: float) -> float:
    """Seconds of a message of ``size`` bytes: half of there and back, between pairs of ranks."""
    pairs = [(low, low + 1) for low in range(0, topology.pp.size - 1, 2)]
    edges = [Edge(a, b, FORTH) for a, b in pairs] + [Edge(b, a, BACK) for a, b in pairs]
    ends = open_channels(topology, edges, timeout)
    times = [0.0]
    if ends:
        me = topology.pp.rank
        forth = next(ends[edge] for edge in ends if edge.purpose == FORTH)
        back = next(ends[edge] for edge in ends if edge.purpose == BACK)
        ways = [_send, _receive] if me % 2 == 0 else [_receive, _send]
        data = torch.zeros(size, dtype=torch.uint8, device=topology.device)
        times = [_there_and_back(ways, [forth, back], data) for _ in range(REPEATS + 1)][1:]
    found: list[float] = all_gather_objects(min(times) / 2, topology.world)
    return max(found)


def _there_and_back(
    ways: Sequence[Callable[[Channel, Tensor], None]], ends: Sequence[Channel], data: Tensor
) -> float:
    start = time.perf_counter()
    for way, end in zip(ways, ends, strict=True):
        way(end, data)
    if data.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _send(end: Channel, data: Tensor) -> None:
    end.send([data])
    end.flush()


def _receive(end: Channel, data: Tensor) -> None:
    for work in end.post([data]):
        work.wait()
