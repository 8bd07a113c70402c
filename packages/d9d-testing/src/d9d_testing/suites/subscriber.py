"""Conformance suite of subscribers, which observe a run and change nothing in it."""

from __future__ import annotations

import gc
import inspect
import shutil
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from d9d_core import events as ev
from torch import Tensor

from d9d_testing.layouts import job_of
from d9d_testing.suites.support.component import ComponentSuite
from d9d_testing.suites.support.tensors import HostReads, bits, differing
from d9d_testing.suites.support.watched_runs import (
    Interruption,
    Interrupts,
    contents,
    text_difference,
    watched_run,
)
from d9d_testing.world import World

_TOY = "d9d_testing.toy.plugin"
#: Paths of files and folders that the training loop itself writes, relative to the directory of runs.
_OF_THE_LOOP = (
    "suite/checkpoints/", "suite/tokenizer/", "suite/job.yaml", "suite/plugins.json", "suite/facts.json",
    "suite/finished.json",
)  # fmt: skip
#: Number of last steps whose tensors the loop itself may still hold after a run.
_RECENT = 2


class SubscriberSuite(ComponentSuite):
    """Conformance suite of subscribers (:class:`d9d_core.subscriber.Subscriber`).

    Subclass it and name the subscriber::

        class TestMySubscriber(SubscriberSuite):
            target = "my_subscriber"

            def fields(self, directory):
                return {"path": str(directory / "events")}

            def broken_fields(self, directory):
                return {"path": str(directory / "missing" / "events")}

    The subscriber observes the toy job of d9d-testing: eight steps, with an evaluation and a checkpoint every four.

    Attributes:
        waits: whether handlers may read device values, which synchronizes with the GPU.
        ranks: number of processes whose files are compared with the files of one process.
        job: sections that replace sections of the toy job, for subscribers that need another model or task.
        builds_on: declaration modules of the plugins that ``job`` uses.
    """

    kind = "subscriber"

    waits: ClassVar[bool] = False
    ranks: ClassVar[int] = 2
    job: ClassVar[Mapping[str, Any]] = {}
    builds_on: ClassVar[tuple[str, ...]] = ()

    # --- for subclasses to override

    def fields(self, directory: Path) -> Mapping[str, Any]:  # noqa: ARG002 - for subclasses
        """Config fields of the subscriber, which may write files into ``directory``."""
        return {}

    def broken_fields(self, directory: Path) -> Mapping[str, Any] | None:  # noqa: ARG002 - for subclasses
        """Config fields with which a handler fails; ``None`` if there are none."""
        return None

    def files(self, directory: Path) -> Mapping[str, bytes]:
        """Files of the subscriber after a run: name -> content; compared between runs.

        By default, the result has all files in ``directory``, the argument of ``fields``, and all files in the run's
        directory that the training loop does not write itself. Leave out content that may differ between runs, such as
        times and files of each rank.
        """
        found = contents(directory)
        return {name: content for name, content in found.items() if not name.startswith(_OF_THE_LOOP)}

    # --- tests

    def test_it_subscribes_to_events_that_exist(self, tmp_path: Path) -> None:
        """Subscriptions are pairs of an existing event type and a function of one argument."""
        pairs = list(self.watching(tmp_path).subscriptions())
        assert pairs, "subscriptions() is empty; yield pairs of an event of d9d_core.events and a function"
        known = ", ".join(event.__name__ for event in ev.CATALOGUE)
        for event, handler in pairs:
            assert event in ev.CATALOGUE, f"subscribes to {event!r}, which is not an event; events are: {known}"
            assert callable(handler), f"the handler of {event.__name__} is {handler!r}; give a function"
            try:
                inspect.signature(handler).bind(object())
            except TypeError as error:
                raise AssertionError(f"the handler of {event.__name__} must take the event only: {error}") from error

    def test_losses_and_weights_are_those_of_a_run_without_it(self, tmp_path: Path) -> None:
        """Losses and weights are bit-identical to a run without the subscriber."""
        plain = self.trained(tmp_path / "plain", [])
        watched = self.trained(tmp_path / "watched", [self.watching(tmp_path)])
        for step, (found, expected) in enumerate(zip(watched.losses, plain.losses, strict=True)):
            assert found == expected, (
                f"step {step}: the loss is {found!r} with the subscriber and {expected!r} without; handlers must not "
                "change the pack, the model, gradients or the optimizer"
            )
        changed = differing(bits(plain.weights), bits(watched.weights))
        assert not changed, f"after the run, {changed} differ from a run without the subscriber"

    def test_it_keeps_no_tensors_of_past_steps(self, tmp_path: Path) -> None:
        """The subscriber does not hold packs and results of past steps, which would fill device memory."""
        subscriber = self.watching(tmp_path)
        tracer = _Tracer()
        self.trained(tmp_path / "run", [subscriber, tracer])
        gc.collect()
        alive = sorted({step for step, what in tracer.alive() if step < tracer.last - _RECENT})
        names = sorted({what for step, what in tracer.alive() if step < tracer.last - _RECENT})
        assert not alive, (
            f"{', '.join(names)} of steps {alive} still exist after step {tracer.last}; keep host values, from "
            "ValuesLogged, or copies of a few numbers"
        )
        del subscriber

    def test_handlers_never_wait_for_the_device(self, tmp_path: Path) -> None:
        """Handlers must not read device values, which synchronizes in every step; ``ValuesLogged`` has host values."""
        if self.waits:
            pytest.skip(f"{type(self).__name__}.waits is True")
        watched = _Watched(self.watching(tmp_path))
        self.trained(tmp_path / "run", [watched])
        assert not watched.reads, (
            f"handlers read values of tensors on the host: {watched.reads}; take them from ValuesLogged, or state "
            "waits = True"
        )

    def test_what_it_raises_ends_the_run(self, tmp_path: Path) -> None:
        """Exceptions of handlers end the run, because subscribers are part of the job."""
        fields = self.broken_fields(tmp_path)
        if fields is None:
            pytest.skip(f"{type(self).__name__}.broken_fields returns no fields with which a handler fails")
        subscriber = self.build(**fields)
        try:
            self.trained(tmp_path / "run", [subscriber])
        except Exception:  # any type, because the loop raises the handler's own exception
            return
        raise AssertionError(f"with {dict(fields)} the run succeeds; handlers must not catch their exceptions")

    def test_a_run_that_fails_ends_with_its_own_error(self, tmp_path: Path) -> None:
        """A failure of the run is raised, not an exception of the subscriber that is notified of it."""

        class Failing:
            def subscriptions(self) -> Iterable[tuple[type[Any], Callable[[Any], None]]]:
                return [(ev.StepEnds, self.fail)]

            def fail(self, event: ev.StepEnds) -> None:
                if event.step == 2:
                    raise ZeroDivisionError("the fault of another")

        with pytest.raises(ZeroDivisionError, match="the fault of another") as caught:
            self.trained(tmp_path / "run", [self.watching(tmp_path), Failing()])
        notes = getattr(caught.value, "__notes__", [])
        assert not notes, f"the subscriber itself fails when it is notified of a failed run: {notes[0]}"

    def test_it_watches_a_resumed_run(self, tmp_path: Path) -> None:
        """A run that is resumed with a new subscriber gives the same weights as a run without subscribers."""
        plain = self.trained(tmp_path / "plain", [])
        self.trained(tmp_path / "run", [self.watching(tmp_path)], steps=4)
        resumed = self.trained(tmp_path / "run", [self.watching(tmp_path)])
        changed = differing(bits(plain.weights), bits(resumed.weights))
        assert not changed, f"after a resumed run, {changed} differ from a run without the subscriber"

    def test_files_do_not_depend_on_the_number_of_processes(self, tmp_path: Path) -> None:
        """A run on ``ranks`` processes writes the same files as a run on one, apart from rounding."""
        expected = self.files_of_one_process(tmp_path / "one")
        directory = tmp_path / "several"
        World(self.ranks).run(watched_run, *self.job_for_files(directory))
        self.compare(
            self.files(directory),
            expected,
            f"a run on {self.ranks} processes",
            "every rank has the subscriber, so write on one rank only (Topology.rank of ForwardReady), and write "
            "values that are equal on all ranks, such as the values of ValuesLogged",
        )

    def test_files_of_a_resumed_run_are_those_of_an_uninterrupted_one(self, tmp_path: Path) -> None:
        """A run that ends some steps after its checkpoint, and is resumed from it, leaves the same files."""
        expected = self.files_of_one_process(tmp_path / "one")
        directory = tmp_path / "resumed"
        values, plugins, address = self.job_for_files(directory)
        with suppress(Interruption):
            watched_run(values, plugins, address, Interrupts(step=5))
            raise AssertionError("a run that an observer interrupts goes on")
        for newer in (directory / "suite" / "checkpoints").glob("step-0*[5-8]"):  # saved at the interruption
            shutil.rmtree(newer)
        watched_run(values, plugins, address)
        self.compare(
            self.files(directory),
            expected,
            "a run that ended some steps after its checkpoint of step 4, and is resumed from it,",
            "at TrainingStarts, remove entries of steps after event.step, and keep earlier ones; values that add up "
            "over steps belong in state() and load_state()",
        )

    # --- helpers for subclasses

    def files_of_one_process(self, directory: Path) -> Mapping[str, bytes]:
        """Files of an uninterrupted run on one process; skips the test if there are none."""
        if type(self).build is not ComponentSuite.build:
            pytest.skip(f"{type(self).__name__} overrides build(), so other processes cannot build the subscriber")
        watched_run(*self.job_for_files(directory))
        found = self.files(directory)
        if not found:
            pytest.skip("the subscriber writes no files in directory or in the run's directory")
        return found

    def job_for_files(self, directory: Path) -> tuple[dict[str, Any], list[str], list[Any]]:
        """Arguments of a run that writes into a directory: the job's values and plugins, and the subscriber."""
        directory.mkdir(parents=True, exist_ok=True)
        values = self.job_values(directory)
        if values["model"] == {"name": "toy_model", "dropout": 0.1}:
            values["model"] = "toy_model"  # dropout draws other numbers on each rank
        kind, plugin, target, config = self.address()
        return values, [_TOY, *self.builds_on], [kind, plugin, target, {**config, **self.fields(directory)}]

    def compare(self, found: Mapping[str, bytes], expected: Mapping[str, bytes], what: str, hint: str) -> None:
        """Compare the files of two runs."""
        missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
        assert not missing, f"{what} lacks the files {missing}; {hint}"
        assert not extra, f"{what} has the files {extra}, which an uninterrupted run on one process has not; {hint}"
        for name, content in expected.items():
            difference = text_difference(found[name], content)
            assert difference is None, (
                f"{what} writes another {name} than an uninterrupted run on one process: {difference}; {hint}"
            )

    def watching(self, directory: Path) -> Any:
        """New subscriber under test."""
        return self.build(**self.fields(directory))

    def trained(self, directory: Path, subscribers: Iterable[Any], steps: int = 8) -> _Curve:
        """Losses and weights of a run with these subscribers."""
        values = self.job_values(directory) | {"steps": steps}
        curve = _Curve()
        trainer = job_of(values, (_TOY, *self.builds_on)).build(lambda _: None, observers=[*subscribers, curve])
        trainer.train()
        curve.weights = {name: parameter.detach() for name, parameter in trainer.stage.named_parameters()}
        return curve

    def job_values(self, directory: Path) -> dict[str, Any]:
        """Values of the observed job, whose runs are in a directory."""
        return {
            "run": {"name": "suite", "dir": str(directory)},
            "steps": 8,
            "device": "cpu",
            "batch": {"size": 4, "microbatch": 2},
            "model": {"name": "toy_model", "dropout": 0.1},
            "data": "toy_data",
            "task": {"name": "toy_task", "decay": 0.01},
            "optimizer": "toy_optimizer",
            "evaluation": {"data": "toy_data", "every": 4, "packs": 1},
            "checkpoint": {"every": 4, "asynchronous": False},
            "logging": {"every": 1},
            "trackers": [],
            "export": False,
            **self.job,
        }


class _Curve:
    """Subscriber that stores the logged losses of a run."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.weights: dict[str, Tensor] = {}

    def subscriptions(self) -> Iterable[tuple[type[Any], Callable[[Any], None]]]:
        return [(ev.ValuesLogged, self._log)]

    def _log(self, event: ev.ValuesLogged) -> None:
        if "loss" in event.values:
            self.losses.append(event.values["loss"])


class _Tracer:
    """Subscriber that stores weak references to the tensors of each step."""

    def __init__(self) -> None:
        self._seen: list[tuple[int, str, weakref.ref[Tensor]]] = []
        self.last = 0

    def subscriptions(self) -> Iterable[tuple[type[Any], Callable[[Any], None]]]:
        return [(ev.StepStarts, self._start), (ev.StepEnds, self._end)]

    def alive(self) -> list[tuple[int, str]]:
        return [(step, what) for step, what, reference in self._seen if reference() is not None]

    def _start(self, event: ev.StepStarts) -> None:
        self.last = event.step
        tensors = [item for microbatch in event.pack for item in microbatch.items()]
        self._seen += [(event.step, f"{name} of the pack", weakref.ref(tensor)) for name, tensor in tensors]

    def _end(self, event: ev.StepEnds) -> None:
        for name in ("loss", "grad_norm", "finite", "tokens"):
            value = getattr(event.result, name)
            if isinstance(value, torch.Tensor):
                self._seen.append((event.step, f"result.{name}", weakref.ref(value)))


class _Watched:
    """Wrapper of a subscriber that detects reads of device values in its handlers."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.reads: dict[str, int] = {}

    def subscriptions(self) -> Iterable[tuple[type[Any], Callable[[Any], None]]]:
        return [(event, self._watch(event.__name__, handler)) for event, handler in self._inner.subscriptions()]

    def _watch(self, name: str, handler: Callable[[Any], None]) -> Callable[[Any], None]:
        def call(event: Any) -> None:
            with HostReads() as reads:
                handler(event)
            if reads.found:
                self.reads[name] = self.reads.get(name, 0) + len(reads.found)

        return call
