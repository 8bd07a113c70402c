"""What d9d-qwen3 offers: the model qwen3."""

from __future__ import annotations

from collections.abc import Iterable

from d9d_core.plugin import ModelSpec, Ref, hookimpl

D9D_API = 1


@hookimpl
def d9d_models() -> Iterable[ModelSpec]:
    """Qwen3 dense."""
    yield ModelSpec(
        name="qwen3",
        summary="Qwen3 dense: grouped queries with head norms, rotary positions, SwiGLU.",
        config=Ref("d9d_qwen3.config:Qwen3Config"),
        build=Ref("d9d_qwen3.model:Qwen3"),
        hugging_face=Ref("d9d_qwen3.hugging_face:Qwen3HuggingFace"),
        flops=Ref("d9d_qwen3.flops:training_flops_per_token"),
        tiny=Ref("d9d_qwen3.config:tiny"),
        provides=frozenset(
            {
                "model:blocks",
                "model:causal_lm",
                "model:context_parallel",
                "model:late_init",
                "model:ops",
                "model:divisible",
                "model:pipeline",
                "model:tensor_parallel",
            }
        ),
    )
