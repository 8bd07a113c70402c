"""Protocols that only some optimizers follow, in whole runs: clipping inside of the step, and averaged weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_core import events as ev
from d9d_core.optimizer import AveragesWeights
from d9d_engine.job import Job
from d9d_engine.run.trainer import Trainer
from d9d_inference.evaluation.library import evaluate
from safetensors.torch import load_file
from torch import Tensor

Write = Callable[..., Path]


class ReadsGradients:
    """Takes down the norm of the gradients that the optimizer gets."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.stage: Any = None

    def subscriptions(self) -> Iterable[tuple[type[Any], Callable[[Any], None]]]:
        return [(ev.ModelReady, self._ready), (ev.OptimizerStepStarts, self._reads)]

    def _ready(self, event: ev.ModelReady) -> None:
        self.stage = event.stage

    def _reads(self, _event: ev.OptimizerStepStarts) -> None:
        gradients = [p.grad.flatten() for p in self.stage.parameters()]
        self.norms.append(torch.cat(gradients).norm().item())


def built(path: Path, *observers: Any, **values: Any) -> Trainer:
    overrides = [f"{field.replace('__', '.')}={json.dumps(value)}" for field, value in values.items()]
    return Job.load(path, overrides=overrides).build(note=lambda _line: None, observers=observers)


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainer.stage.named_parameters()}


@pytest.mark.thorough
def test_clipping_inside_of_the_step_gives_the_bits_of_clipping_before_it(small_job: Write) -> None:
    reader = ReadsGradients()
    path = small_job(steps=3)
    inside = built(path, run__name="inside", gradient_clipping__max_norm=0.1)
    before = built(path, reader, run__name="before", gradient_clipping__max_norm=0.1)
    inside.train()
    before.train()
    assert all(abs(norm - 0.1) < 1e-4 for norm in reader.norms)  # who reads gradients finds them clipped
    assert len(reader.norms) == 3
    first, second = weights(inside), weights(before)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.thorough
def test_averaged_weights_are_evaluated_and_exported(small_job: Write, tmp_path: Path) -> None:
    path = small_job(
        steps=4,
        optimizer={"name": "schedule_free", "lr": 0.05},
        lr_schedule={"name": "constant"},
    )
    job = json.loads(path.read_text())
    job["evaluation"] = {"every": 4, "packs": 1, "data": job["data"]}
    path.write_text(json.dumps(job))
    trainer = built(path)
    trainer.train()
    training, optimizer = weights(trainer), trainer.step.optimizer
    assert isinstance(optimizer, AveragesWeights)
    assert trainer.evaluator is not None
    at_training_weights = trainer.evaluator.run()["eval/loss"]
    with optimizer.evaluation_weights():
        averaged = weights(trainer)
        at_averages = trainer.evaluator.run()["eval/loss"]
    assert trainer.progress.logged["eval/loss"] == at_averages != at_training_weights
    run = trainer.job.run.directory
    (of_run,), (of_export,) = (
        evaluate(subject, like=like, note=lambda _line: None).first.sets.values()
        for subject, like in ((run, None), (run / "model", path))
    )
    assert of_run["loss"] == pytest.approx(of_export["loss"], rel=1e-6)  # of the checkpoint, and of what was exported
    follower = weights(built(path, run__name="follower", model__pretrained=str(run), optimizer__name="schedule_free"))
    assert all(torch.equal(follower[name], averaged[name]) for name in averaged)
    exported = load_file(next((trainer.job.run.directory / "model").glob("*.safetensors")))
    name = "model.norm.weight"
    (own,) = [
        key
        for key in averaged
        if key.endswith("norm.weight") and averaged[key].shape == exported[name].shape and "layers" not in key
    ]
    assert torch.equal(exported[name], averaged[own])
    assert not torch.equal(exported[name], training[own])
