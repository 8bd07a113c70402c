"""Single-file plugin: a decoder whose layers mix tokens by Mamba-2 or by attention, for tests of many layouts."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, ClassVar, Literal

from d9d_core.model import Stage
from d9d_core.plugin import ModelSpec, Ref, hookimpl
from d9d_nn.attention.masks import AttentionMasks
from d9d_nn.decoder.block import DecoderBlock, grouped_query_attention, swiglu
from d9d_nn.decoder.capabilities import CAPABILITIES
from d9d_nn.decoder.config import DenseConfig
from d9d_nn.decoder.model import DecoderModel
from d9d_nn.state_space.mamba2 import Mamba2
from torch import Tensor

D9D_API = 2


class MambaConfig(DenseConfig):
    """Config of a decoder with layers of Mamba-2; all layers of it, unless some have attention."""

    name: Literal["mamba_decoder"] = "mamba_decoder"
    """Selects the plugin."""
    attention_layers: tuple[int, ...] = ()
    """Layers with attention instead."""
    mamba_heads: int = 8
    """Heads of Mamba-2."""
    mamba_groups: int = 4
    """Groups of Mamba-2."""
    time_step_limit: tuple[float, float] = (0.0, 10.0)
    """Smallest and largest step."""

    def kind(self, layer: int) -> Hashable:
        return layer in self.attention_layers


class MambaBlock(DecoderBlock):
    """Decoder block: Mamba-2 or attention, then SwiGLU."""

    routes: ClassVar[bool] = False

    def __init__(self, config: MambaConfig, layer: int) -> None:
        self.is_recurrent = layer not in config.attention_layers
        std, output_std = config.initialization.std, config.initialization.output_std(config.num_layers)
        mixer = grouped_query_attention(config, layer) if not self.is_recurrent else Mamba2(
            config.hidden_size, heads=config.mamba_heads, head_dim=8, groups=config.mamba_groups, state_dim=6, std=std,
            output_std=output_std, norm_eps=config.rms_norm_eps, bias=True, time_step_limit=config.time_step_limit,
        )  # fmt: skip
        super().__init__(config, mixer, swiglu(config, config.intermediate_size))

    def attention_slots(self) -> list[Any]:
        return [] if self.is_recurrent else list(super().attention_slots())

    def mix(self, normed: Tensor, rotation: Any, documents: AttentionMasks | Tensor | None) -> Tensor:
        if not self.is_recurrent:
            return super().mix(normed, rotation, documents)
        numbers = documents.documents if isinstance(documents, AttentionMasks) else documents
        return self.attention(normed, numbers)  # type: ignore[no-any-return]


class MambaDecoder(DecoderModel):
    """Decoder with layers of Mamba-2."""

    def __init__(self, config: MambaConfig, stage: Stage = Stage(), *, heads: bool = True) -> None:  # noqa: B008
        super().__init__(config, stage, MambaBlock, heads=heads)


@hookimpl
def d9d_models() -> Iterable[ModelSpec]:
    """Declare the model ``mamba_decoder``."""
    yield ModelSpec(
        name="mamba_decoder",
        summary="Decoder with layers of Mamba-2.",
        config=Ref(f"{__name__}:MambaConfig"),
        build=Ref(f"{__name__}:MambaDecoder"),
        provides=CAPABILITIES,
    )
