"""The model keeps what holds for every model, untied and tied."""

from __future__ import annotations

from typing import Any

import pytest
from d9d_core.plugin import ModelSpec
from d9d_testing.suites.model import ModelSuite


class TestQwen3(ModelSuite):
    plugin = "d9d_qwen3.plugin"
    target = "qwen3"
    reference = "transformers:AutoModelForCausalLM"


class TestQwen3Tied(ModelSuite):
    plugin = "d9d_qwen3.plugin"
    target = "qwen3"
    reference = "transformers:AutoModelForCausalLM"

    @pytest.fixture
    def config(self, spec: ModelSpec) -> Any:
        return spec.tiny.load()().model_copy(update={"tie_embeddings": True})
