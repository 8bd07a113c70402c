"""Configs of heads, by name in a model's config. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

from d9d_core.config import Section, closest
from d9d_core.errors import BuildError
from pydantic import (
    ConfigDict,
    Field,
    PositiveInt,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapSerializer,
    WrapValidator,
    field_validator,
)

if TYPE_CHECKING:
    from torch import nn

Pooling = Literal["last", "first", "mean", "masked"]
Layers = Annotated[list[int], Field(min_length=1)]


class CausalLMHeadConfig(Section):
    """Language model head. Gives ``token_loss`` float [B, S] with targets, else ``logits`` [B, S, V]."""

    kind: Literal["causal_lm"] = "causal_lm"
    """Selects the head."""


class ClassificationHeadConfig(Section):
    """Classification head. Gives ``class_logits`` float [B, C]."""

    kind: Literal["classification"] = "classification"
    """Selects the head."""

    num_classes: int = Field(ge=1)
    """Number of classes, C; one for a score, as in a reward model."""

    pooling: Pooling = "last"
    """Represents a sample by its last position, its first, the mean of all, or the mean of the positions that
    ``pooling_mask`` of the microbatch marks."""

    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of the pooled features that is dropped in training."""

    layers: Layers | None = None
    """Read the mean of these layers' normalised outputs, counted from 0, or from the end if negative; null reads the
    last layer."""


class TokenClassificationHeadConfig(Section):
    """Head that classifies each position. Gives ``class_logits`` float [B, S, C]."""

    kind: Literal["token_classification"] = "token_classification"
    """Selects the head."""

    num_classes: int = Field(ge=2)
    """Number of classes, C."""

    layers: Layers | None = None
    """Read the mean of these layers' normalised outputs, counted from 0, or from the end if negative; null reads the
    last layer."""


class EmbeddingHeadConfig(Section):
    """Embedding head. Gives ``embedding`` float [B, D]; has parameters only with ``projection``."""

    kind: Literal["embedding"] = "embedding"
    """Selects the head."""

    pooling: Pooling = "last"
    """Represents a sample by its last position, its first, the mean of all, or the mean of the positions that
    ``pooling_mask`` of the microbatch marks."""

    normalize: bool = True
    """Scale vectors to length one."""

    projection: PositiveInt | None = None
    """Features of a trained linear map of the pooled state, without a bias; null has no map."""

    dim: PositiveInt | None = None
    """Keep the first features only, D of them; null keeps all."""

    layers: Layers | None = None
    """Read the mean of these layers' normalised outputs, counted from 0, or from the end if negative; null reads the
    last layer."""


class HiddenStatesHeadConfig(Section):
    """Head that returns normalised hidden states: ``hidden_states`` [B, S, H], or [B, S, L, H] of L layers."""

    kind: Literal["hidden_states"] = "hidden_states"
    """Selects the head."""

    layers: Layers | None = None
    """Layers whose normalised outputs are returned, counted from 0, or from the end if negative; null returns the
    last layer."""

    aggregation: Literal["mean", "none"] = "mean"
    """Return the mean of the layers, or all layers in ascending order."""

    @field_validator("aggregation")
    @classmethod
    def _of_given_layers(cls, value: str, info: ValidationInfo) -> str:
        if value == "none" and "layers" in info.data and info.data["layers"] is None:
            raise ValueError("none returns each of some layers; give layers, or remove aggregation")
        return value


class HeadSizes(NamedTuple):
    """Sizes of a model that a plugin's head is built for.

    Attributes:
        hidden_size: features of a hidden state, H.
        vocabulary: number of token ids.
        std: standard deviation of the initial weights of projections.
    """

    hidden_size: int
    vocabulary: int
    std: float


class PluginHeadConfig(Section):
    """Base of the configs of heads that plugins declare by the hook ``d9d_heads``.

    Attributes:
        parameters: names of the head's parameters, for Hugging Face files, which store them as ``heads.<head>.<name>``.
    """

    parameters: ClassVar[tuple[str, ...]] = ()

    kind: str
    """Selects the head."""

    layers: Layers | None = None
    """Read the mean of these layers' normalised outputs, counted from 0, or from the end if negative; null reads the
    last layer."""

    def build(self, sizes: HeadSizes) -> nn.Module:  # noqa: ARG002 - for subclasses
        """Build the head; called under the meta device, and imports torch only then.

        The head maps hidden states [B, S, H] of all positions, and ``lengths`` [B], ``ends`` [B, N] and
        ``pooling_mask`` [B, S] or ``None``, to outputs by name; see :class:`~d9d_nn.heads.heads.Heads`. Under ``tp``
        its parameters are replicated. A head that pools derives from :class:`~d9d_nn.heads.pooling.PoolsContext`.

        Raises:
            BuildError: the plugin of the head is not installed, so that only its stored config is known; or its config
                class does not override this method.
        """
        raise BuildError(
            f"model.heads: the plugin that declares heads of kind '{self.kind}' is not loaded, or its config class "
            "has no build(); install the plugin, or remove the head"
        )


class StoredHeadConfig(PluginHeadConfig):
    """Config of a plugin's head in a ``config.json``, whose fields only the plugin knows."""

    model_config = ConfigDict(extra="allow")


BuiltinHeadConfig = Annotated[
    CausalLMHeadConfig
    | ClassificationHeadConfig
    | TokenClassificationHeadConfig
    | EmbeddingHeadConfig
    | HiddenStatesHeadConfig,
    Field(discriminator="kind"),
]
#: Kinds of heads of this package.
_KINDS = ("causal_lm", "classification", "token_classification", "embedding", "hidden_states")
#: Validation context with which heads of unknown kinds are kept as :class:`StoredHeadConfig`.
STORED = {"stored_heads": True}


def _read_head(value: Any, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
    """Read a head's config, with the config class of the job's plugin that declares its kind, or as a built-in kind."""
    if isinstance(value, PluginHeadConfig):
        return value
    kind = value.get("kind") if isinstance(value, Mapping) else None
    if not isinstance(kind, str) or kind in _KINDS:
        return handler(value)
    context = info.context or {}
    if "stored_heads" in context:
        return StoredHeadConfig.model_validate(value)
    registry = context.get("registry")
    if registry is None:  # validated outside of a job file, so the plugins are unknown
        return handler(value)
    records = {entry.spec.key: entry for entry in registry.entries("head")}
    if kind not in records:
        near = closest(kind, records)
        hint = f"did you mean '{near}'? " if near else ""
        raise ValueError(f"there is no head of kind '{kind}'; {hint}kinds: {', '.join(records)}")
    return records[kind].spec.config.load().model_validate({**value}, context=context)


def _dump_head(value: Any, handler: SerializerFunctionWrapHandler, info: SerializationInfo) -> Any:
    if isinstance(value, PluginHeadConfig):
        return value.model_dump(mode=info.mode, exclude_none=info.exclude_none, exclude_defaults=info.exclude_defaults)
    return handler(value)


HeadConfig = Annotated[
    BuiltinHeadConfig, WrapValidator(_read_head, json_schema_input_type=BuiltinHeadConfig), WrapSerializer(_dump_head)
]
HeadName = Annotated[str, Field(pattern="^[a-z][a-z0-9_]*$")]
Heads = Annotated[dict[HeadName, HeadConfig], Field(min_length=1)]


def head_layers(head: HeadConfig | PluginHeadConfig, num_layers: int) -> tuple[int, ...] | None:
    """Layers whose mean a head reads, ascending from 0; ``None`` if it reads the final state.

    Args:
        head: config of the head.
        num_layers: number of layers of the whole model.

    Raises:
        ValueError: the model has no such layer, or a layer is named twice.
    """
    layers: Sequence[int] | None = getattr(head, "layers", None)
    if layers is None:
        return None
    if outside := [layer for layer in layers if not -num_layers <= layer < num_layers]:
        raise ValueError(
            f"there is no layer {outside[0]} in a model of {num_layers} layers; give {-num_layers} to {num_layers - 1}"
        )
    found = tuple(sorted(layer % num_layers for layer in layers))
    if twice := [layer for layer in set(found) if found.count(layer) > 1]:
        raise ValueError(f"layer {min(twice)} appears twice in {list(layers)}; name each layer once")
    return found


def head_reads(head: HeadConfig | PluginHeadConfig, num_layers: int) -> tuple[tuple[int, ...], ...]:
    """Layers of each mean that a head reads, see :func:`head_layers`; empty if it reads the final state."""
    layers = head_layers(head, num_layers)
    if layers is None:
        return ()
    alone = isinstance(head, HiddenStatesHeadConfig) and head.aggregation == "none"
    return tuple((layer,) for layer in layers) if alone else (layers,)


def check_heads(
    heads: Mapping[str, HeadConfig], *, hidden_size: int | None, num_layers: int | None, tied: bool | None
) -> None:
    """Check heads against their model; sizes that are ``None`` are not compared.

    Args:
        heads: configs of the heads, by name.
        hidden_size: features of a hidden state.
        num_layers: number of layers of the whole model.
        tied: whether a head takes its weight from the embedding.

    Raises:
        ValueError: a head reads a layer or features that do not exist, or one layer twice; or ``tied`` is true and the
            number of causal_lm heads is not one.
    """
    for name, head in heads.items():
        if num_layers is not None:
            try:
                head_layers(head, num_layers)
            except ValueError as error:
                raise ValueError(f"{name}.layers: {error}") from None
        dim = head.dim if isinstance(head, EmbeddingHeadConfig) else None
        most, of = hidden_size, "hidden_size"
        if isinstance(head, EmbeddingHeadConfig) and head.projection is not None:
            most, of = head.projection, "projection"
        if most is not None and dim is not None and dim > most:
            raise ValueError(f"{name}.dim: {dim} is more than {of} = {most}; give at most {most}")
    language = [name for name, head in heads.items() if head.kind == "causal_lm"]
    if tied and len(language) != 1:
        have = f"{len(language)} causal_lm heads ({', '.join(language)})" if language else "no causal_lm head"
        raise ValueError(
            f"tie_embeddings gives the embedding's weight to the one causal_lm head, but the model has {have}; "
            "set tie_embeddings to false" + (" or keep one of them" if language else " or add {kind: causal_lm}")
        )
