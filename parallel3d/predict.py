"""The model's output without a target: what comes next after some tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .batch import Batch, shapes_of
from .comm.collectives import broadcast
from .engine import Engine
from .pipeline.runtime import Step
from .tensor import gather_from


class LastOutput:
    """In the place of a loss at the end of the last stage: keeps the output."""

    def __init__(self) -> None:
        self.output: Any = None

    def forward(self, microbatch: int, output: Any) -> None:
        """Keep it."""
        self.output = output

    def backward(self, microbatch: int) -> list[Tensor]:
        """Nothing comes back."""
        raise AssertionError("a prediction has no backward")


def next_logits(engine: Engine, tokens: Tensor, vocab_size: int) -> Tensor:
    """The model's logits [b, vocab_size] for what follows ``tokens`` [b, s], on every rank.

        tokens  [b, s]                      the same on all pp and tp ranks
        output  [b, s, ceil(vocab / tp)]    of the last stage, or whole: its last position is used

    Moves   forward the activations of each border; over tp the logits of the last stage, then over
            pp those of all: ``b * vocab_size`` elements in fp32.
    Equals  ``model(tokens)[:, -1]`` in fp32, where ``vocab_size`` is that of the model.
    """
    parts, topology = engine.parts, engine.topology
    x = tokens.to(topology.device)
    kept = LastOutput()
    # Lengths grow by one: their shapes are not known ahead, so no receive is posted ahead.
    actions = parts.programs.mine(1, training=False, ahead=False)
    step = Step([x], [0], shapes_of(Batch([x], [None])), False, kept)
    devices = [topology.device] if topology.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        parts.run(actions, step)
    last = parts.programs.rank_of_stage[-1]
    if topology.pp.rank == last:
        logits = kept.output[:, -1].float()
        if logits.shape[-1] < vocab_size:
            logits = gather_from(logits, topology.tp)
        logits = logits[:, :vocab_size].contiguous()
    else:
        logits = torch.empty(x.shape[0], vocab_size, device=topology.device)
    return broadcast(logits, topology.pp, last, tag="logits")


def continuation(
    engine: Engine,
    tokens: Sequence[int],
    *,
    vocab_size: int,
    num_ids: int,
    context: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> Iterator[int]:
    """Tokens that follow ``tokens``, without end, the same on every rank. Collective.

    Args:
        engine: of a language model.
        tokens: one or more ids.
        vocab_size: the model's.
        num_ids: ids are chosen from 0..num_ids-1; a model may have more than the text needs.
        context: the model is given so many of the last tokens, at most.
        temperature: 0 takes the most probable token, else one is drawn from
            ``softmax(logits / temperature)``.
        seed: of the draws.
    """
    known = list(tokens)
    generator = torch.Generator().manual_seed(seed)
    while True:
        logits = next_logits(engine, torch.tensor([known[-context:]]), vocab_size)[0, :num_ids]
        if temperature:
            share = torch.softmax(logits.double().cpu() / temperature, -1)
            chosen = torch.multinomial(share, 1, generator=generator).to(logits.device)
        else:
            chosen = logits.argmax().view(1)
        # Replicas over dp may differ in the last bit of a logit; all go on with one choice.
        known.append(int(broadcast(chosen, engine.topology.world, tag="token")))
        yield known[-1]
