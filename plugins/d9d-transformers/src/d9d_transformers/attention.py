"""Attention of transformers' models, computed by d9d's attention cores.

In each call, a model of transformers looks its attention function up by name. d9d registers one function, which passes
query, key and value to the core that was attached to the attention module, so that context parallelism, kernels and
documents work as in d9d's own models. Masks of transformers are never built; d9d passes documents by a keyword of its
own.

Shapes: B samples, S positions, N query heads, K key/value heads, D features of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from d9d_core.errors import BuildError
from d9d_nn.attention.core import AttentionCore
from torch import Tensor, nn
from torch.nn import functional

from d9d_transformers.library import ATTENTION, EXAMINED, MASKED, library

#: Name of the core in an attention module.
CORE = "d9d_core"
#: Keyword with which ``forward`` of the model hands documents or masks to attention.
DOCUMENTS = "d9d_documents"
#: Keyword by which models pass learned sinks [N] (one logit per head that takes part in the softmax) to attention.
SINKS = "s_aux"
#: Keywords that models pass to their attention, and that do not change it.
_IRRELEVANT = frozenset({"position_ids", "use_cache", "output_router_logits", "output_attentions", "cache_position"})
_KNOWN = _IRRELEVANT | {"sliding_window", "softcap", SINKS, DOCUMENTS}
#: Attribute of a mask on the meta device: the window that the mask computes.
_WINDOW = "d9d_window"
#: Positions of queries at which a mask is evaluated: farther from the start than any known model's window.
_FAR = (2**20, 2**20 - 12_345, 2**19 + 1)
#: Number of keys after a query's own position at which a mask is evaluated, to see whether it is causal.
_LATER = 8


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
        softcap: soft cap of the scores; ``None`` for no cap.
        sinks: whether the softmax has a learned sink for each query head.
        others: names of keywords with a value that d9d's attention does not support.
    """

    query_heads: int
    key_value_heads: int
    head_dim: int
    value_dim: int
    scaling: float
    window: int | None
    softcap: float | None
    sinks: bool
    others: tuple[str, ...]

    @classmethod
    def of(
        cls,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scaling: Any,
        keywords: Mapping[str, Any],
    ) -> AttentionCall:
        """Read the arguments of a call; a mask, if there is one, decides the window instead of ``sliding_window``."""
        others = [name for name, given in keywords.items() if given is not None and name not in _KNOWN]
        if not getattr(module, "is_causal", True):  # refused even if the model makes a causal mask, which sdpa ignores
            others.append("is_causal=False")
        window = keywords.get("sliding_window")
        if mask is not None:
            window = getattr(mask, _WINDOW, "changed")
            if isinstance(window, str):
                others.append(f"a mask of another kind ({window})")
                window = None
        default = query.shape[3] ** -0.5
        return cls(
            query_heads=query.shape[1],
            key_value_heads=key.shape[1],
            head_dim=query.shape[3],
            value_dim=value.shape[3],
            scaling=default if scaling is None else float(scaling),
            window=window,
            softcap=keywords.get("softcap"),
            sinks=keywords.get(SINKS) is not None,
            others=tuple(sorted(others)),
        )

    def core(self, where: str) -> AttentionCore:
        """Make the attention core that computes these calls.

        Raises:
            BuildError: the calls use an option that d9d's attention does not support.
        """
        if self.others:
            raise BuildError(
                f"model.config: {where} gives its attention {', '.join(self.others)}, which d9d does not support, so "
                "d9d cannot train it"
            )
        return AttentionCore(
            query_heads=self.query_heads,
            key_value_heads=self.key_value_heads,
            head_dim=max(self.head_dim, self.value_dim),
            window=self.window,
            softcap=self.softcap,
            sinks=self.sinks,
        )


def register() -> None:
    """Register d9d's attention functions in transformers, including the functions that record calls; idempotent."""
    transformers = library()
    transformers.AttentionInterface.register(ATTENTION, attend)
    transformers.AttentionInterface.register(EXAMINED, record)
    transformers.AttentionInterface.register(MASKED, record)
    transformers.AttentionMaskInterface.register(MASKED, mask_on_meta)


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

    The core needs heads of one size for queries, keys and values, so the shorter of them are padded with zeros, which
    change no result.

    Args:
        module: attention module with a core in ``d9d_core``.
        query: [B, N, S, D].
        key: [B, K, S, D].
        value: [B, K, S, E]; E need not equal D.
        attention_mask: ``None``, because no mask function is registered for this attention.
        scaling: factor of the scores; ``None`` for D ** -0.5.
        dropout: zero.
        keywords: ``documents``, and keywords that were checked when the core was made.

    Returns:
        [B, S, N, E], and no attention weights.

    Raises:
        ValueError: the model passes a mask or dropout, which this function would ignore.
    """
    if attention_mask is not None or dropout:
        given = "a mask" if attention_mask is not None else f"attention dropout of {dropout}"
        hint = "; set attention_dropout of model.config to 0" if attention_mask is None else ""
        raise ValueError(f"{type(module).__name__} gives its attention {given}, which d9d does not support{hint}")
    core: Callable[..., Tensor] = getattr(module, CORE)
    own, features = query.shape[-1], value.shape[-1]
    width = max(own, features)
    factor = (own**-0.5 if scaling is None else scaling) * math.sqrt(width)  # the core divides by the root of its width
    if not math.isclose(factor, 1.0, rel_tol=1e-6):
        query = query * factor
    query, key, value = (_padded(tensor.transpose(1, 2), width) for tensor in (query, key, value))
    sinks = keywords.get(SINKS)
    return core(query, key, value, keywords.get(DOCUMENTS), *(() if sinks is None else (sinks,)))[..., :features], None


def _padded(tensor: Tensor, width: int) -> Tensor:
    missing = width - tensor.shape[-1]
    return functional.pad(tensor, (0, missing)) if missing else tensor


def record(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """Record a call of attention on the meta device, in a dict that is passed in place of ``documents``.

    Args:
        module: attention module.
        query: [B, N, S, D].
        key: [B, K, S, D].
        value: [B, K, S, E].
        attention_mask: result of :func:`mask_on_meta`, or ``None`` without masks.
        scaling: factor of the scores; ``None`` for D ** -0.5.
        dropout: zero.
        keywords: keywords of the model; in place of documents, the dict from attention modules to
            :class:`AttentionCall` to which the call is added.

    Returns:
        Tensor of the attention's shape, [B, S, N, E], and no attention weights.

    Raises:
        ValueError: the model does not pass keywords to its attention, or uses dropout.
    """
    if dropout:
        text = f"attention dropout of {dropout}, which d9d's attention does not have"
        raise ValueError(
            f"{type(module).__name__} gives its attention {text}; set attention_dropout of model.config to 0"
        )
    if DOCUMENTS not in keywords:
        raise ValueError(
            f"{type(module).__name__} passes no keywords to its attention, so d9d cannot pass it the documents"
        )
    calls: dict[nn.Module, AttentionCall] = keywords[DOCUMENTS]
    calls[module] = AttentionCall.of(module, query, key, value, attention_mask, scaling, keywords)
    samples, heads, length, _ = query.shape
    return query.new_empty(samples, length, heads, value.shape[3]), None


def mask_on_meta(*, mask_function: Callable[..., Any], q_length: int, kv_length: int, **_: Any) -> Tensor:
    """Mask on the meta device, with an attribute for the window that a model's mask function computes.

    Args:
        mask_function: function that returns whether a query sees a key, from indices of sample, head, query and key.
        q_length: number of queries.
        kv_length: number of keys.
    """
    mask = torch.empty(1, 1, q_length, kv_length, device="meta")
    setattr(mask, _WINDOW, window_of(mask_function))
    return mask


def window_of(mask_function: Callable[..., Any]) -> int | str | None:
    """Window of a causal mask function; ``None`` without a window; for other functions, a text with the reason."""
    found = set()
    for query in _FAR:
        keys = torch.arange(query + _LATER, device="cpu")
        one = torch.zeros_like(keys)
        try:
            seen = torch.as_tensor(mask_function(one, one, one + query, keys), device="cpu").expand_as(keys)
        except Exception as error:  # functions of models raise anything
            return f"which cannot be evaluated: {error}"
        if seen[query + 1 :].any():
            return "which is not causal"
        count = int(seen.sum())
        if not count or not seen[query + 1 - count : query + 1].all():
            return "which leaves out some earlier keys"
        found.add(None if count == query + 1 else count)
    return found.pop() if len(found) == 1 else "which depends on the position"
