from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel3d import ColumnParallelLinear, Grid, Topology
from parallel3d.assemble.model import facts_of, separate_ties, units_of
from parallel3d.placement import Replicate, Shard
from parallel3d.topology import Axis
from tests.engine.cases import SGD, WIDTH, engine, error, same, train
from tests.world import run_on


class Custom(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(2, 2), "the model is a Linear: pass an nn.Sequential"),
        (Custom(nn.ReLU()), "Custom has a forward of its own"),
        (nn.Sequential(), "nn.Sequential of 0 units"),
    ],
)
def test_only_a_plain_sequential_is_a_model(model: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        units_of(model)


def test_a_subclass_without_a_forward_of_its_own_is_a_model() -> None:
    class Named(nn.Sequential):
        pass

    assert [unit.name for unit in units_of(Named(nn.ReLU(), nn.ReLU()))] == ["0", "1"]


def test_a_module_with_two_places_is_two_units() -> None:
    relu = nn.ReLU()
    units = units_of(nn.Sequential(nn.Linear(2, 2), relu, nn.Linear(2, 2), relu))
    assert [unit.number for unit in units] == [0, 1, 2, 3]
    assert units[3].module is relu


def test_batch_norm_is_refused_where_its_statistics_depend_on_the_cut() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.BatchNorm1d(WIDTH)))
    with Topology.init() as topology:
        with pytest.raises(ValueError, match="1.0 is a BatchNorm1d, whose statistics depend"):
            engine(topology, model)
        with pytest.raises(ValueError, match="^0 is a BatchNorm1d, whose statistics depend"):
            engine(topology, nn.Sequential(nn.BatchNorm1d(WIDTH)))
        x = torch.randn(4, WIDTH)
        engine(topology, model, num_microbatches=1, precision="fp32").train_step(x, x)


def test_facts_describe_the_whole_model() -> None:
    axis = Axis("tp", 2, 1, (0, 1))
    with torch.device("meta"):
        column = ColumnParallelLinear(4, 6, axis=axis)
        norm = nn.LayerNorm(5)
    norm.bias.requires_grad_(False)
    again = nn.Sequential(nn.LayerNorm(5))
    again[0].weight = norm.weight
    facts = facts_of(units_of(nn.Sequential(column, norm, again)))
    assert list(facts) == ["0.weight", "0.bias", "1.weight", "1.bias", "2.0.weight", "2.0.bias"]
    assert facts["0.weight"].shape == (6, 4) and facts["0.weight"].placement == Shard(0, (6,))
    assert facts["1.weight"].placement == Replicate()
    assert [fact.index for fact in facts.values()] == [0, 1, 2, 3, 2, 4]
    assert facts["2.0.weight"].owner == "1.weight" and facts["2.0.bias"].owner == "2.0.bias"
    assert [fact.trained for fact in facts.values()] == [True, True, True, False, True, True]


def test_each_unit_trains_a_parameter_of_its_own_and_shares_a_frozen_one() -> None:
    linear, frozen = nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)
    again = nn.Linear(2, 2)
    again.weight = linear.weight
    units = units_of(nn.Sequential(linear, frozen, nn.Sequential(linear, again), frozen))
    separate_ties(units, facts_of(units))
    first, second = units[0].module.weight, units[2].module[0].weight
    assert first is linear.weight and second is not first
    assert second.data_ptr() == first.data_ptr()
    assert units[2].module[1].weight is second, "one for each unit"
    assert units[3].module is not frozen and units[3].module.weight is frozen.weight


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_frozen_tie_has_one_value(device: str) -> None:
    with torch.device(device):
        shared = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        other = nn.Linear(WIDTH, WIDTH)
        other.bias = shared.bias
    with Topology.init() as topology:
        mine = engine(topology, nn.Sequential(shared, nn.Linear(WIDTH, WIDTH), other, shared))
        train(mine, 2)
        modules = [unit.module for unit in mine.parts.units]
        assert torch.equal(modules[0].weight, modules[3].weight)
        assert torch.equal(modules[0].bias, modules[2].bias)
        assert modules[0].weight.count_nonzero() > 0
        whole = mine.state_dict_whole()
        assert torch.equal(whole["3.weight"], whole["0.weight"])


def repeated_column(topology: Topology) -> Any:
    with torch.device("meta"):
        layer = ColumnParallelLinear(WIDTH, WIDTH, axis=topology.tp, gather_output=True)
        model = nn.Sequential(layer, nn.Tanh(), layer)
    mine = engine(topology, model)
    return train(mine, 3), mine.state_dict_whole()


def test_a_parallel_layer_with_two_places_equals_one_process() -> None:
    with Topology.init() as topology:
        losses, weights = repeated_column(topology)
    found, others = run_on(Grid(dp=2, tp=2), repeated_column)[0]
    torch.testing.assert_close(found, losses, rtol=1e-12, atol=0)
    assert error(others, weights) < 1e-10


def drawn_by_init(topology: Topology) -> Any:
    """Values of an ``init`` that draws from the default generator, whose state differs by rank."""
    torch.manual_seed(topology.rank)
    before = torch.get_rng_state()
    mine = engine(topology, init=lambda name, tensor: tensor.normal_(), optimizer=SGD)
    assert torch.equal(torch.get_rng_state(), before)
    return mine.state_dict_whole()


@pytest.mark.parametrize("layout", ["2x1x1", "1x2x2"])
def test_what_init_draws_does_not_depend_on_the_layout(layout: str) -> None:
    with Topology.init() as topology:
        expected = drawn_by_init(topology)
    assert same(run_on(Grid.parse(layout), drawn_by_init)[0], expected)
    values = [value for name, value in expected.items() if name.endswith("up.weight")]
    assert all(not torch.equal(value, values[0]) for value in values[1:])


def test_init_is_given_whole_tensors_by_name_in_fp32() -> None:
    seen: dict[str, Any] = {}
    with Topology.init() as topology:
        engine(topology, init=lambda name, t: seen.update({name: (t.shape, t.dtype)}))
    assert seen["0.up.weight"] == ((12, WIDTH), torch.float32)
    assert len(seen) == 4 * 6


def filled_by_rank(topology: Topology) -> dict[str, list[float]]:
    model = nn.Sequential(nn.Linear(2, 2), ColumnParallelLinear(2, 4, axis=topology.tp))
    model[0].register_buffer("count", torch.full((1,), topology.rank))
    model[0].register_buffer("flag", torch.tensor(topology.rank > 0))
    for parameter in model.parameters():
        nn.init.constant_(parameter, topology.rank)
    mine = engine(topology, model, precision="fp32")
    tensors = [*mine.parts.units[0].module.named_parameters(), *model[0].named_buffers()]
    found = {name: tensor.unique().tolist() for name, tensor in tensors}
    return {**found, "cut": mine.parts.units[1].module.weight.unique().tolist()}


@pytest.mark.report("deepspeedai/DeepSpeed#2999")
def test_values_of_a_real_device_are_those_of_the_first_rank() -> None:
    first, second, third, fourth = run_on(Grid(dp=2, tp=2), filled_by_rank)
    whole = {"weight": [0.0], "bias": [0.0], "count": [0], "flag": [False]}
    assert first == third == {**whole, "cut": [0.0]}
    assert second == fourth == {**whole, "cut": [1.0]}


class Mixed(nn.Module):
    """A parameter on meta, and a real buffer with a different value on each rank."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, device="meta")
        self.register_buffer("scale", torch.tensor(value))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


def mixed(topology: Topology) -> float:
    mine = engine(topology, nn.Sequential(Mixed(1.0 + topology.rank)))
    return float(mine.parts.units[0].module.scale)


def test_a_real_buffer_beside_meta_parameters_is_that_of_the_first_rank() -> None:
    assert run_on(Grid(dp=2), mixed) == [1.0, 1.0]


class Buffered(nn.Module):
    """A persistent buffer of 7 and another of 3 that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("kept", torch.empty(()))
        self.register_buffer("derived", torch.empty(()), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.kept.fill_(7.0)
        self.derived.fill_(3.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.kept / self.derived


@pytest.mark.report("deepspeedai/DeepSpeed#1101")
@pytest.mark.parametrize("init", [None, lambda name, tensor: tensor.fill_(0.1)])
def test_buffers_on_meta_get_their_values_and_keep_their_dtype(init: Any) -> None:
    with torch.device("meta"):
        model = nn.Sequential(Buffered())
    with Topology.init() as topology:
        mine = engine(topology, model, precision="bf16", init=init)
        module = mine.parts.units[0].module
        assert (module.kept.item(), module.derived.item()) == (7.0, 3.0)
        assert module.kept.dtype == torch.float32
        whole = mine.state_dict_whole()
        assert sorted(whole) == ["0.kept", "0.linear.bias", "0.linear.weight"]


class Mute(nn.Module):
    """Has a parameter or buffer, and no way to fill it."""

    def __init__(self, buffer: bool) -> None:
        super().__init__()
        if buffer:
            self.register_buffer("scale", torch.ones(1))
        else:
            self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


@pytest.mark.report("huggingface/transformers#45402")
@pytest.mark.report("hiyouga/LlamaFactory#10820")
@pytest.mark.parametrize("buffer", [True, False])
def test_a_module_that_cannot_fill_itself_is_an_error_that_names_it(buffer: bool) -> None:
    def make() -> nn.Module:
        with torch.device("meta"):
            return nn.Sequential(nn.Sequential(nn.ReLU(), Mute(buffer)))

    def ones(name: str, tensor: Tensor) -> None:
        tensor.fill_(1.0)

    with Topology.init() as topology:
        with pytest.raises(ValueError, match=r"0\.1 \(Mute\) has parameters or buffers on meta"):
            engine(topology, make())
        if buffer:  # init fills parameters only
            with pytest.raises(ValueError, match="0.1.scale is a buffer on meta"):
                engine(topology, make(), init=ones)
        else:
            assert engine(topology, make(), init=ones).state_dict_whole()["0.1.scale"] == 1


class Extra(nn.ReLU):
    def get_extra_state(self) -> Any:
        return {"calls": 3}


def test_state_that_is_no_tensor_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(Extra()))
    with (
        Topology.init() as topology,
        pytest.raises(ValueError, match=r"1\.0 \(Extra\) has an extra"),
    ):
        engine(topology, model)


def empty(topology: Topology) -> Any:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
    for unit in model:
        unit.register_parameter("nothing", nn.Parameter(torch.empty(0, 3)))
    mine = engine(topology, model)
    train(mine, 2)
    return mine.state_dict_whole()


def test_a_parameter_without_elements_does_no_harm() -> None:
    weights = run_on(Grid(dp=2), empty)[0]
    assert weights["0.nothing"].shape == weights["1.nothing"].shape == (0, 3)


def test_float64_parameters_are_not_rounded_in_silence() -> None:
    model = nn.Sequential(nn.Linear(2, 2, dtype=torch.float64))
    with (
        Topology.init() as topology,
        pytest.raises(ValueError, match="0.weight is float64, but precision = 'bf16'"),
    ):
        engine(topology, model, precision="bf16")


def test_bf16_starts_from_masters_that_were_never_rounded() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with Topology.init() as topology:
        mine = engine(topology, model, precision="bf16")
        whole = mine.state_dict_whole()
        assert {value.dtype for value in whole.values()} == {torch.float32}
        for name in ("0.weight", "0.bias"):
            assert torch.equal(whole[name], before[name])
        assert torch.equal(whole["1.weight"], before["1.weight"].bfloat16().float())
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
