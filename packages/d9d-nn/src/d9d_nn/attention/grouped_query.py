"""Grouped-query attention with rotary positions.

Shapes: B samples, S positions, H features, N query heads, K key/value heads, D features of a head, R of which rotate.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from d9d_core.attention import Documents, MaskKind
from d9d_core.errors import BuildError
from d9d_core.kernel import OpSlot
from d9d_core.traits import TensorStyle
from torch import Tensor, nn

from d9d_nn.attention.core import AttentionCore
from d9d_nn.attention.masks import AttentionMasks
from d9d_nn.attention.sinks import AttentionSinks
from d9d_nn.linear import Linear, is_plain, outputs_of
from d9d_nn.ops.attention_inputs import attention_inputs_slot
from d9d_nn.ops.normed_rope import normed_rope_slot
from d9d_nn.ops.rope import rope
from d9d_nn.ops.whole import in_one_op
from d9d_nn.rms_norm import RMSNorm
from d9d_nn.rope.rotary_embedding import Rotation


class GroupedQueryAttention(nn.Module):
    """Grouped-query attention: N query heads share K key/value heads (Ainslie et al. 2023), with optional head norms.

    Args:
        hidden_size: H.
        query_heads: N, a multiple of K.
        key_value_heads: K.
        head_dim: D; N * D need not equal H.
        std: initial standard deviation of the query, key and value projections.
        output_std: initial standard deviation of the output projection.
        head_norm_eps: epsilon of an RMSNorm of each query and key head before the rotation; ``None`` for no norm.
        biases: names of the projections that have biases; they start at zero.
        window: number of positions that a token attends to, including its own; ``None`` for all.
        softcap: soft cap of the scores; ``None`` for no cap.
        norm: class of the head norms.
        rotary_dim: R, an even number; ``None`` for D. The first R features of a query or key head rotate, and the
            others do not (Black et al. 2022, "GPT-NeoX-20B", section 2.1.1).
        interleaved: whether neighbouring features 2 i and 2 i + 1 are a pair that rotates, as in Su et al. 2021;
            otherwise features i and i + R/2 are.
        sinks: whether each query head has a learned sink, see :func:`d9d_nn.ops.attention.reference.attention`.
        output_gate: whether the output of each head is multiplied by the sigmoid of a gate, feature by feature (Qiu et
            al. 2025, "Gated Attention for Large Language Models", section 2.2). The query projection then has 2 D rows
            for each head: D of the query, then D of the gate.
        mask: kind of the mask, see :mod:`d9d_core.attention`.
        core: attention core to use, such as one of a subclass; it must have the same numbers of heads and features.
            ``None`` for an :class:`~d9d_nn.attention.core.AttentionCore` with the given window, cap, sinks and mask.

    Raises:
        BuildError: the given core has other heads, features or sinks than the layer; or ``window``, ``softcap`` or
            ``mask`` is given together with ``core``.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        query_heads: int,
        key_value_heads: int,
        head_dim: int,
        std: float,
        output_std: float,
        head_norm_eps: float | None = None,
        biases: Collection[str] = (),
        window: int | None = None,
        softcap: float | None = None,
        norm: type[RMSNorm] = RMSNorm,
        rotary_dim: int | None = None,
        interleaved: bool = False,
        sinks: bool = False,
        output_gate: bool = False,
        mask: MaskKind = "causal",
        core: AttentionCore | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.rotary_dim = head_dim if rotary_dim is None else rotary_dim
        self.interleaved = interleaved
        self.output_gate = output_gate
        self._query_heads, self._key_value_heads = query_heads, key_value_heads
        queries = query_heads * head_dim * (2 if output_gate else 1)
        self.q_proj = Linear(hidden_size, queries, std=std, bias="q_proj" in biases)
        self.k_proj = Linear(hidden_size, key_value_heads * head_dim, std=std, bias="k_proj" in biases)
        self.v_proj = Linear(hidden_size, key_value_heads * head_dim, std=std, bias="v_proj" in biases)
        self.o_proj = Linear(query_heads * head_dim, hidden_size, std=output_std, bias="o_proj" in biases)
        self.q_norm = None if head_norm_eps is None else norm(head_dim, eps=head_norm_eps)
        self.k_norm = None if head_norm_eps is None else norm(head_dim, eps=head_norm_eps)
        if core is None:
            core = AttentionCore(
                query_heads=query_heads,
                key_value_heads=key_value_heads,
                head_dim=head_dim,
                window=window,
                softcap=softcap,
                sinks=sinks,
                mask=mask,
            )
        else:
            _check_core(core, (query_heads, key_value_heads), head_dim, sinks=sinks, options=(window, softcap, mask))
        self.core = core
        self.sinks = AttentionSinks(query_heads, std=std) if sinks else None
        self.rope = OpSlot("rope", rope, head_dim=self.rotary_dim)
        heads = {"head_dim": head_dim, "query_heads": query_heads, "key_heads": key_value_heads}
        self.normed_rope = normed_rope_slot(**heads)
        self.attention_inputs = attention_inputs_slot(hidden=hidden_size, **heads)

    def op_slots(self) -> Mapping[str, OpSlot]:
        """Op slots of this layer: ``rope``; with head norms and whole heads rotated by halves also fused ops.

        ``normed_rope`` is head norms and rotation; ``attention_inputs`` is projections, norms and rotation, and is left
        out if a projection was replaced or adapted, or with an output gate. The slot of attention belongs to the core.
        """
        if self.q_norm is None or not self._rotates_by_halves():
            return {"rope": self.rope}
        plain = not self.output_gate and all(map(is_plain, self._projections()))
        whole = {"attention_inputs": self.attention_inputs} if plain else {}
        return {"rope": self.rope, "normed_rope": self.normed_rope, **whole}

    def adjacent_weights(self) -> Sequence[Sequence[str]]:
        """Names of query, key and value weights, to be adjacent in memory, if a kernel may read them as one tensor."""
        plain = "attention_inputs" in self.op_slots()
        return [("q_proj.weight", "k_proj.weight", "v_proj.weight")] if plain else []

    def attention_cores(self) -> Mapping[str, nn.Module]:
        """Attention core of this layer."""
        return {"core": self.core}

    def divisibility(self) -> Mapping[str, Mapping[str, int]]:
        """Number of query heads, which must be divisible by the number of ranks of ``tp``."""
        return {"tp": {"query heads": self._query_heads}}

    def tensor_parallel_plan(self) -> Mapping[str, TensorStyle]:
        """Styles of the projections, of the sinks, and of the head norms, which are replicated."""
        norms = {} if self.q_norm is None else dict.fromkeys(("q_norm", "k_norm"), TensorStyle.PARTIAL)
        sinks = {} if self.sinks is None else {"sinks": TensorStyle.COLUMN}
        return {
            "q_proj": TensorStyle.COLUMN,
            "k_proj": TensorStyle.COLUMN,
            "v_proj": TensorStyle.COLUMN,
            "o_proj": TensorStyle.ROW,
            **norms,
            **sinks,
        }

    def tensor_parallel_heads(self) -> Mapping[str, int]:
        """Number of heads of each projection and of the sinks, by name: query heads or key/value heads."""
        heads = {"q_proj": self._query_heads, "k_proj": self._key_value_heads, "v_proj": self._key_value_heads}
        return heads if self.sinks is None else heads | {"sinks": self._query_heads}

    def forward(self, hidden: Tensor, rotation: Rotation, documents: AttentionMasks | Documents) -> Tensor:
        """Mix tokens of the same document by attention.

        Args:
            hidden: [B, S, H].
            rotation: rotation of each position.
            documents: int64 [B, S] or ``DocumentBlocks``, or the masks shared by all layers; ``None`` if a sample is
                one document.

        Returns:
            [B, S, H].
        """
        if self.output_gate:
            return self._gated(hidden, rotation, documents)
        query, key, value = self._inputs(hidden, rotation)  # [B, S, N, D], [B, S, K, D], [B, S, K, D]
        sinks = () if self.sinks is None else (self.sinks(),)  # [N]
        mixed = self.core(query, key, value, documents, *sinks)  # [B, S, N, D]
        return self.o_proj(mixed.flatten(2))  # type: ignore[no-any-return]  # [B, S, H]

    def _gated(self, hidden: Tensor, rotation: Rotation, documents: AttentionMasks | Documents) -> Tensor:
        places = (*hidden.shape[:2], -1)
        of_query, of_key, of_value = outputs_of(hidden, self.q_proj, self.k_proj, self.v_proj)
        query, gate = of_query.view(*places, 2 * self.head_dim).chunk(2, dim=-1)  # [B, S, N, D] each
        key = of_key.view(*places, self.head_dim)  # [B, S, K, D]
        value = of_value.view(*places, self.head_dim)  # [B, S, K, D]
        query, key = self._placed(query, key, rotation)
        sinks = () if self.sinks is None else (self.sinks(),)  # [N]
        mixed = self.core(query, key, value, documents, *sinks) * gate.sigmoid()  # [B, S, N, D]
        return self.o_proj(mixed.flatten(2))  # type: ignore[no-any-return]  # [B, S, H]

    @in_one_op("attention_inputs")
    def _inputs(self, hidden: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values; queries and keys normalised and rotated."""
        heads = (*hidden.shape[:2], -1, self.head_dim)  # heads are counted by view: with tp, a rank has fewer
        of_query, of_key, of_value = outputs_of(hidden, self.q_proj, self.k_proj, self.v_proj)
        query = of_query.view(heads)  # [B, S, N, D]
        key = of_key.view(heads)  # [B, S, K, D]
        value = of_value.view(heads)  # [B, S, K, D]
        return *self._placed(query, key, rotation), value

    @in_one_op("normed_rope")
    def _placed(self, query: Tensor, key: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Normalise the heads of query and key, if the layer has head norms, and rotate them."""
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        if self._rotates_by_halves():
            query, key = self.rope(query, key, rotation.cos, rotation.sin)
            return query, key
        turned = self.rope(self._rotary_features(query), self._rotary_features(key), rotation.cos, rotation.sin)
        query, key = (
            torch.cat((part, heads[..., self.rotary_dim :]), dim=-1)
            for part, heads in zip(turned, (query, key), strict=True)
        )
        return query, key

    def _rotates_by_halves(self) -> bool:
        """Whether all features of a head rotate, in pairs i and i + D/2, as the op ``rope`` needs them."""
        return self.rotary_dim == self.head_dim and not self.interleaved

    def _rotary_features(self, heads: Tensor) -> Tensor:
        """Rotated features of heads [B, S, heads, D], with each pair at features i and i + R/2: [B, S, heads, R].

        Interleaved pairs stay in this order, which is the same in queries and keys, so that scores do not change.
        """
        part = heads[..., : self.rotary_dim]
        return torch.cat((part[..., 0::2], part[..., 1::2]), dim=-1) if self.interleaved else part

    def _projections(self) -> tuple[Linear, Linear, Linear]:
        return self.q_proj, self.k_proj, self.v_proj


def _check_core(
    core: AttentionCore,
    heads: tuple[int, int],
    head_dim: int,
    *,
    sinks: bool,
    options: tuple[int | None, float | None, MaskKind],
) -> None:
    """Check that a given core fits the layer, and that window, softcap and mask are not given together with it.

    Raises:
        BuildError: the core does not fit, or an option would be ignored.
    """
    if options != (None, None, "causal"):
        raise BuildError(
            "model: GroupedQueryAttention got a core together with window, softcap or mask, which it would ignore; "
            "give them to the core"
        )
    own = core.attention_heads(), core.head_features(), core.attention.op == "sink_attention"
    if own != (heads, head_dim, sinks):
        raise BuildError(
            f"model: GroupedQueryAttention has {heads[0]} query and {heads[1]} key/value heads of {head_dim} features "
            f"and sinks={sinks}, but its core has {own[0][0]} and {own[0][1]} of {own[1]} and sinks={own[2]}; make "
            "them equal"
        )
