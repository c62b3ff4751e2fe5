"""What selective recompute keeps of a unit's forward: matrix products, attention, collectives.

[Note: replay] The first forward notes the results of these operations, in order; the repeated one
does everything else again and is given each of them in its turn. So the graph that it makes is that
of a whole repeat, with the same bits. A result that somebody has written into since is not given
but made again: its version tells. A product of more than two dims is a view, unsafe in torch's
word: it lies in the memory of a flat one, and has versions of its own. A collective writes without
a new version. Both are noted themselves, and all that was noted of one memory is given, or all made
again; whoever sends by other ways takes what was noted of the same memory with him.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ..topology import Axis

PRODUCTS = frozenset(
    "mm addmm bmm baddbmm addbmm linear convolution _scaled_mm _unsafe_view".split()
)
ATTENTION = "_scaled_dot_product_"


class Entry:
    """The result of one operation: its leaves, None once they are of no use."""

    def __init__(self, func: Any, result: Any) -> None:
        leaves, self.spec = tree_flatten(result)
        self.func = func
        self.leaves: list[Any] | None = [_apart(leaf) for leaf in leaves]
        self.versions = _versions(self.leaves)
        self.group = [ref(self)]  # no more than referred to: a ring would outlive its use

    def is_current(self) -> bool:
        """Whether nobody has written into it, by any of the names of its memory."""
        group = [each() for each in self.group]
        return all(entry is not None and entry._is_unwritten() for entry in group)

    def join(self, others: Sequence[Entry]) -> bool:
        """Be one of the group of those that lie in the same memory; whether there are any."""
        own = {_address(leaf) for leaf in self.leaves or () if _is_tensor(leaf)}
        for other in others:
            if other.lies_in(own):
                self.group = other.group
                self.group.append(ref(self))
                return True
        return False

    def lies_in(self, storages: set[int]) -> bool:
        """Whether any of it is in one of these."""
        return any(_address(leaf) in storages for leaf in self.leaves or () if _is_tensor(leaf))

    def _is_unwritten(self) -> bool:
        return self.leaves is not None and _versions(self.leaves) == self.versions

    def lift(self) -> list[Tensor]:
        """Its tensors, to each of which it only refers from now on."""
        tensors = [leaf for leaf in self.leaves or () if _is_tensor(leaf)]
        if self.leaves is not None:
            self.leaves = [ref(leaf) if _is_tensor(leaf) else leaf for leaf in self.leaves]
        return tensors

    def put_back(self, tensors: Iterator[Tensor]) -> None:
        """The next of ``tensors`` where one was lifted. Another one counts its versions anew."""
        if self.leaves is None:
            return
        before = [leaf() for leaf in self.leaves if isinstance(leaf, ref)]
        self.leaves = [next(tensors) if isinstance(leaf, ref) else leaf for leaf in self.leaves]
        now = [leaf for leaf in self.leaves if _is_tensor(leaf)]
        if any(one is not other for one, other in zip(before, now, strict=True)):
            self.versions = _versions(self.leaves)


class Tape:
    """Results of one forward, for one repeat. ``axes`` are those that the unit may send on."""

    def __init__(self, axes: Sequence[Axis] = ()) -> None:
        self.axes = axes
        self.entries: deque[Entry] = deque()
        self.playing = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Note the results of what is done in here."""
        with self._heard(_Record(self)):
            yield
        self._forget_written()

    def note(self, func: Any, result: Any) -> None:
        """Keep a result; of a view only if it is one of what is kept."""
        entry = Entry(func, result)
        if not entry.join(self.entries) and func is torch.ops.aten._unsafe_view.default:
            entry.leaves = None
        self.entries.append(entry)

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Give the results to what is done in here. Raises RuntimeError if that is other things."""
        self.playing = True
        self._forget_written()
        with self._heard(_Replay(self)):
            yield
        if self.entries:
            raise _differs(f"no {self.entries[0].func}")

    def lift(self) -> list[Tensor]:
        """All that is kept, which is kept here no more."""
        return [tensor for entry in self.entries for tensor in entry.lift()]

    def put_back(self, tensors: Sequence[Tensor]) -> None:
        """What ``lift`` gave, or equal tensors."""
        found = iter(tensors)
        for entry in self.entries:
            entry.put_back(found)

    def take(self, func: Any) -> Entry:
        """The next result, which must be of ``func``."""
        if not self.entries or self.entries[0].func is not func:
            raise _differs(str(func))
        return self.entries.popleft()

    def knows(self, result: Tensor) -> bool:
        """As a memo of the axes (see ``comm.memo``)."""
        if not self.playing:
            self.note(Tape.knows, result)
            return False
        entry = self.take(Tape.knows)
        if entry.leaves is None:
            return False
        if _address(entry.leaves[0]) != _address(result):
            result.copy_(entry.leaves[0])
        return True

    def sends(self, tensors: Sequence[Tensor]) -> None:
        """Forget what others write into: all but the collective that was noted last."""
        written = {_address(tensor) for tensor in tensors}
        last = self.entries[-1] if self.entries else None
        if last is not None and last.func is Tape.knows and last.lies_in(written):
            return
        for entry in self.entries:
            if entry.lies_in(written):
                entry.leaves = None

    def _forget_written(self) -> None:
        for entry in [entry for entry in self.entries if not entry.is_current()]:
            entry.leaves = None

    @contextmanager
    def _heard(self, mode: TorchDispatchMode) -> Iterator[None]:
        with ExitStack() as stack:
            for axis in self.axes:
                axis.memos.append(self)
                stack.callback(axis.memos.pop)
            stack.enter_context(mode)
            yield


class _Record(TorchDispatchMode):
    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "namespace", "") == "c10d":
            self.tape.sends([leaf for leaf in tree_leaves((args, kwargs)) if _is_tensor(leaf)])
        result = func(*args, **kwargs)
        if _keeps(func, args, kwargs):
            self.tape.note(func, result)
        return result


class _Replay(TorchDispatchMode):
    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _keeps(func, args, kwargs):
            entry = self.tape.take(func)
            if entry.leaves is not None:
                return tree_unflatten(entry.leaves, entry.spec)
        return func(*args, **kwargs)


def _keeps(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation is costly, and draws no random numbers: others would follow."""
    if getattr(func, "namespace", "") != "aten":
        return False
    name: str = func._schema.name.removeprefix("aten::")
    if name.startswith(ATTENTION) and "backward" not in name:
        places = [each.name for each in func._schema.arguments]
        given = {**dict(zip(places, args, strict=False)), **kwargs}
        return not given.get("dropout_p")
    return name in PRODUCTS


def _apart(leaf: Any) -> Any:
    """The same tensor without the graph that autograd is about to hang on it."""
    if not _is_tensor(leaf):
        return leaf
    # Below autograd a view has versions of its own, unless this key is let in.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return leaf.detach()


def _versions(leaves: Sequence[Any]) -> list[int]:
    return [leaf._version for leaf in leaves if _is_tensor(leaf)]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


def _differs(what: str) -> RuntimeError:
    return RuntimeError(
        f"the repeated forward comes to {what} where the first did something else: "
        f"use recompute.mode=none"
    )
