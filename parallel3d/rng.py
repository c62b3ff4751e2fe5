"""Random numbers that no layout changes: initial weights by name, dropout by position.

Every draw is made under a seed that is a hash of what it is for, never from a stream that depends
on what was drawn before on this rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .placement import Placement, pieces_along, view_2d, whole_shape
from .topology import Axis

ROWS_PER_BLOCK = 64


def seed_of(*parts: str | int) -> int:
    """A 63-bit seed, the same in every process and version, for a tuple of names and numbers."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def new_seed() -> int:
    """The next seed of the CPU's default generator, also under ``torch.device(...)``."""
    return int(torch.randint(2**62, (), device="cpu"))


def reseed(seed: int) -> None:
    """Put the default generators of the CPU and of the current CUDA device at ``seed``.

    ``torch.manual_seed`` also leaves word for every kind of device that might yet be started,
    with a stack trace each: 0.8 ms a call on a machine without any, which a step makes for each
    unit and microbatch.
    """
    torch.random.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Run with the CPU's default generator at ``seed``; afterwards it is where it was."""
    state = torch.random.get_rng_state()
    torch.random.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.random.set_rng_state(state)


def draw_rows(
    local: Tensor,
    placement: Placement,
    axis: Axis,
    seed: int,
    init: Callable[[Tensor], object],
) -> None:
    """Fill ``local`` with its part of a whole tensor that is drawn in blocks of 64 rows.

    Block ``i`` is drawn by ``init`` on the CPU in fp32 under ``(seed, i)``, so a rank draws only
    the blocks it holds rows of, and any cut gives the same bits. Padding is zero. A ``local`` that
    FSDP2 has sharded (a DTensor over another axis) gets its shard; nothing is sent.
    """
    rows, cols = view_2d(whole_shape(placement, tuple(local.shape)))
    target = _on_host(*view_2d(tuple(local.shape)))
    ((near, far, width),) = pieces_along(placement, axis, 1, cols)
    for at, start, length in pieces_along(placement, axis, 0, rows):
        for block in range(start // ROWS_PER_BLOCK, -(-(start + length) // ROWS_PER_BLOCK)):
            low = block * ROWS_PER_BLOCK
            high = min(low + ROWS_PER_BLOCK, rows)
            drawn = _on_host(high - low, cols)
            with seeded(seed_of(seed, block)):
                init(drawn)
            first, last = max(low, start), min(high, start + length)
            source = drawn[first - low : last - low, far : far + width]
            target[at + first - start : at + last - start, near : near + width] = source
    with torch.no_grad():
        local.copy_(_spread_like(local, target.view(local.shape)))


def _spread_like(local: Tensor, filled: Tensor) -> Tensor:
    if not hasattr(local, "device_mesh"):
        return filled
    # Importing it takes a second, which whoever has such a tensor has spent already.
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(local, DTensor)
    mesh, placements = local.device_mesh, local.placements
    return distribute_tensor(filled.to(local.device), mesh, placements, src_data_rank=None)


def _on_host(rows: int, cols: int) -> Tensor:
    """Zeros, whatever the default device and dtype are."""
    return torch.zeros(rows, cols, dtype=torch.float32, device="cpu")


def materialise(units: Iterable[tuple[str, nn.Module]], seed: int, check: bool = True) -> None:
    """Give the meta tensors of named modules CPU memory and initial values.

    Each submodule that owns meta parameters or buffers has its ``reset_parameters()`` called
    under the seed ``(seed, its full name)``. Shared parameters and modules stay shared, also
    between units, and are drawn under their first name. Raises ValueError naming a submodule
    that has none, unless ``check`` is off (the caller fills them).
    """
    made: dict[int, Tensor] = {}
    for name, unit in units:
        for path, module in unit.named_modules():
            fresh, shared = _allocate(module, made)
            if not fresh:
                continue
            full = ".".join(part for part in (name, path) if part)
            reset = getattr(module, "reset_parameters", None)
            if reset is not None:
                kept = [(tensor, tensor.detach().clone()) for tensor in shared]
                with seeded(seed_of(seed, full)):
                    reset()
                for tensor, value in kept:
                    tensor.data.copy_(value)
            elif check:
                raise ValueError(
                    f"{full} ({type(module).__name__}) has parameters or buffers on meta but no "
                    f"reset_parameters() to fill them: give it one, pass init=fn(name, tensor), "
                    f"or build the model on a real device"
                )


def _allocate(module: nn.Module, made: dict[int, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Replace the module's own meta tensors; returns those new here and those made before."""
    fresh, shared = [], []
    for table in (module._parameters, module._buffers):
        for key, tensor in table.items():
            if tensor is None or not tensor.is_meta:
                continue
            known = made.get(id(tensor))
            if known is None:
                known = torch.zeros_like(tensor, device="cpu")
                if isinstance(tensor, nn.Parameter):
                    known = nn.Parameter(known, tensor.requires_grad)
                made[id(tensor)] = known
                # The meta tensor must outlive the table, or its id could be given out again.
                made[id(known)] = tensor
                fresh.append(known)
            else:
                shared.append(known)
            table[key] = known  # type: ignore[assignment]
    return fresh, shared
