"""The models of the command line: those of the `models` folder, and a subject of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from ..tensor import vocab_parallel_cross_entropy
from ..topology import Topology
from .subject import IGNORED, Batch, LossFn, Subject

SEQ_LEN = 16
# A vocabulary that no tp divides, so that its last part is padded.
LANGUAGE = {"vocab_size": 257, "width": 128, "num_layers": 4, "num_heads": 4, "max_seq_len": 256}
GPT = {**LANGUAGE, "ffn_width": 512}
LLAMA = {**LANGUAGE, "ffn_width": 384, "num_kv_heads": 2}
# Enough units for four ranks of two chunks, and small: for suites of many cases.
DEEP = {
    "vocab_size": 67,
    "width": 32,
    "num_layers": 7,
    "num_heads": 4,
    "ffn_width": 64,
    "max_seq_len": 8,
}
MLP = {"in_features": 16, "out_features": 1, "width": 128, "num_layers": 4, "ffn_width": 512}
PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_tiny": ("models.gpt", GPT),
    "gpt_deep": ("models.gpt", DEEP),
    "gpt_deep_tied": ("models.gpt", {**DEEP, "tied": True}),
    "gpt_tied": ("models.gpt", {**GPT, "tied": True}),
    "llama_tiny": ("models.llama", LLAMA),
    "llama_tied": ("models.llama", {**LLAMA, "tied": True}),
    "mlp": ("models.mlp", MLP),
}


def subject(name: str, num_samples: int = 9) -> Subject:
    """A preset by name, or ``module:attribute``, a ``Subject`` that can be imported.

    A preset's whole batch has ``num_samples``, at best a number that no layout divides, or is of
    one ready microbatch less.

    Raises ValueError for what is neither; names the nearest.
    """
    module, colon, attribute = name.partition(":")
    try:
        if colon:
            found = getattr(import_module(module), attribute)
        elif name in PRESETS:
            return of_model(*PRESETS[name], num_samples)
        else:
            close = get_close_matches(name, PRESETS, n=1, cutoff=0.5) or list(PRESETS)
            raise ValueError(
                f"model={name} is not one of {', '.join(PRESETS)}; did you mean {close[0]}? A "
                f"model of your own is model=MODULE:NAME of a parallel3d.verify.Subject"
            )
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"model={name} cannot be imported ({error}): start from the folder that it lies in"
        ) from error
    if not isinstance(found, Subject):
        raise ValueError(
            f"model={name} is a {type(found).__name__}, not a parallel3d.verify.Subject"
        )
    return found


def of_model(module: str, sizes: dict[str, Any], num_samples: int = 9) -> Subject:
    """The subject of a package with ``build(topology, **sizes)`` and ``reference(**sizes)``."""
    import_module(module)
    if "vocab_size" not in sizes:
        regression = partial(real_batch, num_samples, sizes["in_features"], sizes["out_features"])
        return Subject(
            partial(_build, module, sizes), partial(_reference, module, sizes), summed, regression
        )
    length = min(SEQ_LEN, sizes["max_seq_len"])
    return Subject(
        partial(_build, module, sizes),
        partial(_reference, module, sizes),
        whole_cross_entropy,
        partial(token_batch, num_samples, length, sizes["vocab_size"]),
        cut_cross_entropy,
    )


def token_batch(num_samples: int, length: int, vocab_size: int, step: int) -> Batch:
    """Random tokens; more targets are masked the later the sample, and all of the last."""
    generator = torch.Generator().manual_seed(step)

    def make(first: int, count: int, length: int) -> tuple[Tensor, Tensor]:
        x, target = torch.randint(vocab_size, (2, count, length), generator=generator)
        share = torch.arange(first + 1, first + count + 1).view(-1, 1) / num_samples
        masked = torch.rand(count, length, generator=generator) < share
        return x, target.masked_fill(masked, IGNORED)

    return _uneven(make, num_samples, length, step)


def real_batch(num_samples: int, in_features: int, out_features: int, step: int) -> Batch:
    """Random vectors."""
    generator = torch.Generator().manual_seed(step)

    def make(first: int, count: int, length: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, in_features, generator=generator)
        return x, torch.randn(count, out_features, generator=generator)

    return _uneven(make, num_samples, 1, step)


def _uneven(
    make: Callable[[int, int, int], tuple[Tensor, Tensor]], num_samples: int, length: int, step: int
) -> Batch:
    """A whole batch, or in the second of two steps ready microbatches, all of them uneven.

    ``make(first, count, length)`` makes samples ``first`` to ``first + count``.
    """
    if step % 2 == 0:
        return make(0, num_samples, length)
    # One sample too many for microbatches of one: the last has two.
    last = num_samples - 2
    return [make(k, 2 if k == last else 1, max(1, length - k % 3)) for k in range(last + 1)]


def whole_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """The sum over targets that are not masked, of whole logits."""
    return cross_entropy(logits.flatten(0, -2), target.flatten(), reduction="sum")


def cut_cross_entropy(topology: Topology) -> LossFn:
    """The same of logits that are cut over tp."""
    return partial(vocab_parallel_cross_entropy, axis=topology.tp)


def summed(output: Tensor, target: Tensor) -> Tensor:
    """The squared error, summed."""
    return mse_loss(output, target, reduction="sum")


def _build(module: str, sizes: dict[str, Any], topology: Topology) -> nn.Sequential:
    with torch.device("meta"):
        model: nn.Sequential = import_module(module).build(topology, **sizes)
    return model


def _reference(module: str, sizes: dict[str, Any]) -> nn.Module:
    model: nn.Module = import_module(module).reference(**sizes)
    return model
