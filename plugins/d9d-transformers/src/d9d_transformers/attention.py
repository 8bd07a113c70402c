"""Attention of transformers' models, computed by d9d's attention cores.

A model of transformers looks its attention up by name, in each call. d9d registers one function: it passes query, key
and value to the core that was attached to the attention module, so that context parallelism, kernels and documents work
as in d9d's own models. Masks of transformers are never built; documents are an own keyword of the forward.

Shapes: B samples, S positions, N query heads, K key/value heads, D features of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from d9d_core.errors import BuildError
from d9d_nn.attention.core import AttentionCore
from torch import Tensor, nn
from torch.nn import functional

from d9d_transformers.library import ATTENTION, library

#: Name of the core in an attention module.
CORE = "d9d_core"
#: Keyword of the forward with documents or masks.
DOCUMENTS = "d9d_documents"
#: Keywords that models pass to their attention, and that do not change it.
_IRRELEVANT = frozenset({"position_ids", "use_cache", "output_router_logits", "output_attentions", "cache_position"})
_KNOWN = _IRRELEVANT | {"sliding_window", "softcap", DOCUMENTS}


@dataclass(frozen=True)
class AttentionCall:
    """Facts about the calls of one attention module, recorded on the meta device.

    Attributes:
        query_heads: N.
        key_value_heads: K.
        head_dim: D of query and key.
        value_dim: D of value.
        scaling: factor of the scores.
        window: number of positions that a query attends to; ``None`` for all.
        softcap: soft cap of the scores; ``None`` for none.
        others: names of keywords with a value that d9d's attention does not compute.
    """

    query_heads: int
    key_value_heads: int
    head_dim: int
    value_dim: int
    scaling: float
    window: int | None
    softcap: float | None
    others: tuple[str, ...]

    @classmethod
    def of(
        cls, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: Any, keywords: Any
    ) -> AttentionCall:
        others = [name for name, given in keywords.items() if given is not None and name not in _KNOWN]
        if not getattr(module, "is_causal", True):
            others.append("is_causal=False")
        default = query.shape[3] ** -0.5
        return cls(
            query_heads=query.shape[1],
            key_value_heads=key.shape[1],
            head_dim=query.shape[3],
            value_dim=value.shape[3],
            scaling=default if scaling is None else float(scaling),
            window=keywords.get("sliding_window"),
            softcap=keywords.get("softcap"),
            others=tuple(sorted(others)),
        )

    def core(self, where: str) -> AttentionCore:
        """Core that computes these calls.

        Raises:
            BuildError: d9d's attention has no such option.
        """
        if self.others:
            raise BuildError(
                f"model.config: {where} passes {', '.join(self.others)}, which d9d's attention does not have"
            )
        return AttentionCore(
            query_heads=self.query_heads,
            key_value_heads=self.key_value_heads,
            head_dim=max(self.head_dim, self.value_dim),
            window=self.window,
            softcap=self.softcap,
        )


def register() -> None:
    """Make :func:`attend` known to transformers; idempotent."""
    library().AttentionInterface.register(ATTENTION, attend)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """Compute attention by the module's core, in the signature of transformers.

    The core has heads of one size: features that a query and key, or a value, lack are zeros, which add nothing.

    Args:
        module: attention module with a core in ``d9d_core``.
        query: [B, N, S, D].
        key: [B, K, S, D].
        value: [B, K, S, E]; E need not equal D.
        attention_mask: ``None``, because no mask function is registered.
        scaling: factor of the scores; ``None`` for D ** -0.5.
        dropout: zero.
        keywords: documents or a recorder of calls, and keywords that were checked when the core was made.

    Returns:
        [B, S, N, E], and no attention weights.

    Raises:
        ValueError: the model passes a mask or dropout, which this function would ignore.
    """
    if attention_mask is not None or dropout:
        given = "a mask" if attention_mask is not None else f"attention dropout of {dropout}"
        hint = "; set attention_dropout of model.config to 0" if attention_mask is None else ""
        raise ValueError(f"{type(module).__name__} passes {given}, which d9d's attention does not have{hint}")
    documents = keywords.get(DOCUMENTS)
    if isinstance(documents, CallRecorder):
        return documents(module, query, key, value, scaling, keywords), None
    core: Callable[..., Tensor] | None = getattr(module, CORE, None)
    if core is None:  # while a model is examined
        raise ValueError(f"{type(module).__name__} passes no keywords to its attention, so it would not see documents")
    own, features = query.shape[-1], value.shape[-1]
    width = max(own, features)
    factor = (own**-0.5 if scaling is None else scaling) * math.sqrt(width)  # the core divides by the root of its width
    if not math.isclose(factor, 1.0, rel_tol=1e-6):
        query = query * factor
    query, key, value = (_padded(tensor.transpose(1, 2), width) for tensor in (query, key, value))
    return core(query, key, value, documents)[..., :features], None


def _padded(tensor: Tensor, width: int) -> Tensor:
    missing = width - tensor.shape[-1]
    return functional.pad(tensor, (0, missing)) if missing else tensor


class CallRecorder:
    """Records the calls of attention modules; passed to a forward in place of documents.

    Attributes:
        calls: attention module -> facts about its call.
    """

    def __init__(self) -> None:
        self.calls: dict[nn.Module, AttentionCall] = {}

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: Any, keywords: Any
    ) -> Tensor:
        """Record a call; the result has the shape of the attention's."""
        self.calls[module] = AttentionCall.of(module, query, key, value, scaling, keywords)
        samples, heads, length, _ = query.shape
        return query.new_empty(samples, length, heads, value.shape[3])
