"""Models with a parameter that several units use, and what training them gives, for tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import gpt
from parallel3d import Engine, Grid, Topology, vocab_parallel_cross_entropy
from parallel3d.comm.collectives import all_gather_objects
from parallel3d.placement import Replicate
from tests.engine.cases import Tensors, share
from tests.world import run_on

VOCABULARY, WIDTH, STEPS, MAX_NORM = 11, 8, 3, 0.15
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.5, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1),
    "adam": partial(torch.optim.Adam, lr=0.01),
}
GPT = {
    "vocab_size": VOCABULARY,
    "width": WIDTH,
    "num_layers": 6,
    "num_heads": 2,
    "ffn_width": 16,
    "max_seq_len": 6,
    "tied": True,
}


class Head(nn.Module):
    """An output layer that uses another module's weight, or only has it."""

    def __init__(self, weight: nn.Parameter, used: bool = True) -> None:
        super().__init__()
        self.weight, self.used = weight, used

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) if self.used else x


class Scaled(nn.Module):
    """A linear layer with a buffer that is drawn as well."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) * self.scale)


def eight(middle: Callable[[nn.Embedding], nn.Module]) -> nn.Sequential:
    """An embedding and a head of one weight seven units apart, and something in the middle."""
    embedding = nn.Embedding(VOCABULARY, WIDTH)
    inner = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(5)]
    inner.insert(2, nn.Sequential(middle(embedding)))
    return nn.Sequential(embedding, *inner, Head(embedding.weight))


def ends() -> nn.Sequential:
    return eight(lambda embedding: nn.Tanh())


def three() -> nn.Sequential:
    """With a third use between."""
    return eight(lambda e: nn.Sequential(Head(e.weight), nn.Linear(VOCABULARY, WIDTH)))


def unused() -> nn.Sequential:
    """The use between gets no gradient."""
    return eight(lambda embedding: Head(embedding.weight, used=False))


def frozen() -> nn.Sequential:
    model = three()
    model[0].weight.requires_grad_(False)
    return model


def module() -> nn.Sequential:
    """One module is units 1, 2 and 6; a weight of another lies in units 0 and 7."""
    model = ends()
    model[1] = model[2] = model[6] = Scaled()
    return model


PLAIN = {each.__name__: each for each in (ends, three, unused, frozen, module)}
CASES = [
    ("ends", "adamw"),
    ("three", "sgd"),
    ("three", "adamw"),
    ("unused", "adamw"),
    ("frozen", "sgd"),
    ("module", "adamw"),
    ("gpt", "sgd"),
    ("gpt", "adamw"),
]


def build(name: str, topology: Topology | None) -> nn.Sequential:
    """A model by name; the plain twin without a topology."""
    torch.manual_seed(5)
    if name in PLAIN:
        return PLAIN[name]()
    if topology is None:
        return gpt.reference(**GPT)
    with torch.device("meta"):
        return gpt.build(topology, **GPT)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The whole batch of a step."""
    generator = torch.Generator().manual_seed(step)
    x, target = torch.randint(VOCABULARY, (2, 9, 6), generator=generator)
    return x, target


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten(), reduction="sum")


def engine_of(topology: Topology, name: str, optimizer: str = "sgd", **options: Any) -> Engine:
    cut = partial(vocab_parallel_cross_entropy, axis=topology.tp)
    defaults = {
        "model": build(name, topology),
        "loss_fn": cross_entropy if name in PLAIN else cut,
        "optimizer": OPTIMIZERS[optimizer],
        "num_microbatches": 4,
        "partition": "uniform",
        "precision": "fp64",
        "max_grad_norm": MAX_NORM,
    }
    return Engine(topology=topology, **{**defaults, **options})


class Trained(NamedTuple):
    """What a run gave: loss and norm of each step, and whole weights before it and after it."""

    numbers: list[tuple[float, float]]
    initial: Tensors
    weights: Tensors


def train(engine: Engine, steps: int = STEPS) -> list[tuple[float, float]]:
    """Loss and norm of each step; every copy is compared after each."""
    numbers = []
    for _ in range(steps):
        result = engine.train_step(*share(engine.topology, *batch(engine.step)))
        numbers.append((result.loss, result.grad_norm))
        assert unequal_copies(engine) == [], f"after step {engine.step}"
    return numbers


def unequal_copies(engine: Engine) -> list[str]:
    """Owners of parameters of which ranks that should hold the same values do not."""
    parts, mine = engine.parts, {}
    parts.shards.settle()
    for unit in parts.units:
        for path, parameter in unit.module.named_parameters(remove_duplicate=False):
            fact = parts.facts[f"{unit.name}.{path}"]
            place = 0 if isinstance(fact.placement, Replicate) else parts.topology.tp.rank
            data = parameter.detach().contiguous().view(-1).view(torch.uint8)
            mine[fact.name, fact.owner, place] = blake2b(data.numpy().tobytes()).digest()
    seen: dict[tuple[str, int], set[bytes]] = {}
    for digests in all_gather_objects(mine, parts.topology.world):
        for (_, owner, place), digest in digests.items():
            seen.setdefault((owner, place), set()).add(digest)
    return sorted(owner for (owner, _), digests in seen.items() if len(digests) > 1)


def on_rank(topology: Topology, **options: Any) -> dict[tuple[str, str], Trained]:
    found = {}
    for name, optimizer in CASES:
        engine = engine_of(topology, name, optimizer, **options)
        initial = engine.state_dict_whole()
        numbers = train(engine)
        found[name, optimizer] = Trained(numbers, initial, engine.state_dict_whole())
    return found


@cache
def under(layout: str, **options: Any) -> dict[tuple[str, str], Trained]:
    """Every case on one world of this layout."""
    first, *others = run_on(Grid.parse(layout), on_rank, **options)
    for other in others:
        for key, trained in first.items():
            assert other[key].numbers == trained.numbers, key
    return first


def plainly(name: str, optimizer: str, initial: Tensors) -> Trained:
    """The same in plain PyTorch, with one Parameter for all uses."""
    model = build(name, None).double()
    model.load_state_dict(initial)
    made = OPTIMIZERS[optimizer]([p for p in model.parameters() if p.requires_grad])
    numbers = []
    for step in range(STEPS):
        x, target = batch(step)
        made.zero_grad()
        loss = cross_entropy(model(x), target) / target.numel()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        made.step()
        numbers.append((loss.item(), float(norm)))
    return Trained(numbers, initial, dict(model.state_dict()))
