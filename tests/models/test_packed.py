"""Several documents in a row are what they are on rows of their own."""

from __future__ import annotations

from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import models.gpt
import models.llama
from models.packed import positions, visible
from parallel3d import Engine
from parallel3d.tensor import vocab_parallel_cross_entropy
from parallel3d.topology import Axis, Grid, Topology
from tests.models.padding import apart, together
from tests.world import run_on

VOCAB, LENGTH = 23, 9
GPT = {
    "vocab_size": VOCAB,
    "width": 16,
    "num_layers": 2,
    "num_heads": 4,
    "ffn_width": 12,
    "max_seq_len": LENGTH,
}
LLAMA = {**GPT, "num_kv_heads": 2, "rope_theta": 100.0}
CASES: dict[str, tuple[ModuleType, dict[str, Any]]] = {
    "gpt": (models.gpt, GPT),
    "llama": (models.llama, LLAMA),
}
ONE = SimpleNamespace(tp=Axis.single())
# Rows with two documents, one, four; one of a single token; equal ids are apart in different rows.
DOCUMENTS = torch.tensor(
    [
        [0, 0, 0, 0, 1, 1, 1, 1, 1],
        [7] * 9,
        [2, 3, 3, 3, 4, 4, 9, 9, 9],
        [1, 1, 1, 1, 1, 1, 1, 1, 2],
    ]
)


def rows() -> tuple[Tensor, Tensor]:
    """Tokens and targets of DOCUMENTS; the last token of each has no target."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB, (len(DOCUMENTS), LENGTH + 1), generator=generator)
    target = tokens[:, 1:].clone()
    target[:, :-1][DOCUMENTS[:, 1:] != DOCUMENTS[:, :-1]] = -100
    return tokens[:, :-1].clone(), target


def draw(name: str, tensor: Tensor) -> None:
    nn.init.normal_(tensor, std=0.3)


def randomised(model: nn.Sequential) -> nn.Sequential:
    torch.manual_seed(3)
    for name, parameter in model.double().named_parameters():
        draw(name, parameter)
    return model


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("written_out", [False, True])
def test_logits_loss_and_gradients_are_those_of_padded_documents(
    case: str, written_out: bool
) -> None:
    package, sizes = CASES[case]
    # A dropout that drops nothing takes the attention that is written out.
    model = randomised(package.reference(**sizes, dropout=1e-300 if written_out else 0.0))
    tokens, target = rows()
    alone = apart(tokens, DOCUMENTS, target)
    expected = model(alone.x)
    loss = loss_of(expected, alone.target)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    output = model((tokens, DOCUMENTS))
    torch.testing.assert_close(
        output.flatten(0, 1), together(expected, alone.places), rtol=1e-12, atol=1e-12
    )
    ours = loss_of(output, target)
    torch.testing.assert_close(ours, loss, rtol=1e-12, atol=0)
    for gradient, true in zip(
        torch.autograd.grad(ours, list(model.parameters())), gradients, strict=True
    ):
        scale = true.abs().max().item()
        torch.testing.assert_close(gradient, true, rtol=0, atol=1e-12 * scale + 1e-14)


@pytest.mark.parametrize("case", CASES)
def test_at_tp_1_the_model_is_its_reference_bit_for_bit(case: str) -> None:
    package, sizes = CASES[case]
    whole = randomised(package.reference(**sizes))
    ours = package.build(ONE, **sizes).double()
    ours.load_state_dict(whole.state_dict())
    given = rows()[0], DOCUMENTS
    assert torch.equal(ours(given), whole(given))


@pytest.mark.report("huggingface/nanoVLM#204")
@pytest.mark.parametrize("dropout", [0.0, 1e-300])
@pytest.mark.parametrize("case", CASES)
def test_a_token_of_one_document_changes_nothing_in_another(case: str, dropout: float) -> None:
    package, sizes = CASES[case]
    model = randomised(package.reference(**sizes, dropout=dropout))
    tokens = rows()[0]
    before = model((tokens, DOCUMENTS))
    for row, at in ((0, 2), (0, 6), (2, 1), (3, 0)):
        changed = tokens.clone()
        changed[row, at] = (changed[row, at] + 1) % VOCAB
        differs = (model((changed, DOCUMENTS)) != before).any(-1)
        sees = torch.zeros_like(differs)
        sees[row, at:] = DOCUMENTS[row, at:] == DOCUMENTS[row, at]
        assert torch.equal(differs, sees), (row, at)


def test_a_row_that_is_one_document_is_a_row_without_documents() -> None:
    for package, sizes in CASES.values():
        model, tokens = randomised(package.reference(**sizes)), rows()[0]
        one = torch.full_like(tokens, 5)
        torch.testing.assert_close(model((tokens, one)), model(tokens), rtol=1e-12, atol=1e-12)


def test_positions_start_anew_in_every_run_of_equal_ids_ascending_or_not() -> None:
    assert positions(torch.tensor([[4, 4, 4, 9, 2, 2], [0, 1, 1, 0, 0, 0]])).tolist() == [
        [0, 1, 2, 0, 0, 1],
        [0, 0, 1, 0, 1, 2],
    ]
    assert visible(torch.tensor([[3, 3, 1, 3]])).int().tolist() == [
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    ]


@pytest.mark.parametrize("documents", [DOCUMENTS[:, :-1], DOCUMENTS.bfloat16(), DOCUMENTS[0]])
def test_ids_that_do_not_fit_the_tokens_are_refused(documents: Tensor) -> None:
    for package, sizes in CASES.values():
        with pytest.raises(ValueError, match=r"an integer for each token, \(4, 9\)"):
            package.reference(**sizes)((rows()[0], documents))


# Under layouts

LAYOUTS: dict[str, dict[str, Any]] = {
    "1x1x1": {},
    "2x1x1": {"schedule": "1f1b"},
    "1x1x2": {"recompute": "full"},
    "2x1x2": {"schedule": "zb-h1"},
    "2x2x1": {"schedule": "gpipe", "zero": 1, "recompute": "full"},
}


def engine_of(topology: Topology, case: str, **options: Any) -> Engine:
    package, sizes = CASES[case]
    with torch.device("meta"):
        model = package.build(topology, **sizes)
    return Engine(
        model,
        topology,
        loss_fn=partial(vocab_parallel_cross_entropy, axis=topology.tp),
        optimizer=partial(torch.optim.SGD, lr=1.0),
        precision="fp64",
        num_microbatches=2,
        init=draw,
        **options,
    )


def train_packed(topology: Topology, options: dict[str, Any]) -> dict[str, list[Any]]:
    """By case: evaluation's loss and a step's loss and norm, the weights before and after."""
    found = {}
    tokens, target = rows()
    size, rank = topology.dp.size, topology.dp.rank
    # Dim 0 is cut over dp, then into microbatches.
    x, y = (
        tuple(each.tensor_split(size)[rank] for each in (tokens, DOCUMENTS)),
        target.tensor_split(size)[rank],
    )
    for case in CASES:
        engine = engine_of(topology, case, **options)
        before = engine.state_dict_whole()
        looked = engine.eval_step(x, y)
        result = engine.train_step(x if topology.pp.rank == 0 else None, y)
        found[case] = [looked.loss, result.loss, result.grad_norm, before]
        found[case].append(engine.state_dict_whole())
    return found


def by_padding(case: str, weights: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the plain model on documents apart."""
    package, sizes = CASES[case]
    plain = package.reference(**sizes).double()
    plain.load_state_dict(weights)
    tokens, target = rows()
    alone = apart(tokens, DOCUMENTS, target)
    loss = loss_of(plain(alone.x), alone.target) / int((target != -100).sum())
    loss.backward()
    return loss.item(), {name: p.grad for name, p in plain.named_parameters()}


@pytest.mark.report("KempnerInstitute/KempnerForge#204")
@pytest.mark.report("deepspeedai/DeepSpeed#969")
@pytest.mark.report("pytorch/pytorch#183582")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_under_every_layout_loss_and_gradients_are_those_of_padded_documents(layout: str) -> None:
    ranks = run_on(Grid.parse(layout), train_packed, options=LAYOUTS[layout])
    for case in CASES:
        looked, loss, norm, before, after = ranks[0][case]
        true, gradients = by_padding(case, before)
        assert loss == pytest.approx(true, rel=1e-12)
        assert looked == pytest.approx(true, rel=1e-12)
        square = sum(g.square().sum().item() for g in gradients.values())
        assert norm == pytest.approx(square**0.5, rel=1e-12)
        for name, gradient in gradients.items():
            error = (before[name] - after[name] - gradient).abs().max()
            assert error <= 1e-12 * gradient.abs().max() + 1e-15, (name, float(error))
        assert [rank[case][:3] for rank in ranks] == [ranks[0][case][:3]] * len(ranks)
