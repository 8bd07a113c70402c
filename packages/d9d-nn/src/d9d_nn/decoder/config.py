"""Config of a decoder: fields of attention, embeddings, norms and heads; of dense decoders also feed-forward layers.

Dense decoders have a sliding window in all layers or in the later layers (:class:`DenseConfig`), or in a repeated
pattern (:class:`AlternatingConfig`).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from typing import Any, ClassVar, Literal

from d9d_core.config import ModelConfig
from pydantic import ConfigDict, Field, ValidationInfo, field_validator, model_validator

from d9d_nn.decoder.multi_token_config import MultiTokenPrediction
from d9d_nn.decoder.presets import Presets, fill, sizes_or_preset
from d9d_nn.heads.config import CausalLMHeadConfig, Heads, check_heads
from d9d_nn.initialization import Initialization
from d9d_nn.rope.scaling import Rope, RopeScaling

#: Kind of a layer's attention, as transformers calls it.
LayerType = Literal["full_attention", "sliding_attention"]
#: Names of the rules that select the positions of its document that a token attends to.
AttentionMask = Literal["causal", "bidirectional", "prefix", "blocks"]
#: Valid names in the map ``added_tokens``.
_PART = re.compile("[a-z][a-z0-9_]*")
#: Projections of attention, all of which may have biases.
PROJECTIONS = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})


def keys_of(window: int | None, sequence_length: int, *, bidirectional: bool = False) -> float:
    """Average number of keys that a token attends to in a layer with this window; ``None`` for no window."""
    # Area of the score matrix per query: a causal mask leaves a triangle, and a window cuts off a smaller one.
    # Bidirectional attention has both triangles twice.
    beyond = max(sequence_length - (window or sequence_length), 0)
    causal = sequence_length / 2 - beyond**2 / (2 * sequence_length)
    return 2 * causal if bidirectional else causal


class DecoderConfig(ModelConfig, ABC):
    """Base config of a decoder: fields of attention, embeddings, norms and heads; families add feed-forward layers."""

    model_config = ConfigDict(json_schema_extra=sizes_or_preset)

    presets: ClassVar[Presets] = {}

    preset: str | None = None
    """Published size, which sets every field that is not given."""

    vocab_size: int = Field(gt=0)
    """Number of token ids."""

    added_tokens: int | dict[str, int] = 0
    """Number of last token ids that get a separate weight, which can be trained alone. A map such as
    {chat: 4, tools: 8} makes several such weights: one for the last 8 ids (tools), one for the 4 ids before (chat)."""

    hidden_size: int = Field(gt=0)
    """Features of a token between layers."""

    num_layers: int = Field(gt=0, le=1024)
    """Number of decoder layers."""

    num_attention_heads: int = Field(gt=0)
    """Query heads of a layer."""

    num_key_value_heads: int = Field(gt=0)
    """Key and value heads of a layer; divides the number of query heads."""

    head_dim: int = Field(default=0, ge=0, validate_default=True)
    """Features of a head, an even number; 0 takes hidden_size / num_attention_heads."""

    rope_theta: float = Field(default=1_000_000.0, gt=1, allow_inf_nan=False)
    """Base of the frequencies of rotary positions."""

    rope_scaling: RopeScaling | None = None
    """Scaling of rotary positions beyond the lengths of pretraining; null for none."""

    sliding_window: int | None = Field(default=None, gt=0)
    """Number of positions that a token of a sliding layer attends to, including its own; null for no sliding layers."""

    attention_bias: bool = False
    """Biases in the four projections of attention."""

    rms_norm_eps: float = Field(default=1e-6, gt=0, allow_inf_nan=False)
    """Constant added to the mean square in every norm."""

    tie_embeddings: bool = False
    """Use the embedding's weight for the causal_lm head."""

    max_positions: int = Field(default=32768, gt=0)
    """Longest sequence that the model supports."""

    initialization: Initialization = Initialization()
    """Initialisation of the weights."""

    heads: Heads = {"causal_lm": CausalLMHeadConfig()}
    """Heads on the hidden states, by name; kinds: causal_lm, classification, token_classification, embedding,
    hidden_states."""

    attention_mask: AttentionMask = "causal"
    """Positions of its document that a token attends to: causal, its own and earlier ones; bidirectional, all, as in an
    encoder; prefix, earlier ones, and all of the document's prefix; blocks, earlier ones, and all of its own block."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, value: Any) -> Any:
        return fill(value, cls.presets) if isinstance(value, Mapping) else value

    @field_validator("added_tokens")
    @classmethod
    def _leaves_regular_tokens(cls, value: int | dict[str, int], info: ValidationInfo) -> int | dict[str, int]:
        words, parts = info.data.get("vocab_size"), {"added": value} if isinstance(value, int) else value
        if isinstance(value, int) and value < 0:
            raise ValueError(f"{value} is not greater than or equal to 0; give the number of added token ids")
        for name, size in () if isinstance(value, int) else parts.items():
            if name == "regular" or not _PART.fullmatch(name):
                raise ValueError(
                    f"'{name}' cannot name a part; begin with a lower-case letter, then use only lower-case letters, "
                    "digits and underscores, and not 'regular', the part before the added tokens"
                )
            if size < 1:
                raise ValueError(f"{name}: {size} is not a positive number of token ids; leave the part out")
        if words is not None and sum(parts.values()) >= words:
            raise ValueError(
                f"{sum(parts.values())} of vocab_size = {words} token ids leaves no regular token; add fewer"
            )
        return parts.get("added", 0) if parts.keys() <= {"added"} else parts

    @field_validator("num_key_value_heads")
    @classmethod
    def _divides_query_heads(cls, value: int, info: ValidationInfo) -> int:
        heads = info.data.get("num_attention_heads")
        if heads is not None and heads % value:
            raise ValueError(f"{value} does not divide num_attention_heads = {heads}; choose a divisor")
        return value

    @field_validator("head_dim")
    @classmethod
    def _fill_head_dim(cls, value: int, info: ValidationInfo) -> int:
        hidden, heads = info.data.get("hidden_size"), info.data.get("num_attention_heads")
        if value == 0 and hidden is not None and heads is not None:
            value, rest = divmod(hidden, heads)
            if rest:
                raise ValueError(
                    f"hidden_size = {hidden} is not a multiple of num_attention_heads = {heads}; give head_dim"
                )
        if value % 2:
            raise ValueError(f"{value} is odd, but positions rotate pairs of features; choose an even head_dim")
        return value

    @field_validator("heads")
    @classmethod
    def _heads_fit(cls, value: Heads, info: ValidationInfo) -> Heads:
        hidden, layers, tied = (info.data.get(name) for name in ("hidden_size", "num_layers", "tie_embeddings"))
        check_heads(value, hidden_size=hidden, num_layers=layers, tied=tied)
        return value

    @field_validator("attention_mask")
    @classmethod
    def _hides_targets(cls, value: AttentionMask, info: ValidationInfo) -> AttentionMask:
        heads = info.data.get("heads", {})
        predicting = [name for name, head in heads.items() if head.kind == "causal_lm"]
        if value == "bidirectional" and predicting:
            raise ValueError(
                f"with bidirectional attention the causal_lm head '{predicting[0]}' sees the tokens that it predicts; "
                "set heads to others, such as an embedding or a classification head, or choose prefix"
            )
        return value

    @abstractmethod
    def feed_forward_parameters(self, layer: int) -> int:
        """Number of matrix elements that one token uses in the feed-forward part of this layer."""

    def multi_token(self) -> MultiTokenPrediction:
        """Settings of multi-token prediction; ``depths`` is 0 in families without it."""
        return MultiTokenPrediction()

    def value_features(self) -> int:
        """Features of a value head."""
        return self.head_dim

    def window(self, layer: int) -> int | None:  # noqa: ARG002 - subclasses may have two kinds of layers
        """Number of positions that a token of this layer attends to; ``None`` for all."""
        return self.sliding_window

    def rope(self, layer: int) -> Rope:  # noqa: ARG002 - subclasses may have two kinds of layers
        """Settings of the rotary positions of this layer."""
        return Rope(self.rope_theta, self.rope_scaling)

    def mixer_parameters(self, layer: int) -> int:  # noqa: ARG002 - subclasses may have two kinds of layers
        """Number of matrix elements that one token uses in the attention part of this layer."""
        return 2 * self.hidden_size * (self.num_attention_heads + self.num_key_value_heads) * self.head_dim

    def attended_keys(self, layer: int, sequence_length: int) -> float:
        """Average number of keys that a token of this layer attends to.

        Later keys inside of prefixes and blocks are not counted, because their number depends on the data.
        """
        bidirectional = self.attention_mask == "bidirectional"
        return keys_of(self.window(layer), sequence_length, bidirectional=bidirectional)

    def mask_kind(self) -> Literal["causal", "bidirectional", "blocks"]:
        """Kind of mask that all attention cores compute; for ``prefix``, it is ``blocks``."""
        return "blocks" if self.attention_mask == "prefix" else self.attention_mask

    def mixing_flops(self, layer: int, sequence_length: int) -> float:
        """FLOPs per token, forward and backward, of attention scores and weighted sums of values in this layer."""
        keys = self.attended_keys(layer, sequence_length)
        return 6.0 * self.num_attention_heads * (self.head_dim + self.value_features()) * keys

    def kind(self, layer: int) -> Hashable:
        """Key of a layer's structure: layers with equal keys are built alike."""
        return self.window(layer)

    def biased_projections(self) -> frozenset[str]:
        """Names of the attention projections with a bias."""
        return PROJECTIONS if self.attention_bias else frozenset()


class MultiTokenConfig(DecoderConfig, ABC):
    """Base config of decoders whose files may have layers of multi-token prediction."""

    mtp: MultiTokenPrediction = MultiTokenPrediction()
    """Multi-token prediction: training also predicts further tokens, by layers after the last one. Its losses are the
    series `loss/mtp_loss`, or `loss/mtp_loss_1` and so on with several depths."""

    @field_validator("mtp")
    @classmethod
    def _reads_one_language_model(cls, value: MultiTokenPrediction, info: ValidationInfo) -> MultiTokenPrediction:
        heads = info.data.get("heads")
        if value.depths and heads is not None and [head.kind for head in heads.values()] != ["causal_lm"]:
            raise ValueError(
                "further tokens are predicted by the model's one head of kind causal_lm, but heads has: "
                f"{', '.join(f'{name} ({head.kind})' for name, head in heads.items())}; set depths to 0, or keep only "
                "a causal_lm head"
            )
        kind = info.data.get("attention_mask", "causal")
        if value.depths and kind != "causal":
            # A position that sees a later one would see its own target, which is an input there.
            raise ValueError(f"further tokens need attention_mask causal, not {kind}; set depths to 0")
        return value

    def multi_token(self) -> MultiTokenPrediction:
        """Settings of multi-token prediction."""
        return self.mtp

    def check_resume(self, saved: Mapping[str, Any]) -> None:
        """Refuse to resume with other layers of multi-token prediction than saved; only ``weight`` may change.

        Raises:
            ValueError: the number of depths, or the order of the projections' inputs, differs from the saved model's.
        """
        super().check_resume(saved)
        before = MultiTokenPrediction.model_validate(saved.get("mtp", {}))
        if before.model_copy(update={"weight": self.mtp.weight}) != self.mtp:
            raise ValueError(
                f"mtp has depths {self.mtp.depths} and first {self.mtp.first}, the saved model has depths "
                f"{before.depths} and first {before.first}; only mtp.weight may change"
            )


class DenseConfig(DecoderConfig):
    """Base config of a dense decoder: one SwiGLU per layer, and a window in all layers or in later layers."""

    intermediate_size: int = Field(gt=0)
    """Features inside the feed-forward layers."""

    sliding_from_layer: int = Field(default=0, ge=0)
    """First sliding layer; earlier layers attend to all positions. Hugging Face: ``max_window_layers``."""

    @field_validator("sliding_from_layer")
    @classmethod
    def _some_layer_slides(cls, value: int, info: ValidationInfo) -> int:
        layers, given = info.data.get("num_layers"), "sliding_window" in info.data
        if given and info.data["sliding_window"] is None and value:
            raise ValueError(f"{value} has no effect without sliding_window; set sliding_window, or remove this field")
        if layers is not None and value >= layers:
            raise ValueError(
                f"{value} is not below num_layers = {layers}, so no layer has a sliding window; lower it, or remove "
                "sliding_window and this field"
            )
        return value

    def window(self, layer: int) -> int | None:
        """Number of positions that a token of this layer attends to; ``None`` for all."""
        return self.sliding_window if layer >= self.sliding_from_layer else None

    def feed_forward_parameters(self, layer: int) -> int:  # noqa: ARG002 - all layers are alike
        """Number of matrix elements of SwiGLU, in its three matrices."""
        return 3 * self.hidden_size * self.intermediate_size


class AlternatingConfig(DecoderConfig):
    """Base config of a dense decoder whose layers alternate between a window and attention to all positions.

    Sliding layers may have another base of their rotary positions.
    """

    local_rope_theta: float | None = Field(default=None, gt=1, allow_inf_nan=False)
    """Base of the frequencies in sliding layers, which then ignore rope_scaling; null: the same rotation in all
    layers."""

    intermediate_size: int = Field(gt=0)
    """Features inside the feed-forward layers."""

    sliding_window: int = Field(default=4096, gt=0)
    """Number of positions that a token of a sliding layer attends to, including its own."""

    layer_types: tuple[LayerType, ...] = Field(
        default=("sliding_attention", "full_attention"), min_length=1, validate_default=True
    )
    """Kinds of attention of successive layers, repeated until the last layer."""

    @field_validator("local_rope_theta")
    @classmethod
    def _null_if_it_changes_nothing(cls, value: float | None, info: ValidationInfo) -> float | None:
        same = value == info.data.get("rope_theta") and info.data.get("rope_scaling") is None
        return None if same else value

    @field_validator("layer_types")
    @classmethod
    def _shortest_pattern(cls, value: tuple[LayerType, ...], info: ValidationInfo) -> tuple[LayerType, ...]:
        """Reduce the pattern to its shortest period, so that equal models have equal configs."""
        layers = info.data.get("num_layers", len(value))
        types = tuple(value[layer % len(value)] for layer in range(layers))
        periods = (size for size in range(1, layers) if types[size:] == types[:-size])
        return types[: next(periods, layers)]

    def layer_type(self, layer: int) -> LayerType:
        """Kind of attention of this layer."""
        return self.layer_types[layer % len(self.layer_types)]

    def window(self, layer: int) -> int | None:
        """Number of positions that a token of this layer attends to; ``None`` for all."""
        return self.sliding_window if self.layer_type(layer) == "sliding_attention" else None

    def rope(self, layer: int) -> Rope:
        """Settings of the rotary positions of this layer."""
        if self.local_rope_theta is None or self.window(layer) is None:
            return super().rope(layer)
        return Rope(self.local_rope_theta)

    def feed_forward_parameters(self, layer: int) -> int:  # noqa: ARG002 - all layers are alike
        """Number of matrix elements of SwiGLU or GeGLU, in its three matrices."""
        return 3 * self.hidden_size * self.intermediate_size
