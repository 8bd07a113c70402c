"""The model keeps what holds for every model, with each kind of queries, and computes what transformers computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from d9d_core.kernel import OpSignature
from d9d_core.plugin import ModelSpec, Ref
from d9d_core.traits import HasOps, modules_with
from d9d_deepseek.config import DeepSeekConfig
from d9d_deepseek.model import DeepSeek
from d9d_nn.ops import grouped_linear_torch
from d9d_testing.suites.model import ModelSuite
from d9d_testing.suites.plugin import PluginSuite
from d9d_testing.suites.support.models import initialised
from torch import nn

ALL_EXPERTS = {"num_experts": 4, "experts_per_token": 4, "num_groups": 1, "top_groups": 1}


class OnDevice(Ref):
    """Builds with the products by expert that GPUs choose; the reference reads the counts of rows."""

    def load(self) -> Callable[..., DeepSeek]:
        def build(*args: Any) -> DeepSeek:
            model = DeepSeek(*args).bfloat16()
            for module in modules_with(model, HasOps).values():
                for slot in module.op_slots().values():
                    if slot.op == "grouped_linear":
                        signature = OpSignature(slot.op, "cuda", "bfloat16", slot.static)
                        slot.bind("grouped_mm", grouped_linear_torch.build(signature))
            return model

        return build


class Suite(ModelSuite):
    plugin = "d9d_deepseek.plugin"
    target = "deepseek_v3"
    reference = "transformers:AutoModelForCausalLM"
    flops_per_parameter = (1.5, 9.0)
    initial_std: ClassVar = {"*.kv_*[np].weight": 0.02, "*.attention.*norm.weight": 0.0, "*.experts.gate_proj": 0.02}
    changes: ClassVar[dict[str, Any]] = {}

    @pytest.fixture
    def config(self, spec: ModelSpec) -> Any:
        return DeepSeekConfig.model_validate(spec.tiny.load()().model_dump() | self.changes)

    def test_a_step_never_waits_for_the_device(self, spec: ModelSpec, config: Any) -> None:
        super().test_a_step_never_waits_for_the_device(replace(spec, build=OnDevice("on:device")), config)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_logits_and_every_gradient_are_those_of_the_reference(
        self, spec: ModelSpec, config: Any, tmp_path: Path, dtype: str
    ) -> None:
        if dtype == "bfloat16":  # with all experts, because rounding decides near ties of scores
            config = DeepSeekConfig.model_validate(config.model_dump() | ALL_EXPERTS)
        super().test_logits_and_every_gradient_are_those_of_the_reference(spec, config, tmp_path, dtype)


@pytest.mark.thorough
class TestLatentQueries(Suite):
    initial_std: ClassVar = Suite.initial_std | {"*.q_proj.[ud]*.weight": 0.02}

    # With balancing, below, there is more to compare.
    test_every_data_parallel_layout_computes_the_same = None


@pytest.mark.thorough
class TestPlainQueries(Suite):
    changes: ClassVar = {
        "q_lora_rank": None,
        "balancing": [
            {"name": "auxiliary_loss", "coefficient": 0.1},
            {"name": "z_loss", "coefficient": 0.01},
            {"name": "bias_update"},
        ],
    }

    @pytest.mark.full
    def test_every_data_parallel_layout_computes_the_same(self, config: Any) -> None:
        super().test_every_data_parallel_layout_computes_the_same(config)


@pytest.mark.thorough
class TestFurtherTokens(Suite):
    changes: ClassVar = {"mtp": {"depths": 1}}

    # In test_multi_token.py, because files have copies of weights, transformers computes no further tokens, and the
    # blocks of further tokens are not divided into stages.
    test_hugging_face_round_trip_is_bitwise = None
    test_logits_and_every_gradient_are_those_of_the_reference = None
    test_layers_are_split_as_the_job_says = None
    test_two_stages_compute_what_the_whole_does = None
    # In tests/test_further_token_layouts.py.
    test_every_data_parallel_layout_computes_the_same = None

    @pytest.fixture
    def language_model(self, spec: ModelSpec, config: Any) -> nn.Module:
        """Model whose losses of further tokens have factors, as in a training loop."""
        model = initialised(spec, config)
        assert isinstance(model, DeepSeek)
        assert model.mtp is not None
        for factor in model.mtp.loss_factors().values():
            factor.fill_(0.5)
        return model


class TestPlugin(PluginSuite):
    plugin = "d9d_deepseek.plugin"
    builds_on = ("d9d_moe.plugin", "d9d_nn.plugin")
