"""What units keep, in the host's memory until it is needed.

[Note: storages] What autograd saves are often several views of one memory, as of q, k and v. So
whole storages go, each once, and the views are made anew on what comes back, with the strides that
they had: the kernels, and so the bits, are those of what never left. They go when the unit is done.
Parameters and buffers are known by their storages and stay, as does what is a part of a larger
tensor of the caller's.

[Note: versions] Autograd refuses a saved tensor that was written to, but leaves that to whoever has
hooks. So here each is compared with what it was: one that goes as it goes, since what is away no
write reaches, one that stays as it is needed. As in autograd, one that nothing needs may change.

[Note: stand-ins] A graph keeps the leaves that it begins at. Here these are stand-ins of one
element, expanded: they take the gradients, and the input itself can go.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from ..comm.host import start_copy
from ..topology import Axis
from .segment import Segment, Unit

LEAST = 2**20  # bytes; less is not worth a copy


class Host:
    """The host's memory for activations of ``device``; copies are counted on ``axis``."""

    def __init__(self, device: torch.device, axis: Axis) -> None:
        self.device, self.axis, self.least = device, axis, LEAST
        self.buffers: WeakSet[Tensor] = WeakSet()
        self.is_apart = device.type == "cuda"
        self._out, self._back = (
            torch.cuda.Stream(device) if self.is_apart else None for _ in range(2)
        )

    def put(self, values: Sequence[Any], outputs: Sequence[Any]) -> Stored:
        """Copy tensors out; what comes back are leaves, as they were."""
        return Stored(self, values, outputs)

    def copy_out(self, source: Tensor) -> tuple[Tensor, Any]:
        """Begin to copy; the buffer, and the event of the copy's end."""
        buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=self.is_apart)
        self.buffers.add(buffer)
        with self._beside(self._out):
            start_copy(source, buffer, self.axis, tag="out")()
        if self._out is None:
            return buffer, None
        source.record_stream(self._out)
        return buffer, self._out.record_event()

    def copy_back(self, buffer: Tensor, gone: Any) -> tuple[Tensor, Any]:
        """Begin to copy what ``copy_out`` gave; the tensor, and the event of the copy's end."""
        target = torch.empty(buffer.shape, dtype=buffer.dtype, device=self.device)
        if self._back is not None:
            self._back.wait_event(gone)
        with self._beside(self._back):
            start_copy(buffer, target, self.axis, tag="back")()
        if self._back is None:
            return target, None
        target.record_stream(self._back)  # It may be dropped before anything waits for the copy.
        return target, self._back.record_event()

    def wait(self, event: Any) -> None:
        """What is queued from now on comes after the event."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    @contextmanager
    def _beside(self, stream: Any) -> Iterator[None]:
        """On a stream that has seen all of the current one."""
        if stream is None:
            yield
            return
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            yield


class Parcel:
    """One storage, whole: on the device, or away."""

    def __init__(self, host: Host, tensor: Tensor) -> None:
        self.host = host
        length = tensor.untyped_storage().nbytes() // tensor.element_size()
        self.whole: Tensor | None = tensor.detach().as_strided((length,), (1,), 0)
        self.buffer: Tensor | None = None
        self.event: Any = None

    def send(self, at_once: bool) -> None:
        """Begin to copy it out; ``at_once``: before anything else writes into it."""
        assert self.whole is not None
        self.buffer, self.event = self.host.copy_out(self.whole)
        self.whole = None
        if at_once:
            self.host.wait(self.event)

    def fetch(self) -> None:
        """Begin to copy it back."""
        if self.whole is None:
            assert self.buffer is not None
            self.whole, self.event = self.host.copy_back(self.buffer, self.event)
            self.buffer = None

    def get(self) -> Tensor:
        """It, on the device."""
        self.fetch()
        self.host.wait(self.event)
        assert self.whole is not None
        return self.whole


class View(NamedTuple):
    """A tensor on a parcel."""

    parcel: Parcel
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def make(self) -> Tensor:
        """The tensor, as it was."""
        whole = self.parcel.get()
        same = whole if whole.dtype == self.dtype else whole.view(self.dtype)
        return same.as_strided(self.size, self.stride, self.offset)


class Luggage:
    """What one unit keeps of one microbatch; ``staying`` are addresses of storages left alone.

    Only views keep parcels: of what nothing needs any more nothing is copied.
    """

    def __init__(self, host: Host, staying: Iterable[int] = ()) -> None:
        self.host, self.staying = host, set(staying)
        self.parcels: WeakValueDictionary[int, Parcel] = WeakValueDictionary()

    def view(self, tensor: Tensor) -> View | None:
        """What to keep in the place of a tensor; None if it stays."""
        address = tensor.untyped_storage().data_ptr()
        if address in self.staying or not self._goes(tensor):
            return None
        parcel = self.parcels.get(address)
        if parcel is None:
            parcel = self.parcels[address] = Parcel(self.host, tensor)
        stride = tensor.stride()
        return View(parcel, tensor.dtype, tensor.shape, stride, int(tensor.storage_offset()))

    def send(self, outputs: Iterable[Any]) -> None:
        """Let all go. What lies in the unit's outputs others may write into at once."""
        handed_on = _addresses(outputs)
        for address, parcel in self.parcels.items():
            parcel.send(at_once=address in handed_on)

    def fetch(self) -> None:
        """Begin to bring all back."""
        for parcel in self.parcels.values():
            parcel.fetch()

    def _goes(self, tensor: Tensor) -> bool:
        plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
        return (
            plain
            and tensor.device == self.host.device
            and (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
            and not (tensor.is_conj() or tensor.is_neg())
            and tensor.untyped_storage().nbytes() >= max(self.host.least, 1)
        )


class Saved:
    """A tensor that a graph keeps, in ``view`` if it goes (see [Note: versions])."""

    def __init__(self, tensor: Tensor, view: View | None) -> None:
        # Without its graph, which may keep what is returned: that would be a ring.
        self.here: Tensor | None = tensor.detach()
        self.view, self.shape, self.version = view, list(tensor.shape), tensor._version
        self.was_intact = True

    @property
    def is_intact(self) -> bool:
        """Whether nothing wrote into it while that could be seen."""
        return self.was_intact if self.here is None else self.here._version == self.version

    def leave(self) -> None:
        """From now on only the view has it, if there is one."""
        if self.view is not None:
            self.was_intact, self.here = self.is_intact, None


class Saves(Luggage):
    """What the graph of the unit called ``name`` keeps."""

    def __init__(self, host: Host, name: str, staying: Iterable[int]) -> None:
        super().__init__(host, staying)
        self.name = name
        self.saved: WeakSet[Saved] = WeakSet()

    def pack(self, tensor: Tensor) -> Saved:
        """What to keep in the place of a tensor."""
        saved = Saved(tensor, self.view(tensor))
        self.saved.add(saved)
        return saved

    def send(self, outputs: Iterable[Any]) -> None:
        """Let go what goes."""
        for saved in self.saved:
            saved.leave()
        super().send(outputs)

    def unpack(self, saved: Saved) -> Tensor:
        """The tensor that was packed. Raises RuntimeError if it was written to."""
        if not saved.is_intact:
            raise RuntimeError(
                f"a tensor {saved.shape} that unit {self.name} needs for its backward was changed "
                f"in place, so gradients would be wrong: let what changes it work on a copy"
            )
        if saved.here is not None:
            return saved.here
        assert saved.view is not None
        return saved.view.make()

    def left(self) -> list[Tensor]:
        """What stayed."""
        return [saved.here for saved in self.saved if saved.here is not None]


class Stored:
    """Values of a unit with these outputs, of which the large tensors are away."""

    def __init__(self, host: Host, values: Sequence[Any], outputs: Sequence[Any]) -> None:
        self.luggage = Luggage(host, _parts(values))
        self.values = [self._pack(value) for value in values]
        self.needs = [isinstance(value, Tensor) and value.requires_grad for value in values]
        self.luggage.send(outputs)

    def fetch(self) -> None:
        """Begin to bring them back."""
        self.luggage.fetch()

    def take(self) -> list[Any]:
        """The values."""
        self.fetch()
        values, self.values = self.values, []
        return [
            value.make().detach().requires_grad_(need) if isinstance(value, View) else value
            for value, need in zip(values, self.needs, strict=True)
        ]

    def here(self) -> list[Tensor]:
        """Those that stayed."""
        return [value for value in self.values if isinstance(value, Tensor)]

    def _pack(self, value: Any) -> Any:
        view = self.luggage.view(value) if isinstance(value, Tensor) else None
        return value if view is None else view


class Offloaded(Segment):
    """Keeps its graph, of which the large saved tensors are away."""

    def __init__(self, unit: Unit, x: Any, seed: int, host: Host) -> None:
        super().__init__(unit, x, seed)
        module = unit.module
        own = [*module.parameters(), *module.buffers()]
        self.luggage = Saves(host, unit.name, {*_addresses(own), *_parts(self.leaves)})

    def forward(self) -> Any:
        """As ever; then the copies begin."""
        with saved_tensors_hooks(self.luggage.pack, self.luggage.unpack):
            outputs = super().forward()
        self.luggage.send(tree_leaves(outputs))
        return outputs

    def fetch(self) -> None:
        """Begin to bring back what was put away."""
        self.luggage.fetch()

    def prepare(self) -> None:
        """Each is waited for when the backward comes to it."""
        self.luggage.fetch()

    def kept(self) -> list[Tensor]:
        """What stayed of the saved tensors."""
        return self.luggage.left()

    def enter(self) -> list[Any]:
        """Leave stand-ins in the place of the input."""
        given = self.leaves
        self.leaves = [_stand_in(leaf) for leaf in given if _needs_grad(leaf)]
        stand_ins = iter(self.leaves)
        return [
            _Enter.apply(next(stand_ins), leaf.detach()) if _needs_grad(leaf) else leaf
            for leaf in given
        ]


class _Enter(Function):
    """Gives a tensor that is in no graph, and its gradient to the stand-in."""

    @staticmethod
    def forward(ctx: Any, stand_in: Tensor, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _stand_in(leaf: Tensor) -> Tensor:
    return leaf.detach().new_zeros(()).expand(leaf.shape).requires_grad_()


def _needs_grad(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _addresses(values: Iterable[Any]) -> set[int]:
    return {value.untyped_storage().data_ptr() for value in values if isinstance(value, Tensor)}


def _parts(values: Iterable[Any]) -> set[int]:
    """Storages that are larger than the value in them."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    return _addresses(t for t in tensors if t.untyped_storage().nbytes() > t.nbytes)
