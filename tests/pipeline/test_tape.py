"""Selective recompute: what is given again, what is made again, and the bytes between."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from parallel3d import Axis, ColumnParallelLinear
from parallel3d.pipeline.activations import Activations
from parallel3d.pipeline.stage import Stage
from parallel3d.pipeline.tape import _keeps
from tests.live import Live
from tests.pipeline.units import (
    WIDTH,
    Apply,
    agree,
    by_stage,
    gradients_for,
    hidden,
    linear,
    made,
    stage_of,
)

ROWS = 64
HIDDEN = ROWS * WIDTH * 4


class Seen(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[func.__name__.split(".")[0]] += 1
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    """Attention and a feed-forward of plain layers, [b, s, 8]."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), linear()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout, self.p = nn.Dropout(0.2), p

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x))[:, None].chunk(3, -1)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p, is_causal=True)
        x = x + self.dropout(self.out(y[:, 0]))
        return x + self.dropout(self.down(F.gelu(self.up(x))))


def sequences() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(2, 5, WIDTH, generator=generator, requires_grad=True)


def prepared(stage: Stage) -> Counter[str]:
    """What is done again in a backward, before the backward itself."""
    (segment,) = stage._kept.pop(0)
    with Seen() as seen:
        segment.prepare()
    return seen.count


def test_products_and_attention_are_given_and_all_else_is_made_again() -> None:
    again = {}
    for mode in ("full", "selective"):
        stage = stage_of([Block()], mode)
        stage.forward(0, sequences(), seed=1)
        again[mode] = prepared(stage)
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert again["full"] - again["selective"] == Counter({"addmm": 4, attention: 1})
    assert again["selective"]["native_layer_norm"] == again["selective"]["gelu"] == 1


def test_attention_that_draws_numbers_is_made_again() -> None:
    """Others are drawn after it."""
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention.default
    for place, p, kept in [((), 0.0, True), ((), 0.1, False), ((0.1,), None, False)]:
        named = {} if p is None else {"dropout_p": p}
        assert _keeps(efficient, (None, None, None, None, True, *place), named) == kept


@pytest.mark.parametrize("p", [0.0, 0.4])
def test_dropout_after_attention_draws_what_it_drew(p: float) -> None:
    units = lambda: [Block(p), Block(p)]  # noqa: E731
    assert agree(*(by_stage(made(units), sequences(), recompute=r) for r in ("none", "selective")))


def softmaxed(x: Tensor) -> Tensor:
    """Attention written out, with a mask that is a tensor of its own."""
    mask = torch.ones(3, 3, dtype=torch.bool).triu(1)
    scores = torch.einsum("ik,jk->ij", x, x).masked_fill(mask, -torch.inf)
    return torch.baddbmm(x[None], scores.softmax(-1)[None], x[None])[0]


def into_a_buffer(x: Tensor) -> Tensor:
    """A product that is written where it is told to."""
    buffer = torch.zeros(3, 3)
    torch.mm(x.detach(), x.detach().t(), out=buffer)
    return buffer @ x


IN_PLACE: dict[str, Callable[[], list[nn.Module]]] = {
    "relu": lambda: [nn.Sequential(linear(), nn.ReLU(inplace=True), linear())],
    "scaled": lambda: [nn.Sequential(linear(), Apply(lambda x: x.mul_(3)), nn.Tanh(), linear())],
    "scaled, of more dims": lambda: [
        nn.Sequential(
            Apply(lambda x: x[None]),
            nn.Linear(WIDTH, WIDTH, bias=False),
            Apply(lambda x: x.mul_(3)),
            nn.Tanh(),
            Apply(lambda x: (x @ x.transpose(1, 2)).mul_(2).exp() @ x),
        )
    ],
    "through a view": lambda: [
        nn.Sequential(linear(), Apply(lambda x: x[1:].mul_(3) + x[:2]), linear())
    ],
    "accumulated": lambda: [Apply(lambda x: torch.zeros(3, 3).addmm_(x, x.t()) @ x)],
    "into a buffer": lambda: [Apply(into_a_buffer), linear()],
    "by hand": lambda: [Apply(softmaxed), linear()],
    "convolution": lambda: [Apply(lambda x: F.conv1d(x[None], torch.ones(3, 3, 1))[0].sin())],
    "its own checkpoint": lambda: [
        Apply(lambda x: checkpoint(lambda y: (y @ y.t()).sin() @ y, x, use_reentrant=False))
    ],
}


@pytest.mark.parametrize("case", IN_PLACE)
def test_a_product_written_into_is_made_again(case: str) -> None:
    found = [by_stage(made(IN_PLACE[case]), hidden(), recompute=r) for r in ("none", "selective")]
    assert agree(*found)


@pytest.mark.parametrize(("bias", "product"), [(True, "addmm"), (False, "mm")])
def test_a_product_that_a_later_unit_writes_into_is_made_again(bias: bool, product: str) -> None:
    def units() -> list[nn.Module]:
        first, last = nn.Linear(WIDTH, WIDTH, bias), nn.Linear(WIDTH, WIDTH, bias)
        # What follows the product in its unit needs the product's value.
        return [
            nn.Sequential(first, Apply(lambda x: (x, x.sin()))),
            Apply(lambda x: x[0].mul_(2) + x[1]),
            last,
        ]

    selective, x = Activations("selective", every=2), sequences()
    full = Activations("full", every=2)
    assert agree(*(by_stage(made(units), x, recompute=each) for each in (selective, full)))
    stage = stage_of(made(units), selective)
    output = stage.forward(0, x, seed=0)
    for segment in stage._kept.pop(0):
        with Seen() as seen:
            segment.prepare()
        made_again = 1 if segment.unit.number == 0 else 0
        assert seen.count[product] == made_again, "that of the first unit, and not of the last"
    del output


class Moody(nn.Module):
    """Does other things every second time."""

    def __init__(self, *ways: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.ways = list(ways)

    def forward(self, x: Tensor) -> Tensor:
        self.ways.reverse()
        return self.ways[0](x)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda x: x @ x.t() @ x, lambda x: x * 2),
        (lambda x: x * 2, lambda x: x @ x.t() @ x),
        (lambda x: x @ x.t() @ x, lambda x: torch.addmm(x, x @ x.t(), x)),
    ],
    ids=["less", "more", "another"],
)
def test_a_forward_that_does_other_things_is_an_error_with_the_unit(
    first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor]
) -> None:
    stage = stage_of([linear(), Moody(second, first)], "selective")
    output = stage.forward(0, hidden(), seed=0)
    with pytest.raises(RuntimeError, match="did something else: use recompute.mode=none") as error:
        stage.backward(0, gradients_for(output))
    assert error.value.__notes__ == ["in unit 1 (Moody), stage 0"]


@pytest.mark.parametrize("parallel", [False, True])
def test_the_input_and_the_products_are_kept_and_no_more(parallel: bool) -> None:
    def layer() -> nn.Module:
        return ColumnParallelLinear(WIDTH, WIDTH, axis=Axis.single()) if parallel else linear()

    units = [nn.Sequential(nn.LayerNorm(WIDTH), layer(), nn.GELU(), layer()) for _ in range(2)]
    stage = stage_of(units, "selective", split=True)
    for parameter in (p for each in units for p in each.parameters()):
        parameter.grad = torch.zeros_like(parameter)
    with Live() as live:
        for k in range(3):
            stage.forward(k, torch.randn(ROWS, WIDTH, requires_grad=True), seed=k)
            # Two products a unit; the second of the first is the input of the second.
            assert live.bytes() == (1 + 2 * 2) * HIDDEN * (k + 1)
        for k in range(3):
            del stage.input_grad(k, [torch.ones(ROWS, WIDTH)])[:]
            stage.weight_grad(k)
        assert live.bytes() == 0


def test_a_product_written_into_is_not_kept() -> None:
    stage = stage_of([nn.Sequential(linear(), nn.ReLU(inplace=True), linear())], "selective")
    with Live() as live:
        stage.forward(0, torch.randn(ROWS, WIDTH, requires_grad=True), seed=0)
        assert live.bytes() == 2 * HIDDEN, "the input, and the second layer's product"


def test_the_first_forward_needs_no_more_than_a_graph_that_is_kept() -> None:
    peaks = {}
    for mode in ("none", "selective"):
        stage = stage_of([nn.Sequential(linear(), *[nn.GELU()] * 6, linear())], mode)
        with Live() as live:
            stage.forward(0, torch.randn(ROWS, WIDTH, requires_grad=True), seed=0)
            peaks[mode] = live.peak
    assert peaks["selective"] <= peaks["none"]


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_every_nth_unit_is_repeated(mode: str) -> None:
    ran: list[int] = []

    def unit(number: int) -> nn.Module:
        return Apply(lambda x: (ran.append(number), x * 2)[1])

    stage = stage_of([unit(number) for number in range(5)], Activations(mode, every=2))
    output = stage.forward(0, hidden(), seed=0)
    assert ran == [0, 1, 2, 3, 4]
    stage.backward(0, gradients_for(output))
    assert ran[5:] == [4, 2, 0]


def sends_itself(x: Tensor) -> Tensor:
    """Sums a product over a group of its own, which hears of no memo."""
    y = x @ x.t()
    dist.all_reduce(y)
    return y.detach() @ x


def test_a_product_that_somebody_else_sends_is_made_again_and_sent_again(tmp_path: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        stage = stage_of([Apply(sends_itself)], "selective")
        stage.forward(0, hidden(), seed=0)
        again = prepared(stage)
    finally:
        dist.destroy_process_group()
    assert again["allreduce_"] == 1 and again["mm"] == 1, "the first product, not the second"


def test_a_copy_in_another_shape_is_not_kept() -> None:
    stage = stage_of([Apply(lambda x: x.t().reshape(-1).sin())], "selective")
    with Live() as live:
        stage.forward(0, torch.randn(ROWS, WIDTH, requires_grad=True), seed=0)
        assert live.bytes() == HIDDEN
