"""The model with experts keeps what holds for every model: as it comes, and with a dense layer and balancing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from d9d_core.kernel import OpSignature
from d9d_core.plugin import ModelSpec, Ref
from d9d_core.traits import HasOps, modules_with
from d9d_nn.ops import grouped_linear_torch
from d9d_qwen3.model import Qwen3
from d9d_qwen3.moe_config import Qwen3MoeConfig
from d9d_testing.suites.model import ModelSuite


class OnDevice(Ref):
    """Builds with the products by expert that GPUs choose; the reference reads the counts of rows."""

    def load(self) -> Callable[..., Qwen3]:
        def build(*args: Any) -> Qwen3:
            model = Qwen3(*args).bfloat16()
            for module in modules_with(model, HasOps).values():
                for slot in module.op_slots().values():
                    if slot.op == "grouped_linear":
                        signature = OpSignature(slot.op, "cuda", "bfloat16", slot.static)
                        slot.bind("grouped_mm", grouped_linear_torch.build(signature))
            return model

        return build


class MoeSuite(ModelSuite):
    plugin = "d9d_qwen3.plugin"
    target = "qwen3_moe"
    flops_per_parameter = (1.5, 9.0)
    changes: dict[str, Any]

    @pytest.fixture
    def config(self, spec: ModelSpec) -> Any:
        return Qwen3MoeConfig.model_validate(spec.tiny.load()().model_dump() | self.changes)

    def test_a_step_never_waits_for_the_device(self, spec: ModelSpec, config: Any) -> None:
        super().test_a_step_never_waits_for_the_device(replace(spec, build=OnDevice("on:device")), config)


@pytest.mark.thorough
class TestQwen3Moe(MoeSuite):
    changes = {}
    reference = "transformers:AutoModelForCausalLM"

    # With balancing, below, there is more to compare.
    test_every_data_parallel_layout_computes_the_same = None

    # In bfloat16 their router decides near ties otherwise: see test_moe_hugging_face.py.
    @pytest.mark.thorough
    @pytest.mark.parametrize("dtype", ["float32"])
    def test_logits_and_every_gradient_are_those_of_the_reference(
        self, spec: ModelSpec, config: Any, tmp_path: Path, dtype: str
    ) -> None:
        super().test_logits_and_every_gradient_are_those_of_the_reference(spec, config, tmp_path, dtype)


@pytest.mark.thorough
class TestQwen3MoeBalanced(MoeSuite):
    changes = {
        "dense_layers": [0],
        "balancing": [
            {"name": "auxiliary_loss", "coefficient": 0.1},
            {"name": "z_loss", "coefficient": 0.01},
            {"name": "bias_update"},
        ],
    }

    @pytest.mark.full
    def test_every_data_parallel_layout_computes_the_same(self, config: Any) -> None:
        super().test_every_data_parallel_layout_computes_the_same(config)
