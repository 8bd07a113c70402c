"""Answers of ``d9d plan`` and ``d9d check`` about predicted layouts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from d9d_core.errors import JobError
from d9d_core.job import JobFile
from d9d_planner import check, command
from d9d_planner.check import check_memory, ways_out
from d9d_planner.command import accepted, with_memory
from d9d_planner.device import Device
from d9d_planner.search import Found
from d9d_planner.step_time import StepTime
from typer.testing import CliRunner

GIB = 2**30


@pytest.mark.parametrize(
    ("parts", "bound"),
    [
        ({"products": 9.0, "bubble": 0.6, "transfers": 0.4}, "bubble 6%"),
        ({"products": 9.5, "bubble": 0.4, "transfers": 0.1}, "compute"),
        ({"products": 10.0}, "compute"),
        ({"idle": 5.0, "tensor parallelism": 0.5, "optimizer": 4.5}, "tensor parallelism 5%"),
    ],
)
def test_a_step_is_bound_by_the_largest_part_that_another_layout_could_reduce(
    parts: dict[str, float], bound: str
) -> None:
    assert StepTime(10.0, parts).bound == bound


def test_another_memory_size_keeps_the_rates() -> None:
    device = Device.named("h100")
    assert with_memory(device, None) is device
    other = with_memory(device, 3 * GIB)
    assert (other.memory, other.product) == (3 * GIB, device.product)


def prediction(total: float, size: float = 1.0, *, valid: bool = True, devices: int = 2, tp: int = 1) -> Any:
    """Stand-in of a prediction on devices of 4 GiB."""

    def checked(_devices: int) -> None:
        if not valid:
            raise JobError("not valid")

    job = SimpleNamespace(check=checked)
    job.use = lambda _registry: job
    mesh = SimpleNamespace(world_size=devices, tp=tp)
    return SimpleNamespace(
        time=SimpleNamespace(total=total, parts={"tensor parallelism": total / 4}),
        memory=SimpleNamespace(needed=size * GIB, outside=0.7 * GIB),
        fits=size <= 4.0,
        device=SimpleNamespace(memory=4 * GIB, node=8),
        layout=SimpleNamespace(mesh=mesh, on=lambda _job: job),
        workload=SimpleNamespace(job="job"),
    )


def test_the_fastest_layouts_and_then_the_smallest_that_pass_the_checks_are_kept() -> None:
    ranked = [prediction(float(at), 9.0 - at, valid=at not in (1, 3)) for at in range(1, 8)]
    job: Any = SimpleNamespace(registry=None)
    assert [one.time.total for one in accepted(Found(ranked, 9, None), job, 3)] == [2.0, 4.0, 5.0]
    # Of 4 times as many as are wanted, none is valid; the front has further ones.
    front = [prediction(float(at), 20.0 - at, valid=at > 5) for at in range(1, 8)]
    assert [one.time.total for one in accepted(Found(front, 9, None), job, 1)] == [6.0]
    # The fifth is too slow to be among them, and the sixth is faster than no smaller one.
    later = [
        prediction(float(at), size, valid=at > 4) for at, size in zip(range(1, 7), (9, 8, 7, 6, 6, 5), strict=True)
    ]
    assert [one.time.total for one in accepted(Found(later, 9, None), job, 1)] == [6.0]
    assert accepted(Found([], 0, None), job, 3) == []


def test_why_no_layout_fits_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "largest", lambda _prediction: "optimizer 9.0")
    job: Any = SimpleNamespace(batch=SimpleNamespace(size=12))
    device: Any = SimpleNamespace(memory=4 * GIB)
    text = command._nothing(Found([], 0, None), 8, device, job)
    assert text.startswith("no layout on 8 devices is valid: batch.size 12 ")
    text = command._nothing(Found([], 0, None), 8, device, job, JobError("the model has no layers"))
    assert text == "no layout on 8 devices is valid: the model has no layers"
    smallest = prediction(1.0, 9.25)
    smallest.layout = "tp=8, tp"
    text = command._nothing(Found([], 3, smallest), 8, device, job)
    assert text.startswith(
        "no layout on 8 devices fits into 4.0 GiB; the smallest, tp=8, tp, needs 9.2 GiB (optimizer 9.0); use more"
    )


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stand-ins of all that the command calls, and the calls."""
    seen: dict[str, Any] = {"legal": 1234, "ranked": ["first", "second"], "notes": ["samples differ"]}
    job = SimpleNamespace(device="cuda", registry="registry", views=lambda: "views", mesh=SimpleNamespace(world_size=6))
    smallest = SimpleNamespace(memory=SimpleNamespace(needed=9.25 * GIB, outside=0.0))

    def search(*given: Any) -> Found:
        seen["search"] = given
        return Found([], seen["legal"], seen.get("smallest", smallest))

    def load(*given: Any, **options: Any) -> Any:
        seen["load"] = (*given, options)
        return job

    def calibrated(name: str, rates: Device, file: Path) -> Device:
        seen["calibrated"] = (name, rates, file)
        return rates.model_copy(update={"node": 3})

    def workload(*given: Any) -> Any:
        assert given == (job, "registry", "views")
        return SimpleNamespace(notes=seen["notes"])

    for name, value in {
        "load_job": load, "_calibrated": calibrated, "Workload": workload, "search": search,
        "accepted": lambda found, given, most: seen["ranked"][:most] if given is job else [],
        "refusal": lambda _workload, devices, device: seen.update(refusal=devices) or f"refused on {device.node}",
        "_nothing": lambda found, devices, device, given, reason: f"none of {found.legal} on {devices}: {reason}",
        "plan_table": lambda found, ranked: f"table of {ranked}",
        "time_line": lambda one: f"time of {one}",
        "memory_line": lambda one: f"bytes of {one}",
        "job_text": lambda given, one: f"text of {one}" if given is job else "",
    }.items():  # fmt: skip
        monkeypatch.setattr(command, name, value)
    seen["job"] = job
    return seen


def test_a_plan_prints_the_layouts_and_notes_and_writes_the_first(planned: dict[str, Any], tmp_path: Path) -> None:
    out, rates = tmp_path / "planned.yaml", tmp_path / "rates.yaml"
    options = ["job.yaml", "--plugin", "one.py", "--strict-plugins", "--set", "seed=1"]
    result = CliRunner().invoke(command.app, options, catch_exceptions=False)
    assert result.exit_code == 0
    given = (JobFile, Path("job.yaml"), ["seed=1"], [Path("one.py")], False, True, {"world_size": None})
    assert planned["load"] == given
    assert planned["search"][1:] == (6, Device.named("h200"))
    assert result.stdout.splitlines() == [
        "table of ['first', 'second']",
        "* no other layout is both faster and smaller; 1,234 layouts were compared",
        "1: time of first",
        "1: memory bytes of first",
    ]
    assert result.stderr == "note: samples differ\n"
    more = ["--gpus", "4", "--memory", "3GiB", "--gpu", "h100", "--top", "1", "--no-plugins", "--write", str(out)]
    result = CliRunner().invoke(command.app, ["job.yaml", *more, "--calibrate", str(rates)], catch_exceptions=False)
    assert planned["load"][-3:] == (True, False, {"world_size": 4})
    assert planned["calibrated"] == ("cuda", Device.named("h100"), rates)
    changed = {"memory_gib": 3.0, "node": 3}
    assert planned["search"][1:] == (4, Device.named("h100").model_copy(update=changed))
    assert result.stdout.splitlines()[0] == "table of ['first']"
    assert result.stdout.splitlines()[-1].replace("\n", "").startswith(f"written: {tmp_path}"[:20])
    assert out.read_text() == "text of first"


@pytest.mark.parametrize("option", ["--write", "--calibrate"])
def test_a_plan_replaces_no_file(planned: dict[str, Any], tmp_path: Path, option: str) -> None:
    with pytest.raises(JobError, match=f"^{option}: {tmp_path} exists; name another file, or remove it$"):
        CliRunner().invoke(command.app, ["job.yaml", option, str(tmp_path)], catch_exceptions=False)
    assert "search" not in planned


@pytest.mark.parametrize(("legal", "said"), [(3, "none of 3 on 6: None"), (0, "none of 0 on 6: refused on 8")])
def test_a_plan_without_layouts_is_an_error_with_the_reason(planned: dict[str, Any], legal: int, said: str) -> None:
    planned.update(legal=legal, ranked=[])
    with pytest.raises(JobError, match=f"^{said}$"):
        CliRunner().invoke(command.app, ["job.yaml"], catch_exceptions=False)
    assert planned.get("refusal") == (None if legal else 6)


@pytest.mark.parametrize(("tp", "lines"), [(8, 0), (16, 1)])
def test_tensor_parallelism_between_machines_is_told_with_its_time(tp: int, lines: int) -> None:
    found = list(check._between_nodes(prediction(2.0, tp=tp)))
    assert found == ["tp 16 over nodes of 8 devices takes 25% of a step of 2 s"][:lines]


@pytest.fixture
def alternatives(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Layouts near the job's, and those that a search finds on a number of devices."""
    found: dict[str, Any] = {"near": [], "asked": []}

    def search(_workload: object, devices: int, _device: object) -> Found:
        found["asked"].append(devices)
        return Found(found.get(f"on {devices}", []), 1, None)

    monkeypatch.setattr(check, "_nearby", lambda _prediction: iter(found["near"]))
    monkeypatch.setattr(check, "search", search)
    # The edit turns the job's own layout into the other one.
    monkeypatch.setattr(
        check, "edit", lambda job, other: "mesh:\ntp: 2" if (job, other == job) == ("job", False) else ""
    )
    monkeypatch.setattr(check, "largest", lambda _prediction: "optimizer 9.0")
    return found


def test_alternatives_are_those_that_fit_by_the_time_of_all_devices(alternatives: dict[str, Any]) -> None:
    alternatives["near"] = [prediction(9.0), prediction(1.0, 5.0), prediction(0.0)]
    alternatives["on 4"] = [prediction(at, devices=4) for at in (1.0, 2.0, 3.0, 0.5)]
    alternatives["on 2"] = [prediction(0.125, 5.0)]
    found = ways_out(prediction(1.0, 9.0))
    assert [one.time.total for one in found] == [1.0, 2.0, 3.0]
    assert alternatives["asked"] == [2, 4]
    alternatives["near"] = [prediction(9.0), prediction(8.0), prediction(7.0)]
    alternatives["asked"].clear()
    assert [one.time.total for one in ways_out(prediction(1.0, 9.0))] == [7.0, 8.0, 9.0]
    assert alternatives["asked"] == []


def test_a_job_that_does_not_fit_lists_its_alternatives(alternatives: dict[str, Any]) -> None:
    check_memory(prediction(1.0, 4.0))
    alternatives["near"] = [prediction(3.0, 2.5)]
    alternatives["on 8"] = [prediction(1.0, 1.5, devices=8)]
    with pytest.raises(JobError) as error:
        check_memory(prediction(2.0, 9.0))
    assert str(error.value).splitlines() == [
        "this job needs 9.0 GiB on a device (optimizer 9.0), which has 4.0 GiB; the cheapest alternatives:",
        "1. 3 s a step (+50% time a step), 2.5 GiB:", "   mesh:", "   tp: 2",
        "2. 1 s a step (8 devices), 1.5 GiB:", "   mesh:", "   tp: 2",
    ]  # fmt: skip
    assert alternatives["asked"] == [2, 4, 8, 16]
    alternatives.update({"near": [], "on 8": []})
    with pytest.raises(JobError, match="no layout on up to 8 times as many devices fits: use a smaller model"):
        check_memory(prediction(2.0, 9.0))
    alternatives["asked"].clear()
    none = prediction(2.0, 9.0)
    none.memory.outside = 4 * GIB
    with pytest.raises(JobError, match=r"fits: the driver and libraries alone need 4.0 GiB, so use a device with more"):
        check_memory(none)
