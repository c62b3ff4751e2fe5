"""One training step of a model under any layout. No layout changes the numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .assemble import Offload, Options, assemble
from .assemble.alike import check_alike
from .assemble.kinds import check_first, check_kinds
from .assemble.model import DTYPES
from .assemble.options import scaler_of
from .assemble.state import load_state, save_state, whole_state
from .batch import Batch, check_same, check_same_number, shapes_of, split, to_device
from .checkpoint.agree import agree
from .comm.collectives import Pending, all_reduce, broadcast, start_all_reduce
from .optim.norm import clip, clip_coefficient
from .pipeline.actions import Program
from .pipeline.runtime import Step
from .rng import seed_of
from .topology import Topology
from .watch import MAKING, watch_over, watched


class StepResult(NamedTuple):
    """What a step gives back, as Python numbers, equal on all ranks.

    ``loss`` is per item over the whole batch; ``grad_norm`` is the norm before clipping, over all
    parameters (nan in evaluation); ``lr`` that of the first group in this step; ``skipped`` whether
    the update was left out; ``num_items`` the batch's items.
    """

    loss: float
    grad_norm: float
    lr: float
    skipped: bool
    num_items: int


class Engine:
    """Trains an ``nn.Sequential`` of units under a topology of pp, dp and tp.

    Args:
        model: its elements are the units. On ``meta`` it is given initial values that depend on
            ``seed`` and names only; on a real device its values are kept, those of the first rank.
        topology: who this rank is.
        loss_fn: ``loss_fn(output, target)``, the SUM over a microbatch's items, a scalar. Losses of
            torch with ``reduction="mean"`` are switched to sums.
        optimizer: called with parameter groups; any elementwise torch optimizer, and of others
            ``torch.optim.Adafactor``, ``torch.optim.Muon`` (matrices only), and ``Lamb`` and
            ``Muon`` (matrices, with AdamW for the rest) of ``parallel3d.optim``.
        num_items: ``fn(target)`` counts a target's items, a whole number; by default integers
            other than -100 (or the loss's ``ignore_index``), or the elements of a float tensor.
        param_groups: ``fn(name, parameter)`` gives a parameter's optimizer options.
        lr_schedule: factor of the learning rate, of the number of updates made so far. A skipped
            step makes no update.
        schedule: ``gpipe``, ``1f1b``, ``interleaved``, ``looped-bfs``, ``zb-h1``, ``zbv``,
            ``v-half``, ``v-min``; ``auto``, the fastest of these and more by what the units cost;
            a program, or the path of one.
        num_microbatches: parts of a local batch; every dp rank runs the same number.
        num_chunks: stages per pipeline rank, None for what the schedule needs.
        partition: what the stages have equally much of, ``parameters``, ``uniform`` (units),
            ``flops`` or ``measure`` (time), or the list of each later stage's first unit.
        memory_limit: bytes of activations that a rank may keep; None for no limit.
        sample: one microbatch ``(x, target)``, for what looks at the units' costs: ``auto``,
            ``flops``, ``measure`` and ``memory_limit``.
        zero: what is sharded over dp: 0 nothing, 1 the optimizer's state, 2 also gradients, 3 also
            parameters, which are gathered around their uses.
        zero_reduce: of stages 2 and 3: sum gradients over dp in ``each`` microbatch, or in the
            ``last`` only, for which they are kept whole until then. 0 and 1 do so once a step.
        gather_budget: of stage 3: bytes of parameters that may be gathered at once, beyond which
            only what one unit needs; None for 2**28.
        shard_size: shard over so many neighbours of a dp rank, the others have replicas (FSDP
            calls it hybrid); it divides dp. None for all of dp.
        reduce_dtype: ``bf16`` or ``fp16``: gradients are summed over dp from values rounded to
            it, and half the bytes are sent; ``fp32``, or None for the gradients' own.
        precision: ``fp32``, ``bf16`` or ``fp16`` (fp32 masters and gradients), ``fp64``.
        fp16: how the loss of ``fp16`` is scaled, see ``optim.scaler.LossScaler``:
            ``{"initial_scale": 65536, "window": 1000, "hysteresis": 2, "min_scale": 1, "scale":
            None}`` or part of it; ``scale`` is a fixed one.
        recompute: ``none``; ``full``, units keep their input only; ``selective``, besides the
            results of matrix products, attention and collectives.
        recompute_every: of the units, those whose number it divides are recomputed.
        recompute_partition: of ``full``; an input that is whole on every tp rank is kept in parts
            there, which are gathered for the backward.
        offload: what leaves the device, ``{"optimizer": "none", "parameters": "none",
            "activations": "none", "path": None}`` or part of it; None for nothing. ``cpu`` is the
            host's memory; of activations, what autograd saves in 1 MiB or more. The ``optimizer``
            (masters and moments) is updated where it is, one unit after another while the device
            goes on; ``disk`` are files in the folder ``path``, of which three units at most are
            in memory.
        state_dtype: ``bf16``: the optimizer's moments are kept in it and widened one unit at a
            time, for its update. None for the masters' own.
        tied: groups of parameter names, each of which is one parameter, as if the model had been
            built with one Parameter object: ``[("0.weight", "5.weight")]``. The first in model
            order gives its name, values and optimizer group.
        max_grad_norm: clip the gradients to this norm.
        max_bad_steps: the last of so many steps in a row with a loss or gradient that is not
            finite raises RuntimeError. Each such step is skipped on all ranks together. A gradient
            that overflows in ``fp16`` while its scale can still fall is not counted.
        init: ``init(name, tensor)`` fills every parameter, given whole in fp32, in place.
        compile: compile each unit for itself.
        timeout: seconds that a rank may be at one thing, a wait or a computation; then all end,
            with a report of who waits for whom.
        seed: of initial values and dropout.

    The model's parameters become views of the engine's buffers. After a step their new values may
    still be on their way: read them by ``state_dict_whole``.

    Raises ValueError, on every rank and before anything is sent, for what cannot be done; options
    whose feature is not built yet are refused by name.
    """

    def __init__(
        self,
        model: nn.Module,
        topology: Topology,
        *,
        loss_fn: Callable[[Any, Any], Tensor],
        optimizer: Callable[..., torch.optim.Optimizer],
        num_items: Callable[[Any], Tensor | int] | None = None,
        param_groups: Callable[[str, nn.Parameter], dict[str, Any]] | None = None,
        lr_schedule: Callable[[int], float] | None = None,
        schedule: str | Program = "1f1b",
        num_microbatches: int = 1,
        num_chunks: int | None = None,
        partition: str | Sequence[int] = "parameters",
        memory_limit: float | None = None,
        sample: tuple[Any, Any] | None = None,
        zero: int = 1,
        zero_reduce: str = "each",
        gather_budget: int | None = None,
        shard_size: int | None = None,
        reduce_dtype: str | None = None,
        precision: str = "fp32",
        fp16: Mapping[str, Any] | None = None,
        recompute: str = "none",
        recompute_every: int = 1,
        recompute_partition: bool = False,
        offload: Offload | Mapping[str, Any] | None = None,
        state_dtype: str | None = None,
        tied: Sequence[Sequence[str]] | None = None,
        max_grad_norm: float | None = None,
        max_bad_steps: int | None = None,
        init: Callable[[str, Tensor], object] | None = None,
        compile: bool = False,
        timeout: float = 600.0,
        seed: int = 0,
    ) -> None:
        given = dict(locals())
        check_first(topology, timeout)
        self.watch = watch_over(topology, timeout)
        with self.watch.during(MAKING):
            agree(topology.world, lambda: check_kinds(model, given))
            given["offload"] = agree(topology.world, lambda: Offload.of(offload))
            check_alike(model, given, topology)
        options = Options(**{each.name: given[each.name] for each in fields(Options)})
        options.check(topology.dp.size, topology.tp.size)
        self.scaler = scaler_of(precision, fp16)
        self.topology, self.seed = topology, seed
        self.max_grad_norm, self.max_bad_steps = max_grad_norm, max_bad_steps
        with self.watch.during(MAKING):
            self.parts = assemble(model, topology, options)
        self.watch.follow(self.parts.interpreter, self.parts.programs.rank_of_stage)
        self.step, self.bad_steps = 0, 0
        self._lists: bool | None = None  # whether batches come as such, once a step has told
        self._known: set[tuple[bool, int]] = set()
        self._dtype = DTYPES[precision]

    @property
    def _num_microbatches(self) -> int:
        return self.parts.programs.num_microbatches

    @property
    def loss_scale(self) -> float:
        """What the next step's loss will be multiplied by for its backward; 1 but in fp16."""
        return 1.0 if self.scaler is None else self.scaler.scale

    @watched("a training step")
    def train_step(self, x: Any, target: Any = None) -> StepResult:
        """One update on this dp rank's share of a batch. Collective over the world.

        ``x`` and ``target`` are pytrees of tensors cut along dim 0 into ``num_microbatches``;
        ``x`` may be None off the first stage. A list ``[(x, target), ...]`` is ready microbatches,
        whose sizes may differ. Raises ValueError for a batch smaller than the microbatches.
        """
        self.watch.notes.step = self.step + 1
        self._refuse_modes(training=True)
        batch = self._batch(x, target, self._num_microbatches)
        if self._lists is None:
            self._lists = check_same(batch, self.topology, isinstance(x, list))
        elif self._lists:
            check_same_number(batch, self.topology.world)
        elif self.topology.dp.size > 1 and len(batch.targets) != self._num_microbatches:
            raise ValueError(
                f"a list of {len(batch.targets)} microbatches after steps without lists: pass "
                f"num_microbatches = {self._num_microbatches}, or lists in every step"
            )
        items = self._count(batch)
        self.parts.criterion.begin(batch.targets, lambda: self._factor(items.wait()))
        try:
            self._run(batch, training=True)
            self.watch.enters("the sum of gradients")
            self.parts.shards.finish_reduce()
            return self._update(items.wait())
        except BaseException:
            self.parts.shards.abandon()
            raise

    @watched("an evaluation step")
    def eval_step(self, x: Any, target: Any = None) -> StepResult:
        """The loss of this dp rank's share of a batch, which may have any size, also none.

        Changes nothing: not the weights, the gradients, the counters or any random state.
        """
        self._refuse_modes(training=False)
        batch = self._batch(x, target, self._num_microbatches, training=False)
        items = self._count(batch).wait()
        self.parts.criterion.begin(batch.targets, None)
        if most := self._most(len(batch.targets)):
            self._run(batch, training=False, most=most)
        self.watch.enters("the sum of losses")
        scalars = torch.zeros(self.topology.dp.size, dtype=torch.float64, device=items.device)
        self._write_loss(scalars)
        *losses, count = torch.cat(
            [all_reduce(scalars, self.topology.world), items.view(1)]
        ).tolist()
        loss = sum(losses) / count if count else math.nan
        return StepResult(loss, math.nan, self.parts.optimizer.lr, False, int(count))

    @watched("a save")
    def save(self, folder: str | Path, **meta: Any) -> None:
        """Write a checkpoint that any layout can load; all or nothing. Collective.

        ``meta`` is kept beside it, as JSON.
        """
        counters = {
            "step": self.step,
            "bad_steps": self.bad_steps,
            "seed": self.seed,
            "loss_scale": self.scaler and self.scaler.state(),
        }
        if taken := sorted(meta.keys() & {*counters, "optimizer"}):
            raise ValueError(f"meta {', '.join(taken)} is the engine's own: use another name")
        save_state(self.parts, Path(folder), {**counters, **meta})

    @watched("a load")
    def load(self, folder: str | Path) -> dict[str, Any]:
        """Take weights, optimizer state and counters from a checkpoint of any layout. Collective.

        Returns the ``meta`` it was saved with.
        """
        meta = load_state(self.parts, Path(folder))
        self.step, self.bad_steps = meta["step"], meta["bad_steps"]
        if self.scaler is not None and meta.get("loss_scale"):
            self.scaler.load(meta["loss_scale"])
        return meta

    @watched("state_dict_whole")
    def state_dict_whole(self) -> dict[str, Tensor]:
        """Every parameter (fp32 master) and persistent buffer, whole, on the CPU. Collective.

        On rank 0 under the names of ``model.state_dict()``; elsewhere ``{}``.
        """
        return whole_state(self.parts)

    def _batch(self, x: Any, target: Any, count: int, training: bool = True) -> Batch:
        batch = split(x, target, count, training)
        first = self.topology.pp.rank == self.parts.programs.rank_of_stage[0]
        if first and any(part is None for part in batch.inputs):
            raise ValueError("x is None on the first stage, which needs it")
        return to_device(batch, self.topology.device, self._dtype, first)

    def _refuse_modes(self, training: bool) -> None:
        """What would change the numbers of a step from outside."""
        if torch.is_autocast_enabled(self.topology.device.type):
            raise ValueError(
                "torch.autocast is on around the step, where it would change the numbers: leave "
                "it, and build the engine with precision='bf16' or 'fp16'"
            )
        if training and torch.is_inference_mode_enabled():
            raise ValueError(
                "torch.inference_mode is on around train_step, which needs gradients: leave it, "
                "or take eval_step"
            )

    def _most(self, count: int) -> int:
        """Microbatches of the dp rank that has most, where ranks gather for each other's."""
        if not self.parts.shards.keeps_owned:
            return count
        counts = torch.tensor(count, device=self.topology.device)
        return int(all_reduce(counts, self.topology.dp, op="max", tag="microbatches"))

    def _count(self, batch: Batch) -> Pending:
        """Items of the whole batch: known before the first backward needs it."""
        counts = [self.parts.num_items(target) for target in batch.targets]
        total = torch.zeros((), dtype=torch.int64, device=self.topology.device)
        for count in counts:
            if isinstance(count, float) or (
                isinstance(count, Tensor) and count.is_floating_point()
            ):
                raise ValueError(f"num_items gave {float(count)}: it counts, in whole numbers")
            total += count
        return start_all_reduce(total, self.topology.dp, tag="items")

    def _factor(self, items: Tensor) -> Tensor:
        """One over the count of items, times the loss scale."""
        inverse = _inverse(items)
        return inverse if self.scaler is None else inverse * self.scaler.scale

    def _run(self, batch: Batch, training: bool, most: int | None = None) -> None:
        """``most``: of the microbatches of any rank, these are the first."""
        parts, count = self.parts, len(batch.targets)
        first = self.topology.dp.rank * count
        seeds = [seed_of(self.seed, "step", self.step, first + k) for k in range(count)]
        shapes = torch.tensor(shapes_of(batch), dtype=torch.int64)
        if count:
            first_rank = parts.programs.rank_of_stage[0]
            shapes = broadcast(shapes, self.topology.pp, first_rank, tag="shapes")
        step = Step(batch.inputs, seeds, shapes.tolist(), training, parts.criterion)
        known = {(training, shape) for shape in step.shapes}
        actions = parts.programs.mine(most or count, training, ahead=known <= self._known)
        devices = [self.topology.device] if self.topology.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            parts.run(actions, step)
        self._known |= known

    def _write_loss(self, scalars: Tensor) -> None:
        """Into one slot per dp rank, by one rank of its last stage."""
        total = self.parts.criterion.total
        last = self.topology.pp.rank == self.parts.programs.rank_of_stage[-1]
        if last and self.topology.tp.rank == 0 and total is not None:
            scalars[self.topology.dp.rank] = total

    def _update(self, items: Tensor) -> StepResult:
        parts, dp = self.parts, self.topology.dp.size
        flats = parts.shards.trained()
        count = parts.slots.count
        scalars = torch.zeros(count + dp, dtype=torch.float64, device=self.topology.device)
        parts.slots.squares(scalars[:count])
        self._write_loss(scalars[count:])
        all_reduce(scalars, self.topology.world, tag="norm")
        # The one place in a step where the host waits for the device.
        self.watch.awaits_device()
        square, *losses, num_items = torch.cat(
            [scalars[:count].sum().view(1), scalars[count:], items.view(1)]
        ).tolist()
        if num_items < 0:
            raise ValueError(f"num_items gave {num_items:.0f} for the batch: 0 is the least")
        self.watch.enters("the update")
        scale, loss = self.loss_scale, sum(losses)
        norm = math.sqrt(square) / scale if square >= 0 else math.nan
        bad = not (math.isfinite(norm) and math.isfinite(loss))
        lr = parts.optimizer.lr
        if not bad and num_items:
            clip(flats, clip_coefficient(norm, self.max_grad_norm) / scale)
            parts.optimizer.step()
            parts.shards.publish()
        parts.shards.zero_gradients()
        self.step += 1
        # A lower scale may mend a gradient, but not a loss, which is not scaled in the forward.
        scaler = self.scaler if math.isfinite(loss) and (bad or num_items) else None
        if not (bad and scaler is not None and scaler.can_fall):
            self._count_bad(bad, loss, norm)
        if scaler is not None:
            scaler.update(overflow=bad)
        mean = loss / num_items if num_items else 0.0
        return StepResult(mean, norm, lr, bad or not num_items, int(num_items))

    def _count_bad(self, bad: bool, loss: float, norm: float) -> None:
        self.bad_steps = self.bad_steps + 1 if bad else 0
        if self.max_bad_steps and self.bad_steps >= self.max_bad_steps:
            raise RuntimeError(
                f"{self.bad_steps} steps in a row had a loss ({loss}) or gradient norm ({norm}) "
                f"that is not finite, and train.max_bad_steps = {self.max_bad_steps}: start a new "
                f"run with a lower learning rate, or look at the data from step "
                f"{self.step - self.bad_steps + 1}"
            )


def _inverse(items: Tensor) -> Tensor:
    """One over a count; 0 of nothing, so that a batch without items gives zeros."""
    return torch.where(items > 0, 1.0 / items.clamp(min=1).double(), 0.0)
