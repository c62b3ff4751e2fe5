"""The closed sets of values, and which values are built. Plain Python: any room may ask."""

from typing import Any, Literal

from .values import spell

Precision = Literal["fp32", "bf16", "fp16", "fp64"]
ZeroStage = Literal[0, 1, 2, 3]
ZeroReduce = Literal["each", "last"]
ReduceDtype = Literal["fp32", "bf16", "fp16"]
Partition = Literal["uniform", "parameters", "flops", "measure"]
RecomputeMode = Literal["none", "full"]
OffloadTo = Literal["none", "cpu", "disk"]
StateDtype = Literal["bf16"]
LrSchedule = Literal["constant", "linear", "cosine", "wsd"]
WandbMode = Literal["online", "offline", "disabled"]
ScheduleName = Literal[
    "gpipe", "1f1b", "interleaved", "looped-bfs", "zb-h1", "zbv", "v-half", "v-min", "auto"
]

BUILT: dict[str, tuple[Any, ...]] = {
    "recompute.mode": ("none", "full"),
    "recompute.every": (1,),
    "recompute.partition": (False,),
    "offload.parameters": ("none",),
    "offload.activations": ("none",),
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
