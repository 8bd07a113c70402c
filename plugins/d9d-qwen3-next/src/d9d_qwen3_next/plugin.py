"""Plugin declaration of the models ``qwen3_next``, ``qwen3_5`` and ``qwen3_5_moe``."""

from __future__ import annotations

from collections.abc import Iterable

from d9d_core.plugin import ModelSpec, Ref, hookimpl
from d9d_nn.decoder.capabilities import CAPABILITIES

D9D_API = 2
#: Capabilities of models with experts.
EXPERTS = frozenset(
    {"model:adapts", "model:banks", "model:layout_dependent", "model:experts", "model:losses", "model:tallies"}
)


@hookimpl
def d9d_models() -> Iterable[ModelSpec]:
    """Declare the models ``qwen3_next``, ``qwen3_5`` and ``qwen3_5_moe``."""
    for name, kind, tiny, types, title in (
        ("qwen3_next", "Qwen3Next", "tiny", {"qwen3_next"}, "Qwen3-Next with experts"),
        ("qwen3_5", "Qwen35", "tiny_dense", {"qwen3_5", "qwen3_5_text"}, "Qwen3.5 dense"),
        ("qwen3_5_moe", "Qwen35Moe", "tiny_moe", {"qwen3_5_moe", "qwen3_5_moe_text"}, "Qwen3.5 with experts"),
    ):
        yield ModelSpec(
            name=name,
            summary=f"{title}: Gated DeltaNet in most layers, gated attention in the others.",
            config=Ref(f"d9d_qwen3_next.config:{kind}Config"),
            build=Ref("d9d_qwen3_next.model:Qwen3Next"),
            hugging_face=Ref(f"d9d_qwen3_next.hugging_face:{kind}HuggingFace"),
            model_types=frozenset(types),
            flops=Ref("d9d_nn.decoder.flops:training_flops_per_token"),
            cost=Ref("d9d_qwen3_next.costs:stage_cost"),
            tiny=Ref(f"d9d_qwen3_next.config:{tiny}"),
            provides=CAPABILITIES if name == "qwen3_5" else CAPABILITIES | EXPERTS,
        )
