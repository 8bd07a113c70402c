"""Plugin declaration of the model ``deepseek_v3``."""

from __future__ import annotations

from collections.abc import Iterable

from d9d_core.plugin import ModelSpec, Ref, hookimpl
from d9d_nn.decoder.capabilities import CAPABILITIES

D9D_API = 2


@hookimpl
def d9d_models() -> Iterable[ModelSpec]:
    """Declare the model ``deepseek_v3``."""
    yield ModelSpec(
        name="deepseek_v3",
        summary="DeepSeek-V3: latent attention, experts chosen by sigmoid scores within groups, a shared expert.",
        config=Ref("d9d_deepseek.config:DeepSeekConfig"),
        build=Ref("d9d_deepseek.model:DeepSeek"),
        hugging_face=Ref("d9d_deepseek.hugging_face:DeepSeekHuggingFace"),
        model_types=frozenset({"deepseek_v3"}),
        flops=Ref("d9d_nn.decoder.flops:training_flops_per_token"),
        cost=Ref("d9d_deepseek.costs:stage_cost"),
        tiny=Ref("d9d_deepseek.config:tiny"),
        provides=(CAPABILITIES - {"model:adjacent_weights"})
        | {"model:adapts", "model:banks", "model:layout_dependent", "model:experts", "model:losses", "model:tallies"},
    )
