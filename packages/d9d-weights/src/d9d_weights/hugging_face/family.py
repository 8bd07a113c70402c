"""Families of models in transformers: names of classes and tensors, and the head that an export writes. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from d9d_weights.hugging_face.fields import READ

__all__ = ["ATTENTION", "HEAD_NORMS", "SWIGLU", "Family", "Head", "LanguageModel", "published_head", "vocabulary_parts"]

#: Names of attention and both norms inside a layer: transformers' -> d9d's.
ATTENTION = {
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "attention.q_proj",
    "self_attn.k_proj": "attention.k_proj",
    "self_attn.v_proj": "attention.v_proj",
    "self_attn.o_proj": "attention.o_proj",
    "post_attention_layernorm": "ffn_norm",
}
#: Names of the norms of queries and keys: transformers' -> d9d's.
HEAD_NORMS = {"self_attn.q_norm": "attention.q_norm", "self_attn.k_norm": "attention.k_norm"}
#: Names inside a SwiGLU: transformers' -> d9d's.
SWIGLU = {"mlp.gate_proj": "ffn.gate_proj", "mlp.up_proj": "ffn.up_proj", "mlp.down_proj": "ffn.down_proj"}


class Head(Protocol):
    """Config of a head. Classifiers also have ``num_classes``; heads for whole samples have ``pooling``."""

    @property
    def kind(self) -> str:
        """Name of the kind, such as ``causal_lm``, ``classification`` or ``token_classification``."""
        ...


class LanguageModel(Protocol):
    """Config of a model of any family: the fields on which names of tensors outside of layers depend."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        ...

    @property
    def added_tokens(self) -> int | Mapping[str, int]:
        """Number of token ids at the end of the vocabulary with a separate weight; for several weights, by name."""
        ...

    @property
    def tie_embeddings(self) -> bool:
        """Whether the causal_lm head shares the embedding's weight."""
        ...

    @property
    def heads(self) -> Mapping[str, Head]:
        """Configs of the heads, by name."""
        ...


@dataclass(frozen=True)
class Family:
    """Names of one model family in transformers.

    Attributes:
        model_type: ``model_type`` in ``config.json``.
        prefix: prefix of the class names.
        layer: d9d's names of the tensors inside a layer, by their names in transformers.
        read: fields of ``config.json`` that become part of d9d's config.
        only: accepted values of further fields, by field name; other values are refused.
        causal_lm: class name of the language model, if it does not begin with the prefix.
    """

    model_type: str
    prefix: str
    layer: Mapping[str, str]
    read: frozenset[str] = READ
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    causal_lm: str = ""

    @property
    def language_model(self) -> str:
        """Name of transformers' class of the language model."""
        return self.causal_lm or f"{self.prefix}ForCausalLM"

    @property
    def classifier(self) -> str:
        """Name of transformers' class that classifies samples, by the hidden state of their last token."""
        return f"{self.prefix}ForSequenceClassification"

    @property
    def token_classifier(self) -> str:
        """Name of transformers' class that classifies tokens."""
        return f"{self.prefix}ForTokenClassification"

    @property
    def backbone(self) -> str:
        """Name of transformers' class of the model without heads."""
        return f"{self.prefix}Model"


def vocabulary_parts(vocabulary: int, added: int | Mapping[str, int]) -> dict[str, int]:
    """Number of token ids of each separate weight, by name: ``regular``, then added tokens; empty for one weight.

    Args:
        vocabulary: number of token ids.
        added: number of last token ids with a weight called ``added``; or a map of names to numbers of ids, in order.
    """
    named = {"added": added} if isinstance(added, int) else dict(added)
    last = sum(named.values())
    return {"regular": vocabulary - last, **named} if last else {}


def published_head(heads: Mapping[str, Head]) -> str | None:
    """Head that a class of transformers supports: the first language model, else the first supported classifier.

    A classifier of samples takes precedence over a classifier of tokens.
    """
    for kind in ("causal_lm", "classification", "token_classification"):
        for name, head in heads.items():
            plain = getattr(head, "pooling", "last") == "last" and getattr(head, "layers", None) is None
            if head.kind == kind and plain:
                return name
    return None
