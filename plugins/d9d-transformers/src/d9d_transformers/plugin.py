"""Plugin declaration of the model ``transformers``."""

from __future__ import annotations

from collections.abc import Iterable

from d9d_core.plugin import ANY_MODEL_TYPE, ModelSpec, Ref, hookimpl

D9D_API = 2


@hookimpl
def d9d_models() -> Iterable[ModelSpec]:
    """Declare the model ``transformers``: any decoder model of transformers that passes the checks of this plugin."""
    yield ModelSpec(
        name="transformers",
        summary="A decoder language model of transformers, by the model_type of its config.",
        config=Ref("d9d_transformers.config:TransformersConfig"),
        build=Ref("d9d_transformers.build:build"),
        hugging_face=Ref("d9d_transformers.hugging_face:TransformersFormat"),
        model_types=frozenset({ANY_MODEL_TYPE}),
        flops=Ref("d9d_transformers.flops:training_flops_per_token"),
        cost=Ref("d9d_transformers.costs:stage_cost"),
        tiny=Ref("d9d_transformers.config:tiny"),
        provides=frozenset(
            {
                "model:adapts", "model:banks", "model:blocks", "model:causal_lm", "model:context_parallel",
                "model:experts", "model:late_init", "model:layout_dependent", "model:losses", "model:ops",
                "model:pipeline", "model:tallies", "model:tensor_parallel",
            }
        ),
    )  # fmt: skip
