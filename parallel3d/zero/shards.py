"""Who reduces, updates and gathers what: the four stages of ZeRO over flat buffers.

One mechanism, and a choice of what stays (Rajbhandari et al., 2020, arXiv 1910.02054, section 5):

    stage   values    gradients    optimizer
    0       whole     whole        whole
    1       whole     whole        owned
    2       whole     owned        owned
    3       owned     owned        owned

Per rank and step stages 0, 1 and 2 send ``2 n (d - 1) / d`` elements for ``n`` on ``d`` ranks; with
a reduction in each of ``m`` microbatches 2 sends ``(m + 1) n (d - 1) / d``. Stage 3 sends
``n (d - 1) / d`` for each time that the budget makes it gather, once a step if everything fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from ..topology import Axis
from .flat import Flat
from .gradients import Gradients
from .store import Store
from .ties import Tie
from .updates import HostUpdates
from .values import Owned, Values, Whole


class Shards:
    """The flat buffers of a rank's units, by unit index; what a stage asks for its weights.

    Args:
        flats: of each unit, trained.
        frozen: parameters by name that are not trained, of each unit.
        kept: flats of the frozen ones, at stage 3.
        replicas: the ranks that hold the same shards.
        each: reduce gradients in each microbatch, from stage 2 on.
        budget: bytes that may be gathered at once, at stage 3.
        ties: of which this rank holds a use.
        fixed: buffers by name that other pipeline ranks hold too, of each unit.
        wire: what gradients are rounded to before they are summed; None for their own dtype.
    """

    def __init__(
        self,
        flats: dict[int, list[Flat]],
        *,
        frozen: Mapping[int, Sequence[tuple[str, nn.Parameter]]] | None = None,
        kept: dict[int, list[Flat]] | None = None,
        replicas: Axis | None = None,
        each: bool = False,
        budget: int = 2**28,
        ties: Sequence[Tie] = (),
        fixed: Mapping[int, Sequence[tuple[str, Tensor]]] | None = None,
        wire: torch.dtype | None = None,
    ) -> None:
        self.flats, self.kept, self.frozen, self.fixed = (
            flats,
            kept or {},
            frozen or {},
            fixed or {},
        )
        self.replicas = replicas or Axis.single("dp")
        self.gradients = Gradients(flats, self.replicas, each, ties, wire)
        self.values = self._values(budget)
        self.host: HostUpdates | None = None
        self.parameter_store: Store | None = None  # of the owned values, where those are away
        self._note_versions()

    def _values(self, budget: int) -> Values:
        homes = {flat: unit for unit in sorted(self.flats) for flat in self.flats[unit]}
        homes |= {flat: unit for unit in sorted(self.kept) for flat in self.kept[unit]}
        homes = {flat: unit for flat, unit in homes.items() if flat.of is None}
        if any(flat.stage == 3 for flat in homes):
            return Owned(self._needs(homes), homes, budget)
        return Whole(self.trained_by_unit())

    def _needs(self, homes: Mapping[Flat, int]) -> dict[int, list[Flat]]:
        """Of each unit the flats of its parameters; frozen ones may lie in another unit's."""
        at = {id(slot.held.parameter): flat for flat in homes for slot in flat.slots}
        needs = {unit: [flat.home for flat in self.flats[unit]] for unit in self.flats}
        for unit, named in self.frozen.items():
            needs.setdefault(unit, []).extend(at[id(parameter)] for _, parameter in named)
        return {unit: list(dict.fromkeys(flats)) for unit, flats in needs.items()}

    @property
    def keeps_owned(self) -> bool:
        """Whether parameters are gathered around their uses."""
        return isinstance(self.values, Owned)

    def all(self) -> list[Flat]:
        """Every flat buffer with gradients, in unit order."""
        return [flat for unit in sorted(self.flats) for flat in self.flats[unit]]

    def trained(self) -> list[Flat]:
        """Those whose parameters are updated here: all but second uses of tied ones."""
        return [flat for flats in self.trained_by_unit().values() for flat in flats]

    def trained_by_unit(self) -> dict[int, list[Flat]]:
        """As ``trained``, of each unit that has some."""
        own = {unit: [f for f in self.flats[unit] if f.of is None] for unit in sorted(self.flats)}
        return {unit: flats for unit, flats in own.items() if flats}

    def held(self) -> list[Flat]:
        """Every flat buffer with values: trained ones, and where they are sharded frozen ones."""
        return [flat for flats in self.held_by_unit().values() for flat in flats]

    def held_by_unit(self) -> dict[int, list[Flat]]:
        """As ``held``, of each unit that has some."""
        own = self.trained_by_unit()
        units = sorted({*own, *self.kept})
        return {unit: [*own.get(unit, ()), *self.kept.get(unit, ())] for unit in units}

    def begin(
        self, uses: Sequence[int], num_microbatches: int, training: bool, here: Sequence[bool]
    ) -> None:
        """Of a program that uses these units' parameters, in order; see ``Values.begin``."""
        self.values.begin(uses, training, here)
        self.gradients.begin(num_microbatches)

    def end(self) -> None:
        """Of the program."""
        self.values.end()

    def before_forward(self, unit: int) -> None:
        """The unit's parameters are there when this returns."""
        self.values.before(unit)

    def before_backward(self, unit: int, microbatch: int) -> None:
        """As before a forward, and there is a place for the gradients."""
        self.values.before(unit)
        self.gradients.before(unit, microbatch)

    def before_weight_grad(self, unit: int, microbatch: int) -> None:
        """There is a place for the gradients."""
        self.gradients.before(unit, microbatch)

    def after_backward(self, unit: int, microbatch: int, reduce: bool) -> None:
        """Look whether all is in its place; ``reduce`` says that gradients are to be summed now."""
        self._check(unit)
        if reduce:
            self.gradients.reduce(unit, microbatch)

    def _check(self, unit: int) -> None:
        for flat in self.flats.get(unit, ()):
            flat.check()
        for name, parameter in self.frozen.get(unit, ()):
            if parameter.requires_grad:
                raise RuntimeError(
                    f"{name} was unfrozen after the engine was built, which reads requires_grad "
                    f"once: build another engine and load a checkpoint"
                )
        for name, buffer in self.fixed.get(unit, ()):
            if buffer._version != self._versions[name]:
                raise RuntimeError(
                    f"{name} was changed by its unit, but units on other pipeline ranks share that "
                    f"buffer and do not see it: put all that share it in one stage "
                    f"(pipeline.partition), or give each a buffer of its own"
                )

    def finish_reduce(self) -> None:
        """Wait until all gradients are summed."""
        self.gradients.finish()

    def abandon(self) -> None:
        """After an error in the middle of a step: the next one starts from zero."""
        self.gradients.abandon()

    def zero_gradients(self) -> None:
        """Set every gradient to zero, in place."""
        self.gradients.zero()

    def publish(self) -> None:
        """After the optimizer, or a load: bring the new values to where they are used."""
        self._note_versions()
        self.values.publish()

    def wait(self) -> None:
        """Until no gather is under way, so that masters may be read and written."""
        self.values.wait()

    def settle(self) -> None:
        """Have all parameters there, so that they may be read. Collective at stage 3."""
        self.values.settle()

    @contextmanager
    def edit(self) -> Iterator[None]:
        """Inside, all parameters are there and may be written, on all ranks alike. Collective.

        At the end each rank takes what it owns of them and what was written there; before that
        nothing has changed.
        """
        self.settle()
        with torch.no_grad():
            yield
            for flat in self.held():
                _take(flat.data[slice(*flat.updated)], flat.master)
                flat.accept()
        self.publish()

    def let_go(self, flat: Flat) -> Callable[[], None]:
        """What to call when its masters and their state have been looked at."""
        if self.host is None or flat.away is None:
            return lambda: None
        return partial(self.host.let_go, flat)

    def _note_versions(self) -> None:
        found = [pair for unit in self.fixed for pair in self.fixed[unit]]
        self._versions = {name: buffer._version for name, buffer in found}


def _take(values: Tensor, master: Tensor) -> None:
    """Into wide masters what was written to their values; where nothing was, they stay as wide."""
    written = values != master.to(values.dtype)
    master.copy_(torch.where(written, values.to(master.dtype), master))
