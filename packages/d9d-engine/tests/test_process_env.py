"""A process learns its rank from whatever launcher started it, and refuses what does not add up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from d9d_core.errors import JobError
from d9d_core.job import JobFile
from d9d_core.job_file.job import Mesh
from d9d_engine.job import Job
from d9d_engine.launch.start import process_of_launcher
from d9d_engine.process_env import ProcessEnv, expand_counts, expand_hosts
from hypothesis import given
from hypothesis import strategies as st

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node-a",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_PROCID": "9",
    "SLURM_NTASKS": "11",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_TASKS_PER_NODE": "4(x2),3",
    "SLURM_JOB_NODELIST": "node[01-03]",
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_ID": "0",
    "SLURMD_NODENAME": "node03",
}


def process_env(environ: dict[str, str], **changes: str | None) -> ProcessEnv:
    changed: dict[str, Any] = {**environ, **changes}
    return ProcessEnv.from_environment({name: value for name, value in changed.items() if value is not None})


def test_without_a_launcher_there_is_one_process() -> None:
    alone = process_env({})
    assert (alone.rank, alone.world_size, alone.launcher, alone.master) == (0, 1, None, None)
    assert alone.node


def test_torchrun() -> None:
    found = process_env(TORCHRUN)
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (5, 8, 1, 4)
    assert (found.launcher, found.master) == ("torchrun", ("node-a", 29500))


def test_torchrun_inside_a_slurm_step_comes_first() -> None:
    assert process_env({**SLURM, **TORCHRUN}).launcher == "torchrun"


def test_a_slurm_step() -> None:
    found = process_env(SLURM)
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (9, 11, 1, 3)
    assert (found.launcher, found.node) == ("slurm", "node03")
    assert found.master == ("node01", 12_000 + 1234567 % 16_000)


def test_a_slurm_step_uses_its_own_counts_not_those_of_the_allocation() -> None:
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NODELIST": "node[02-03]"}
    found = process_env({**SLURM, **step}, SLURM_PROCID="1", SLURM_NODEID="1", SLURM_LOCALID="0")
    assert (found.world_size, found.local_world_size) == (2, 1)
    assert found.master is not None
    assert found.master[0] == "node02"


def test_slurm_with_equal_nodes_names_one_count() -> None:
    changes = {"SLURM_TASKS_PER_NODE": None, "SLURM_NTASKS_PER_NODE": "4"}
    assert process_env(SLURM, **changes).local_world_size == 4


def test_slurm_can_be_told_where_to_meet() -> None:
    assert process_env(SLURM, MASTER_ADDR="head", MASTER_PORT="7000").master == ("head", 7000)


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURM_STEP_ID": None},  # the batch script itself, whatever was allocated
        {"SLURM_STEP_ID": None, "SLURM_NTASKS": "1"},
        {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"},
    ],
)
def test_slurm_without_several_tasks_is_one_process(changes: dict[str, str | None]) -> None:
    found = process_env(SLURM, **changes)
    assert (found.world_size, found.launcher) == (1, None)


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"])
def test_half_set_variables_are_named(missing: str) -> None:
    with pytest.raises(JobError, match=rf"set, but {missing} is not; torchrun sets"):
        process_env(TORCHRUN, **{missing: None})


@pytest.mark.parametrize("missing", ["SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_JOB_NODELIST"])
def test_half_set_slurm_variables_are_named(missing: str) -> None:
    with pytest.raises(JobError, match=rf"set, but {missing} is not; srun sets"):
        process_env(SLURM, **{missing: None})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"RANK": "8"}, "rank 8 does not exist among 8 processes"),
        ({"LOCAL_RANK": "4"}, "local rank 4 does not exist among 4 processes of this machine"),
        ({"LOCAL_WORLD_SIZE": "9"}, "9 processes on this machine are more than all 8"),
        ({"RANK": "-1"}, "RANK: '-1' is not a number of 0 or more"),
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE: 'many' is not a number"),
    ],
)
def test_contradictions_are_errors(changes: dict[str, str], text: str) -> None:
    with pytest.raises(JobError, match=text):
        process_env(TORCHRUN, **changes)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", ["node1"]),
        ("node[01-03,7],gpu2", ["node01", "node02", "node03", "node7", "gpu2"]),
        ("a[1-2]b[08-10]c", ["a1b08c", "a1b09c", "a1b10c", "a2b08c", "a2b09c", "a2b10c"]),
        ("rack-1.example,rack-2.example", ["rack-1.example", "rack-2.example"]),
    ],
)
def test_node_lists_are_expanded(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize("text", ["", "node[1-", "node[a-b]", "node[]", "node 1"])
def test_what_is_no_node_list_is_refused(text: str) -> None:
    with pytest.raises(JobError, match="SLURM_JOB_NODELIST"):
        expand_hosts(text)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5)), min_size=1))
def test_counts_are_expanded_as_slurm_folds_them(runs: list[tuple[int, int]]) -> None:
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)
    assert expand_counts(text) == [count for count, times in runs for _ in range(times)]


def test_what_is_no_list_of_counts_is_refused() -> None:
    with pytest.raises(JobError, match="'4x2' is not a list of counts"):
        expand_counts("4x2")


def test_places_are_read_without_torch() -> None:
    from d9d_testing.suites.fresh import import_fresh

    modules = (
        "d9d_engine.process_env",
        "d9d_engine.supervision.failure",
        "d9d_engine.launch.process",
        "d9d_engine.launch.agent",
    )
    assert {name: fact.heavy for name, fact in import_fresh(*modules).items() if fact.heavy} == {}


def test_the_machine_has_a_number_among_the_machines() -> None:
    named = process_env(TORCHRUN, GROUP_RANK="1", GROUP_WORLD_SIZE="3")
    assert (named.node_rank, named.num_nodes) == (1, 3)
    counted = process_env(TORCHRUN, RANK="5", LOCAL_RANK="1", LOCAL_WORLD_SIZE="4", WORLD_SIZE="8")
    assert (counted.node_rank, counted.num_nodes) == (1, 2)
    slurm = process_env(SLURM, SLURM_NODEID="1", SLURM_NNODES="5", SLURM_STEP_NUM_NODES="2")
    assert (slurm.node_rank, slurm.num_nodes) == (1, 2)
    assert (process_env({}).node_rank, process_env({}).num_nodes) == (0, 1)


def test_a_machine_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(JobError, match="machine 2 does not exist among 2 machines"):
        process_env(TORCHRUN, GROUP_RANK="2", GROUP_WORLD_SIZE="2")


OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
PALS = {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"}


@pytest.mark.parametrize("mpi", [OPEN_MPI, MPICH, PALS])
def test_mpi_names_a_rank(mpi: dict[str, str]) -> None:
    found = process_env(mpi, MASTER_ADDR="head")
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (3, 4, 1, 2)
    assert (found.launcher, found.master, found.node_rank, found.num_nodes) == ("mpi", ("head", 29_500), 1, 2)
    assert process_env(mpi, MASTER_ADDR="head", MASTER_PORT="7").master == ("head", 7)
    assert process_env({**SLURM, **OPEN_MPI}).launcher == "mpi"  # mpirun in a step of Slurm


def test_variables_of_mpi_that_are_there_are_named_beside_those_that_lack() -> None:
    some = {name: value for name, value in OPEN_MPI.items() if "LOCAL" not in name}
    text = "OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE, MASTER_ADDR are set, but OMPI_COMM_WORLD_LOCAL_RANK, .* are not"
    with pytest.raises(JobError, match=text):
        process_env(some, MASTER_ADDR="head")


def test_one_process_of_mpi_is_alone() -> None:
    assert process_env({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}).launcher is None


def test_the_pmi_of_slurm_is_slurm() -> None:
    assert process_env({**SLURM, "PMI_RANK": "9", "PMI_SIZE": "11"}).launcher == "slurm"


def test_a_rank_without_a_local_rank_is_the_only_one_of_its_machine() -> None:
    by_hand = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    found = process_env(by_hand)
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (5, 8, 0, 1)
    assert (found.node_rank, found.num_nodes, found.master) == (5, 8, ("node-a", 29500))
    for missing in by_hand:
        with pytest.raises(JobError, match=rf"{missing} (is|are) not"):
            process_env(by_hand, **{missing: None})


def refusal(**environ: str) -> str:
    with pytest.raises(JobError) as caught:
        process_of_launcher(environ, alone=False)
    assert process_of_launcher(environ, alone=True).launcher is None
    return str(caught.value)


def test_a_machine_among_several_is_told_the_command_that_starts_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["d9d", "train", "a job.yaml"])
    command = "-m d9d_core train 'a job.yaml'\n"
    for name, value in (("NNODES", "2"), ("NNODES", "1:4"), ("NPROC_PER_NODE", "8"), ("NPROC_PER_NODE", "gpu")):
        assert f"    torchrun {command}" in refusal(**{f"PET_{name}": value})
    sky = refusal(SKYPILOT_NUM_NODES="2", SKYPILOT_NODE_IPS="10.0.0.1\n10.0.0.2", SKYPILOT_NUM_GPUS_PER_NODE="8")
    assert '--node-rank "$SKYPILOT_NODE_RANK" --nproc-per-node "$SKYPILOT_NUM_GPUS_PER_NODE"' in sky
    assert f"--master-addr 10.0.0.1 --master-port 29500 {command}" in sky
    assert '--node-rank "$JOB_COMPLETION_INDEX"' in refusal(JOB_COMPLETION_INDEX="1")
    assert "--alone" in refusal(**OPEN_MPI)


@pytest.mark.parametrize(
    "environ",
    [
        {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "auto"},
        {"SKYPILOT_NUM_NODES": "1"},
        {"JOB_COMPLETION_INDEX": "0"},
        {**TORCHRUN, "PET_NNODES": "2"},  # torchrun in such a pod
    ],
)
def test_one_machine_or_torchrun_is_not_refused(environ: dict[str, str]) -> None:
    process_of_launcher(environ, alone=False)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "variables", [{"PET_NNODES": "2"}, {"SKYPILOT_NUM_NODES": "2"}, {"JOB_COMPLETION_INDEX": "1"}, OPEN_MPI]
)
def test_commands_that_train_nothing_do_not_ask_who_started_them(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch, job: Any, tmp_path: Path
) -> None:
    file = tmp_path / "job.json"
    made = job()
    file.write_text(json.dumps(made.resolved()))
    registry = made.registry
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert JobFile.load(file, registry=registry).check()
    assert Job.of(JobFile.load(file, registry=registry)).plan()


def test_a_rank_that_builds_without_joining_is_told_how_to_join(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    job = Job.model_construct(mesh=Mesh(dp_replicate=2))
    with pytest.raises(JobError, match=r"one of 2 that a launcher started(?s:.*)with job\.joined\(\) as topology"):
        job.build()
