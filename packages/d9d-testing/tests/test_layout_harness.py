"""Harness of layouts with stand-ins for worlds and measurements: which jobs run where, and what is compared."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_testing import collectives, layouts
from d9d_testing.layouts import Harness, assert_passed, measure_all, topology_here, train_part
from d9d_verify.compare import Verdict
from d9d_verify.layouts import Layout

VALUES = {"steps": 3, "device": "cpu", "model": {"name": "m"}}
ONE = Layout("one", {}, ())
TWO = Layout("two", {"dp_shard": 2}, ("fsdp",))
FOUR = Layout("four", {"dp_shard": 4}, ("fsdp",), ("precision.autocast=bfloat16",))


class Found:
    """Stand-in of a measurement: which jobs were measured where."""

    def __init__(self, records: Any) -> None:
        self.records = [record["told"] for record in records]
        self.numbers = {"a": 1.0, "end/a": 2.0}

    def guide(self) -> Any:
        return SimpleNamespace(by=self.records)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Runs of worlds: size, options, function and arguments."""
    found: list[Any] = []

    class World:
        def __init__(self, size: int, **options: Any) -> None:
            self.size, self.options = size, options

        def run(self, function: Any, jobs: Any, *arguments: Any) -> Any:
            found.append((self.size, self.options, function, jobs, arguments))
            jobs = jobs if isinstance(jobs, list) else [jobs]
            records = [[{"told": (dict(job["mesh"]), rank)} for job in jobs] for rank in range(self.size)]
            return records if function is measure_all else [of_rank[0] for of_rank in records]

    monkeypatch.setattr(layouts, "World", World)
    monkeypatch.setattr(layouts, "Record", lambda **fields: fields)
    monkeypatch.setattr(layouts, "Measurement", SimpleNamespace(of=Found))
    return found


def test_layouts_of_as_many_ranks_share_a_world_and_stay_in_order(ran: list[Any]) -> None:
    harness = Harness(VALUES, ("a.plugin", "b.py"), steps=5)
    other = Layout("other two", {"dp_replicate": 2}, ("replicate",))
    found = harness.measure([TWO, ONE, other], "f.py:fault", elsewhere=True)
    assert [one.records for one in found] == [
        [({"dp_shard": 2}, 0), ({"dp_shard": 2}, 1)], [({}, 0)], [({"dp_replicate": 2}, 0), ({"dp_replicate": 2}, 1)],
    ]  # fmt: skip
    assert [(size, len(jobs)) for size, _, _, jobs, _ in ran] == [(1, 1), (2, 2)]
    for _, options, function, jobs, (plugins, steps, fault, guides, elsewhere) in ran:
        assert options == {"timeout": 180.0, "backend": "gloo"}
        assert function is measure_all
        assert (plugins, steps, fault, elsewhere) == (["a.plugin", "b.py"], 5, "f.py:fault", True)
        assert guides == [None] * len(jobs)
        for job in jobs:
            assert not Path(job["run"]["dir"]).exists()  # removed after the run
            assert (job["model"], job["steps"]) == ({"name": "m"}, 3)
    assert [job["parallel"] for job in ran[1][3]] == [["fsdp"], ["replicate"]]
    guide: Any = found[0]
    Harness({**VALUES, "device": "cuda"}, ()).measure([TWO], guides=[guide])
    assert ran[-1][1] == {"timeout": 180.0, "backend": "cpu:gloo,cuda:nccl"}
    assert ran[-1][4] == ([], 3, None, [{"by": guide.records}], False)
    del VALUES_WITHOUT_DEVICE["device"]
    Harness(VALUES_WITHOUT_DEVICE, ()).measure([ONE])
    assert ran[-1][1]["backend"] == "gloo"


VALUES_WITHOUT_DEVICE: dict[str, Any] = dict(VALUES)


def test_layouts_are_compared_with_one_process_and_with_its_rounding(
    ran: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[Any] = []
    monkeypatch.setattr(layouts, "Limits", SimpleNamespace(of=lambda dtype, expected, sound: (dtype, expected, sound)))
    monkeypatch.setattr(layouts, "compare", lambda *given: compared.append(given) or given[0])
    assert Harness(VALUES, ()).compare([TWO, FOUR], fault="f.py:fault") == ["two", "four"]
    facts = [(size, arguments[2], arguments[4], arguments[3]) for size, _, _, _, arguments in ran]
    expected = compared[0][2]
    guide = {"by": expected.records}
    assert facts == [
        (1, None, False, [None]), (1, None, True, [guide]), (2, "f.py:fault", False, [guide]),
        (4, "f.py:fault", False, [guide]),
    ]  # fmt: skip
    assert ran[-1][3][0]["precision"] == {"autocast": "bfloat16"}
    for (name, measured, reference, limits), size, dtype in zip(
        compared, (2, 4), (torch.float32, torch.bfloat16), strict=True
    ):
        assert (name, len(measured.records), reference) == ({2: "two", 4: "four"}[size], size, expected)
        assert (limits[0], limits[1], len(limits[2])) == (dtype, expected, 1)
    ran.clear()
    Harness(VALUES, ()).compare([ONE], reference=TWO)
    assert [size for size, *_ in ran] == [2, 2, 1]


def test_a_run_that_changes_its_layout_is_compared_without_its_end(
    ran: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[Any] = []
    monkeypatch.setattr(Found, "steps", property(lambda self: 2 if len(self.records) == 2 else 3), raising=False)
    monkeypatch.setattr(Found, "with_steps_of", lambda self, other: (self, other), raising=False)
    monkeypatch.setattr(layouts, "replace", lambda one, numbers: (one, numbers))
    monkeypatch.setattr(layouts, "Limits", SimpleNamespace(of=lambda dtype, expected, sound: (dtype, expected, sound)))
    monkeypatch.setattr(layouts, "compare", lambda *given: compared.append(given) or "the verdict")
    harness = Harness(VALUES, ("a",), steps=5)
    assert harness.compare_resumed(TWO, FOUR) == "the verdict"
    ((name, (first, second), (expected, numbers), limits),) = compared
    assert (name, len(first.records), len(second.records)) == ("two, then four", 2, 4)
    assert numbers == {"a": 1.0}
    assert limits[:2] == (torch.bfloat16, expected)  # of the layout with less precision
    parts = [(size, jobs, arguments) for size, _, function, jobs, arguments in ran if function is train_part]
    assert [(size, job["steps"], job["run"]["name"]) for size, job, _ in parts] == [
        (2, 2, "resumed"),
        (4, 5, "resumed"),
    ]
    assert parts[0][1]["run"]["dir"] == parts[1][1]["run"]["dir"]
    assert all(arguments == (["a"], {"by": expected.records}) for *_, arguments in parts)
    with pytest.raises(AssertionError, match="the second half did not resume from the first"):
        harness.compare_resumed(FOUR, TWO)
    ran.clear()
    harness.compare_resumed(TWO, FOUR, reference=FOUR)
    assert [size for size, *_ in ran] == [4, 4, 2, 4]


def test_failed_layouts_are_listed_with_the_step_from_1() -> None:
    passed = Verdict("good", 0.0, 0.0, (0.0, "a"), (0.0, "a"), (0.0, "a"), None)
    late = Verdict("late", 0.0, 0.0, (0.0, "a"), (0.0, "a"), (0.0, "a"), (2, "the loss is off"))
    first = Verdict("first", 0.0, 0.0, (0.0, "a"), (0.0, "a"), (0.0, "a"), (0, "a gradient is off"))
    assert_passed([passed])
    with pytest.raises(AssertionError) as caught:
        assert_passed([late, passed, first])
    first_line, second_line, *_ = str(caught.value).splitlines()
    assert (first_line, second_line.strip()) == ("late: step 3: the loss is off", "first: step 1: a gradient is off")


def test_a_fault_is_called_with_each_job_before_it_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "f.py").write_text("def fault(job):\n    job.told.append('fault')\n")
    jobs = [SimpleNamespace(told=[]), SimpleNamespace(told=[])]
    left = iter(jobs)
    monkeypatch.setattr(layouts, "job_of", lambda values, plugins: next(left))
    monkeypatch.setattr(layouts, "topology_here", lambda job: "topology")
    monkeypatch.setattr(layouts, "Measurement", lambda **fields: ("guide", fields))

    def measured(job: Any, topology: Any, steps: int, guide: Any, elsewhere: bool) -> Any:
        job.told.append((topology, steps, guide, elsewhere))
        return SimpleNamespace(a=len(job.told))

    monkeypatch.setattr(layouts, "measure", measured)
    guides: Any = [None, {"x": 1}]
    assert measure_all([{}, {}], [], 5, f"{tmp_path}/f.py:fault", guides, True) == [{"a": 2}, {"a": 2}]
    assert jobs[0].told == ["fault", ("topology", 5, None, True)]
    assert jobs[1].told == ["fault", ("topology", 5, ("guide", {"x": 1}), True)]
    left = iter(jobs)
    measure_all([{}], [], 5, None, [None], False)
    assert jobs[0].told[2:] == [("topology", 5, None, False)]


def test_each_rank_has_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[Any] = []
    monkeypatch.setattr(layouts.dist, "get_rank", lambda: 3)
    monkeypatch.setattr(layouts.dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(layouts, "load_kernels_eagerly", happened.append)
    monkeypatch.setattr(layouts.torch.cuda, "set_device", happened.append)
    monkeypatch.setattr(layouts, "Topology", lambda **facts: facts)
    job: Any = SimpleNamespace(device="cpu", mesh=SimpleNamespace(sizes=lambda: {"a": 4}), views=lambda: "views")
    common = {"sizes": {"a": 4}, "rank": 3, "world_size": 4, "local_rank": 3, "views": "views"}
    assert topology_here(job) == {**common, "device": torch.device("cpu")}
    assert happened == []
    job.device = "cuda"
    assert topology_here(job) == {**common, "device": torch.device("cuda", 3)}
    assert happened == ["cuda", torch.device("cuda", 3)]


def test_a_part_of_a_run_is_recorded_with_joined_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[Any] = []

    class Trainer:
        def train(self) -> None:
            happened.append("trained")

    def build(note: Any, topology: Any, observers: Any) -> Trainer:
        happened.append((topology, len(observers)))
        return Trainer()

    monkeypatch.setattr(layouts, "job_of", lambda values, plugins: SimpleNamespace(build=build))
    monkeypatch.setattr(layouts, "topology_here", lambda job: "topology")
    monkeypatch.setattr(layouts, "Measurement", lambda **fields: fields)
    monkeypatch.setattr(layouts, "Witness", lambda guide: SimpleNamespace(record=SimpleNamespace(guide=guide)))
    monkeypatch.setattr(layouts, "join_replicas", lambda trainer: happened.append("joined"))
    assert train_part({}, [], {"a": 1}) == {"guide": {"a": 1}}
    assert happened == [("topology", 1), "joined", "trained"]


# --- recorded collectives


@pytest.mark.parametrize(
    ("name", "arguments", "call"),
    [
        ("_c10d_functional::all_gather_into_tensor", {"input": 12, "group_size": 2}, ("all_gather", (4, 7), 24)),
        ("_c10d_functional::reduce_scatter_tensor", {"input": 12}, ("reduce_scatter", (4, 7), 12)),
        ("_c10d_functional::all_to_all_single", {"input": 8}, ("all_to_all", (4, 7), 8)),
        ("c10d::alltoall_base_", {"output": 4, "input": 8}, ("all_to_all", (4, 7), 8)),
        ("c10d::allgather_into_tensor_coalesced_", {"outputs": 4, "inputs": 8}, ("all_gather", (4, 7), 4)),
        ("c10d::reduce_scatter_tensor_coalesced_", {"outputs": 4, "inputs": 8}, ("reduce_scatter", (4, 7), 8)),
        ("c10d::broadcast_", {"tensors": 4}, ("c10d::broadcast_", (4, 7), 4)),
        ("c10d::send", {"tensors": 4, "process_group": 0, "peer": 1}, ("send", (1, 7), 4)),
        ("c10d::recv_", {"tensors": 4, "process_group": 0, "peer": 9}, ("receive", (7, 9), 4)),
        ("_c10d_functional::wait_tensor", {"input": 4}, None), ("c10d::monitored_barrier_", {"x": 4}, None),
        ("aten::mm", {"input": 4}, None),
    ],
)  # fmt: skip
def test_bytes_and_ranks_of_each_operator(
    name: str, arguments: dict[str, int], call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collectives, "_group", lambda _arguments: "group")
    monkeypatch.setattr(collectives.dist, "get_process_group_ranks", lambda group: [4, 7])
    monkeypatch.setattr(collectives.dist, "get_rank", lambda: 7)
    monkeypatch.setattr(collectives.dist, "get_global_rank", lambda _group, peer: peer)
    given = [
        size if key in ("peer", "process_group", "group_size") else torch.zeros(size, dtype=torch.uint8)
        for key, size in arguments.items()
    ]

    class Operator:
        _schema = SimpleNamespace(name=name, arguments=[SimpleNamespace(name=key) for key in arguments])

        def __call__(self, *given: Any, **more: Any) -> Any:
            return len(given), more

    recorder: Any = SimpleNamespace(calls=[])
    # Without torch's wrapper, which imports its compiler.
    record: Any = inspect.unwrap(collectives.CollectiveRecorder.__torch_dispatch__)
    assert record(recorder, Operator(), (), given, {"a": 1}) == (
        len(given), {"a": 1},
    )  # fmt: skip
    assert recorder.calls == ([] if call is None else [call])
    monkeypatch.setattr(collectives.dist, "get_process_group_ranks", lambda group: [4])
    if call is not None and call[0] not in ("send", "receive"):
        record(recorder, Operator(), (), given)
        assert len(recorder.calls) == 1
