"""Who this process is, as the launcher says: torchrun, SLURM's srun, or nobody."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

# Below Linux's ephemeral range (32768-60999), where any outgoing connection may sit on a port.
FIRST_PORT, NUM_PORTS = 10_000, 20_000


@dataclass(frozen=True)
class Launch:
    """One process's place in the world, before any of them has spoken.

    ``master_addr`` and ``master_port`` say where rank 0 listens; None when the launcher does not
    say (one process needs neither).
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str | None = None
    master_port: int | None = None

    def __post_init__(self) -> None:
        for name, rank, size in (
            ("rank", self.rank, self.world_size),
            ("local rank", self.local_rank, self.local_world_size),
        ):
            if not 0 <= rank < size:
                raise ValueError(f"the launcher says {name} {rank} of {size}: it must be below")
        if self.local_world_size > self.world_size:
            raise ValueError(
                f"the launcher says {self.local_world_size} processes on this node of "
                f"{self.world_size} in all"
            )

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> Launch:
        """Read torchrun's variables, else those of SLURM's srun, else: one process.

        torchrun wins inside a SLURM job, where one task per node starts a launcher of its own and
        SLURM's counts are of launchers. An allocation in which nothing was started by srun
        (``salloc``, then ``python``) is one process.

        Raises ValueError when variables are missing, are no numbers or disagree.
        """
        if "RANK" in env or "WORLD_SIZE" in env:
            return _from_torchrun(env)
        if "SLURM_NTASKS" in env or "SLURM_PROCID" in env:
            return _from_slurm(env)
        return cls()


def _from_torchrun(env: Mapping[str, str]) -> Launch:
    world_size = _number(env, "WORLD_SIZE")
    return Launch(
        rank=_number(env, "RANK"),
        world_size=world_size,
        # Without it the device would be a guess; one process alone has nothing to guess.
        local_rank=0 if world_size == 1 else _number(env, "LOCAL_RANK"),
        # Not every launcher of this kind sets it; then all processes count as one node's.
        local_world_size=_number(env, "LOCAL_WORLD_SIZE", default=world_size),
        master_addr=env.get("MASTER_ADDR"),
        master_port=_number(env, "MASTER_PORT") if "MASTER_PORT" in env else None,
    )


def _from_slurm(env: Mapping[str, str]) -> Launch:
    _check_tasks(env)
    if "SLURM_PROCID" not in env:
        return Launch()
    world_size = _number(env, "SLURM_NTASKS")
    nodes = next((env[n] for n in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST") if n in env), None)
    return Launch(
        rank=_number(env, "SLURM_PROCID"),
        world_size=world_size,
        local_rank=0 if world_size == 1 else _number(env, "SLURM_LOCALID"),
        local_world_size=_tasks_on_this_node(env, world_size),
        master_addr=env.get("MASTER_ADDR") or (first_host(nodes) if nodes else None),
        master_port=_number(env, "MASTER_PORT") if "MASTER_PORT" in env else job_port(env),
    )


def _check_tasks(env: Mapping[str, str]) -> None:
    """Fewer tasks started than asked for would train on a part of the job without a word."""
    tasks = _number(env, "SLURM_NTASKS", default=1)
    if "SLURM_NTASKS_PER_NODE" in env and "SLURM_NNODES" in env:
        nodes, per_node = _number(env, "SLURM_NNODES"), _number(env, "SLURM_NTASKS_PER_NODE")
        if tasks != nodes * per_node:
            raise ValueError(
                f"SLURM_NTASKS={tasks} tasks run, but SLURM_NTASKS_PER_NODE={per_node} on "
                f"SLURM_NNODES={nodes} asks for {nodes * per_node}: start them all with "
                f"srun --ntasks={nodes * per_node}, or ask for fewer per node"
            )
    in_script = env.get("ENVIRONMENT") == "BATCH" and "SLURM_STEP_ID" not in env
    if in_script and "SLURM_PROCID" in env and tasks > 1:
        raise ValueError(
            f"SLURM_NTASKS={tasks}, but a batch script itself is one process: "
            f"start this with srun or torchrun inside the script"
        )


def _tasks_on_this_node(env: Mapping[str, str], world_size: int) -> int:
    if "SLURM_NTASKS_PER_NODE" in env:
        return _number(env, "SLURM_NTASKS_PER_NODE")
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if name in env:
            counts = _expand_counts(name, env[name])
            node = _number(env, "SLURM_NODEID", default=0) if len(set(counts)) > 1 else 0
            if node >= len(counts):
                raise ValueError(f"SLURM_NODEID={node}, but {name}={env[name]!r} has fewer nodes")
            return counts[node]
    if world_size == 1 or env.get("SLURM_NNODES") == "1":
        return world_size
    raise ValueError(
        f"how many of the SLURM_NTASKS={world_size} tasks run on this node is not known: "
        f"neither SLURM_NTASKS_PER_NODE nor SLURM_TASKS_PER_NODE is set; "
        f"start with srun --ntasks-per-node"
    )


def _expand_counts(name: str, text: str) -> list[int]:
    """``"2(x3),1"`` -> ``[2, 2, 2, 1]``."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not match:
            raise ValueError(f"{name}={text!r} must be counts such as 4(x2),3")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_host(nodes: str) -> str:
    """The first host of SLURM's compact node list: ``"rack-[001-003],q"`` -> ``"rack-001"``."""
    element = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    if not element:
        raise ValueError(f"node list {nodes!r} names no host")
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", element[0])


def job_port(env: Mapping[str, str]) -> int | None:
    """A port that all ranks of a SLURM job step agree on and another job does not take.

    Neighbouring job ids get neighbouring ports; a second step of one job is far from the first.
    None outside a job.
    """
    if "SLURM_JOB_ID" not in env:
        return None
    step = _number(env, "SLURM_STEP_ID", default=0)
    return FIRST_PORT + (_number(env, "SLURM_JOB_ID") + 7919 * step) % NUM_PORTS


def device_index(local_rank: int, visible: int, oversubscribe: bool = False) -> int:
    """Index of this rank's GPU among the ``visible`` ones.

    A task that sees one device was given that one, whatever its local rank. ``oversubscribe``
    lets several ranks share a device; otherwise more ranks than devices are a ValueError.
    """
    if visible < 1:
        raise ValueError(f"local rank {local_rank} sees no CUDA device: check CUDA_VISIBLE_DEVICES")
    if visible == 1:
        return 0
    if local_rank < visible:
        return local_rank
    if oversubscribe:
        return local_rank % visible
    raise ValueError(
        f"local rank {local_rank} has no device of its own among the {visible} visible: "
        f"start {visible} processes on this node, or make more devices visible"
    )


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None and default is not None:
        return default
    if text is None:
        raise ValueError(f"{name} is not set, though other variables of its launcher are")
    if not re.fullmatch(r"\d+", text.strip()):
        raise ValueError(f"{name}={text!r} must be a whole number")
    return int(text)
