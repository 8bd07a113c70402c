"""Measurements of a trainer: recorded values, the learning rate, and save and resume. The trainer is a stand-in."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from d9d_core import events as ev
from d9d_core.errors import D9dError
from d9d_core.job_file.job import GradientClipping, JobConfig
from d9d_core.metric import Table
from d9d_engine.job import Job
from d9d_verify import measure as module
from d9d_verify import worker
from d9d_verify.measure import Rate, Resume, Witness, join_replicas, measure, probe
from d9d_verify.measurement import Measurement, Record
from torch import distributed as dist
from torch import nn


def job_that_clips(max_norm: float | None) -> JobConfig:
    construct: Any = JobConfig.model_construct
    return cast("JobConfig", construct(gradient_clipping=GradientClipping(max_norm=max_norm)))


class Model(nn.Module):
    """Parameters of the given values and one buffer."""

    def __init__(self, **parameters: list[float]) -> None:
        super().__init__()
        for name, values in parameters.items():
            setattr(self, name, nn.Parameter(torch.tensor(values)))
        self.register_buffer("seen", torch.zeros(1))


@dataclass(frozen=True)
class Pipeline:
    schedule: Any
    hosts: Sequence[int] = (0,)
    _programs: Mapping[int, object] = field(default_factory=lambda: {1: "cached"})


class Trainer:
    """Plain gradient descent: a step subtracts the schedule's factor times the fixed gradients, and counts in ``seen``.

    Attributes:
        did: calls, in order.
    """

    def __init__(
        self,
        model: Model,
        gradients: Mapping[str, list[float]],
        schedule: Callable[[int], float] = lambda _step: 1.0,
        total_steps: int = 10,
        hosts: Sequence[int] = (0,),
    ) -> None:
        self.stage, self.gradients, self.total_steps = model, gradients, total_steps
        self.did: list[object] = []
        self.observers: list[Any] = []
        self.lr = 0.0
        self.lr_schedule = schedule
        self.executor = SimpleNamespace(pipeline=Pipeline(self._schedule, hosts))
        self.statistics = SimpleNamespace(compute=self._series, reset=lambda: self.did.append("reset"))
        self.optimizer = SimpleNamespace(state=lambda: {"a/m": torch.ones(1), "x/m": torch.ones(1, device="meta")})
        self.evaluator = SimpleNamespace(run=lambda: {"eval/loss": 7.5 if self.averaged else 0.0})
        self.averaged = False
        self.terms = {"hard", "soft"}
        self.prefetcher = self
        self.step = self
        self.replicas = SimpleNamespace(count=1, group=None, meetings=("held",))
        self.job = SimpleNamespace(checkpoint=SimpleNamespace(model_copy=lambda update: update), model_copy=dict)
        self.topology = "topology"
        self.checkpointer: Any = SimpleNamespace(
            store=SimpleNamespace(name="own", opened=self._opened),
            save=lambda progress, wait: self.did.append(("save", progress.step, wait)),
            restore=lambda: self.did.append(("restore from", self.checkpointer.store)),
            tensors=lambda: dict(self.stage.named_parameters()),
        )

    def _schedule(self, _ranks: int, _microbatches: int) -> list[Any]:
        return []

    def _series(self) -> dict[str, Any]:
        return {"accuracy": torch.tensor(0.25), "load": Table(torch.tensor([[1.0, 2.0]]))}

    @contextmanager
    def evaluation_weights(self) -> Any:
        self.averaged = True
        yield
        self.averaged = False

    @contextmanager
    def _opened(self) -> Any:
        self.did.append("opened")
        yield
        self.did.append("closed")

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.did.append("end of data")

    def next(self) -> str:
        self.did.append("pack")
        return "pack"

    def build(self, _note: object, topology: object, observers: Iterable[Any]) -> Trainer:
        assert topology == self.topology
        self.observers = list(observers)
        self.emit(ev.JobConfigured, job=job_that_clips(3.0))
        self.emit(ev.ModelReady, stage=self.stage)
        self.emit(ev.OptimizerReady, optimizer=SimpleNamespace(state=self.optimizer.state, lr=0.5))
        return self

    def emit(self, event: type[Any], **values: Any) -> None:
        for observer in self.observers:
            for kind, handler in observer.subscriptions():
                if kind is event:
                    handler(SimpleNamespace(**values))

    def __call__(self, step: int, pack: object) -> None:
        assert pack == "pack"
        self.did.append(("step", step))
        for name, parameter in self.stage.named_parameters():
            if name in self.gradients:
                parameter.grad = torch.tensor(self.gradients[name], dtype=parameter.dtype)
        self.emit(ev.OptimizerStepStarts, step=step)
        with torch.no_grad():
            for parameter in self.stage.parameters():
                if parameter.grad is not None:
                    parameter.sub_(self.lr_schedule(step) * parameter.grad)
            cast("torch.Tensor", self.stage.seen).add_(1)
        self.emit(ev.OptimizerStepEnds, step=step)
        terms = {"hard": torch.tensor(6.0), "soft": torch.tensor(4.0 + step)}
        terms = {name: term for name, term in terms.items() if name in self.terms}
        result = SimpleNamespace(
            loss=torch.tensor(10.0 + step), terms=terms, tokens=torch.tensor(24.0), grad_norm=torch.tensor(20.0 + step)
        )
        self.emit(ev.StepEnds, step=step, result=result)


def test_gradients_of_replicas_of_their_own_steps_become_weighted_means_before_they_are_clipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: tensor.add_(1 if group == "replicas" else 0))
    parameter, clipped = torch.nn.Parameter(torch.zeros(2)), list[Any]()
    step = SimpleNamespace(
        clipper=SimpleNamespace(clip=lambda loss, tokens: clipped.append((loss, tokens, parameter.grad))),
        loss_scale=SimpleNamespace(share=torch.tensor(0.25)),
        replicas=SimpleNamespace(count=2, group="replicas", meetings=("held",)),
    )
    frozen = torch.nn.Parameter(torch.zeros(1))
    stage = SimpleNamespace(parameters=lambda: [parameter, frozen])
    join_replicas(cast("Any", SimpleNamespace(step=step, stage=stage)))
    assert step.replicas.meetings == ()
    parameter.grad = torch.tensor([4.0, 8.0])
    step.clipper.clip("loss", 3)
    ((loss, tokens, gradient),) = clipped
    assert (loss, tokens, gradient.tolist()) == ("loss", 3, [2.0, 3.0])

    before = SimpleNamespace(clipper="own", replicas=SimpleNamespace(count=1, meetings=("held",)))
    join_replicas(cast("Any", SimpleNamespace(step=before, stage=stage)))
    assert (before.clipper, before.replicas.meetings) == ("own", ("held",))


def measured(trainer: Trainer, steps: int, **options: Any) -> Record:
    return measure(cast("Job", trainer), cast("Any", "topology"), steps, **options)


def probed(trainer: Trainer, steps: int) -> tuple[Rate, float]:
    return probe(cast("Job", trainer), cast("Any", "topology"), steps)


def tensors(record: Record) -> dict[str, list[float]]:
    return {name: tensor.tolist() for name, tensor in record.windows.items()}


def test_a_measurement_has_all_values_of_each_step_and_of_the_end() -> None:
    trainer = Trainer(Model(a=[1.0, 2.0], frozen=[9.0]), {"a": [0.5, 0.25]}, lambda step: 1.0 + step)
    record = measured(trainer, 2, rate=Rate(2.0, 3))
    assert record.numbers == {
        "start/max_norm": 3.0, "0/lr": 0.5, "0/loss": 10.0, "0/loss/hard": 6.0, "0/loss/soft": 4.0, "0/tokens": 24.0,
        "0/grad_norm": 20.0, "1/lr": 0.5, "1/loss": 11.0, "1/loss/hard": 6.0, "1/loss/soft": 5.0, "1/tokens": 24.0,
        "1/grad_norm": 21.0, "end/accuracy": 0.25, "end/load[0]": 1.0, "end/load[1]": 2.0, "end/eval/loss": 7.5,
    }  # fmt: skip
    # The factors are 2 x schedule(3) = 8 and 2 x schedule(4) = 10.
    assert tensors(record) == {
        "start/model/a@0": [1.0, 2.0], "start/model/frozen@0": [9.0], "start/model/seen@0": [0.0],
        "0/gradients/a@0": [0.5, 0.25], "0/model/a@0": [-3.0, 0.0], "0/model/frozen@0": [9.0], "0/model/seen@0": [1.0],
        "0/optimizer/a/m@0": [1.0],
        "1/gradients/a@0": [0.5, 0.25], "1/model/a@0": [-8.0, -2.5], "1/model/frozen@0": [9.0],
        "1/model/seen@0": [2.0], "1/optimizer/a/m@0": [1.0],
    }  # fmt: skip
    assert trainer.did == ["pack", ("step", 0), "pack", ("step", 1), "end of data"]


def test_without_clipping_and_evaluation_a_measurement_has_no_values_of_them() -> None:
    trainer = Trainer(Model(a=[1.0]), {"a": [1.0]})
    trainer.evaluator = None  # type: ignore[assignment]
    record = measured(trainer, 1)
    witness = Witness()
    witness._configured(cast("Any", SimpleNamespace(job=job_that_clips(None))))
    assert witness.record.numbers == {}
    assert record.numbers.keys() == {
        "start/max_norm", "0/lr", "0/loss", "0/loss/hard", "0/loss/soft", "0/tokens", "0/grad_norm", "end/accuracy",
        "end/load[0]", "end/load[1]",
    }  # fmt: skip
    assert record.windows["0/model/a@0"].tolist() == [0.0]


def test_the_only_term_of_a_loss_is_not_measured_twice() -> None:
    trainer = Trainer(Model(a=[1.0]), {"a": [1.0]})
    trainer.terms = {"hard"}
    assert [name for name in measured(trainer, 1).numbers if "loss" in name] == ["0/loss", "end/eval/loss"]


def test_a_guided_step_records_its_own_gradients_and_goes_on_with_the_reference_s() -> None:
    values = {"0/gradients/a": [0.25], "1/gradients/a": [0.5], "0/model/seen": [5.0]}
    guide = Measurement({}, {name: torch.tensor(value) for name, value in values.items()})
    record = measured(Trainer(Model(a=[1.0]), {"a": [8.0]}), 2, guide=guide)
    found = tensors(record)
    assert (found["0/gradients/a@0"], found["1/gradients/a@0"]) == ([8.0], [8.0])
    assert (found["0/model/a@0"], found["1/model/a@0"]) == ([0.75], [0.25])
    assert (found["0/model/seen@0"], found["1/model/seen@0"]) == ([1.0], [6.0])


@pytest.mark.parametrize(("hosts", "reversed_"), [((0,), True), ((0, 1), False)])
def test_a_varied_run_reverses_microbatches_on_a_single_stage(hosts: Sequence[int], reversed_: bool) -> None:
    trainer = Trainer(Model(a=[1.0]), {"a": [1.0]}, hosts=hosts)
    own = trainer.executor.pipeline
    measured(trainer, 1, elsewhere=True)
    assert [type(observer).__name__ for observer in trainer.observers] == ["Witness", "Jitter"]
    assert (trainer.executor.pipeline is not own) == reversed_
    assert (trainer.executor.pipeline._programs == {}) == reversed_
    plain = Trainer(Model(a=[1.0]), {"a": [1.0]})
    own = plain.executor.pipeline
    measured(plain, 1)
    assert plain.executor.pipeline is own
    assert len(plain.observers) == 1


def test_a_varied_run_rounds_equal_gradients_in_another_way() -> None:
    values = [1.0 + index / 128 for index in range(128)]
    guide = Measurement({}, {"0/gradients/a": torch.tensor(values), "0/model/seen": torch.zeros(1)})
    trainer = Trainer(Model(a=[0.0] * 128), {"a": [8.0] * 128})
    record = measured(trainer, 1, guide=guide, elsewhere=True)
    assert record.windows["0/gradients/a@0"].tolist() == [8.0] * 128
    other = measured(Trainer(Model(a=[0.0] * 128), {"a": [8.0] * 128}), 1, guide=guide, elsewhere=True, seed=1)
    assert not torch.equal(other.windows["0/model/a@0"], record.windows["0/model/a@0"])
    bits = (-record.windows["0/model/a@0"] - torch.tensor(values)) / torch.finfo(torch.float32).eps
    assert bits.unique().tolist() == [-1.0, 0.0, 1.0]  # half a bit, rounded


def test_a_reference_saves_before_its_step_and_goes_on() -> None:
    trainer = Trainer(Model(a=[1.0]), {"a": [0.25]})
    measured(trainer, 2, resume=Resume(1))
    assert trainer.did == [
        "opened", "pack", ("step", 0), ("save", 1, True), "pack", ("step", 1), "end of data", "closed",
    ]  # fmt: skip
    assert trainer.stage.a.tolist() == [0.5]  # type: ignore[operator]


def test_a_layout_forgets_all_and_loads_the_checkpoint_of_the_reference(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "open_store", lambda job, topology: (job, topology))
    trainer = Trainer(Model(a=[1.0]), {"a": [0.25]})
    trainer.job.model_copy = lambda update: update
    own = trainer.checkpointer.store
    measured(trainer, 2, resume=Resume(1, tmp_path))
    other = ({"checkpoint": {"dir": str(tmp_path)}}, "topology")
    assert trainer.did[3:7] == [("save", 1, True), "reset", "pack", ("restore from", other)]
    assert trainer.checkpointer.store is own
    assert trainer.stage.a.tolist() == [-0.25]  # type: ignore[operator] # from zero, as nothing was loaded


def warm_up(over: int) -> Callable[[int], float]:
    return lambda step: min(step / over, 1.0)


#: Relative changes of 0.1, 0.3 and 0.2; a parameter of zeros and one that stays are no examples.
PARAMETERS = {"a": [3.0, 4.0], "b": [1.0, 0.0], "c": [0.0, 2.0], "zero": [0.0, 0.0], "stays": [1.0, 1.0]}
GRADIENTS = {"a": [0.0, 0.5], "b": [0.3, 0.0], "c": [0.0, 0.4], "zero": [1.0, 0.0], "stays": [0.0, 0.0]}


@pytest.mark.parametrize(
    ("total", "schedule", "factor", "first"),
    [
        (100, warm_up(10), 0.05 / (0.2 * 0.5), 5),
        (9, warm_up(10), 0.05 / (0.2 * 0.3), 3),  # steps 0 to 5: half of 0.5 is reached in step 3
        (3004, warm_up(2001), 0.05 / (0.2 * 1004 / 2001), 1004),  # of every fourth step
        (3, warm_up(10), 1.0, 0),  # the first factor is zero
        (100, lambda _step: 1.0, 0.05 / 0.2, 0),
    ],
)
def test_the_learning_rate_changes_the_median_parameter_visibly_after_the_warm_up(
    total: int, schedule: Callable[[int], float], factor: float, first: int
) -> None:
    trainer = Trainer(Model(**PARAMETERS), GRADIENTS, schedule, total)
    rate, norm = probed(trainer, 4)
    assert rate.factor == pytest.approx(factor)
    assert (rate.first, norm) == (first, 20.0)
    assert trainer.did == ["pack", ("step", 0), "end of data"]


def test_the_larger_of_two_middle_parameters_counts() -> None:
    trainer = Trainer(Model(a=[1.0], b=[2.0]), {"a": [0.5], "b": [0.5]})
    assert probed(trainer, 1)[0].factor == pytest.approx(0.05 / 0.5)


def test_a_job_whose_parameters_do_not_change_keeps_its_learning_rate() -> None:
    assert probed(Trainer(Model(a=[1.0]), {"a": [0.0]}), 1)[0] == Rate(1.0, 0)
    assert probed(Trainer(Model(a=[1.0]), {"a": [float("nan")]}), 1)[0] == Rate(1.0, 0)


def test_bfloat16_weights_take_one_more_step_that_moves_a_weight_of_one() -> None:
    model = Model(a=[1.0], b=[2.0])
    assert not probed(Trainer(model, {"a": [0.5], "b": [0.5]}), 1)[0].loud
    model.b = nn.Parameter(torch.tensor([2.0], dtype=torch.bfloat16))
    assert probed(Trainer(model, {"a": [0.5], "b": [0.5]}), 1)[0].loud
    trainer = Trainer(Model(a=[1.0]), {"a": [0.25]})
    record = measured(trainer, 2, rate=Rate(0.5, 3, loud=True), resume=Resume(1))
    found = [record.windows[f"{step}/model/a@0"].item() for step in range(3)]
    assert found == [0.875, 0.75, 0.75 - module.LOUD * 0.125]
    assert record.numbers["end/eval/loss"] == 7.5
    assert trainer.did[-3:] == [("step", 2), "end of data", "closed"]


class Jobs:
    """Jobs by file, as a worker loads them."""

    norm = 6.0

    def __init__(self, monkeypatch: pytest.MonkeyPatch, max_norm: float | None = 8.0) -> None:
        self.max_norm, self.measured, self.error = max_norm, list[tuple[Any, ...]](), cast("BaseException | None", None)
        monkeypatch.setattr(worker, "Job", self)
        monkeypatch.setattr(worker, "measure", self.measure)
        monkeypatch.setattr(worker, "probe", self.probe)

    def load(self, path: Path) -> Any:
        return self._job(path.name, self.max_norm)

    def _job(self, name: str, max_norm: float | None) -> Any:
        def clipping(update: dict[str, Any]) -> Any:
            return SimpleNamespace(max_norm=update["max_norm"])

        def changed(update: dict[str, Any]) -> Any:
            return self._job(name, update["gradient_clipping"].max_norm)

        gradient_clipping = SimpleNamespace(max_norm=max_norm, model_copy=clipping)
        return SimpleNamespace(name=name, gradient_clipping=gradient_clipping, model_copy=changed, joined=self.joined)

    def joined(self, env: Any) -> Any:
        if self.error is not None:
            raise self.error
        return nullcontext(SimpleNamespace(rank=env.rank))

    def probe(self, job: Any, _topology: object, steps: int) -> tuple[Rate, float]:
        self.measured.append(("probe", job.name, job.gradient_clipping.max_norm, steps))
        return Rate(2.0, 3), self.norm

    def measure(self, job: Any, topology: Any, *given: Any, **options: Any) -> Record:
        self.measured.append((job.name, job.gradient_clipping.max_norm, *given, options))
        return Record({f"{topology.rank}/loss": 1.0, "start/of": float(len(self.measured))})


def run_worker(directory: Path, monkeypatch: pytest.MonkeyPatch, rank: int = 0, **plan: Any) -> None:
    for name, value in (("RANK", rank), ("WORLD_SIZE", 2), ("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", 2)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    (directory / "plan.json").write_text(json.dumps(plan))
    worker.main(directory)


@pytest.mark.parametrize(("clipped", "steps", "resume"), [(8.0, 5, Resume(2)), (8.0, 2, Resume(1)), (None, 1, None)])
def test_the_reference_clips_at_half_of_its_gradient_norm_and_guides_its_variants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clipped: float | None, steps: int, resume: Resume | None
) -> None:
    jobs = Jobs(monkeypatch, clipped)
    run_worker(tmp_path, monkeypatch, steps=steps, reference=None, sound=2)
    norm = None if clipped is None else 3.0
    probe_call, reference, *variants = jobs.measured
    assert probe_call == ("probe", "job.json", None, steps)
    assert reference == ("job.json", norm, steps, {"rate": Rate(2.0, 3), "resume": resume})
    assert [call[:3] for call in variants] == [(f"sound-{index}.json", norm, steps) for index in range(2)]
    for index, call in enumerate(variants):
        assert call[3].numbers == {"0/loss": 1.0, "start/of": 2.0}
        assert call[4:] == (Rate(2.0, 3), {"elsewhere": True, "seed": index})
    settings = json.loads((tmp_path / "settings.json").read_text())
    assert settings == {"rate": {"factor": 2.0, "first": 3, "loud": False}, "max_norm": norm}
    assert Record.read(tmp_path, 0).numbers["start/of"] == 2.0
    assert [Record.read(tmp_path / f"sound-{index}", 0).numbers["start/of"] for index in range(2)] == [3.0, 4.0]


def test_a_reference_without_gradients_is_not_clipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = Jobs(monkeypatch)
    jobs.norm = 0.0
    run_worker(tmp_path, monkeypatch, steps=2, reference=None, sound=0)
    assert jobs.measured[1][:2] == ("job.json", None)
    assert json.loads((tmp_path / "settings.json").read_text())["max_norm"] is None


@pytest.mark.parametrize(("steps", "resumes"), [(5, True), (2, True), (1, False)])
def test_a_layout_is_measured_with_the_settings_and_the_checkpoint_of_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int, resumes: bool
) -> None:
    reference, directory = tmp_path / "reference", tmp_path / "layout"
    reference.mkdir()
    directory.mkdir()
    Record({"0/loss": 4.0}).write(reference, 0)
    (reference / "settings.json").write_text(json.dumps({"rate": {"factor": 2.5, "first": 1}, "max_norm": 0.5}))
    jobs = Jobs(monkeypatch)
    run_worker(directory, monkeypatch, rank=1, steps=steps, reference=str(reference), sound=0)
    ((name, norm, count, guide, rate, resume, options),) = jobs.measured
    assert (name, norm, count, rate, options) == ("job.json", 0.5, steps, Rate(2.5, 1), {})
    assert resume == (Resume(steps // 2, reference / "checkpoints") if resumes else None)
    assert guide.numbers == {"0/loss": 4.0}
    assert Record.read(directory, 1).numbers == {"1/loss": 1.0, "start/of": 1.0}


def test_the_first_failure_of_a_layout_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = Jobs(monkeypatch)
    for error, kept in ((D9dError("no room"), "no room"), (ValueError("x"), "no room")):
        jobs.error = error
        with pytest.raises(type(error)):
            run_worker(tmp_path, monkeypatch)
        assert (tmp_path / "failure.txt").read_text() == kept
    (tmp_path / "failure.txt").unlink()
    with pytest.raises(ValueError, match="x"):
        run_worker(tmp_path, monkeypatch)
    assert (tmp_path / "failure.txt").read_text().startswith("ValueError: x (")
