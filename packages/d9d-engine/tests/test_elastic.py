"""Elastic replicas share steps, undo attempts, and take over each other's state; here as threads of one process."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from d9d_core.accumulators import AccumulatedMetric, Accumulator
from d9d_core.config import PluginConfig
from d9d_core.elastic import Attempt, LiveState
from d9d_core.errors import BuildError, TrainingError
from d9d_core.events import AttemptStarts, StepEnds, StepStarts
from d9d_core.plugin import Ref, StrategySpec, hookimpl
from d9d_core.registry.registry import Registry
from d9d_core.strategy import Applied, GradientOwner, no_collectives
from d9d_core.subscriber import subscribe
from d9d_core.traits import Adapts, HasTallies
from d9d_engine.compose.parts.elastic import build_shared_step
from d9d_engine.job import Job
from d9d_engine.run.attempts import Attempts
from d9d_engine.run.trainer import Trainer
from d9d_engine.step.auxiliary_losses import Tallies
from d9d_engine.step.elastic import UndoneError
from d9d_engine.step.metrics import Statistics
from d9d_testing.toy import plugin as toy
from d9d_testing.toy.runs import assert_identical, final_tensors, metrics_of, quiet, toy_job
from torch import Tensor, nn

D9D_API = 2
#: The name of this module in pytest has a dash, which a reference must not have.
MODULE = "d9d_elastic_tests"
sys.modules[MODULE] = sys.modules[__name__]
MERGES = {"sum": lambda t: t.sum(0), "max": lambda t: t.amax(0), "min": lambda t: t.amin(0)}


class Hub:
    """Exchange between replicas in threads, which make the same calls in the same order."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._barrier = threading.Barrier(len(names), timeout=30)
        self._values: dict[str, Any] = {}

    def exchange(self, name: str, value: Any) -> list[Any]:
        self._values[name] = value
        self._barrier.wait()
        found = [self._values[one] for one in self.names]
        self._barrier.wait()
        return found


class Replicas:
    """Elastic replica in a thread.

    Args:
        hub: the replicas.
        name: name of this one.
        undone: numbers of the attempts (from 0) that are undone.
        offers: numbers of the attempts before which the state is kept in ``offered``.
        takes: state to take before the first attempt.
        stops: number of the attempt before which this replica is asked to stop.
    """

    def __init__(
        self,
        hub: Hub,
        name: str,
        undone: Sequence[int] = (),
        offers: Sequence[int] = (),
        takes: tuple[Any, Mapping[str, Tensor]] | None = None,
        stops: int | None = None,
    ) -> None:
        self.hub, self.name, self.undone, self.offers, self.takes = hub, name, undone, offers, takes
        self.attempts, self.stops = 0, stops
        self.offered: list[tuple[Any, dict[str, Tensor]]] = []
        self.closed = False

    def meet(self, step: int, live: LiveState) -> Attempt | None:
        source = None
        if self.attempts == self.stops:
            return None
        if self.attempts in self.offers:
            self.offered.append((live.values(), {name: tensor.clone() for name, tensor in live.tensors().items()}))
        if self.takes is not None and not self.attempts:
            live.take(*self.takes)
            source = "donor"
        self.attempts += 1
        return Attempt(self.hub.names.index(self.name), self.hub.names, f"{self.attempts}", source)

    def reduce(self, tensors: Sequence[Tensor], operation: Literal["sum", "max", "min"]) -> None:
        for tensor in tensors:
            parts = self.hub.exchange(self.name, tensor.clone())
            tensor.copy_(MERGES[operation](torch.stack(parts)))
            if self.attempts - 1 in self.undone and tensor.is_floating_point():
                tensor.fill_(torch.nan)  # a lost replica leaves any values

    def commit(self) -> bool:
        return self.attempts - 1 not in self.undone

    def close(self) -> None:
        self.closed = True


class Config(PluginConfig):
    """Elastic replicas in threads."""

    name: Literal["threads"] = "threads"
    """Selects the strategy."""


class Breaks(PluginConfig):
    """Strategy that does not fit to elastic replicas."""

    name: Literal["breaks"] = "breaks"
    """Selects the strategy."""
    how: str = "max"
    """Operation of the reduction."""


#: Replicas for the next job that is built.
NEXT: list[Replicas] = []


class Threads:
    """Strategy of elastic replicas in threads."""

    def __init__(self, _config: Config) -> None: ...

    def apply(self, _stage: nn.Module, _topology: Any) -> Applied:
        return Applied(modules=("",), collectives=no_collectives, elastic=NEXT[0])


class Breaking:
    """Strategy that breaks what elastic replicas need."""

    def __init__(self, config: Breaks) -> None:
        self.how = config.how

    def apply(self, _stage: nn.Module, _topology: Any) -> Applied:
        if self.how == "max":
            return Applied(("",), (GradientOwner("layers.0.weight", "dp_shard", "fsdp", "max"),))
        if self.how == "own":
            return Applied(("",), resynchronise=lambda: None)
        return Applied(("",), elastic=NEXT[0])


@hookimpl
def d9d_strategies() -> Iterator[StrategySpec]:
    for name, config, build in (("threads", "Config", "Threads"), ("breaks", "Breaks", "Breaking")):
        yield StrategySpec(
            name=name,
            summary="Elastic replicas in threads, for tests.",
            config=Ref(f"{MODULE}:{config}"),
            build=Ref(f"{MODULE}:{build}"),
            anchor="data",
        )


def job_of(directory: Path, name: str, parallel: Sequence[Any] = ("threads",), **sections: Any) -> Job:
    path = directory / name
    path.mkdir()
    made = toy_job(path, parallel=[], trackers=[{"name": "jsonl", "picture": False}], **sections)
    values = {**made.source.document.values, "parallel": list(parallel)}
    (path / "job.json").write_text(json.dumps(values))
    return Job.load(path / "job.json", registry=Registry.of(toy, sys.modules[__name__]))


def built(job: Job, replicas: Replicas, *observers: Any) -> Trainer:
    NEXT[:] = [replicas]
    return job.build(lambda _: None, observers=observers)


SECTIONS: dict[str, Any] = {
    "batch": {"size": 10, "microbatch": 2},
    "gradient_clipping": {"max_norm": 0.5},
    "nonfinite": "skip",
    "data": {"name": "toy_data", "nan_at": 6},
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A finished run without elastic replicas."""
    job = job_of(tmp_path_factory.mktemp("alone"), "alone", parallel=[], **SECTIONS)
    quiet(job).train()
    return job


@pytest.mark.parametrize(
    "count",
    [pytest.param(2, id="two"), pytest.param(6, id="more-than-microbatches", marks=pytest.mark.thorough)],
)
def test_replicas_that_share_each_step_end_like_one_run(tmp_path: Path, alone: Job, count: int) -> None:
    hub = Hub([f"r{index}" for index in range(count)])
    jobs = [job_of(tmp_path, name, **SECTIONS) for name in hub.names]
    trainers = [built(job, Replicas(hub, name)) for job, name in zip(jobs, hub.names, strict=True)]
    threads = [threading.Thread(target=trainer.train) for trainer in trainers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first, *others = (final_tensors(job) for job in jobs)
    for other in others:
        assert_identical(first, other)
    for name, tensor in final_tensors(alone).items():
        torch.testing.assert_close(first[name], tensor, rtol=1e-5, atol=1e-6, msg=name)
    for lines in map(metrics_of, (jobs[0], jobs[-1])):
        for line, expected in zip(lines, metrics_of(alone), strict=True):
            for name in expected.keys() - {"tokens_per_second"}:
                assert line[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-7), name
    assert metrics_of(jobs[0])[-1]["skipped_steps"] == 1


def test_utilisation_relates_the_tokens_of_all_replicas_to_the_devices_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("d9d_engine.compose.training.flops_per_token", lambda *_: 3e6)
    hub = Hub(["r0", "r1"])
    jobs = [job_of(tmp_path, name, **SECTIONS, logging={"every": 3, "peak_tflops": 0.5}) for name in hub.names]
    trainers = [built(job, Replicas(hub, name)) for job, name in zip(jobs, hub.names, strict=True)]
    threads = [threading.Thread(target=trainer.train) for trainer in trainers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for line in (line for job in jobs for line in metrics_of(job)):
        assert line["mfu"] == pytest.approx(line["tokens_per_second"] * 3e6 / (2 * 0.5e12))
    assert jobs[0].mesh.world_size == 1


def test_undone_attempts_leave_no_trace_but_repeated_events(tmp_path: Path, alone: Job) -> None:
    replicas = Replicas(Hub(["a"]), "a", undone=[0, 3, 4, 9])
    job = job_of(tmp_path, "undone", **SECTIONS)
    starts: list[int] = []
    ends: list[int] = []
    seen: list[int] = []
    observers = [
        subscribe(StepStarts)(lambda event: starts.append(event.step)),
        subscribe(StepEnds)(lambda event: ends.append(event.step)),
        subscribe(AttemptStarts)(lambda event: seen.append(event.step)),
    ]
    built(job, replicas, *observers).train()
    assert ends == list(range(12))
    assert starts == seen == sorted([*range(12), 0, 2, 2, 6])
    assert replicas.closed
    assert_identical(final_tensors(job), final_tensors(alone))
    same = [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in metrics_of(job)]
    expected = [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in metrics_of(alone)]
    assert same == [pytest.approx(line) for line in expected]


def test_a_replica_that_takes_a_state_continues_like_its_donor(tmp_path: Path) -> None:
    sections = {**SECTIONS, "subscribers": []}
    donor_job = job_of(tmp_path, "donor", **sections)
    donor = Replicas(Hub(["a"]), "a", offers=[7], undone=[6])
    built(donor_job, donor).train()
    ((values, tensors),) = donor.offered
    assert values["step"] == 6  # an attempt was undone before
    job = job_of(tmp_path, "taker", **sections)
    taker = built(job, Replicas(Hub(["b"]), "b", takes=(values, tensors), undone=[0]))
    with torch.no_grad():
        for parameter in taker.stage.parameters():
            parameter.fill_(torch.nan)
    outcome = taker.train()
    assert outcome.step == 12
    assert_identical(final_tensors(job), final_tensors(donor_job))
    donated = {line["step"]: line for line in metrics_of(donor_job)}
    for line in metrics_of(job):
        assert line["step"] > 6
        for name in ("loss", "absolute_error", "tokens", "skipped_steps"):
            assert line[name] == donated[line["step"]][name], name


def test_a_replica_that_is_asked_to_stop_saves_without_another_step(tmp_path: Path, alone: Job) -> None:
    job = job_of(tmp_path, "stopped", **SECTIONS)
    outcome = built(job, Replicas(Hub(["a"]), "a", stops=7)).train()
    assert (outcome.status, outcome.step) == ("stopped", 7)
    with pytest.raises(KeyboardInterrupt, match="stopped after step 9 of 12 and saved"):
        assert len(list(built(job, Replicas(Hub(["a"]), "a", stops=2)).steps(4))) == 2
    outcome = built(job, Replicas(Hub(["a"]), "a")).train()
    assert (outcome.status, outcome.step) == ("finished", 12)
    assert_identical(final_tensors(job), final_tensors(alone))


def test_a_state_of_another_job_is_refused(tmp_path: Path) -> None:
    donor = Replicas(Hub(["a"]), "a", offers=[1])
    built(job_of(tmp_path, "donor"), donor).train()
    other = job_of(tmp_path, "other", optimizer={"name": "toy_optimizer", "lr": 0.5})
    with pytest.raises(TrainingError, match=r"another job: optimizer\.lr: 0\.05 there, 0\.5 here; start all"):
        built(other, Replicas(Hub(["b"]), "b", takes=donor.offered[0])).train()


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("max", r"parallel\[1\] \(breaks\) reduces gradients by their maximum, but parallel\[0\] \(threads\)"),
        ("own", r"parallel\[1\] \(breaks\) lets replicas take their own steps"),
        ("elastic", r"both declare elastic replicas; remove one"),
    ],
)
def test_strategies_that_do_not_fit_are_refused(tmp_path: Path, how: str, text: str) -> None:
    job = job_of(tmp_path, "job", parallel=["threads", {"name": "breaks", "how": how}])
    with pytest.raises(BuildError, match=text):
        built(job, Replicas(Hub(["a"]), "a"))


def test_a_pipeline_is_refused() -> None:
    assembly: Any = SimpleNamespace(
        applied=[
            (SimpleNamespace(where="parallel[0]", spec=Config()), Applied(("",), elastic=Replicas(Hub("a"), "a")))
        ],
        all_stages=[nn.Identity(), nn.Identity()],
    )
    parts: list[Any] = [None] * 5
    with pytest.raises(BuildError, match=r"parallel\[0\] \(threads\) gives .* remove 'pipeline' and mesh.pp"):
        build_shared_step(assembly, *parts)


class Range(AccumulatedMetric):
    def __init__(self) -> None:
        super().__init__(total=Accumulator(), largest=Accumulator("max"), least=Accumulator("min", dtype=torch.int64))

    def update(self, observations: Mapping[str, Tensor]) -> None:
        x = observations["x"]
        self.accumulate(total=x.sum(), largest=x.max(), least=x.min().long())

    def compute(self) -> Mapping[str, Tensor]:
        return self.state()


def test_metrics_merge_the_updates_of_an_attempt_or_forget_them() -> None:
    statistics = Statistics({"range": Range()}, gated=False)
    statistics.update({"x": torch.tensor([1.0, 5.0])})
    before = statistics.own()
    statistics.set_aside()
    statistics.update({"x": torch.tensor([-3.0, 2.0])})
    statistics.take_back()
    assert_identical(statistics.own(), before)
    statistics.set_aside()
    statistics.update({"x": torch.tensor([2.0, 7.0])})
    statistics.merge(statistics.updates())
    found = {name: tensor.item() for name, tensor in statistics.own().items()}
    assert found == {"range/total": 15.0, "range/largest": 7.0, "range/least": 1}
    other = Statistics({"range": Range()}, gated=False)
    other.take_own(statistics.own())
    assert_identical(other.own(), statistics.own())


class Counting(nn.Module):
    """Module that adapts to how many samples it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.tensor([3.0, 4.0])
        self.adapted: list[list[float]] = []

    def tallies(self) -> Mapping[str, Tensor]:
        return {"seen": self.seen}

    def adapts_to(self) -> frozenset[str]:
        return frozenset({"seen"})

    def adapt(self, tallies: Mapping[str, Tensor], _finite: Tensor) -> None:
        self.adapted.append(tallies["seen"].tolist())


def test_tallies_of_a_replica_without_microbatches_are_zeros_that_can_be_summed() -> None:
    module = Counting()
    assert isinstance(module, HasTallies)
    assert isinstance(module, Adapts)
    tallies = Tallies({0: nn.Sequential(module)})
    (zeros,) = tallies.sums()
    assert zeros.tolist() == [0.0, 0.0]
    zeros.add_(5.0)  # of the other replicas
    tallies.adapt(torch.tensor(True))
    tallies.take(0)
    tallies.forget()
    tallies.take(0)
    tallies.adapt(torch.tensor(True))
    assert module.adapted == [[5.0, 5.0], [3.0, 4.0]]


def test_a_lost_replica_repeats_a_step_with_the_same_pack_and_another_state_needs_a_new_one() -> None:
    """Attempts, as replica 0: an undone one, a repetition alone, a state that was taken, and a stop."""
    phases, notes, emitted, asked = [], [], [], []
    attempts = iter(
        [
            Attempt(0, ("0", "1"), "k/1"),
            Attempt(0, ("0",), "l/1"),
            Attempt(0, ("0", "1"), "m/2", source="1"),
            None,
        ]
    )
    packs, positions = iter(["first", "second"]), iter(range(9))

    def meet(step: int, live: Any) -> Attempt | None:
        asked.append((step, live))
        return next(attempts)

    def step(number: int, pack: Any, attempt: Attempt) -> Any:
        if attempt.key == "k/1":
            raise UndoneError
        return number, pack, attempt.key

    made = Attempts(
        SimpleNamespace(replicas=SimpleNamespace(meet=meet)),  # type: ignore[arg-type]
        step,  # type: ignore[arg-type]
        SimpleNamespace(watchdog=SimpleNamespace(phase=lambda *given: phases.append(given))),  # type: ignore[arg-type]
        SimpleNamespace(state=lambda: {"at": next(positions)}, next=lambda: next(packs)),  # type: ignore[arg-type]
        SimpleNamespace(emit=emitted.append),  # type: ignore[arg-type]
        lambda name: nullcontext(),  # type: ignore[arg-type, return-value]
        lambda position: position,  # type: ignore[arg-type, return-value]
        notes.append,
    )
    progress: Any = SimpleNamespace(step=6)
    assert made.step(progress) == (6, "first", "l/1")
    assert made.replicas == 1
    assert made.step(progress) == (6, "second", "m/2")
    assert made.replicas == 2
    assert made.step(progress) is None
    assert asked == [(6, {"at": 0}), (6, {"at": 0}), (6, {"at": 1}), (6, {"at": 3})]
    assert phases == [("step", 6)] * 3
    assert [one.attempt.key for one in emitted] == ["k/1", "l/1", "m/2"]
    assert notes == [
        "step 7: 2 replicas share the batch: 0, 1",
        "step 7: a replica was lost; the step is repeated",
        "step 7: 1 replica runs the batch: 0",
        "took the state of replica 1 after step 6",
        "step 7: 2 replicas share the batch: 0, 1",
    ]
