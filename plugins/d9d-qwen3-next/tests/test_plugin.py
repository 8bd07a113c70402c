"""The declaration keeps what holds for every plugin."""

from __future__ import annotations

import pytest
from d9d_qwen3_next.config import Qwen35Config
from d9d_testing.suites.fresh import import_fresh
from d9d_testing.suites.plugin import PluginSuite
from pydantic import ValidationError


class TestPlugin(PluginSuite):
    plugin = "d9d_qwen3_next.plugin"
    builds_on = ("d9d_moe.plugin", "d9d_nn.plugin")


def test_configs_and_formats_are_read_without_torch() -> None:
    modules = ("d9d_qwen3_next.config", "d9d_qwen3_next.costs", "d9d_qwen3_next.hugging_face")
    facts = import_fresh(*modules)
    assert all("torch" not in facts[module].modules for module in modules)


@pytest.mark.parametrize("mask", ["bidirectional", "prefix", "blocks"])
def test_recurrent_layers_have_causal_attention_only(mask: str) -> None:
    heads = {"topic": {"kind": "classification", "num_classes": 2}}
    with pytest.raises(ValidationError, match=f"{mask} has no meaning in Gated DeltaNet, .*; choose causal"):
        Qwen35Config.model_validate({"preset": "9b", "tie_embeddings": False, "heads": heads, "attention_mask": mask})
