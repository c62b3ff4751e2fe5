"""The closed sets of values."""

from typing import Literal

Precision = Literal["fp32", "bf16", "fp16", "fp64"]
ZeroStage = Literal[0, 1, 2, 3]
ZeroReduce = Literal["each", "last"]
ReduceDtype = Literal["fp32", "bf16", "fp16"]
Partition = Literal["uniform", "parameters", "flops", "measure"]
RecomputeMode = Literal["none", "full", "selective"]
OffloadTo = Literal["none", "cpu", "disk"]
StateDtype = Literal["bf16"]
LrSchedule = Literal["constant", "linear", "cosine", "wsd"]
WandbMode = Literal["online", "offline", "disabled"]
ScheduleName = Literal[
    "gpipe", "1f1b", "interleaved", "looped-bfs", "zb-h1", "zbv", "v-half", "v-min", "auto"
]
