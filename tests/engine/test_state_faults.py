"""Checkpoints of the engine: from any layout into any other, and reported faults."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel3d import Engine, Grid, Topology
from parallel3d.checkpoint.files import Files
from tests.engine import cases, state_cases
from tests.engine.cases import Tensors, same, share
from tests.engine.state_cases import engine, save_each, step_counts, train, whole
from tests.world import run_on

LAYOUTS = ["1x1x1", "1x2x1", "2x1x1", "1x1x2", "2x2x1", "1x4x1", "2x1x2"]
Saved = dict[str, tuple[Tensors, list[float]]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Saved]:
    """A folder of checkpoints by layout and ZeRO stage; what each held, and the next losses."""
    folder, found = tmp_path_factory.mktemp("checkpoints"), {}
    for layout in LAYOUTS:
        each = run_on(Grid.parse(layout), save_each, folder=folder)[0]
        found |= {f"{layout}-{zero}": each[zero] for zero in range(4)}
    return folder, found


def load_all(topology: Topology, folder: Path, names: list[str]) -> Any:
    """Of each checkpoint: the whole state right after loading, and the next two losses."""
    found = {}
    for at, name in enumerate(names):
        mine = engine(topology, zero=(at // 2 + 3) % 4, gather_budget=0, seed=1)
        if at % 3 == 0:
            train(mine, 1)  # an engine that has a state of its own already
        meta = mine.load(folder / name)
        assert meta["note"] == "kept" and mine.step == mine.parts.optimizer.updates == 3
        assert step_counts(mine) <= {3.0} and mine.parts.optimizer.lr == 0.01 / 4
        state = whole(mine)
        mine.seed = 0
        found[name] = state, train(mine, 2)
    return found


@pytest.mark.report("deepspeedai/DeepSpeed#3810")
@pytest.mark.report("deepspeedai/DeepSpeed#2898")
@pytest.mark.report("deepspeedai/DeepSpeed#2921")
@pytest.mark.report("deepspeedai/DeepSpeed#1101")
@pytest.mark.report("huggingface/nanotron#221")
@pytest.mark.report("huggingface/nanotron#230")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_checkpoint_loads_under_a_layout_bit_for_bit_and_goes_on_alike(
    layout: str, saved: tuple[Path, Saved]
) -> None:
    folder, expected = saved
    # Of each layout one: the stages of saver and loader take turns.
    turn = LAYOUTS.index(layout)
    names = [f"{saver}-{(at + turn) % 4}" for at, saver in enumerate(LAYOUTS)]
    found = run_on(Grid.parse(layout), load_all, folder=folder, names=names)[0]
    for name, (state, losses) in found.items():
        assert same(state, expected[name][0]), name
        assert losses == pytest.approx(expected[name][1], rel=1e-12, abs=0), name


@pytest.mark.report("deepspeedai/DeepSpeed#5439")
@pytest.mark.report("deepspeedai/DeepSpeed#4055")
def test_a_checkpoint_holds_every_name_and_no_state_of_frozen_parameters(
    saved: tuple[Path, Saved],
) -> None:
    folder, found = saved
    with Topology.init() as topology:
        names = set(state_cases.model(topology).state_dict())
    for state, _ in found.values():
        kinds: dict[str, set[str]] = {}
        for key in state:
            kind, name = key.split("/", 1)
            kinds.setdefault(kind, set()).add(name)
        assert kinds["weight"] == names
        trained = {name for name in names if not name.endswith(("scale", "kept"))}
        assert kinds["exp_avg"] == kinds["exp_avg_sq"] == kinds["max_exp_avg_sq"] == trained
    manifests = [json.loads(path.read_text()) for path in folder.glob("*/manifest.json")]
    keys = [sorted(manifest["tensors"]) for manifest in manifests]
    assert len(keys) == 28 and all(other == keys[0] for other in keys), "global names only"


class Constant(nn.Module):
    """Adds a weight, which every layer fills with its own number."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.value.sum()


def numbered(topology: Topology, folder: Path, loads: bool) -> Any:
    """Seven equal layers in interleaved groups; weights and moments are the layer's number."""
    mine = cases.engine(
        topology,
        nn.Sequential(*[Constant() for _ in range(7)]),
        optimizer=torch.optim.Adam,
        init=lambda name, tensor: tensor.fill_(-1.0 if loads else float(name[0])),
        param_groups=lambda name, p: {"lr": [0.1, 0.2, 0.3][(int(name[0]) + loads) % 3]},
    )
    if loads:
        mine.load(folder)
        bundles = mine.parts.optimizer.bundles.values()
        rates = {group["lr"] for bundle in bundles for group in bundle.inner.param_groups}
        assert rates <= {0.1, 0.2, 0.3}
    else:
        cases.train(mine, 1)
        mine.parts.shards.settle()
        for part, state in zip(
            mine.parts.optimizer.parts(), mine.parts.optimizer.states(), strict=True
        ):
            for held, start, stop in part.flat.parts(part.start, part.stop):
                layer = float(held.name[0])
                span = slice(start - part.start, stop - part.start)
                state["exp_avg"][span], state["exp_avg_sq"][span] = layer, 10 * layer
                part.parameter.data[span] = layer
        mine.parts.shards.publish()
        mine.save(folder)
    return whole(mine)


@pytest.mark.report("tenstorrent/tt-metal#54884")
@pytest.mark.report("huggingface/transformers#24381")
@pytest.mark.report("pytorch/pytorch#113673")
@pytest.mark.report("pytorch/pytorch#54736")
@pytest.mark.report("facebookresearch/fairscale#601")
@pytest.mark.parametrize(
    ("source", "target"), [("1x1x1", "3x1x1"), ("3x1x1", "2x2x1"), ("1x3x1", "1x2x1")]
)
def test_each_layer_gets_its_own_state_back(source: str, target: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    run_on(Grid.parse(source), numbered, folder=folder, loads=False)
    state = run_on(Grid.parse(target), numbered, folder=folder, loads=True)[0]
    for layer in range(7):
        for kind, value in (("weight", layer), ("exp_avg", layer), ("exp_avg_sq", 10 * layer)):
            assert state[f"{kind}/{layer}.value"].tolist() == [value] * 5


def resumed_in(topology: Topology, precision: str, folder: Path) -> None:
    """20 steps at once, and 10 with a checkpoint and 10 more; masters bit for bit."""
    for zero in (0, 1, 2, 3):
        mine = engine(topology, zero=zero, precision=precision)
        losses = train(mine, 10)
        mine.save(folder / str(zero))
        losses += train(mine, 10)
        resumed = engine(topology, zero=zero, precision=precision)
        resumed.load(folder / str(zero))
        assert train(resumed, 10) == losses[10:]
        assert same(whole(resumed), whole(mine))


@pytest.mark.report("TensorAuto/OpenTau#185")
@pytest.mark.report("NVIDIA/apex#42")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("layout", ["1x4x1", "2x1x2"])
def test_a_run_resumes_with_its_masters(layout: str, precision: str, tmp_path: Path) -> None:
    run_on(Grid.parse(layout), resumed_in, precision=precision, folder=tmp_path)


def with_dropout(topology: Topology) -> Engine:
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(3)])
    return cases.engine(topology, model, seed=3)


def dropout_resumed(topology: Topology, folder: Path) -> list[tuple[float, float]]:
    unbroken = with_dropout(topology)
    cases.train(unbroken, 2)
    unbroken.save(folder)
    state = torch.get_rng_state()
    expected = cases.train(unbroken, [2, 3])
    torch.manual_seed(topology.rank)  # whatever else was drawn in between
    resumed = with_dropout(topology)
    resumed.load(folder)
    assert cases.train(resumed, [2, 3]) == expected
    torch.set_rng_state(state)
    return expected


@pytest.mark.report("NVIDIA/Megatron-LM#6858")
@pytest.mark.report("radixark/miles#3187")
@pytest.mark.report("NVIDIA-NeMo/Automodel#3437")
@pytest.mark.parametrize("layout", ["2x2x1", "1x1x2"])
def test_dropout_goes_on_after_a_resume_as_if_nothing_had_happened(
    layout: str, tmp_path: Path
) -> None:
    results = run_on(Grid.parse(layout), dropout_resumed, folder=tmp_path / "checkpoint")
    assert all(result == results[0] for result in results)


def unchanged_by_a_failed_load(topology: Topology, folder: Path) -> None:
    mine = engine(topology)
    train(mine, 2)
    mine.save(folder)
    other = Engine(
        nn.Sequential(*state_cases.model(topology)[:-1], nn.Linear(8, 4)),
        topology,
        loss_fn=nn.CrossEntropyLoss(reduction="sum"),
        optimizer=partial(torch.optim.AdamW, amsgrad=True),
        precision="fp64",
    )
    before = whole(other)
    with pytest.raises(ValueError, match="does not fit the model"):
        other.load(folder)
    assert same(whole(other), before) and other.step == 0
    assert not other.parts.optimizer.inner or not other.parts.optimizer.inner.state


def test_a_load_that_fails_changes_nothing(tmp_path: Path) -> None:
    run_on(Grid(dp=2), unchanged_by_a_failed_load, folder=tmp_path / "checkpoint")


def to_the_start(topology: Topology, folder: Path) -> None:
    """A checkpoint without optimizer state resets an engine that has some."""
    mine = engine(topology)
    mine.save(folder)
    first = train(mine, 3), whole(mine)
    mine.load(folder)
    assert mine.step == 0 and not any(mine.parts.optimizer.states())
    again = train(mine, 3), whole(mine)
    assert first[0] == again[0] and same(first[1], again[1])


def test_a_checkpoint_of_the_start_forgets_later_moments(tmp_path: Path) -> None:
    run_on(Grid(dp=2), to_the_start, folder=tmp_path / "checkpoint")


def every_optimizer_resumes(topology: Topology, folder: Path) -> None:
    makers = {
        "SGD": cases.SGD,
        "Adagrad": partial(torch.optim.Adagrad, initial_accumulator_value=0.1),
        "NAdam": torch.optim.NAdam,
        "ASGD": torch.optim.ASGD,
        "Rprop": torch.optim.Rprop,
        "Counting": partial(cases.Counting, lr=0.1),
        "plain": partial(torch.optim.SGD, lr=0.1),
    }
    for name, make in makers.items():
        for steps in (0, 2):
            mine = cases.engine(topology, optimizer=make)
            cases.train(mine, steps)
            mine.save(folder / f"{name}-{steps}")
            expected = cases.train(mine, [5, 6])
            resumed = cases.engine(topology, optimizer=make, zero=0)
            resumed.load(folder / f"{name}-{steps}")
            assert cases.train(resumed, [5, 6]) == expected, name
            assert same(resumed.state_dict_whole(), mine.state_dict_whole()), name


def test_every_optimizer_goes_on_where_it_was(tmp_path: Path) -> None:
    run_on(Grid(dp=2), every_optimizer_resumes, folder=tmp_path)


def other_precision(topology: Topology, folder: Path) -> Any:
    """fp32 masters are the same in fp32 and bf16; a frozen parameter is rounded to bf16."""
    mine = engine(topology, precision="fp32")
    train(mine, 2)
    mine.save(folder / "fp32")
    narrow = engine(topology, precision="bf16")
    narrow.load(folder / "fp32")
    narrow.save(folder / "bf16")
    back = engine(topology, precision="fp32")
    back.load(folder / "bf16")
    states = whole(mine), whole(narrow), whole(back)
    frozen = "weight/1.scale"
    rounded = states[0][frozen].bfloat16().float()
    assert torch.equal(states[1][frozen], rounded) and torch.equal(states[2][frozen], rounded)
    for state in states:
        for key in [key for key in state if key.endswith(".scale")]:
            del state[key]
    assert same(states[1], states[0]) and same(states[2], states[0])


def test_a_run_may_resume_in_another_precision(tmp_path: Path) -> None:
    with Topology.init() as topology:
        other_precision(topology, tmp_path)


def largest_of_others(topology: Topology) -> tuple[int, int]:
    """Elements of the largest set of live tensors while the state is put together."""
    peak = 0
    mine = cases.engine(topology, nn.Sequential(*[nn.Linear(128, 128) for _ in range(6)]))
    sizes: list[int] = []
    pack = torch.cat

    def counted(tensors: Any, *args: Any) -> Tensor:
        result = pack(tensors, *args)
        sizes.append(result.numel() * result.element_size())
        return result

    torch.cat = counted  # type: ignore[assignment]
    try:
        whole_state = mine.state_dict_whole()
    finally:
        torch.cat = pack
    peak = max(sizes)
    return len(whole_state), peak


@pytest.mark.report("facebookresearch/fairscale#844")
@pytest.mark.report("pytorch/pytorch#73383")
def test_only_rank_0_gets_the_whole_state(monkeypatch: pytest.MonkeyPatch) -> None:
    whole_bytes = 6 * 128 * 129 * 8
    (names, _), *others = run_on(Grid(dp=4), largest_of_others)
    assert names == 12
    for count, sent in others:
        assert count == 0 and sent <= whole_bytes / 4 * 1.1


def bytes_loaded(topology: Topology, folder: Path, saves: bool) -> tuple[int, int]:
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    mine = cases.engine(topology, model, precision="fp32")
    if saves:
        mine.train_step(*share(topology, torch.ones(8, 64), torch.ones(8, 64)))
        mine.save(folder)
        return 0, 0
    copied, copy = 0, Files.copy

    def counted(files: Files, source: Any, target: Any) -> None:
        nonlocal copied
        copied += source.nbytes
        copy(files, source, target)

    Files.copy = counted  # type: ignore[method-assign]
    mine.load(folder)
    return copied, 4 * 64 * 65 * 4


@pytest.mark.report("deepspeedai/DeepSpeed#1111")
@pytest.mark.parametrize("target", [4, 2])
def test_a_rank_reads_its_own_share_of_the_moments(target: int, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    run_on(Grid(dp=4), bytes_loaded, folder=folder, saves=True)
    for copied, weights in run_on(Grid(dp=target), bytes_loaded, folder=folder, saves=False):
        # Its part of the masters and two moments.
        assert weights * 3 / target * 0.5 < copied < weights * 3 / target * 1.2


def frozen_nines(topology: Topology, folder: Path, zero: int) -> Any:
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    for unit in model[:2]:
        unit.requires_grad_(False)
        for parameter in unit.parameters():
            nn.init.constant_(parameter, 9.0)
    mine = cases.engine(topology, model, zero=zero)
    cases.train(mine, 1)
    mine.save(folder)
    fresh = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    fresh[:2].requires_grad_(False)
    other = cases.engine(topology, fresh, zero={0: 3, 1: 0, 3: 1}[zero])
    other.load(folder)
    weights = other.state_dict_whole()
    # Unfreezing afterwards is refused with the next step.
    if topology.pp.rank == 0:
        other.parts.units[0].module.requires_grad_(True)
        with pytest.raises(RuntimeError, match="was unfrozen after the engine was built"):
            other.train_step(*share(topology, *cases.batch(0)))
    return weights


@pytest.mark.report("deepspeedai/DeepSpeed#5439")
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_frozen_weights_are_saved_and_loaded(zero: int, tmp_path: Path) -> None:
    weights = run_on(Grid(dp=2), frozen_nines, folder=tmp_path / "checkpoint", zero=zero)[0]
    for name in ("0.weight", "0.bias", "1.weight", "1.bias"):
        assert (weights[name] == 9).all()
    assert not (weights["2.weight"] == 9).any()
