"""Plugin declaration of the model ``gpt_oss``."""

from __future__ import annotations

from collections.abc import Iterable

from d9d_core.plugin import ModelSpec, Ref, hookimpl
from d9d_nn.decoder.capabilities import CAPABILITIES

D9D_API = 2


@hookimpl
def d9d_models() -> Iterable[ModelSpec]:
    """Declare the model ``gpt_oss``."""
    yield ModelSpec(
        name="gpt_oss",
        summary="gpt-oss: experts with biases in every layer, attention with sinks, alternating windows.",
        config=Ref("d9d_gpt_oss.config:GptOssConfig"),
        build=Ref("d9d_gpt_oss.model:GptOss"),
        hugging_face=Ref("d9d_gpt_oss.hugging_face:GptOssHuggingFace"),
        model_types=frozenset({"gpt_oss"}),
        flops=Ref("d9d_nn.decoder.flops:training_flops_per_token"),
        cost=Ref("d9d_gpt_oss.costs:stage_cost"),
        tiny=Ref("d9d_gpt_oss.config:tiny"),
        provides=CAPABILITIES - {"model:adjacent_weights"}
        | {"model:banks", "model:experts", "model:layout_dependent", "model:losses", "model:tallies"},
    )
