"""The closed sets of values, and which values are built. Plain Python: any room may ask."""

from typing import Any, Literal, get_args

from .values import spell

Precision = Literal["fp32", "bf16", "fp16", "fp64"]
ZeroStage = Literal[0, 1, 2, 3]
ZeroReduce = Literal["each", "last"]
ReduceDtype = Literal["fp32", "bf16", "fp16"]
Partition = Literal["uniform", "parameters", "flops", "measure"]
RecomputeMode = Literal["none", "full", "selective"]
OffloadTo = Literal["none", "cpu", "disk"]
StateDtype = Literal["bf16"]
OffloadToHost = Literal["none", "cpu"]
LrSchedule = Literal["constant", "linear", "cosine", "wsd"]
WandbMode = Literal["online", "offline", "disabled"]
ScheduleName = Literal[
    "gpipe", "1f1b", "interleaved", "looped-bfs", "zb-h1", "zbv", "v-half", "v-min", "auto"
]

BUILT: dict[str, tuple[Any, ...]] = {
    "offload.parameters": ("none", "cpu"),
}
"""The values that work, by key; the last one is the nearest to a value that does not."""


def require_built(key: str, value: Any, spelling: str | None = None) -> None:
    """Refuse a legal value whose feature does not exist yet.

    Args:
        key: the key as the configuration spells it, an entry of `BUILT` (others pass).
        value: what was asked for; lists (explicit cuts) always pass.
        spelling: the name to show where it is not the configuration's key.

    Raises:
        ValueError: names the nearest value that works.
    """
    built = BUILT.get(key)
    if built is None or isinstance(value, list | tuple) or value in built:
        return
    name = spelling or key
    shown, nearest = (spell(each).strip("'") for each in (value, built[-1]))
    raise ValueError(
        f"{name} = {shown} is not built yet: the nearest that works is {name}={nearest}"
    )


def check_recompute(
    mode: str, every: int, partition: bool, compiled: bool, tp: int | None = None
) -> None:
    """Raise ValueError for ways to recompute that contradict each other; ``tp`` if it is known."""
    modes = get_args(RecomputeMode)
    if mode not in modes:
        raise ValueError(f"recompute.mode = {mode!r} is not one of {', '.join(modes)}")
    if every < 1:
        raise ValueError(f"recompute.every = {every} is below 1: the least is recompute.every=1")
    if every > 1 and mode == "none":
        raise ValueError(
            f"recompute.every = {every}, but recompute.mode = none repeats no unit: set "
            f"recompute.mode=full, or recompute.every=1"
        )
    if partition and mode != "full":
        raise ValueError(
            f"recompute.partition = true cuts what recompute.mode = full keeps, but that is "
            f"{mode}: set recompute.mode=full, or recompute.partition=false"
        )
    if partition and tp == 1:
        raise ValueError(
            "recompute.partition = true cuts over tp, but topology.tp = 1: set "
            "recompute.partition=false, or topology.tp=2"
        )
    if compiled and mode == "selective":
        raise ValueError(
            "recompute.mode = selective looks at every operation, which a compiled unit hides: "
            "set recompute.mode=full, or compile=false"
        )
