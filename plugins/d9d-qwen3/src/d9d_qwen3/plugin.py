"""Plugin declaration of the models ``qwen3`` and ``qwen3_moe``."""

from __future__ import annotations

from collections.abc import Iterable

from d9d_core.plugin import ModelSpec, Ref, hookimpl
from d9d_nn.decoder.capabilities import CAPABILITIES

D9D_API = 2


@hookimpl
def d9d_models() -> Iterable[ModelSpec]:
    """Declare the models ``qwen3`` and ``qwen3_moe``."""
    yield ModelSpec(
        name="qwen3",
        summary="Qwen3 dense: grouped-query attention with head norms, rotary positions, SwiGLU.",
        config=Ref("d9d_qwen3.config:Qwen3Config"),
        build=Ref("d9d_qwen3.model:Qwen3"),
        hugging_face=Ref("d9d_qwen3.hugging_face.dense:Qwen3HuggingFace"),
        model_types=frozenset({"qwen3"}),
        flops=Ref("d9d_nn.decoder.flops:training_flops_per_token"),
        cost=Ref("d9d_qwen3.costs:stage_cost"),
        tiny=Ref("d9d_qwen3.config:tiny"),
        provides=CAPABILITIES,
    )
    yield ModelSpec(
        name="qwen3_moe",
        summary="Qwen3 with mixtures of experts: as qwen3, but a few of many SwiGLU experts compute each token.",
        config=Ref("d9d_qwen3.moe_config:Qwen3MoeConfig"),
        build=Ref("d9d_qwen3.model:Qwen3"),
        hugging_face=Ref("d9d_qwen3.hugging_face.moe:Qwen3MoeHuggingFace"),
        model_types=frozenset({"qwen3_moe"}),
        flops=Ref("d9d_nn.decoder.flops:training_flops_per_token"),
        cost=Ref("d9d_qwen3.costs:stage_cost"),
        tiny=Ref("d9d_qwen3.moe_config:tiny"),
        provides=CAPABILITIES
        | {"model:adapts", "model:banks", "model:layout_dependent", "model:experts", "model:losses", "model:tallies"},
    )
