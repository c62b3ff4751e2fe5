from __future__ import annotations

import pytest

from parallel3d.launch import Launch, device_index, first_host, job_port
from parallel3d.topology import Grid

STEP = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_LOCALID": "1"}


def test_without_a_launcher_it_is_one_process() -> None:
    assert Launch.from_environment({"PATH": "/bin"}) == Launch(0, 1, 0, 1, None, None)


@pytest.mark.report("Lightning-AI/pytorch-lightning#11406")
def test_torchrun_wins_over_slurm() -> None:
    env = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3"}
    launch = Launch.from_environment({**env, "SLURM_PROCID": "0", "SLURM_NTASKS": "1"})
    assert (launch.rank, launch.world_size, launch.local_rank) == (3, 4, 3)


@pytest.mark.report("Lightning-AI/pytorch-lightning#11406")
def test_slurm_alone_is_used() -> None:
    nodes = {"SLURM_NTASKS_PER_NODE": "4", "SLURM_STEP_NODELIST": "n[1-2]"}
    launch = Launch.from_environment({**STEP, **nodes, "SLURM_NTASKS": "8"})
    assert launch == Launch(5, 8, 1, 4, "n1", 10_077)


@pytest.mark.report("Lightning-AI/pytorch-lightning#18618")
def test_an_allocation_without_srun_is_one_process() -> None:
    env = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "n[1-2]"}
    assert Launch.from_environment(env) == Launch()


def test_torchrun_passes_the_whole_description() -> None:
    env = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    launch = Launch.from_environment({**env, "MASTER_ADDR": "n1", "MASTER_PORT": "29500"})
    assert launch == Launch(5, 8, 1, 4, "n1", 29500)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"WORLD_SIZE": "4"}, "RANK is not set"),
        ({"RANK": "1"}, "WORLD_SIZE is not set"),
        ({"RANK": "1", "WORLD_SIZE": "4"}, "LOCAL_RANK is not set"),
        ({"RANK": "one", "WORLD_SIZE": "4"}, "RANK='one' must be a whole number"),
        ({"RANK": "4", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}, "rank 4 of 4"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"},
            "4 processes on this node of 2",
        ),
        ({**STEP}, "SLURM_NTASKS is not set"),
        ({**STEP, "SLURM_NTASKS": "8", "SLURM_TASKS_PER_NODE": "4*2"}, "counts such as"),
        (
            {**STEP, "SLURM_NTASKS": "8", "SLURM_TASKS_PER_NODE": "4,3", "SLURM_NODEID": "2"},
            "NODEID=2",
        ),
    ],
)
def test_what_is_missing_or_impossible_is_named(env: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Launch.from_environment(env)


@pytest.mark.report("Lightning-AI/pytorch-lightning#20391")
@pytest.mark.parametrize("started", [{}, {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}])
def test_fewer_tasks_than_asked_for_is_an_error_with_both_values(started: dict[str, str]) -> None:
    env = {"SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "1", **started}
    with pytest.raises(
        ValueError, match=r"SLURM_NTASKS=1 .* SLURM_NTASKS_PER_NODE=2 .* asks for 2"
    ):
        Launch.from_environment(env)


@pytest.mark.report("Lightning-AI/pytorch-lightning#17252")
def test_a_world_that_does_not_fit_the_grid_names_all_four_numbers() -> None:
    with pytest.raises(ValueError, match=r"2 \* 3 \* 2 = 12, but 8 processes"):
        Grid.infer(8, pp=2, dp=3, tp=2)


@pytest.mark.report("Lightning-AI/pytorch-lightning#17252")
def test_python_in_a_batch_script_of_several_tasks_is_an_error() -> None:
    env = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "ENVIRONMENT": "BATCH"}
    with pytest.raises(
        ValueError, match="SLURM_NTASKS=4, but a batch script itself is one process"
    ):
        Launch.from_environment(env)


@pytest.mark.report("tunib-ai/oslo#150")
@pytest.mark.parametrize(
    ("tasks", "here"),
    [
        ({"SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": "4"}, 4),
        ({"SLURM_TASKS_PER_NODE": "4(x2)"}, 4),
        ({"SLURM_TASKS_PER_NODE": "2(x3),3", "SLURM_NODEID": "3"}, 3),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_TASKS_PER_NODE": "8(x2)"}, 4),
        ({"SLURM_NNODES": "1"}, 8),
    ],
)
def test_the_local_world_is_what_slurm_says_of_tasks_not_nodes(
    tasks: dict[str, str], here: int
) -> None:
    assert Launch.from_environment({**STEP, "SLURM_NTASKS": "8", **tasks}).local_world_size == here


@pytest.mark.report("tunib-ai/oslo#150")
def test_an_unknown_local_world_is_an_error() -> None:
    with pytest.raises(ValueError, match="neither SLURM_NTASKS_PER_NODE nor SLURM_TASKS_PER_NODE"):
        Launch.from_environment({**STEP, "SLURM_NTASKS": "8", "SLURM_NNODES": "2"})


@pytest.mark.report("ACEsuit/mace#435")
@pytest.mark.parametrize(("visible", "index"), [(1, 0), (4, 3), (8, 3)])
def test_a_task_that_sees_one_device_takes_it_whatever_its_local_rank(
    visible: int, index: int
) -> None:
    assert device_index(3, visible) == index


@pytest.mark.report("deepspeedai/DeepSpeed#3165")
def test_more_ranks_than_devices_is_an_error_unless_allowed() -> None:
    with pytest.raises(ValueError, match="local rank 3 has no device of its own among the 2"):
        device_index(3, 2)
    assert device_index(3, 2, oversubscribe=True) == 1
    with pytest.raises(ValueError, match="sees no CUDA device"):
        device_index(0, 0)


@pytest.mark.report("Lightning-AI/pytorch-lightning#14896")
@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("box[1,2]", "box1"),
        ("red,green,blue", "red"),
        ("big-sky-a[410-411]", "big-sky-a410"),
        ("rack-[001-003]", "rack-001"),
        ("q", "q"),
        ("cn[09-11]", "cn09"),
        ("rack[1-2]n[3,5-6]-ib,login", "rack1n3-ib"),
    ],
)
def test_the_first_host_of_a_compact_node_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_an_empty_node_list_is_an_error() -> None:
    with pytest.raises(ValueError, match="node list '' names no host"):
        first_host("")


@pytest.mark.report("NVIDIA/enroot#243")
def test_jobs_get_ports_of_their_own_outside_the_ephemeral_range() -> None:
    ports = [job_port({"SLURM_JOB_ID": str(job)}) for job in range(123_000, 143_000)]
    assert len(set(ports)) == len(ports)
    assert all(port is not None and 1024 < port < 32_768 for port in ports)
    ranks = [
        {**STEP, "SLURM_PROCID": str(r), "SLURM_NTASKS": "8", "SLURM_NNODES": "1"} for r in range(2)
    ]
    assert len({Launch.from_environment(env).master_port for env in ranks}) == 1
    steps = [job_port({"SLURM_JOB_ID": "5", "SLURM_STEP_ID": step}) for step in "01"]
    assert steps[0] != steps[1]
    assert job_port({}) is None
