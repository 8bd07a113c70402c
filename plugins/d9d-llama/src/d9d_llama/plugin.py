"""Plugin declaration of the models ``llama``, ``mistral``, ``qwen2`` and ``glm``."""

from __future__ import annotations

from collections.abc import Iterable

from d9d_core.plugin import ModelSpec, Ref, hookimpl
from d9d_nn.decoder.capabilities import CAPABILITIES

D9D_API = 2


@hookimpl
def d9d_models() -> Iterable[ModelSpec]:
    """Declare dense models with grouped-query attention, rotary positions and SwiGLU."""
    for name, prefix, model, summary in (
        ("llama", "Llama", "Llama", "Llama 3: grouped-query attention, rotary positions, SwiGLU."),
        ("mistral", "Mistral", "Llama", "Mistral: as llama, with a sliding window in all layers or none."),
        ("qwen2", "Qwen2", "Llama", "Qwen2 and Qwen2.5: as llama, with biases of queries, keys and values."),
        ("glm", "Glm", "Glm", "GLM-4: as qwen2, with rotary positions in a part of each head."),
    ):
        yield ModelSpec(
            name=name,
            summary=summary,
            config=Ref(f"d9d_llama.config:{prefix}Config"),
            build=Ref(f"d9d_llama.model:{model}"),
            hugging_face=Ref(f"d9d_llama.hugging_face:{prefix}HuggingFace"),
            model_types=frozenset({name}),
            flops=Ref("d9d_nn.decoder.flops:training_flops_per_token"),
            cost=Ref("d9d_llama.config:stage_cost"),
            tiny=Ref(f"d9d_llama.config:tiny_{name}"),
            provides=CAPABILITIES,
        )
