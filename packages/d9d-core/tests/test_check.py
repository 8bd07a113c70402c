"""``d9d check`` where the installed packages cannot check all of a job."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import d9d_testing.toy.plugin as toy
import pytest
from d9d_core.cli.check import check_job
from d9d_core.cli.options import bytes_of
from d9d_core.errors import JobError
from d9d_core.job import JobFile
from d9d_core.plugin import JobCheckSpec, Ref, hookimpl
from d9d_core.registry.policy import FOUNDATION
from d9d_core.registry.registry import Registry

JOB = {"steps": 3, "model": "toy_model", "data": "toy_data", "task": "toy_task", "optimizer": "toy_optimizer"}
MODEL, MEMORY = "Model, strategies and kernels, without a GPU.", "Predicted memory of the busiest device."


def registry(**options: Any) -> Registry:
    """The toy plugin and one check of a plugin, as where d9d-core is installed without d9d-engine."""

    @hookimpl
    def d9d_job_checks() -> list[JobCheckSpec]:
        return [JobCheckSpec(name="mine", summary="Mine.", run=Ref("builtins:print"), **options)]

    found = Registry.of(toy, SimpleNamespace(d9d_job_checks=d9d_job_checks, __name__="acme")).entries()
    return Registry(entry for entry in found if entry.origin.distribution not in FOUNDATION)


def test_what_the_checks_of_plugins_leave_out_is_said_beside_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    check_job(JobFile.from_values(JOB, registry=registry()), None)
    out = capsys.readouterr().out
    assert f"not checked (to check it: pip install d9d-engine): {MODEL}" in out
    assert f"not checked (to check it: pip install d9d-planner): {MEMORY}" in out
    assert "Mine." not in out  # it ran
    rows = [line.split() for line in out.splitlines()]
    assert ["mesh", *str(JobFile.from_values(JOB, registry=registry()).mesh).split()] in rows
    assert ["model", "toy_model", "d9d_testing.toy.plugin"] in rows


def test_the_length_of_a_run_is_said_as_far_as_it_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    check_job(JobFile.from_values(JOB, registry=registry()), None)
    assert "3 steps" in capsys.readouterr().out
    check_job(JobFile.from_values({**JOB, "steps": None, "epochs": 2}, registry=registry()), None)
    assert "epochs: 2; the number of steps follows from the data, which was not read" in capsys.readouterr().out


def test_memory_is_refused_where_nothing_predicts_it() -> None:
    with pytest.raises(JobError, match="--memory: nothing installed predicts the memory of a job; pip install"):
        check_job(JobFile.from_values(JOB, registry=registry()), None, 80 * 2**30)


def test_a_check_that_wants_it_gets_the_memory(capsys: pytest.CaptureFixture[str]) -> None:
    check_job(JobFile.from_values(JOB, registry=registry(memory=True)), None, 12345)
    assert "None 12345" in capsys.readouterr().out


@pytest.mark.parametrize(("text", "size"), [("80GiB", 80 << 30), ("141GB", 141 * 10**9), ("1.5 TiB", 3 << 39)])
def test_sizes_are_read_with_their_unit(text: str, size: int) -> None:
    assert bytes_of(text) == size


@pytest.mark.parametrize("text", ["80", "GiB", "-1GiB", "0GB", "80gib", "1e3GB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(JobError, match="is not a size; write a number and a unit"):
        bytes_of(text)
