"""The models keep what holds for every model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
from d9d_core.plugin import ModelSpec
from d9d_testing.suites.model import ModelSuite


class Suite(ModelSuite):
    plugin = "d9d_qwen3_next.plugin"
    reference = "transformers:AutoModelForCausalLM"
    initial_std: ClassVar = {"*.[qkv]_proj.weight": 0.02, "*.o_proj.weight": 0.01, "*_norm.weight": 0.0}

    @pytest.mark.full
    def test_every_data_parallel_layout_computes_the_same(self, config: Any) -> None:
        super().test_every_data_parallel_layout_computes_the_same(config)


class ExpertsSuite(Suite):
    flops_per_parameter = (1.5, 9.0)

    # The reference of products by expert reads the counts of rows, on a CPU.
    test_a_step_never_waits_for_the_device = None

    # In bfloat16 routers decide near ties otherwise.
    @pytest.mark.parametrize("dtype", ["float32"])
    def test_logits_and_every_gradient_are_those_of_the_reference(
        self, spec: ModelSpec, config: Any, tmp_path: Path, dtype: str
    ) -> None:
        super().test_logits_and_every_gradient_are_those_of_the_reference(spec, config, tmp_path, dtype)


@pytest.mark.thorough
class TestQwen3Next(ExpertsSuite):
    target = "qwen3_next"


@pytest.mark.thorough
class TestQwen35(Suite):
    target = "qwen3_5"


@pytest.mark.thorough
class TestQwen35Moe(ExpertsSuite):
    target = "qwen3_5_moe"
