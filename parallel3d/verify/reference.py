"""The other side of the proof: plain PyTorch on one process, and no class of this package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils._pytree import tree_map_only

from .subject import Subject
from .trace import OPTIMIZERS, Run, Setting, Tensors, Trace


def half_norm(subject: Subject, initial: Tensors) -> float:
    """Half the norm of the first gradient."""
    model = _model(subject, initial)
    _backward(model, subject, 0)
    return 0.5 * float(clip_grad_norm_(model.parameters(), torch.inf))


def train_plainly(subject: Subject, setting: Setting, initial: Tensors) -> Trace:
    """A few steps from ``initial`` under each optimizer."""
    return {name: _run(subject, setting, initial, make) for name, make in OPTIMIZERS.items()}


def _run(
    subject: Subject,
    setting: Setting,
    initial: Tensors,
    make: Callable[[Any], torch.optim.Optimizer],
) -> Run:
    model = _model(subject, initial)
    optimizer = make(model.parameters())
    losses, norms, gradients = [], [], {}
    for step in range(setting.steps):
        optimizer.zero_grad(set_to_none=False)
        losses.append(_backward(model, subject, step))
        if step == 0:
            gradients = {name: p.grad.clone() for name, p in _trained(model) if p.grad is not None}
        norms.append(float(clip_grad_norm_(model.parameters(), setting.max_grad_norm)))
        optimizer.step()
    return Run(losses, norms, gradients, _whole(model), [])


def _model(subject: Subject, initial: Tensors) -> nn.Module:
    model = subject.reference().double().train()
    ours, theirs = initial.keys(), model.state_dict().keys()
    if ours != theirs:
        only = sorted(ours ^ theirs)
        raise ValueError(
            f"build and reference differ in {', '.join(only[:3])}{'...' if only[3:] else ''}: give "
            f"them the same names, those of model.state_dict()"
        )
    model.load_state_dict(initial)
    return model


def _backward(model: nn.Module, subject: Subject, step: int) -> float:
    """One backward of the mean over the whole batch, which ready microbatches are together."""
    batch = tree_map_only(Tensor, _widen, subject.batch(step))
    parts = batch if isinstance(batch, list) else [batch]
    items = max(1, sum(int(subject.num_items(target)) for _, target in parts))
    loss = torch.stack([subject.loss(model(x), target) for x, target in parts]).sum() / items
    loss.backward()
    for _, parameter in _trained(model):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return loss.item()


def _widen(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def _whole(model: nn.Module) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
