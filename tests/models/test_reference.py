"""The references against the papers' formulas, written out again with loops and complex numbers."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

import models.gpt
import models.llama
import models.mlp
from models.llama.rotary import rotate

VOCAB, WIDTH, LAYERS, HEADS, FFN, LENGTH = 23, 24, 2, 6, 20, 9


def randomised(model: nn.Sequential) -> nn.Sequential:
    """In fp64, with every parameter (norms and biases too) far from its first value."""
    torch.manual_seed(3)
    for parameter in model.double().parameters():
        nn.init.normal_(parameter, std=0.5)
    return model


def tokens() -> Tensor:
    return torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def normalise(x: Tensor, centre: bool) -> Tensor:
    x = x - x.mean(-1, keepdim=True) * centre
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One head, position by position: q, k, v [b, s, d]."""
    rows = []
    for s in range(q.shape[1]):
        scores = (q[:, s : s + 1] * k[:, : s + 1]).sum(-1) / math.sqrt(q.shape[-1])
        shares = scores.exp() / scores.exp().sum(-1, keepdim=True)
        rows.append((shares[..., None] * v[:, : s + 1]).sum(1))
    return torch.stack(rows, 1)


def turned(x: Tensor, theta: float) -> Tensor:
    """x [b, s, d]: the pair (x_i, x_{i + d/2}) as a complex number, turned by s theta^(-2i/d)."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[1])[:, None] * theta ** (-torch.arange(half).double() / half)
    z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((z.real, z.imag), -1)


def test_gpt_is_the_formula_of_gpt2() -> None:
    model = randomised(models.gpt.reference(VOCAB, WIDTH, LAYERS, HEADS, FFN, LENGTH + 2))
    p, d = model.state_dict(), WIDTH // HEADS
    x = p["0.token.weight"][tokens()] + p["0.position.weight"][:LENGTH]
    for i in range(1, LAYERS + 1):

        def affine(x: Tensor, name: str, i: int = i) -> Tensor:
            return x @ p[f"{i}.{name}.weight"].T + p[f"{i}.{name}.bias"]

        h = normalise(x, True) * p[f"{i}.norm1.weight"] + p[f"{i}.norm1.bias"]
        q, k, v = affine(h, "attention.qkv").split(WIDTH, -1)
        heads = [slice(n * d, n * d + d) for n in range(HEADS)]
        y = torch.cat([attend(q[..., n], k[..., n], v[..., n]) for n in heads], -1)
        x = x + affine(y, "attention.out")
        h = normalise(x, True) * p[f"{i}.norm2.weight"] + p[f"{i}.norm2.bias"]
        u = affine(h, "mlp.up")
        u = 0.5 * u * (1 + torch.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)))
        x = x + affine(u, "mlp.down")
    x = normalise(x, True) * p[f"{LAYERS + 1}.norm.weight"] + p[f"{LAYERS + 1}.norm.bias"]
    logits = x @ p[f"{LAYERS + 1}.logits.weight"].T
    torch.testing.assert_close(model(tokens()), logits, rtol=1e-12, atol=1e-12)


def test_llama_is_the_formula_with_grouped_queries_rotation_and_biases() -> None:
    kv, theta = 2, 500.0
    model = randomised(
        models.llama.reference(VOCAB, WIDTH, LAYERS, HEADS, FFN, LENGTH, kv, theta, qkv_bias=True)
    )
    p, d = model.state_dict(), WIDTH // HEADS
    x = p["0.token.weight"][tokens()]
    for i in range(1, LAYERS + 1):
        h = normalise(x, False) * p[f"{i}.norm1.weight"]
        qkv = h @ p[f"{i}.attention.qkv.weight"].T + p[f"{i}.attention.qkv.bias"]
        heads = qkv.split(d, -1)
        y = []
        for n in range(HEADS):
            shared = n // (HEADS // kv)
            q, k = turned(heads[n], theta), turned(heads[HEADS + shared], theta)
            y.append(attend(q, k, heads[HEADS + kv + shared]))
        x = x + torch.cat(y, -1) @ p[f"{i}.attention.out.weight"].T
        h = normalise(x, False) * p[f"{i}.norm2.weight"]
        gate, up = (h @ p[f"{i}.mlp.gate_up.weight"].T).split(FFN, -1)
        x = x + (gate / (1 + (-gate).exp()) * up) @ p[f"{i}.mlp.down.weight"].T
    x = normalise(x, False) * p[f"{LAYERS + 1}.norm.weight"]
    logits = x @ p[f"{LAYERS + 1}.logits.weight"].T
    torch.testing.assert_close(model(tokens()), logits, rtol=1e-12, atol=1e-12)


def test_mlp_is_residual_blocks_between_two_linear_layers() -> None:
    model = randomised(models.mlp.reference(3, 2, 8, 2, 12))
    p, x = model.state_dict(), torch.randn(5, 3, dtype=torch.float64)
    prediction = model(x)
    x = x @ p["0.weight"].T + p["0.bias"]
    for i in (1, 2):
        h = normalise(x, True) * p[f"{i}.norm.weight"] + p[f"{i}.norm.bias"]
        u = h @ p[f"{i}.up.weight"].T + p[f"{i}.up.bias"]
        u = u * 0.5 * (1 + torch.erf(u / math.sqrt(2)))
        x = x + u @ p[f"{i}.down.weight"].T + p[f"{i}.down.bias"]
    x = normalise(x, True) * p["3.norm.weight"] + p["3.norm.bias"]
    expected = x @ p["3.out.weight"].T + p["3.out.bias"]
    torch.testing.assert_close(prediction, expected, rtol=1e-12, atol=1e-12)


def test_rotation_leaves_only_distances_in_dot_products() -> None:
    q, k = torch.randn(2, 8, dtype=torch.float64)
    turns = rotate(torch.stack((q.expand(6, 8), k.expand(6, 8))), 100.0)
    products = turns[0] @ turns[1].T
    for distance in range(-5, 6):
        same = products.diagonal(distance)
        torch.testing.assert_close(same, same[:1].expand_as(same), rtol=1e-12, atol=1e-12)


def test_rotation_of_bf16_keeps_far_positions_apart() -> None:
    x = torch.ones(1, 2000, 4, dtype=torch.bfloat16)
    turns = rotate(x, 10000.0)
    exact = rotate(x.double(), 10000.0)
    assert turns.dtype == torch.bfloat16
    assert (turns.double() - exact).abs().max() < 0.01


def test_attention_with_dropout_is_the_fused_one_on_average_and_in_evaluation() -> None:
    sizes = (VOCAB, WIDTH, LAYERS, HEADS, FFN, LENGTH, 2)
    plain = randomised(models.llama.reference(*sizes))
    dropped = models.llama.reference(*sizes, dropout=0.5).double()
    dropped.load_state_dict(plain.state_dict())
    assert torch.equal(dropped.eval()(tokens()), plain(tokens()))
    dropped.train()
    for module in dropped.modules():
        if isinstance(module, nn.Dropout):
            module.p = 1e-300  # the written-out path, with nothing dropped
    torch.testing.assert_close(dropped(tokens()), plain(tokens()), rtol=1e-12, atol=1e-12)


def test_a_later_token_changes_no_earlier_logits() -> None:
    changed = tokens()
    changed[:, 5] = (changed[:, 5] + 1) % VOCAB
    for dropout in (0.0, 1e-300):
        for model in (
            models.gpt.reference(VOCAB, WIDTH, LAYERS, HEADS, FFN, LENGTH, dropout=dropout),
            models.llama.reference(VOCAB, WIDTH, LAYERS, HEADS, FFN, LENGTH, 2, dropout=dropout),
        ):
            before, after = randomised(model)(tokens()), model(changed)
            assert torch.equal(before[:, :5], after[:, :5])
            assert not torch.equal(before[:, 5:], after[:, 5:])
