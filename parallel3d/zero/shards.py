"""Who reduces, updates and gathers what: ZeRO stages 0 and 1 over flat buffers.

Both sum a unit's gradients into the owned shards the moment its last backward has ended, so the sum
runs beside the backward of the units before it. Stage 0 then gathers the gradients and updates
everything on every rank; stage 1 updates the owned shard and gathers the parameters, unit by unit,
ahead of the next forward that needs them (Rajbhandari et al., 2020, arXiv 1910.02054, section 5).
Per rank and step either sends ``2 n (d - 1) / d`` elements for ``n`` on ``d`` ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch import Tensor, nn

from ..comm.collectives import Pending, start_all_gather, start_reduce_scatter
from ..topology import Axis
from .flat import Flat
from .ties import Tie, Ties
from .updates import HostUpdates


class Shards:
    """The flat buffers of a rank's units, by unit index, sharded over ``axis``.

    Args:
        flats: of each unit.
        axis: the dp axis.
        stage: 0 or 1.
        frozen: parameters by name that lie in no buffer, of each unit.
        ties: of which this rank holds a use.
        fixed: buffers by name that other pipeline ranks hold too, of each unit.
    """

    def __init__(
        self,
        flats: dict[int, list[Flat]],
        axis: Axis,
        stage: int,
        frozen: Mapping[int, Sequence[tuple[str, nn.Parameter]]] | None = None,
        ties: Sequence[Tie] = (),
        fixed: Mapping[int, Sequence[tuple[str, Tensor]]] | None = None,
    ) -> None:
        self.flats, self.axis, self.stage, self.frozen = flats, axis, stage, frozen or {}
        self.ties, self.fixed = Ties(ties), fixed or {}
        self._note_versions()
        self.host: HostUpdates | None = None
        self._reducing: dict[Flat, Pending] = {}
        self._gathering: dict[int, list[Pending]] = {}

    def all(self) -> list[Flat]:
        """Every flat buffer, in unit order."""
        return [flat for unit in sorted(self.flats) for flat in self.flats[unit]]

    def trained(self) -> list[Flat]:
        """Those whose parameters are updated here: all but second uses of tied ones."""
        return [flat for flat in self.all() if flat.of is None]

    def before(self, unit: int) -> None:
        """Called before each forward of a unit: its parameters are there when this returns."""
        for flat in self.flats.get(unit, ()):
            if flat.arrive():
                flat.grad.zero_()
                self._gather(flat, unit)
        for pending in self._gathering.pop(unit, ()):
            pending.wait()

    def check(self, unit: int) -> None:
        """Called after each backward of a unit."""
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

    def reduce(self, unit: int) -> None:
        """Called when a unit's gradients are complete: start summing them over ``dp``."""
        for flat in self.flats.get(unit, ()):
            self._reducing[flat] = start_reduce_scatter(
                flat.grad, flat.owned_grad, self.axis, tag=f"unit {unit}"
            )
        self.ties.advance(self._reducing)

    def finish_reduce(self) -> None:
        """Wait for every sum; add up the uses of tied parameters; at stage 0 gather the sums."""
        self.ties.advance(self._reducing, last=True)
        for pending in self._reducing.values():
            pending.wait()
        self.ties.add_up()
        if self.stage == 0:
            gathers = [
                start_all_gather(flat.owned_grad, flat.grad, self.axis, tag=f"unit {unit}")
                for unit in sorted(self.flats)
                for flat in self.flats[unit]
                if flat.of is None
            ]
            for gather in gathers:
                gather.wait()
        self._reducing.clear()

    def abandon(self) -> None:
        """After an error in the middle of a step: the next one starts from zero."""
        self._reducing.clear()
        self.ties.forget()
        self.zero_gradients()

    def publish(self) -> None:
        """After the optimizer: bring the new values into ``data``, and start gathering them.

        Also after a checkpoint was loaded, which writes buffers too.
        """
        self._note_versions()
        for unit in sorted(self.flats):
            for flat in self.flats[unit]:
                if flat.of is not None or flat.coming is not None:
                    continue
                part = flat.data[slice(*flat.updated)]
                if self.host is not None:
                    self.host.publish(flat)
                elif part.data_ptr() != flat.master.data_ptr():
                    part.copy_(flat.master)
                self._gather(flat, unit)

    def _gather(self, flat: Flat, unit: int) -> None:
        if self.stage > 0:
            part = flat.data[slice(*flat.updated)]
            pending = start_all_gather(part, flat.data, self.axis, tag=f"unit {unit}")
            self._gathering.setdefault(unit, []).append(pending)

    def settle(self) -> None:
        """Wait for every gather, so that all parameters may be read."""
        for unit in sorted(self.flats):
            self.before(unit)

    def let_go(self, flat: Flat) -> Callable[[], None]:
        """What to call when its masters and their state have been looked at."""
        return (lambda: None) if self.host is None else partial(self.host.let_go, flat)

    def _note_versions(self) -> None:
        found = [pair for unit in self.fixed for pair in self.fixed[unit]]
        self._versions = {name: buffer._version for name, buffer in found}

    def zero_gradients(self) -> None:
        """Set every gradient to zero, in place."""
        for flat in self.all():
            if flat.coming is None:  # or else it is still read, and set to zero when it arrives
                flat.grad.zero_()
