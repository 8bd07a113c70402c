"""Attention core: the part of an attention layer that mixes tokens; owns no parameters.

Shapes: B samples, S positions, N query heads, K key/value heads, D features of a query or key head, V of a value head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from d9d_core.attention import Documents, MaskKind
from d9d_core.errors import BuildError
from d9d_core.kernel import OpSlot
from d9d_core.model import ContextShare
from d9d_core.traits import HasOps
from torch import Tensor, nn
from torch.nn import functional

from d9d_nn.attention.masks import AttentionMasks
from d9d_nn.ops.attention.slot import AttentionSlot


class AttentionCore(nn.Module):
    """Attention among the tokens of a document, without parameters; context parallelism may replace its forward.

    Args:
        query_heads: N.
        key_value_heads: K.
        head_dim: D.
        value_dim: V, at most D; ``None`` for D.
        window: number of positions that a query attends to, including its own; ``None`` for all.
        softcap: soft cap of the scores, see :func:`d9d_nn.ops.attention.reference.attention`; ``None`` for no cap.
        sinks: whether each call passes sinks, a learned logit per query head; see the same function.
        mask: kind of the mask: ``causal``, ``bidirectional`` or ``blocks``, see :mod:`d9d_core.attention`.

    Raises:
        BuildError: both a soft cap and sinks are given; or V is larger than D.
    """

    def __init__(
        self,
        *,
        query_heads: int,
        key_value_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        mask: MaskKind = "causal",
    ) -> None:
        super().__init__()
        if value_dim is not None and value_dim > head_dim:
            raise BuildError(
                f"model: attention has values of {value_dim} features and keys of {head_dim}; d9d supports values up "
                "to the size of keys, so choose a smaller value_dim"
            )
        if sinks and softcap is not None:
            raise BuildError(
                "model: attention has both sinks and a soft cap of scores, which d9d does not support; remove one "
                "of them"
            )
        self.softcap = softcap
        self.attention = AttentionSlot(
            query_heads=query_heads,
            key_value_heads=key_value_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            window=window,
            softcap=softcap,
            sinks=sinks,
            mask=mask,
        )
        self._function: Callable[..., Tensor] | None = None

    def op_slots(self) -> Mapping[str, OpSlot]:
        """Slot of the op ``attention``, or the slots of the function given to :meth:`attend_by`."""
        if self._function is None:
            return {"attention": self.attention}
        return self._function.op_slots() if isinstance(self._function, HasOps) else {}

    def attention_heads(self) -> tuple[int, int]:
        """Numbers of query heads and of key/value heads of the whole model."""
        return self.attention.static["query_heads"], self.attention.static["key_value_heads"]

    def head_features(self) -> int:
        features: int = self.attention.static["head_dim"]
        return features

    def fit(self, value: Tensor) -> Tensor:
        """Pad values with zeros to the size of keys, unless the bound backend computes values of another size.

        Parallel strategies, which replace the forward or the function, need keys and values of one size.

        Args:
            value: [B, S, K, V].

        Returns:
            [B, S, K, V], or padded [B, S, K, D]. Attention then returns D features, of which only the first V count.
        """
        missing = self.head_features() - value.shape[-1]
        as_given = self._function is None and "forward" not in vars(self) and self.attention.takes_any_values
        return value if as_given or not missing else functional.pad(value, (0, missing))

    def see_queries(self, share: ContextShare) -> None:
        """Prepare for calls with only this rank's queries, but the keys and values of all positions.

        Raises:
            BuildError: the bound backend cannot compute the queries of some positions alone.
        """
        self.attention.see_queries(share)

    def attend_by(self, function: Callable[..., Tensor]) -> None:
        """Replace the attention backend by a function; see :class:`d9d_core.model.SharesAttention`.

        Raises:
            BuildError: the scores have a soft cap, which the function would ignore; or the function does not compute
                this kind of mask.
        """
        if self.softcap is not None:
            raise BuildError(
                "context_parallel: the model has a soft cap of attention scores, which this method does not compute; "
                "use method ulysses"
            )
        self.attention.attend_by(function)
        self._function = function
        for slot in self.op_slots().values():
            slot.static = {**self.attention.static, **slot.static}

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        documents: AttentionMasks | Documents = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Compute attention, see :func:`d9d_nn.ops.attention.reference.attention`.

        Args:
            query: [B, S, N, D]; after :meth:`see_queries` this rank's queries, [B, S / cp, N, D].
            key: [B, S, K, D].
            value: [B, S, K, D], or the result of :meth:`fit`.
            documents: int64 [B, S] or ``DocumentBlocks``, or the masks shared by all layers; ``None`` if a sample is
                one document.
            sinks: [N], if the core has sinks.

        Returns:
            [B, S, N, F], or [B, S / cp, N, F] after :meth:`see_queries`, where F is the last dimension of ``value``.
        """
        more = () if sinks is None else (sinks,)
        if self._function is not None:
            mask: Any = documents
            if isinstance(documents, AttentionMasks):  # a function that makes no masks gets the documents
                prepared = documents.prepared.get(self.attention.mask_key)
                mask = documents.documents if prepared is None else prepared
            return self._function(query, key, value, mask, self.attention.static["window"], *more)
        if isinstance(documents, AttentionMasks):
            if self.attention.mask_key in documents.prepared:
                return self._attend(query, key, value, documents.prepared[self.attention.mask_key], *more)
            documents = documents.documents  # no mask was prepared: a replaced layer, which the model does not know
        return self._attend(query, key, value, self.attention.prepare(documents, key.shape[1], query.device), *more)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, *sinks: Tensor) -> Tensor:
        out: Tensor = self.attention(query, key, value, mask, *sinks)
        return out
