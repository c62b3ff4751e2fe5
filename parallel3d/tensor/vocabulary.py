"""Layers cut over the vocabulary: the embedding and the output head."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..placement import Placement, Shard, cut, pieces_along
from ..rng import draw_rows, new_seed
from ..topology import Axis
from .linear import ColumnParallelLinear
from .regions import reduce_from


def standard_normal(rows: Tensor, fan_in: int) -> None:
    """How ``nn.Embedding`` draws: N(0, 1)."""
    rows.normal_()


class VocabParallelEmbedding(nn.Module):
    """Embedding with its rows cut over an axis of ``t`` ranks.

        ids [...]               whole, 0 <= id < V
        w   [ceil(V / t), h]    rows rank * ceil(V / t) ...; the last ranks' are padded with zeros
        y   [..., h]            whole

    Moves   forward one all-reduce, the elements of y; backward nothing.
    Equals  ``nn.Embedding``. Padding rows are never looked up, so they get no gradient.

    Args:
        num_embeddings: V, any number.
        embedding_dim: h.
        axis: the axis that cuts; of size 1 the layer is exactly ``nn.Embedding``.

    Raises IndexError for an id outside the vocabulary, as ``nn.Embedding`` does (on CUDA a device
    assertion). Source: Megatron-LM (arXiv 1909.08053), section 3.
    """

    init_weight: Callable[[Tensor, int], object] = staticmethod(standard_normal)

    def __init__(self, num_embeddings: int, embedding_dim: int, *, axis: Axis) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim, self.axis = num_embeddings, embedding_dim, axis
        self.weight = nn.Parameter(torch.empty(-(-num_embeddings // axis.size), embedding_dim))
        self.reset_parameters()

    def placements(self) -> dict[str, Placement]:
        """The weight cut along dim 0."""
        return {"weight": Shard(0, (self.num_embeddings,))}

    def reset_parameters(self) -> None:
        """Draw the rows; ranks under one ``torch.manual_seed`` draw cuts of one whole table."""
        if not self.weight.is_meta:
            seed, init = new_seed(), self.init_weight
            placement, width = self.placements()["weight"], self.embedding_dim
            draw_rows(self.weight, placement, self.axis, seed, lambda rows: init(rows, width))

    @classmethod
    def from_embedding(cls, module: nn.Embedding, *, axis: Axis) -> VocabParallelEmbedding:
        """The cut of an existing whole table, on its device and in its dtype."""
        plain = {
            "padding_idx": None,
            "max_norm": None,
            "scale_grad_by_freq": False,
            "sparse": False,
        }
        for option, default in plain.items():
            value = getattr(module, option)
            if value != default:
                raise ValueError(f"nn.Embedding's {option} = {value} is not offered: use {default}")
        with torch.device("meta"):
            layer = cls(module.num_embeddings, module.embedding_dim, axis=axis)
        value = cut(module.weight.detach(), layer.placements()["weight"], axis).clone()
        layer.weight = nn.Parameter(value, module.weight.requires_grad)
        return layer

    def forward(self, ids: Tensor) -> Tensor:
        """``[...]`` integers to ``[..., h]``."""
        if self.axis.size == 1:
            return F.embedding(ids, self.weight)
        check_range(ids, self.num_embeddings, "index out of range in self: id")
        local = ids - self.axis.rank * self.weight.shape[0]
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        rows = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return reduce_from(rows.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.axis)

    def extra_repr(self) -> str:
        """As ``nn.Embedding``'s, with the axis."""
        axis = f"{self.axis.name}/{self.axis.size}"
        return f"{self.num_embeddings}, {self.embedding_dim}, axis={axis}"


class VocabParallelLinear(ColumnParallelLinear):
    """The output head: a column-parallel linear layer over a vocabulary of any size.

        x   [..., k]                whole
        w   [ceil(V / t), k]        the last ranks' rows are padded with zeros
        y   [..., ceil(V / t)]      cut; padding columns are -inf

    Moves   forward nothing; backward one all-reduce of x's gradient, the elements of x.
    Equals  ``nn.Linear`` on the whole weight, then the rank's slice of the last dim. A padding
            column has no probability under softmax, and its rows get no gradient.
    """

    def __init__(
        self, in_features: int, vocab_size: int, bias: bool = False, *, axis: Axis
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.axis = in_features, vocab_size, axis
        self.gather_output, self.blocks = False, (vocab_size,)
        rows = -(-vocab_size // axis.size)
        self._make(rows, in_features, rows if bias else None)

    @classmethod
    def from_linear(  # type: ignore[override]
        cls, module: nn.Linear, *, axis: Axis
    ) -> VocabParallelLinear:
        """The cut of an existing whole head, on its device and in its dtype."""
        with torch.device("meta"):
            layer = cls(module.in_features, module.out_features, module.bias is not None, axis=axis)
        return layer._load(module)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., k]`` to ``[..., ceil(V / t)]``."""
        logits = super().forward(x)
        used = pieces_along(self.placements()["weight"], self.axis, 0, logits.shape[-1])[0].length
        if used == logits.shape[-1]:
            return logits
        padding = torch.arange(logits.shape[-1], device=logits.device) >= used
        return logits.masked_fill(padding, -torch.inf)


def check_range(ids: Tensor, size: int, message: str) -> None:
    """Raise IndexError for an id outside 0..size-1; on CUDA assert it on the device."""
    inside = ((ids >= 0) & (ids < size)).all()
    if ids.device.type == "cpu":
        if not inside:
            wrong = ids[(ids < 0) | (ids >= size)][0]
            raise IndexError(f"{message} {wrong.item()} is not in 0..{size - 1}")
    else:
        torch._assert_async(inside)
