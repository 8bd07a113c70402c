"""``d9d profile`` names the cause of the time of a step."""

from __future__ import annotations

import os
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import yaml
from d9d_core.errors import JobError
from d9d_engine.job import Job
from d9d_engine.profiling.summary import LABELS
from d9d_engine.run.interrupt import STOPPED, Interrupts, Terminated
from d9d_planner import calibrate
from d9d_planner.device import Device
from d9d_planner.profile import command, measure, report
from d9d_planner.profile.command import app
from d9d_planner.profile.measure import Measured
from d9d_planner.profile.report import lines
from d9d_planner.profile.verdict import Verdict, verdict
from pydantic import BaseModel
from torch.profiler import ProfilerActivity
from typer.testing import CliRunner

KINDS = ("optimizer", "attention", "matmul", "other", "communication", "idle")


def measured(waits: float = 0.0, tail: float = 0.9, on_device: bool = True, **kinds: float) -> Measured:
    """Times of a step of one second, whose other time is spent in matrix products."""
    shares = dict.fromkeys(KINDS, 0.0) | kinds
    shares["matmul"] += 1.0 - sum(shares.values())
    return Measured(1.0, waits, 1.0 - waits, tail, shares, 1.0, 100.0, None, on_device)


def found(
    *names: str,
    fields: tuple[str, ...] = ("workers",),
    count: int = 4,
    size: int = 1,
    predicted: float | None = None,
    **times: float,
) -> Verdict:
    return verdict(measured(**times), predicted, names, fields, count, size)  # type: ignore[arg-type]


def test_a_wait_for_data_comes_first() -> None:
    slow = found(waits=0.3, idle=0.5, tail=0.0)
    assert slow.cause == "data"
    assert "waits 30% of its time for data" in slow.reason
    assert slow.advice[0].startswith("data.workers: 4")
    assert not any("workers" in text for text in found(waits=0.3, fields=()).advice)
    assert found(waits=0.05).cause == "compute"


def test_an_idle_gpu_that_the_host_does_not_feed_is_host_bound() -> None:
    starved = found(idle=0.4, tail=0.01)
    assert starved.cause == "host"
    assert "the GPU is idle 40% of the time" in starved.reason
    assert any("compile" in text for text in starved.advice)
    assert any("a step has 4 microbatches" in text for text in starved.advice)
    again = found("compile", idle=0.4, tail=0.01, count=1)
    assert not any("compile" in text or "microbatch" in text for text in again.advice)


def test_a_gpu_that_the_host_runs_ahead_of_is_not_host_bound() -> None:
    assert found(idle=0.4, tail=0.9).cause == "compute"


def test_a_processor_needs_more_gaps_to_be_host_bound_than_a_gpu() -> None:
    assert found(idle=0.3, tail=0.0, on_device=False).cause == "compute"
    assert found(idle=0.5, tail=0.0, on_device=False).cause == "host"


def test_a_processor_that_is_much_slower_than_predicted_is_host_bound() -> None:
    assert found(tail=0.0, on_device=False, predicted=0.1).cause == "host"
    assert found(tail=0.0, on_device=False, predicted=0.5).cause == "compute"
    assert found(tail=0.9, predicted=0.1).cause == "compute"


def test_other_causes_are_named_by_their_share() -> None:
    assert found(communication=0.2).cause == "communication"
    assert found(optimizer=0.3).cause == "optimizer"
    assert found(other=0.5).cause == "memory"
    assert found("compile", other=0.5).advice[0].startswith("kernel libraries")
    assert found(other=0.5, on_device=False).cause == "compute"
    assert "take 90%" in found(attention=0.4, other=0.1).reason
    assert any("d9d plan" in text for text in found(size=2).advice)


LARGER = "a larger model or longer samples give the device more work for each launch"
COMPILED = "parallel: [compile] launches fewer, larger kernels"
FEWER = "batch.microbatch: larger; a step has 4 microbatches"
DATA = ("batch.prefetch: 8 evens out slow reads", "data on a local disk, or tokenised beforehand")
PRECISION = "precision: {autocast: bfloat16}, or the strategy fp8, if the job does not have it"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"waits": 0.1}, ("compute", "the GPU is busy 100% of the time; matrix products and attention take 100%",
                          (PRECISION,))),
        ({"waits": 0.11, "fields": ()}, ("data", "a step waits 11% of its time for data", DATA)),
        ({"waits": 0.11}, ("data", "a step waits 11% of its time for data",
                           ("data.workers: 4 reads and tokenises in other processes", *DATA))),
        ({"idle": 0.25, "tail": 0.25},
         ("host", "the GPU is idle 25% of the time and waits for the host, which starts each operation from Python",
          (COMPILED, FEWER, LARGER))),
        ({"idle": 0.25, "tail": 0.5, "size": 2},
         ("compute", "the GPU is busy 75% of the time; matrix products and attention take 75%",
          ("d9d plan JOB to compare layouts", PRECISION))),
        ({"idle": 0.15, "tail": 0.25, "attention": 0.5},
         ("compute", "the GPU is busy 85% of the time; matrix products and attention take 85%", (PRECISION,))),
        ({"idle": 0.5, "tail": 0.0, "on_device": False, "count": 1},
         ("host", "most time goes into starting operations from Python, since each of them is small",
          (COMPILED, LARGER))),
        ({"idle": 0.4, "tail": 0.0, "on_device": False},
         ("compute", "the processor is busy 60% of the time; matrix products and attention take 60%", ("a GPU",))),
        ({"waits": 0.0625, "tail": 0.0, "on_device": False, "predicted": 0.234375},
         ("compute", "the processor is busy 100% of the time; matrix products and attention take 100%", ("a GPU",))),
        ({"waits": 0.0625, "tail": 0.0, "on_device": False, "predicted": 0.234},
         ("host", "most time goes into starting operations from Python, since each of them is small",
          (COMPILED, FEWER, LARGER))),
        ({"communication": 0.15},
         ("compute", "the GPU is busy 100% of the time; matrix products and attention take 85%", (PRECISION,))),
        ({"communication": 0.16},
         ("communication", "16% of a step is communication that nothing hides",
          ("d9d plan JOB finds a layout with less communication",
           "a larger batch per device, or hsdp in place of fsdp across machines"))),
        ({"optimizer": 0.25},
         ("compute", "the GPU is busy 100% of the time; matrix products and attention take 75%", (PRECISION,))),
        ({"optimizer": 0.26},
         ("optimizer", "the optimizer takes 26% of a step",
          ("batch.size: larger, so that a step computes more per update",))),
        ({"other": 0.4},
         ("compute", "the GPU is busy 100% of the time; matrix products and attention take 60%", (PRECISION,))),
        ({"other": 0.41},
         ("memory", "elementwise operations, which are bound by memory, take 41% of a step",
          ("parallel: [compile] fuses elementwise operations",
           "kernel libraries: d9d doctor lists the ones that are missing"))),
    ],
)  # fmt: skip
def test_a_cause_counts_above_its_share_of_a_step(
    given: dict[str, Any], expected: tuple[str, str, tuple[str, ...]]
) -> None:
    assert found(**given) == Verdict(*expected)


def test_shares_are_of_the_recorded_time() -> None:
    kinds = {"communication": 0.1, "matmul": 0.3, "attention": 0.1}
    slow = Measured(1.0, 0.0, 1.0, 0.9, kinds, 0.5, 100.0, None, True)
    assert verdict(slow, None, (), (), 1, 1).reason == "20% of a step is communication that nothing hides"
    unknown = Measured(1.0, 0.0, 1.0, 0.9, kinds, 0.0, 100.0, None, True)
    busy = "the GPU is busy 100% of the time; matrix products and attention take 0%"
    assert verdict(unknown, None, (), (), 1, 1).reason == busy


class Data(BaseModel):
    """Config of a dataset."""

    workers: int = 0


def job_of(size: int, microbatch: int, ranks: int) -> Any:
    mesh = SimpleNamespace(data_parallel_size=ranks, world_size=2 * ranks)
    return SimpleNamespace(
        batch=SimpleNamespace(size=size), microbatch_size=microbatch, mesh=mesh, data=Data(),
        parallel=[SimpleNamespace(selector="compile")],
    )  # fmt: skip


def test_a_profile_lists_times_shares_cause_and_prediction() -> None:
    kinds = {"matmul": 0.3, "communication": 0.05, "idle": 0.15}
    times = Measured(0.5, 0.0125, 0.4, 0.1, kinds, 0.5, 12_345.0, 3 * 2**29, True)
    rows = {label: kinds.get(kind, 0.0) for kind, label in LABELS.items()}
    head = [
        "step: 500.00 ms, 24,690 tokens/s, peak memory 1.5 GiB",
        "  waits for data               12.50 ms    2.5%",
        "  host launches work          400.00 ms   80.0%",
        "time of the GPU",
        *(f"  {label:<22}  {taken * 1e3:10.2f} ms {taken / 0.5:7.1%}" for label, taken in rows.items()),
        "cause: host: the GPU is idle 30% of the time and waits for the host, which starts each operation from Python",
        "  try batch.microbatch: larger; a step has 3 microbatches",
        f"  try {LARGER}",
    ]
    assert list(lines(times, job_of(24, 2, 4), (0.25, ""))) == [
        *head,
        "prediction: 250.00 ms per step without waits and launches, with this machine's rates (measured 2.00 x)",
    ]
    assert list(lines(times, job_of(24, 2, 4), (None, "the model has no costs"))) == [
        *head,
        "prediction: none, because the model has no costs",
    ]


def test_a_profile_of_a_processor_says_that_recorded_steps_are_slower() -> None:
    times = Measured(1.0, 0.5, 0.5, 0.0, {"matmul": 2.0}, 2.0, 7.0, None, False)
    first, waits, host, recorded, *rows = lines(times, job_of(8, 0, 1), (4.0, ""))
    assert first == "step: 1000.00 ms, 7 tokens/s"
    assert (waits[-6:], host[-6:]) == (" 50.0%", " 50.0%")
    assert recorded == "time of the CPU in recorded steps, which are slower: 2000.00 ms"
    assert [row for row in rows if row.endswith("100.0%")] == [f"  {LABELS['matmul']:<22}     2000.00 ms  100.0%"]
    assert rows[-1].endswith("(measured 0.25 x)")
    assert "  try data.workers: 4 reads and tokenises in other processes" in rows
    slow = Measured(1.0, 0.0, 0.5, 0.0, {"matmul": 2.0}, 2.0, 7.0, None, False)
    for microbatch, ranks, count in ((1, 1, 12), (2, 1, 6), (1, 3, 4)):
        line = f"  try batch.microbatch: larger; a step has {count} microbatches"
        assert line in list(lines(slow, job_of(12, microbatch, ranks), (0.125, "")))
    empty = Measured(1.0, 0.0, 0.5, 0.0, {}, 0.0, 7.0, None, False)
    assert [row[-6:] for row in lines(empty, job_of(8, 1, 1), (4.0, ""))][4 : 4 + len(LABELS)] == ["  0.0%"] * len(
        LABELS
    )


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_times_are_means_of_the_timed_steps(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls = [0.0], []
    device = torch.device(kind)

    def after(seconds: float, name: object) -> None:
        now[0] += seconds
        calls.append(name)

    def step(number: int, pack: object) -> Any:
        after(2.0 + number, f"step {number} {pack}")
        return SimpleNamespace(tokens=torch.tensor(100 + number))

    trainer = cast(
        "Any",
        SimpleNamespace(
            topology=SimpleNamespace(device=device, watchdog=SimpleNamespace(phase=lambda *given: calls.append(given))),
            prefetcher=SimpleNamespace(next=lambda: after(0.5, "next") or "pack"),
            step=Step(step),
        ),
    )

    def recorded(where: torch.device, count: int, one_step: Any, given: object) -> tuple[dict[str, float], float]:
        assert (where, given is trainer) == (device, True)
        for _ in range(count):
            one_step()
        return {"matmul": 3.0, "idle": 0.25}, 3.25

    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(measure, "_synchronise", lambda where: after(0.25, where))
    monkeypatch.setattr(measure, "_recorded", recorded)
    monkeypatch.setattr(measure.torch.cuda, "max_memory_allocated", lambda where: {device: 77}[where])
    found = measure.measure(trainer, 2, 4, 1)
    # Steps 2 to 5 take 4, 5, 6 and 7 seconds and a wait; the last synchronisation is a sixteenth of a second of each.
    seconds = (22.0 + 4 * 0.5 + 0.25) / 4
    on_gpu = kind == "cuda"
    assert found == Measured(
        step=seconds, waits=0.5, host=22.0 / 4, tail=0.25,
        kinds={"matmul": 3.0, "idle": seconds - 3.0 if on_gpu else 0.25}, recorded=seconds if on_gpu else 3.25,
        tokens=103.5, memory=77 if on_gpu else None, on_device=on_gpu,
    )  # fmt: skip
    one = [part for number in range(7) for part in (("step", number), "next", f"step {number} pack")]
    assert calls == [*one[:6], device, *one[6:18], device, *one[18:]]
    assert trainer.step.told == ["data wait"] * 7


class Step:
    """Stand-in of a step with its named ranges."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self.told: list[str] = []

    def __call__(self, *given: Any) -> Any:
        return self._call(*given)

    def ranges(self, name: str) -> Any:
        self.told.append(name)
        return nullcontext()


@pytest.mark.parametrize(("steps", "expected"), [(12, (4, 2, 5)), (30, (10, 14, 5))])
@pytest.mark.parametrize("main", [True, False])
def test_a_third_of_the_steps_warms_up_and_the_last_ones_are_recorded(
    steps: int, expected: tuple[int, int, int], main: bool, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    asked: list[Any] = []
    trainer = SimpleNamespace(prefetcher=nullcontext())
    job = SimpleNamespace(build=lambda topology, observers, interrupts: trainer)
    topology = SimpleNamespace(is_main=main, device="cpu")

    def joined(process: object, _interrupts: object, load: Any, import_modules: Any, what: str) -> Any:
        asked.append((process, load(), what))
        return nullcontext((job, topology, "start", True))

    def started(_interrupts: object, alone: bool, what: str) -> Any:
        asked.append((alone, what))
        return nullcontext()

    monkeypatch.setattr(command, "joined_process", joined)
    monkeypatch.setattr(command, "start_up", started)
    monkeypatch.setattr(command, "_predicted", lambda *given: (given == (job, "cpu"), "why"))
    monkeypatch.setattr(measure, "measure", lambda *given: asked.append(given) or "times")
    monkeypatch.setattr(report, "lines", lambda *given: [str(given[::2])])
    process: Any = "process"
    command._profile(process, Interrupts(), lambda: job, steps)  # type: ignore[arg-type, return-value]
    assert asked == [("process", job, "measured"), (True, "measured"), (trainer, *expected)]
    said = capsys.readouterr()
    assert said.out == ("('times', (True, 'why'))\n" if main else "")
    assert (f"profile: {steps} steps; nothing is saved" in said.err) is main


def test_a_profile_runs_here_or_in_processes_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[Any] = []
    env = SimpleNamespace(launcher=None)

    def processes(load: Any, nproc: str) -> Any:
        happened.append(nproc)
        return load(3, "again")

    for name, value in {
        "process_of_launcher": lambda _environ, alone: env,
        "running": lambda given, _environ, _interrupts: nullcontext(SimpleNamespace(repeats="again", env=given)),
        "_profile": lambda process, _interrupts, load, steps: happened.append((process.env is env, load(), steps)),
        "load_job": lambda *given: given,
        "for_processes": processes,
        "launch": lambda *given: happened.append(given[:3]) or 7,
    }.items():
        monkeypatch.setattr(command, name, value)
    omitted = [
        "steps=1000000000", "epochs=null", "evaluation=null", "checkpoint.every=null", "trackers=[]", "subscribers=[]",
        "metrics=[]", "export=false", "profiling=null",
    ]  # fmt: skip
    given = (Job, Path("job.yaml"), ["seed=1", *omitted], [Path("one.py")])
    words = ["job.yaml", "--set", "seed=1", "--plugin", "one.py"]
    assert CliRunner().invoke(app, [*words, "--strict-plugins"]).exit_code == 0
    assert happened == [(True, (*given, False, True, "again"), 30)]
    happened.clear()
    assert CliRunner().invoke(app, [*words, "--no-plugins", "--nproc", "2", "--steps", "12"]).exit_code == 7
    command_line = ["profile", "job.yaml", "--steps", "12", *words[1:], "--no-plugins"]
    assert happened == ["2", ((*given, True, False, "again", 3), command_line, 0)]
    env.launcher = "torchrun"
    result = CliRunner().invoke(app, [*words, "--nproc", "2"])
    assert str(result.exception) == "--nproc: torchrun has started this process; use its own options"


def test_a_profile_that_is_stopped_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object) -> None:
        raise Terminated("SIGTERM")

    monkeypatch.setattr(command, "process_of_launcher", stopped)
    result = CliRunner().invoke(app, ["job.yaml"])
    assert (result.exit_code, result.stdout, result.stderr) == (
        STOPPED, "", "SIGTERM: stopped; nothing was measured\n",
    )  # fmt: skip


@pytest.mark.parametrize("fails", [False, True])
def test_a_profile_predicts_with_the_rates_of_one_process_on_this_machine(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def predict(*given: object) -> Any:
        assert given == (job, "registry", "views", "rates")
        if fails:
            raise JobError("no costs")
        return SimpleNamespace(time=SimpleNamespace(total=1.5))

    asked: list[Any] = []
    monkeypatch.setattr(calibrate, "calibrated", lambda *given: asked.append(given) or ("rates", ["product"]))
    monkeypatch.setattr(command, "predict", predict)
    job: Any = SimpleNamespace(registry="registry", views=lambda: "views")
    assert command._predicted(job, "device") == ((None, "no costs") if fails else (1.5, ""))
    assert asked == [("device", Device.named("h200"), 1)]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_profiler_records_steps_after_one_that_it_skips(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    ranges = SimpleNamespace(on=False)

    class Profile:
        def __init__(self, **given: Any) -> None:
            calls.append(given)

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            calls.append("closed")

        def step(self) -> None:
            calls.append("profiled")

    monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
    monkeypatch.setattr(measure, "profile", Profile)
    monkeypatch.setattr(measure, "schedule", lambda **given: given)
    monkeypatch.setattr(measure, "supported_activities", lambda: {ProfilerActivity.CUDA})
    monkeypatch.setattr(measure, "_synchronise", calls.append)
    monkeypatch.setattr(measure, "spans_of", lambda profiler: [profiler])
    monkeypatch.setattr(
        measure, "time_by_kind", lambda spans, count: ({"matmul": 1e6 * count}, 3e6 * len(spans) * count)
    )
    trainer: Any = SimpleNamespace(step=SimpleNamespace(ranges=ranges))
    device = torch.device(kind)
    found = measure._recorded(device, 2, lambda: calls.append(("step", ranges.on)), trainer)
    assert found == ({"matmul": 1.0}, 3.0)
    activities = {ProfilerActivity.CPU} | ({ProfilerActivity.CUDA} if kind == "cuda" else set())
    steps: list[Any] = [("step", True), "profiled"] * 2
    assert calls == [
        {"activities": activities, "schedule": {"wait": 0, "warmup": 1, "active": 2}, "acc_events": True},
        *steps, ("step", True), device, "profiled", "closed",
    ]  # fmt: skip
    assert (ranges.on, os.environ["KINETO_LOG_LEVEL"]) == (False, "6")


@pytest.mark.parametrize(("kind", "waited"), [("cpu", []), ("cuda", [torch.device("cuda")])])
def test_a_profile_waits_for_the_work_of_an_accelerator(
    kind: str, waited: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", found.append)
    measure._synchronise(torch.device(kind))
    assert found == waited


MODULE = """
import time
from typing import Literal
from d9d_core.plugin import DatasetSpec, Ref, hookimpl
from d9d_testing.toy.config import ToyTokensConfig
from d9d_testing.toy.data import ToyTokens

class SlowConfig(ToyTokensConfig):
    name: Literal["slow"] = "slow"

class SlowTokens(ToyTokens):
    def next_pack(self):
        time.sleep(1)
        return super().next_pack()

@hookimpl
def d9d_datasets():
    config, build = Ref(f"{__name__}:SlowConfig"), Ref(f"{__name__}:SlowTokens")
    yield DatasetSpec(name="slow", summary="Slow data.", config=config, build=build)
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("data", "cause"),
    [("slow", "data"), ({"name": "text", "sources": ["python:topics"], "sequence_length": 16}, "host")],
)
def test_the_cause_of_a_job_on_a_cpu_is_found(
    data: Any, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("slow.py").write_text(MODULE)
    job: dict[str, Any] = {
        "plugins": ["./slow.py"], "task": "causal_lm", "optimizer": {"name": "adamw", "lr": 0.01}, "data": data,
        "model": {"name": "qwen3", "vocab_size": 257, "hidden_size": 16, "intermediate_size": 32, "num_layers": 2,
                  "num_attention_heads": 2, "num_key_value_heads": 1},
        "batch": {"size": 2 if data == "slow" else 16, "microbatch": 1}, "steps": 5, "device": "cpu",
        "checkpoint": {"every": 1},
    }  # fmt: skip
    Path("job.yaml").write_text(yaml.safe_dump(job))
    result = CliRunner().invoke(app, ["job.yaml", "--steps", "12"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert f"cause: {cause}: " in result.output
    assert re.search(r"step: [\d,.]+ ms, [\d,]+ tokens/s\n", result.output)
    assert not list(tmp_path.glob("runs/*/checkpoints/*"))


def test_what_no_kind_of_work_took_of_a_step_on_a_device_is_idle() -> None:
    assert measure._with_idle({"matmul": 0.25, "idle": 9.0}, 1.0) == ({"matmul": 0.25, "idle": 0.75}, 1.0)
    # The profiler slows down the steps that it records.
    assert measure._with_idle({"matmul": 1.5, "communication": 0.5}, 1.0) == (
        {"matmul": 1.5, "communication": 0.5, "idle": 0.0}, 2.0,
    )  # fmt: skip
