"""Determinism, the same bits each time: settings of torch, kernels, and generators that code of users draws from."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from d9d_core import events as ev
from d9d_core.errors import BuildError, JobError
from d9d_core.kernel import OpSlot
from d9d_core.plugin import KernelSpec, Ref, hookimpl
from d9d_core.registry.registry import Registry
from d9d_core.subscriber import Subscribes, subscribe
from d9d_engine.compose.kernels import bind_kernels
from d9d_engine.distributed.determinism import deterministic_algorithms, prepare_determinism
from d9d_engine.job import Job
from d9d_engine.run.trainer import Trainer
from d9d_engine.step.randomness import generators_kept, seed_generators
from d9d_testing.toy.runs import assert_identical, final_tensors, metrics_of, quiet
from torch import nn

MakeJob = Callable[..., Job]
TIMES = ("tokens_per_second", "time")


class Settings(Subscribes):
    """Subscriber that notes whether torch is held to deterministic algorithms."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.seen: set[bool] = set()

    @subscribe(ev.StepEnds)
    def on_step(self, event: ev.StepEnds) -> None:
        self.seen.add(torch.are_deterministic_algorithms_enabled())
        if self.fails and event.step == 2:
            raise RuntimeError("broken")


def without_times(job: Job) -> list[dict[str, Any]]:
    # Memory held by the allocator depends on earlier tests of this process.
    measured = (*TIMES, "memory/allocated_gib", "memory/reserved_gib")
    return [{name: value for name, value in line.items() if name not in measured} for line in metrics_of(job)]


def drawing(trainer: Trainer, draws: list[tuple[float, float]]) -> Trainer:
    """Trainer whose model draws by Python's and NumPy's global generators in each forward."""
    trainer.stage.register_forward_hook(lambda *_: draws.append((random.random(), np.random.rand())))  # noqa: NPY002
    return trainer


def same_twice(job: MakeJob, *overrides: str) -> None:
    first, second = job("run.name=first", *overrides), job("run.name=second", *overrides)
    quiet(first).train()
    quiet(second).train()
    assert len(without_times(first)) > 2
    assert without_times(first) == without_times(second)
    assert_identical(final_tensors(first), final_tensors(second))


@pytest.mark.thorough
def test_two_runs_of_one_seed_log_the_same_numbers(job: MakeJob) -> None:
    same_twice(job, "deterministic=true")


@pytest.mark.gpu
def test_two_runs_of_one_seed_log_the_same_numbers_on_a_gpu(job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # other tests may have started CUDA
    same_twice(job, "deterministic=true", "device=cuda")


@pytest.mark.parametrize("wanted", [True, False])
def test_torch_is_held_to_deterministic_algorithms_while_the_run_is_open(job: MakeJob, wanted: bool) -> None:
    settings = Settings()
    notes: list[str] = []
    job(f"deterministic={str(wanted).lower()}").build(notes.append, observers=[settings]).train()
    assert settings.seen == {wanted}
    assert not any("deterministic" in note for note in notes), "on a CPU nothing is slower"
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_settings_are_as_before_after_a_run_that_failed(job: MakeJob) -> None:
    with pytest.raises(RuntimeError, match="broken"):
        job("deterministic=true").build(lambda _: None, observers=[Settings(fails=True)]).train()
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_settings_of_a_caller_come_back() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with deterministic_algorithms(True):
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
            assert (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark) == (True, False)
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert not torch.backends.cudnn.deterministic
    finally:
        torch.use_deterministic_algorithms(False)


class TestCublas:
    @pytest.fixture(autouse=True)
    def cuda(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")

    def test_its_workspaces_are_set_before_cuda_starts(self) -> None:
        prepare_determinism("auto")
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"

    def test_a_process_that_has_started_cuda_is_refused_with_the_command(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        with pytest.raises(JobError, match=r"started by this process .* CUBLAS_WORKSPACE_CONFIG=:4096:8 d9d train JOB"):
            prepare_determinism("cuda:0")

    def test_another_value_of_the_variable_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2")
        with pytest.raises(JobError, match="is ':4096:2', with which cuBLAS is not deterministic"):
            prepare_determinism("cuda")

    def test_a_job_for_the_cpu_needs_nothing(self) -> None:
        prepare_determinism("cpu")
        assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


class Square(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.op = OpSlot("square", lambda x: x * x)

    def op_slots(self) -> dict[str, OpSlot]:
        return {"op": self.op}


def offers() -> Registry:
    @hookimpl
    def d9d_kernels() -> list[KernelSpec]:
        absent = Ref("a_module_that_is_not_there:supports")
        return [
            KernelSpec(name="loose", op="square", summary="x", supports=absent, build=absent, deterministic=False),
        ]

    return Registry.of(SimpleNamespace(d9d_kernels=d9d_kernels, __name__="acme"))


def test_a_kernel_that_is_not_deterministic_is_refused_where_the_job_is() -> None:
    (choice,) = bind_kernels(Square().named_modules(), offers(), {}, "cpu", "float32", lambda _: (), deterministic=True)
    assert choice.backend == "reference"
    assert choice.considered["loose"].reason == "is not deterministic, and the job sets 'deterministic'"
    with pytest.raises(BuildError, match=r"kernels.square: 'loose' \(acme\) cannot run here: is not deterministic"):
        bind_kernels(
            Square().named_modules(), offers(), {"square": "loose"}, "cpu", "float32", lambda _: (), deterministic=True
        )


@pytest.mark.thorough
def test_python_and_numpy_draw_the_same_in_each_run_and_after_a_resume(job: MakeJob) -> None:
    straight: list[tuple[float, float]] = []
    drawing(quiet(job("run.name=straight")), straight).train()
    parts: list[tuple[float, float]] = []
    made = job("run.name=parts")
    trainer = drawing(quiet(made), parts)
    list(trainer.steps(5))
    trainer.finish()
    random.random()
    drawing(quiet(made), parts).train()
    assert len(set(straight)) == len(straight) == 24
    assert parts == straight


def test_the_generators_of_python_and_numpy_are_the_callers_again_after_the_block() -> None:
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    expected = random.random(), np.random.rand()  # noqa: NPY002
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    with generators_kept(torch.device("cpu")):
        seed_generators(torch.device("cpu"), 2**62 + 5)
    assert (random.random(), np.random.rand()) == expected  # noqa: NPY002


def test_without_cuda_any_value_of_the_variable_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2")
    for device in ("auto", "cuda", "cuda:1", "cpu"):
        prepare_determinism(device)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    prepare_determinism("cuda")
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
