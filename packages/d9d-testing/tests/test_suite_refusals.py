"""Refusals and skips of the conformance suites, with stand-ins for their subjects: no processes, no training."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_testing.suites import model as model_suite
from d9d_testing.suites import peft as peft_suite
from d9d_testing.suites.dataset import DatasetSuite
from d9d_testing.suites.inference.task import InferenceTaskSuite
from d9d_testing.suites.model import ModelSuite
from d9d_testing.suites.peft import PeftSuite
from d9d_testing.suites.schedule import ScheduleSuite
from d9d_testing.suites.strategy import StrategySuite
from d9d_testing.suites.task import TaskSuite
from torch import nn


def skipped(reason: str) -> Any:
    return pytest.raises(pytest.skip.Exception, match=reason)


# --- models, fine-tuning methods, strategies, schedules, tasks and datasets


def test_suites_skip_what_their_components_do_not_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec: Any = SimpleNamespace(hugging_face=None, flops=None, name="m", provides={"a"})
    nothing: Any = None
    for check in (
        lambda: ModelSuite().test_hugging_face_round_trip_is_bitwise(spec, nothing, nothing),
        lambda: ModelSuite().test_matrices_are_exported_as_linear_layers_hold_them(spec, nothing),
    ):
        with skipped("the model has no Hugging Face format"):
            check()
    monkeypatch.setattr(
        model_suite, "_LAYOUT_PLUGINS", ("no_such_package.plugin", "d9d_core.plugin", "nor_this.plugin")
    )
    with skipped("needs no_such_package.plugin, nor_this.plugin"):
        ModelSuite().test_every_data_parallel_layout_computes_the_same(nothing)
    with pytest.raises(NotImplementedError):
        ModelSuite().reference_logits(nothing, nothing, nothing)

    class Method(PeftSuite):
        matches_nothing = {}

        def build(self, **_: Any) -> Any:
            return object()

    with skipped("Method.matches_nothing has no fields that match no layer"):
        Method().test_a_method_that_matches_nothing_is_refused()
    with skipped("the method does not implement off"):
        Method().test_switched_off_it_computes_as_the_model_did(False)
    monkeypatch.setattr(peft_suite, "find_spec", lambda name: None if name == "d9d_parallel" else name)
    with skipped("needs d9d-parallel"):
        Method().need_layouts()
    monkeypatch.setattr(peft_suite, "find_spec", lambda name: name)
    Method().need_layouts()

    class File(ScheduleSuite):
        plugin = "mine.py"

    with skipped("a single-file plugin"):
        File().test_it_is_made_without_torch()

    class Data(DatasetSuite):
        def build(self, **_: Any) -> Any:
            return None

    with skipped("Data overrides build.., so another process cannot build the dataset"):
        Data().test_order_is_the_same_in_another_process(tmp_path)
    with pytest.raises(AssertionError, match=r"^InferenceTaskSuite must override case\(\); return outputs of a model"):
        InferenceTaskSuite().case()


def test_a_method_that_starts_from_weights_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[float] = []

    class Starts:
        def inject(self, stage: nn.Module) -> frozenset[str]:
            return frozenset({"weight"})

        def start(self, stage: Any) -> None:
            started.append(stage.weight[0, 0].item())

    class Method(PeftSuite):
        def on_meta(self) -> nn.Module:
            with torch.device("meta"):
                return nn.Linear(2, 2)

    monkeypatch.setattr(peft_suite, "StartsFromWeights", Starts)
    monkeypatch.setattr(peft_suite, "initialise", lambda stage, seed, device: stage.weight.data.fill_(7.0))
    stage, named = Method().adapted(Starts())
    assert (started, named) == ([7.0], {"weight"})
    assert bool(stage.bias.isnan().all())  # what initialisation leaves out shows
    assert Method().adapted()[1] == frozenset()
    assert started == [7.0]


def test_a_strategy_without_declared_collectives_declares_none() -> None:
    class Undeclared(StrategySuite):
        meshes = ({"dp_shard": 2},)
        settings = ({"a": 1}, {"a": 2})
        declares_collectives = False
        found: Any = (None, None)

        def applied(self, mesh: Any, settings: Any) -> Any:
            return None, SimpleNamespace(collectives=self.found[settings["a"] - 1])

    Undeclared().test_the_collectives_of_a_traced_step_are_those_it_declares()
    Undeclared.found = (None, ())
    with pytest.raises(AssertionError, match="'a': 2}: Applied.collectives is declared; remove declares_collectives"):
        Undeclared().test_the_collectives_of_a_traced_step_are_those_it_declares()
    Undeclared.declares_collectives = True
    with pytest.raises(AssertionError, match="'a': 1}: Applied.collectives is None, so that d9d explain cannot list"):
        Undeclared().test_the_collectives_of_a_traced_step_are_those_it_declares()


def test_sums_of_a_task_are_numbers_of_all_samples() -> None:
    class Sums(TaskSuite):
        def whole(self) -> Any:
            return "all"

        def sums(self, task: Any, samples: Any) -> Any:
            return {"a": torch.tensor(2.5), task: torch.tensor(1.0 if samples == "all" else 0.0)}

    assert Sums()._numbers("b") == {"a": 2.5, "b": 1.0}
