from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_core import events as ev
from d9d_core.errors import BuildError, TrainingError
from d9d_engine.job import Job
from d9d_engine.run.trainer import Trainer
from d9d_engine.sleep.offload import CHUNK, offload
from d9d_testing.toy.runs import assert_identical, final_tensors, metrics_of, quiet
from torch import Tensor, nn

MakeJob = Callable[..., Job]


def occupied(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def test_tensors_stay_the_same_objects_and_their_views_follow() -> None:
    flat = torch.arange(12.0)
    view, parameter = flat[3:7].view(2, 2), nn.Parameter(torch.randn(3, 5, dtype=torch.bfloat16))
    expected = [tensor.detach().clone() for tensor in (flat, view, parameter)]
    empty, meta = torch.empty(0), torch.empty(4, device="meta")
    offloaded = offload([view, flat, parameter, empty, meta])
    assert offloaded.bytes == 12 * 4 + 15 * 2  # what two share counts once
    assert occupied([flat, view, parameter]) == 0
    assert (view.shape, view.stride(), view.storage_offset(), parameter.dtype) == ((2, 2), (2, 1), 3, torch.bfloat16)
    offloaded.restore()
    offloaded.restore()  # nothing is left to do
    for tensor, before in zip((flat, view, parameter), expected, strict=True):
        assert torch.equal(tensor, before)
    flat[3] = -1
    assert view[0, 0] == -1


def test_a_tensor_larger_than_a_piece_of_memory_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CHUNK == 2**28
    monkeypatch.setattr("d9d_engine.sleep.offload.CHUNK", 64)
    tensors = [torch.randn(size) for size in (5, 61, 1, 16, 33)]
    before = [tensor.clone() for tensor in tensors]
    offload(tensors).restore()
    assert all(torch.equal(*pair) for pair in zip(tensors, before, strict=True))


def test_memory_of_a_file_is_left_alone(tmp_path: Path) -> None:
    torch.arange(4.0).numpy().tofile(tmp_path / "numbers")
    mapped = torch.from_file(str(tmp_path / "numbers"), shared=True, size=4)
    offloaded = offload([mapped])
    assert (offloaded.bytes, mapped.tolist()) == (0, [0, 1, 2, 3])


def state(trainer: Trainer) -> list[Tensor]:
    optimizer = trainer.step.optimizer.state().values()
    return [*trainer.stage.parameters(), *trainer.stage.buffers(), *optimizer]


@pytest.mark.thorough
@pytest.mark.parametrize("tags", [(), ("optimizer",), ("weights",)])
def test_training_goes_on_as_if_nothing_had_happened(job: MakeJob, tags: tuple[Any, ...]) -> None:
    straight, sleeping = job("run.name=straight"), job("run.name=sleeping")
    quiet(straight).train()
    with quiet(sleeping) as trainer:
        for _result in trainer.steps(5):
            pass
        for _ in range(2):
            before = occupied(state(trainer))
            freed = trainer.sleep(*tags)
            assert freed == before - occupied(state(trainer)) > 0
            assert trainer.sleep(*tags) == 0  # it sleeps already
            assert trainer.wake() == freed
            assert trainer.wake() == 0
            assert occupied(state(trainer)) == before
            for _result in trainer.steps(2):
                pass
        list(trainer.steps())
    assert_identical(final_tensors(straight), final_tensors(sleeping))
    losses = [[line["loss"] for line in metrics_of(run)] for run in (straight, sleeping)]
    assert losses[0] == losses[1]


def asleep(trainer: Trainer) -> set[str]:
    return set(trainer._parts.sleeper.asleep)


def test_everything_on_the_device_sleeps(job: MakeJob) -> None:
    with quiet(job()) as trainer:
        list(trainer.steps(1))
        trainer.sleep()
        assert occupied(state(trainer)) == 0
        assert asleep(trainer) == {"weights", "optimizer", "communicators"}
        trainer.wake("weights")
        assert "weights" not in asleep(trainer)
        assert occupied(trainer.stage.parameters()) > 0


def test_what_sleeps_cannot_be_used(job: MakeJob) -> None:
    evaluation = {"every": 6, "packs": 1, "data": "toy_data"}
    with quiet(job(evaluation=evaluation)) as trainer:
        list(trainer.steps(1))
        trainer.sleep("optimizer")
        calls: list[Callable[[], Any]] = [trainer.evaluate, trainer.save, trainer.train, trainer.start, trainer.export]
        for call in (*calls, lambda: list(trainer.steps(1))):
            with pytest.raises(TrainingError, match=r"optimizer are asleep; call wake\(\) first"):
                call()
        trainer.wake()
        with pytest.raises(
            TrainingError, match=r"'kv_cache' is no tag of memory to release; choose among weights, opt"
        ):
            trainer.sleep("kv_cache")  # type: ignore[arg-type]


@pytest.mark.thorough
def test_a_run_that_is_left_asleep_is_saved(job: MakeJob) -> None:
    run = job(checkpoint={"every": None})
    with pytest.raises(ZeroDivisionError), quiet(run) as trainer:  # noqa: PT012
        list(trainer.steps(3))
        trainer.sleep()
        raise ZeroDivisionError
    straight = job("run.name=straight")
    quiet(straight).train()
    quiet(run).train()
    assert_identical(final_tensors(straight), final_tensors(run))


def test_a_checkpoint_that_is_being_written_is_waited_for(job: MakeJob) -> None:
    run = job(checkpoint={"every": 2, "asynchronous": True})
    with quiet(run) as trainer:
        list(trainer.steps(2))
        trainer.sleep()
        assert (run.run.directory / "checkpoints" / "step-00000002" / "manifest.json").exists()


class Watches:
    """Notes what sleeps and wakes, and sleeps in the middle of a step if it is told to."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any]] = []
        self.trainer: Trainer | None = None

    def subscriptions(self) -> Iterable[tuple[type[Any], Callable[[Any], None]]]:
        for event in (ev.SleepStarts, ev.SleepEnds, ev.WakeStarts, ev.WakeEnds):
            yield event, lambda event: self.seen.append((type(event).__name__, event.tags))
        yield ev.StepEnds, lambda _event: self.trainer.sleep() if self.trainer else None


def test_sleeping_and_waking_are_events(job: MakeJob) -> None:
    watches = Watches()
    with job().build(lambda _note: None, observers=[watches]) as trainer:
        list(trainer.steps(1))
        trainer.sleep("optimizer")
        trainer.wake()
    names = ["SleepStarts", "SleepEnds", "WakeStarts", "WakeEnds"]
    assert watches.seen == [(name, ("optimizer",)) for name in names]


def test_sleep_inside_a_step_is_refused(job: MakeJob) -> None:
    watches = Watches()
    watches.trainer = job().build(lambda _note: None, observers=[watches])
    with pytest.raises(TrainingError, match=r"sleep\(\) was called inside a step"):
        watches.trainer.train()


def test_a_caller_who_lets_it_sleep_between_two_steps_is_told(job: MakeJob) -> None:
    with quiet(job()) as trainer:
        with pytest.raises(TrainingError, match="weights and optimizer and communicators are asleep"):  # noqa: PT012
            for _result in trainer.steps(3):
                trainer.sleep()
        trainer.wake()
        assert len(list(trainer.steps(1))) == 1  # nothing was lost


def test_a_sleep_that_fails_leaves_everything_awake_and_the_run_open(
    job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise BuildError("this torch cannot")

    with quiet(job()) as trainer:
        list(trainer.steps(1))
        with monkeypatch.context() as patch:
            patch.setattr("d9d_engine.sleep.sleeper.suspend", refuse)
            with pytest.raises(BuildError, match="this torch cannot"):
                trainer.sleep()
        assert "weights" not in asleep(trainer)
        assert len(list(trainer.steps(1))) == 1


def test_what_is_asleep_when_a_block_ends_in_an_error_trains_again_once_awake(job: MakeJob) -> None:
    trainer = quiet(job("steps=3"))
    with pytest.raises(ZeroDivisionError), trainer:  # noqa: PT012
        trainer.sleep()
        raise ZeroDivisionError
    with pytest.raises(TrainingError, match="are asleep"):
        trainer.train()
    trainer.wake()
    assert trainer.train().status == "finished"
