"""Replicas train as one process trains several models in plain torch, and runs continue bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_core.data import DataContext
from d9d_core.errors import BuildError, CheckpointError, JobError
from d9d_core.events import ForwardBackwardEnds, StepEnds, StepStarts
from d9d_core.subscriber import subscribe
from d9d_core.tensors import full
from d9d_engine.checkpoint.store import CheckpointStore
from d9d_engine.run.trainer import Trainer
from d9d_testing.layouts import job_of, topology_here
from d9d_testing.suites.strategy import StrategySuite
from d9d_testing.toy.config import ToyDataConfig
from d9d_testing.toy.data import ToyStream
from d9d_testing.world import RankFailedError, World
from torch import Tensor

PLUGINS = [
    "d9d_testing.toy.plugin",
    "d9d_local_sgd.plugin",
    "d9d_parallel.plugin",
    "d9d_optim.plugin",
    "d9d_pipeline.plugin",
]
FEATURES = 6
CLIPPED = {"gradient_clipping": {"max_norm": 0.5}}


def job(directory: str, **sections: Any) -> dict[str, Any]:
    """Values of a toy job without dropout; ``sections`` replace the defaults."""
    return {
        "run": {"dir": directory, "name": "run"},
        "steps": 7,
        "device": "cpu",
        "batch": {"size": 8, "microbatch": 2},
        "model": {"name": "toy_model", "features": FEATURES, "blocks": 3},
        "data": {"name": "toy_data", "features": FEATURES},
        "task": "toy_task",
        "optimizer": {"name": "toy_optimizer", "lr": 0.05},
        "gradient_clipping": {"max_norm": None},
        "trackers": [],
        "export": False,
        "checkpoint": {"asynchronous": False},
        **sections,
    }


def replicas(strategy: str, count: int = 2, shards: int = 1, **fields: Any) -> dict[str, Any]:
    """Sections ``mesh`` and ``parallel`` of a job with replicas of their own steps."""
    own = [{"name": strategy, **fields}]
    mesh = {"dp_replicate": count, "dp_shard": shards}
    return {"mesh": mesh, "parallel": [*(["fsdp"] if shards > 1 else []), *own]}


class Stop:
    """Subscriber that asks rank 1 to stop in the last one of some steps."""

    def __init__(self, after: int) -> None:
        self.left, self.trainer = after, None

    def subscriptions(self) -> Any:
        return [(StepStarts, self._starts)]

    def _starts(self, _event: StepStarts) -> None:
        self.left -= 1
        assert isinstance(self.trainer, Trainer)
        if self.left == 0 and self.trainer.topology.rank == 1:
            self.trainer.interrupts.requested = "SIGTERM"


def trained(values: Mapping[str, Any], stop: int | None = None, broken: tuple[int, int] | None = None) -> Any:
    """Train a job, from its newest checkpoint if there is one; return what this rank has then.

    Args:
        values: values of the job.
        stop: number of steps, in the last one of which rank 1 is asked to stop.
        broken: step (0-based) and rank whose gradients become NaN.

    Returns:
        Outcome, norms and losses of steps, full parameters and momentum of this rank's replica, strategy's tensors.
    """
    stops = [] if stop is None else [Stop(stop)]
    losses: list[tuple[float, float, bool]] = []
    read = subscribe(StepEnds)(
        lambda event: losses.append(
            (event.result.loss.item(), event.result.grad_norm.item(), bool(event.result.finite.item()))
        )
    )
    made = job_of(values, PLUGINS)

    @subscribe(ForwardBackwardEnds)
    def spoil(event: ForwardBackwardEnds) -> None:
        if broken == (event.step, trainer.topology.rank):
            for parameter in trainer.stage.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(torch.nan)

    trainer = made.build(lambda _text: None, topology_here(made), observers=[*stops, read, spoil])
    for one in stops:
        one.trainer = trainer
    outcome = trainer.train()
    return {
        "status": outcome.status,
        "step": outcome.step,
        "losses": losses,
        "parameters": _lists(dict(trainer.stage.named_parameters())),
        "optimizer": _lists(trainer.step.optimizer.state()),
        "strategy": _lists(trainer.step.replicas.state()),
    }


def trained_in_turn(runs: Sequence[Sequence[Any]]) -> list[Any]:
    """Train several jobs one after the other in one world; see :func:`trained`."""
    return [trained(*run) for run in runs]


def _lists(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    here = {name: tensor for name, tensor in tensors.items() if tensor.device.type != "meta"}
    return {name: full(tensor).detach().tolist() for name, tensor in here.items()}


def as_tensors(values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Tensors of the parameters that :func:`trained` returned."""
    return {name: torch.tensor(value) for name, value in values.items()}


class Replica:
    """Replica of the toy model in plain torch, with its own data, and ``torch.optim.SGD`` with momentum 0.9."""

    def __init__(self, start: Mapping[str, Tensor], index: int, count: int, batch: int, seed: int) -> None:
        self.weights = {name: torch.nn.Parameter(t.clone()) for name, t in start.items() if name != "unused"}
        self.optimizer = torch.optim.SGD(self.weights.values(), lr=0.05, momentum=0.9)
        sizes = {"batch_size": batch, "microbatch_size": batch // count}
        context = DataContext(seed=seed, cache_dir=Path(), rank=index, ranks=count, **sizes)
        self.stream = ToyStream(ToyDataConfig(features=FEATURES), context)

    def backward(self) -> tuple[float, float]:
        """Loss and gradient norm of the next step, which is not taken."""
        (microbatch,) = self.stream.next_pack()
        x = microbatch["x"]
        for weight in self.weights.values():
            x = x + torch.tanh(x @ weight)
        loss = (x - microbatch["y"]).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.get_total_norm([w.grad for w in self.weights.values() if w.grad is not None])
        return loss.item(), norm.item()


def reference(
    start: Mapping[str, Tensor],
    steps: int,
    meet: Callable[[int, list[Replica]], None],
    count: int = 2,
    batch: int = 8,
    seed: int = 0,
    max_norm: float | None = None,
    skipped: int | None = None,
) -> tuple[list[Replica], list[tuple[float, float]]]:
    """Train replicas in one process; return them, with the mean loss and mean norm of each step.

    Args:
        start: initial weights.
        steps: number of steps.
        meet: called with the number of steps done and the replicas.
        count: number of replicas.
        batch: samples per step of all replicas.
        seed: seed of the data.
        max_norm: norm to which each replica clips its gradients.
        skipped: step (0-based) that no replica takes.
    """
    made = [Replica(start, index, count, batch, seed) for index in range(count)]
    found = []
    for step in range(steps):
        results = [replica.backward() for replica in made]
        for replica in made:
            if max_norm is not None:
                torch.nn.utils.clip_grad_norm_(replica.weights.values(), max_norm)
            if step != skipped:
                replica.optimizer.step()
        found.append(tuple(sum(values) / count for values in zip(*results, strict=True)))
        meet(step + 1, made)
    return made, found


def averaging(period: int) -> Callable[[int, list[Replica]], None]:
    """Plain averages of the weights every ``period`` steps."""

    @torch.no_grad()
    def meet(steps: int, made: list[Replica]) -> None:
        if steps % period == 0:
            for weights in zip(*(replica.weights.values() for replica in made), strict=True):
                mean = torch.stack(list(weights)).mean(0)
                for weight in weights:
                    weight.copy_(mean)

    return meet


def outer_steps(start: Mapping[str, Tensor], period: int, lr: float, momentum: float) -> Any:
    """DiLoCo's outer steps by ``torch.optim.SGD`` with Nesterov momentum, every ``period`` steps."""
    outer = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in start.items() if name != "unused"}
    optimizer = torch.optim.SGD(outer.values(), lr=lr, momentum=momentum, nesterov=momentum > 0)

    @torch.no_grad()
    def meet(steps: int, made: list[Replica]) -> None:
        if steps % period:
            return
        for name, weight in outer.items():
            weight.grad = torch.stack([weight - replica.weights[name] for replica in made]).mean(0)
        optimizer.step()
        for replica, (name, weight) in itertools.product(made, outer.items()):
            replica.weights[name].copy_(weight)

    return meet


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Tensor]:
    """Initial weights of the toy job: a run whose learning rate is so small that no weight changes."""
    still = job(str(tmp_path_factory.mktemp("start")), steps=1, optimizer={"name": "toy_optimizer", "lr": 1e-30})
    ((found,),) = World(1).run(trained_in_turn, [[still]])
    return as_tensors(found["parameters"])


def assert_like(found: Mapping[str, Any], expected: Replica) -> None:
    for name, weight in as_tensors(found["parameters"]).items():
        if name != "unused":  # the rank's own pipeline stages only
            torch.testing.assert_close(weight, expected.weights[name].detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.thorough
def test_two_replicas_train_as_in_plain_torch(tmp_path: Path, start: Mapping[str, Tensor]) -> None:
    runs = [
        job(str(tmp_path / "averages"), **replicas("local_sgd", period=3)),
        job(str(tmp_path / "clipped"), **replicas("local_sgd", period=3), **CLIPPED),
        job(str(tmp_path / "outer"), **replicas("diloco", period=3)),
        job(str(tmp_path / "plain-outer"), **replicas("diloco", period=2, outer_lr=0.5, outer_momentum=0.0)),
        job(str(tmp_path / "broken"), **replicas("local_sgd", period=3), nonfinite="skip"),
    ]
    broken = [None] * 4 + [(4, 1)]
    found = World(2).run(trained_in_turn, [[run, None, spoilt] for run, spoilt in zip(runs, broken, strict=True)])
    expected = [
        reference(start, 7, averaging(3)),
        reference(start, 7, averaging(3), max_norm=0.5),
        reference(start, 7, outer_steps(start, 3, 0.7, 0.9)),
        reference(start, 7, outer_steps(start, 2, 0.5, 0.0)),
        reference(start, 7, averaging(3), skipped=4),
    ]
    for index, (made, results) in enumerate(expected):
        for rank in (0, 1):
            one = found[rank][index]
            assert_like(one, made[rank])
            for step, (loss, norm) in enumerate(results):
                seen_loss, seen_norm, finite = one["losses"][step]
                assert seen_loss == pytest.approx(loss, rel=1e-4)
                assert finite == (index < 4 or step != 4)
                assert not finite or seen_norm == pytest.approx(norm, rel=1e-4)
    own, other = found[0][0]["parameters"], found[1][0]["parameters"]
    assert own["layers.0.weight"] != other["layers.0.weight"]  # seven steps: the replicas differ again


@pytest.mark.thorough
def test_replicas_of_shards_train_as_in_plain_torch(tmp_path: Path, start: Mapping[str, Tensor]) -> None:
    averages = job(str(tmp_path / "averages"), **replicas("local_sgd", shards=2, period=3), **CLIPPED)
    outer = job(str(tmp_path / "outer"), **replicas("diloco", shards=2, period=3))
    found = World(4, timeout=120.0).run(trained_in_turn, [[averages], [outer]])
    expected = [
        reference(start, 7, averaging(3), max_norm=0.5),
        reference(start, 7, outer_steps(start, 3, 0.7, 0.9)),
    ]
    for index, (made, _) in enumerate(expected):
        for rank in range(4):
            assert_like(found[rank][index], made[rank // 2])


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble_v"])
def test_replicas_of_pipelines_train_and_continue_as_in_plain_torch(tmp_path: Path, schedule: str) -> None:
    model = {"name": "toy_model", "features": FEATURES, "blocks": 4}
    shared = {"pipeline": schedule, "model": model, "batch": {"size": 16, "microbatch": 2}, **CLIPPED}
    values = job(str(tmp_path), **replicas("diloco", period=3), **shared)
    values["mesh"] |= {"pp": 2}
    still = values | {
        "steps": 1,
        "optimizer": {"name": "toy_optimizer", "lr": 1e-30},
        "run": {"dir": str(tmp_path / "0")},
    }
    runs = [[still], [values, 4], [values]]
    found = World(4, timeout=120.0).run(trained_in_turn, runs)
    everywhere = {name: t for of_rank in found for name, t in as_tensors(of_rank[0]["parameters"]).items()}
    initial = dict(sorted(everywhere.items()))  # the order of the layers
    made, _ = reference(initial, 7, outer_steps(initial, 3, 0.7, 0.9), batch=16, max_norm=0.5)
    for rank in range(4):
        assert len(found[rank][2]["parameters"]) in (2, 3)
        assert_like(found[rank][2], made[rank % 2])


def test_averages_after_each_step_of_plain_descent_are_synchronous_training(tmp_path: Path) -> None:
    sgd = {"optimizer": {"name": "sgd", "lr": 0.1}}
    local = job(str(tmp_path / "local"), **replicas("local_sgd", period=1), **sgd)
    summed = job(str(tmp_path / "summed"), mesh={"dp_replicate": 2}, parallel=["replicate"], **sgd)
    for one, other in World(2).run(trained_in_turn, [[local], [summed]]):
        mine, theirs = as_tensors(one["parameters"]), as_tensors(other["parameters"])
        for name, weight in theirs.items():
            torch.testing.assert_close(mine[name], weight, rtol=1e-5, atol=1e-6)
        for step in range(7):
            assert one["losses"][step][0] == pytest.approx(other["losses"][step][0], rel=1e-5)


def state(found: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    return found["parameters"], found["optimizer"], found["strategy"]


@pytest.mark.thorough
def test_a_run_continues_bit_for_bit_at_and_between_meetings(tmp_path: Path) -> None:
    meetings = replicas("diloco", period=3)
    evaluated = {"evaluation": {"every": 2, "packs": 1, "data": {"name": "toy_data", "features": FEATURES}}}
    saving = {"checkpoint": {"every": 2, "asynchronous": True}}
    runs: list[list[Any]] = [
        [job(str(tmp_path / "undisturbed"), **meetings)],
        [job(str(tmp_path / "observed"), **meetings, **evaluated, **saving)],
    ]
    for stop in (2, 3, 4):  # before, at and after a meeting
        values = job(str(tmp_path / f"stopped-{stop}"), **meetings)
        runs += [[values, stop], [values]]
    found = World(2).run(trained_in_turn, runs)
    for rank in (0, 1):
        undisturbed, observed, *parts = found[rank]
        assert undisturbed["status"] == "finished"
        assert state(observed) == state(undisturbed)
        for stop, stopped, resumed in zip((2, 3, 4), parts[::2], parts[1::2], strict=True):
            assert (stopped["status"], stopped["step"]) == ("stopped", stop)
            assert (resumed["status"], resumed["step"]) == ("finished", 7)
            assert state(resumed) == state(undisturbed)
            assert stopped["losses"] + resumed["losses"] == undisturbed["losses"]
    assert state(found[0][0])[:2] != state(found[1][0])[:2]  # or the replicas were never apart


@pytest.mark.thorough
def test_a_checkpoint_keeps_each_replica_and_their_mean_in_any_layout(tmp_path: Path) -> None:
    values = job(str(tmp_path), steps=4, **replicas("diloco", shards=2, period=3))
    saved = World(4, timeout=120.0).run(trained_in_turn, [[values]])
    values |= replicas("diloco", period=3)
    loaded = World(2).run(trained_in_turn, [[values]])
    for rank in (0, 1):
        assert state(loaded[rank][0]) == state(saved[2 * rank][0])
    made = CheckpointStore(tmp_path / "run" / "checkpoints").newest(print)
    assert made is not None
    mean = {"model/layers.0.weight": torch.empty(FEATURES, FEATURES)}
    made.load_into(mean, only=True)
    both = [as_tensors(one["parameters"])["layers.0.weight"] for (one,) in loaded]
    assert not torch.equal(*both)
    torch.testing.assert_close(mean["model/layers.0.weight"], (both[0] + both[1]) / 2, rtol=0, atol=1e-7)


@pytest.mark.thorough
def test_other_numbers_of_replicas_are_refused_and_synchronous_checkpoints_are_not(tmp_path: Path) -> None:
    apart = job(str(tmp_path / "apart"), steps=4, **replicas("local_sgd", period=3))
    together = job(str(tmp_path / "together"), steps=4, mesh={"dp_replicate": 2}, parallel=["replicate"])
    then = job(str(tmp_path / "together"), **replicas("diloco", period=100))
    found = World(2).run(trained_in_turn, [[apart], [together], [then]])
    for _, synchronous, own in found:
        assert own["strategy"]["layers.0.weight/anchor"] == synchronous["parameters"]["layers.0.weight"]
        assert own["step"] == 7
    assert found[0][2]["parameters"] != found[1][2]["parameters"]
    what = "keeps the optimizer states of 2 replicas that took their own steps, but this job has"
    with pytest.raises(CheckpointError, match=f"{what} 1; set mesh.dp_replicate to 2"):
        job_of({**apart, "mesh": {}, "parallel": []}, PLUGINS).build(lambda _text: None).train()
    with pytest.raises(RankFailedError, match=f"{what} 1"):
        World(2).run(trained, {**apart, "mesh": {"dp_replicate": 2}, "parallel": ["replicate"]})
    with pytest.raises(RankFailedError, match=f"{what} 4"):
        World(4, timeout=120.0).run(trained, {**apart, **replicas("local_sgd", count=4)})


def test_optimizers_that_average_weights_are_refused(tmp_path: Path) -> None:
    values = job(str(tmp_path), optimizer="schedule_free", **replicas("local_sgd"))
    with pytest.raises(BuildError, match="averages weights for evaluation, and a checkpoint cannot"):
        job_of(values, PLUGINS).plan()
    job_of({**values, "parallel": ["replicate"]}, PLUGINS).plan()


def test_no_message_recommends_a_strategy_that_alters_the_training(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"add a strategy for it \(replicate or hsdp\) to 'parallel'"):
        job_of(job(str(tmp_path), mesh={"dp_replicate": 2}), PLUGINS).plan()


@pytest.mark.full
class TestDiLoCoOfShards(StrategySuite):
    plugin = "d9d_local_sgd.plugin"
    target = "diloco"
    meshes = ({"dp_replicate": 2, "dp_shard": 2},)
    settings = ({"period": 4},)
    beside = ("fsdp",)
    large = ({"dp_replicate": 8, "dp_shard": 8},)

    def plugins(self) -> list[str]:
        return [*super().plugins(), "d9d_parallel.plugin"]

    def job_values(self, **sections: Any) -> dict[str, Any]:
        return super().job_values(**{"gradient_clipping": {"max_norm": 0.5}} | sections)
