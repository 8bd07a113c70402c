"""Plugin declaration of the model ``gemma``."""

from __future__ import annotations

from collections.abc import Iterable

from d9d_core.plugin import ModelSpec, Ref, hookimpl
from d9d_nn.decoder.capabilities import CAPABILITIES

D9D_API = 2


@hookimpl
def d9d_models() -> Iterable[ModelSpec]:
    """Declare the model ``gemma``: Gemma 2 and the text models of Gemma 3."""
    yield ModelSpec(
        name="gemma",
        summary="Gemma 2 and 3: four norms in a layer, GeGLU, alternating windows, soft caps or head norms.",
        config=Ref("d9d_gemma.config:GemmaConfig"),
        build=Ref("d9d_gemma.model:Gemma"),
        hugging_face=Ref("d9d_gemma.hugging_face:GemmaHuggingFace"),
        model_types=frozenset({"gemma2", "gemma3_text"}),
        flops=Ref("d9d_nn.decoder.flops:training_flops_per_token"),
        cost=Ref("d9d_gemma.config:stage_cost"),
        tiny=Ref("d9d_gemma.config:tiny"),
        provides=CAPABILITIES,
    )
