"""The declaration keeps what holds for every plugin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from d9d_nn import plugin
from d9d_testing.suites.fresh import import_fresh
from d9d_testing.suites.plugin import PluginSuite


class TestPlugin(PluginSuite):
    plugin = "d9d_nn.plugin"
    builds_on = ("d9d_testing.toy.plugin",)
    examples: ClassVar[Mapping[str, Any]] = {"distillation": {"teacher": {"name": "toy_model"}}}


def test_configs_load_without_torch() -> None:
    facts = import_fresh("d9d_nn.causal_lm.config", "d9d_nn.initialization")
    assert "torch" not in facts["d9d_nn.causal_lm.config"].modules | facts["d9d_nn.initialization"].modules


def test_tasks_read_rows_of_tokens_and_labels_for_each_token_or_each_sample() -> None:
    tokens, samples = {"tokens": 2}, {"samples": 1}
    targets = {**tokens, "targets": 2}
    assert {spec.name: spec.reads for spec in plugin.d9d_tasks()} == {
        "causal_lm": targets,
        "classification": {**tokens, "labels": 1},
        "dpo": {**targets, **samples},
        "distillation": targets,
        "embedding": {**tokens, **samples},
        "token_classification": {**tokens, "labels": 2},
    }
    found = {spec.name: spec.reads for spec in plugin.d9d_inference_tasks()}
    assert {name: reads for name, reads in found.items() if reads != tokens} == {
        "log_probs": targets,
        "perplexity": targets,
    }


def test_only_cudnn_may_compute_other_bits_in_each_run() -> None:
    assert [spec.name for spec in plugin.d9d_kernels() if not spec.deterministic] == ["sdpa_cudnn"]
