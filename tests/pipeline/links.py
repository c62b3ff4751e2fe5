"""Both ends of a border in one process."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from parallel3d.pipeline.border import Border


class Work:
    """A receive under way."""

    def __init__(self, queue: deque[Tensor], buffer: Tensor) -> None:
        self.queue, self.buffer = queue, buffer

    def wait(self) -> None:
        self.buffer.copy_(self.queue.popleft())


class Queue:
    """A channel whose both ends are this object; an end that finds nothing raises IndexError."""

    def __init__(self) -> None:
        self.tensors: deque[Tensor] = deque()
        self.descriptions: deque[bytes] = deque()
        self.described = 0

    def send(self, tensors: Sequence[Tensor]) -> None:
        assert all(not tensor.requires_grad and tensor.is_contiguous() for tensor in tensors)
        self.tensors += [tensor.clone() for tensor in tensors]

    def post(self, buffers: Sequence[Tensor]) -> list[Any]:
        return [Work(self.tensors, buffer) for buffer in buffers]

    def send_description(self, description: Any) -> None:
        self.described += 1
        self.descriptions.append(pickle.dumps(description))

    def receive_description(self) -> Any:
        return pickle.loads(self.descriptions.popleft())

    def flush(self) -> None:
        pass


def both_ends(index: int = 1) -> tuple[Border, Border]:
    """A border as the sender of activations sees it, and as the receiver does."""
    activations, gradients = Queue(), Queue()
    ends = [Border(index, activations, gradients, torch.device("cpu")) for _ in range(2)]
    return ends[0], ends[1]
