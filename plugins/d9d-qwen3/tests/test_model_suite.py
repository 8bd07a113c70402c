"""The model keeps what holds for every model, untied and tied."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from d9d_core.plugin import ModelSpec
from d9d_testing.suites.model import ModelSuite


@pytest.mark.thorough
class TestQwen3(ModelSuite):
    plugin = "d9d_qwen3.plugin"
    target = "qwen3"
    reference = "transformers:AutoModelForCausalLM"
    # Of two layers; what writes to the residual stream is divided by sqrt(2 x 2).
    initial_std: ClassVar = {"*.[qkv]_proj.weight": 0.02, "*.o_proj.weight": 0.01, "*.down_proj.weight": 0.01}

    @pytest.mark.full
    def test_every_data_parallel_layout_computes_the_same(self, config: Any) -> None:
        super().test_every_data_parallel_layout_computes_the_same(config)


@pytest.mark.thorough
class TestQwen3Tied(ModelSuite):
    plugin = "d9d_qwen3.plugin"
    target = "qwen3"
    reference = "transformers:AutoModelForCausalLM"

    @pytest.fixture
    def config(self, spec: ModelSpec) -> Any:
        return spec.tiny.load()().model_copy(update={"tie_embeddings": True})

    @pytest.mark.full
    def test_every_data_parallel_layout_computes_the_same(self, config: Any) -> None:
        super().test_every_data_parallel_layout_computes_the_same(config)
