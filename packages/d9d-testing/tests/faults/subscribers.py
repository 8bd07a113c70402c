"""Subscribers with one fault each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from d9d_core import events as ev
from d9d_testing.suites.subscriber import SubscriberSuite

Pairs = Iterable[tuple[type[Any], Callable[..., None]]]


class Subscriber:
    """Keeps the logged losses; sound."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.kept: list[Any] = []
        self.model: Any = None

    def subscriptions(self) -> Pairs:
        return [(ev.ValuesLogged, self.log), (ev.ModelReady, self.ready), (ev.StepEnds, self.step)]

    def log(self, event: ev.ValuesLogged) -> None:
        if self.fails:
            raise OSError("disk full")
        self.kept.append(dict(event.values))

    def ready(self, event: ev.ModelReady) -> None:
        self.model = event.stage

    def step(self, event: ev.StepEnds) -> None:
        pass


class NoEvents(Subscriber):
    def subscriptions(self) -> Pairs:
        return []


class UnknownEvent(Subscriber):
    def subscriptions(self) -> Pairs:
        return [(ev.StepResult, self.log)]


class HandlerOfTwoArguments(Subscriber):
    def subscriptions(self) -> Pairs:
        return [(ev.StepEnds, lambda step, result: None)]


class KeepsResults(Subscriber):
    def step(self, event: ev.StepEnds) -> None:
        self.kept.append(event.result)


class KeepsPacks(Subscriber):
    def subscriptions(self) -> Pairs:
        return [(ev.StepStarts, self.kept.append)]


class ReadsTheLoss(Subscriber):
    def step(self, event: ev.StepEnds) -> None:
        self.kept.append(event.result.loss.item())


class CopiesTheLoss(Subscriber):
    def step(self, event: ev.StepEnds) -> None:
        self.kept.append(event.result.loss.detach().cpu().clone())


class ChangesThePack(Subscriber):
    def subscriptions(self) -> Pairs:
        return [(ev.StepStarts, lambda event: event.pack[0]["x"].mul_(1.001))]


class ChangesWeights(Subscriber):
    def subscriptions(self) -> Pairs:
        return [*super().subscriptions(), (ev.OptimizerStepEnds, self.clip)]

    @torch.no_grad()
    def clip(self, event: ev.OptimizerStepEnds) -> None:
        if event.step == 7:
            for parameter in self.model.parameters():
                parameter.clamp_(-0.5, 0.5)


class ClearsGradients(Subscriber):
    def subscriptions(self) -> Pairs:
        return [*super().subscriptions(), (ev.OptimizerStepStarts, self.clear)]

    def clear(self, event: ev.OptimizerStepStarts) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None


class LeavesTheModelInEvaluation(Subscriber):
    def subscriptions(self) -> Pairs:
        return [*super().subscriptions(), (ev.EvaluationEnds, lambda _event: self.model.eval())]


class SwallowsItsFailure(Subscriber):
    def log(self, event: ev.ValuesLogged) -> None:
        with suppress(OSError):
            super().log(event)


class FailsWhenTheRunFails(Subscriber):
    def subscriptions(self) -> Pairs:
        return [*super().subscriptions(), (ev.TrainingFailed, self.report)]

    def report(self, event: ev.TrainingFailed) -> None:
        raise KeyError(event.step)


class TakesItsTime(Subscriber):
    """No value is wrong, but every step is slower."""

    def step(self, event: ev.StepEnds) -> None:
        time.sleep(0.001)


class CountsFromZeroInEachProcess(Subscriber):
    """Takes the first step it sees for step 0."""

    def subscriptions(self) -> Pairs:
        return [*super().subscriptions(), (ev.StepStarts, self.start)]

    def start(self, event: ev.StepStarts) -> None:
        self.kept.append(event.step)
        assert event.step == len([step for step in self.kept if isinstance(step, int)]) - 1


class Sound(SubscriberSuite):
    target = "faulty"
    made_of: type[Subscriber] = Subscriber

    def build(self, *arguments: Any, **fields: Any) -> Subscriber:
        return self.made_of(**fields)

    def broken_fields(self, directory: Path) -> Mapping[str, Any]:
        return {"fails": True}


FAULTS = {
    "no events": ({"made_of": NoEvents}, "subscriptions() is empty"),
    "an event that does not exist": ({"made_of": UnknownEvent}, "which is not an event"),
    "a handler of two arguments": ({"made_of": HandlerOfTwoArguments}, "must take the event only"),
    "keeps results": ({"made_of": KeepsResults}, "still exist after step"),
    "keeps packs": ({"made_of": KeepsPacks}, "still exist after step"),
    "reads the loss": ({"made_of": ReadsTheLoss}, "take them from ValuesLogged"),
    "copies the loss to the host": ({"made_of": CopiesTheLoss}, "take them from ValuesLogged"),
    "changes the pack": ({"made_of": ChangesThePack}, "handlers must not change"),
    "changes weights at the end": ({"made_of": ChangesWeights}, "differ from a run without"),
    "clears gradients": ({"made_of": ClearsGradients}, "handlers must not change"),
    "leaves the model in evaluation": ({"made_of": LeavesTheModelInEvaluation}, "handlers must not change"),
    "swallows its failure": ({"made_of": SwallowsItsFailure}, "the run succeeds"),
    "fails when the run fails": ({"made_of": FailsWhenTheRunFails}, "the subscriber itself fails"),
    "takes its time": ({"made_of": TakesItsTime}, ""),
    "does not know a resumed run": ({"made_of": CountsFromZeroInEachProcess}, ""),
}
