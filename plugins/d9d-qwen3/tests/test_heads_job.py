"""Jobs with other heads than the language model's, from planning to training."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from d9d_core.config import PluginConfig
from d9d_core.data import DataContext
from d9d_core.errors import JobError
from d9d_core.plugin import DatasetSpec, Ref, hookimpl
from d9d_core.registry.registry import Registry
from d9d_core.types import Pack, State
from d9d_engine.job import Job
from d9d_qwen3.config import tiny


class LabelledConfig(PluginConfig):
    """Right-padded samples that a word in their middle puts into one of three classes."""

    name: Literal["labelled"] = "labelled"
    """Selects the data."""


class Labelled:
    def __init__(self, config: LabelledConfig, context: DataContext) -> None:
        self._context, self._packs = context, 0

    @property
    def facts(self) -> State:
        return {"num_classes": 3, "vocab_size": 64, "sequence_length": 8}

    def next_pack(self) -> Pack:
        generator = torch.Generator().manual_seed(self._packs)
        self._packs += 1
        size = self._context.batch_size
        tokens = torch.randint(3, 64, (size, 8), generator=generator)
        labels = torch.randint(3, (size,), generator=generator)
        tokens[:, 2] = labels
        lengths = torch.randint(3, 9, (size,), generator=generator)
        whole = {"tokens": tokens, "labels": labels, "lengths": lengths, "targets": tokens.roll(-1, dims=1)}
        parts = {name: tensor.split(self._context.microbatch_size) for name, tensor in whole.items()}
        return [dict(zip(parts, part, strict=True)) for part in zip(*parts.values(), strict=True)]

    def state(self) -> State:
        return {"packs": self._packs}

    def load_state(self, state: State) -> None:
        self._packs = int(state["packs"])  # type: ignore[arg-type]

    def save_assets(self, directory: Path) -> None:
        pass


class Here(Ref):
    """A reference to something of this file."""

    def load(self) -> Any:
        return {"x:config": LabelledConfig, "x:build": Labelled}[self.target]


@hookimpl
def datasets() -> Iterator[DatasetSpec]:
    yield DatasetSpec(name="labelled", summary="Labelled samples.", config=Here("x:config"), build=Here("x:build"))


def job(directory: Path, **sections: Any) -> Job:
    modules = ("d9d_nn.plugin", "d9d_testing.toy.plugin", "d9d_qwen3.plugin")
    mine = SimpleNamespace(d9d_datasets=datasets, __name__="labelled")
    registry = Registry.of(*map(importlib.import_module, modules), mine)
    values = {
        "run": {"dir": str(directory)},
        "device": "cpu",
        "data": "labelled",
        "task": "classification",
        "optimizer": {"name": "toy_optimizer", "lr": 0.1},
        "batch": {"size": 16, "microbatch": 8},
        "steps": 30,
        "trackers": [],
        "export": False,
        **sections,
    }
    values["model"] = {**tiny().model_dump(), "initialization": {"std": 0.1}, **sections["model"]}
    return Job.from_values(values, registry=registry)


TOPIC = {"kind": "classification", "num_classes": 3}
BOTH = {"words": {"kind": "causal_lm"}, "topic": {**TOPIC, "pooling": "mean"}}
ON_TOPIC = {"name": "classification", "head": "topic"}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "task"),
    [
        ({"heads": {"topic": {**TOPIC, "layers": [0, -1]}}}, "classification"),
        ({"heads": BOTH, "added_tokens": 4}, ON_TOPIC),
    ],
)
def test_a_classifier_learns(model: dict[str, Any], task: Any, tmp_path: Path) -> None:
    given = job(tmp_path, model=model, task=task)
    trainer = given.build(lambda _text: None)
    with trainer.prefetcher as feed:
        losses = [trainer.step(step, feed.next()).loss.item() for step in range(given.steps)]
    assert losses[0] == pytest.approx(1.1, abs=0.4)
    assert sum(losses[-5:]) / 5 < losses[0] / 2


def test_one_model_trains_either_head(tmp_path: Path) -> None:
    first = {}
    for task in (ON_TOPIC, {"name": "causal_lm", "head": "words"}):
        trainer = job(tmp_path, model={"heads": BOTH}, task=task).build(lambda _text: None)
        before = {name: p.detach().clone() for name, p in trainer.stage.named_parameters()}
        with trainer.prefetcher as feed:
            trainer.step(0, feed.next())
        moved = {name for name, p in trainer.stage.named_parameters() if not torch.equal(p, before[name])}
        first[task["name"]] = {name for name in moved if name.startswith("heads.")}
    assert first == {"classification": {"heads.topic.weight"}, "causal_lm": {"heads.words.weight"}}


@pytest.mark.parametrize(
    ("model", "task", "text"),
    [
        ({"heads": BOTH}, "classification", "task.head: the model has several heads, name one of kind classification"),
        ({}, "classification", "task.head: the task needs a head of kind classification, the model has: causal_lm"),
        ({"heads": {"t": {**TOPIC, "num_classes": 2}}}, "classification", "the head has 2 classes, the data has 3"),
        ({"heads": {"topic": TOPIC}}, "causal_lm", "task.head: the task needs a head of kind causal_lm"),
    ],
)
def test_a_task_without_its_head_is_refused_before_the_model_is_built(
    model: dict[str, Any], task: str, text: str, tmp_path: Path
) -> None:
    with pytest.raises(JobError, match=text):
        job(tmp_path, model=model, task=task).build(lambda _text: None)
