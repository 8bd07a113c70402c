"""Multi-head latent attention, whose keys and values are computed from a small latent of each position.

Shapes: B samples, S positions, H features, N heads, L features of the latent; in each head P features without
positions, R that rotate, D = P + R features of queries and keys, V features of values.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from d9d_core.attention import Documents, MaskKind
from d9d_core.kernel import OpSlot
from d9d_core.model import ContextShare
from d9d_core.traits import TensorStyle
from torch import Tensor, nn

from d9d_nn.attention.core import AttentionCore
from d9d_nn.attention.masks import AttentionMasks
from d9d_nn.linear import Linear
from d9d_nn.ops.rope import rope
from d9d_nn.rms_norm import RMSNorm
from d9d_nn.rope.rotary_embedding import Rotation


class LowRankProjection(nn.Module):
    """Low-rank projection ``up(norm(down(x)))``: two linear layers with few features and an RMSNorm between them.

    Args:
        in_features: features of the input.
        rank: features between the two layers.
        out_features: features of the output.
        std: initial standard deviation of both weights.
        eps: epsilon of the norm.
        bias: whether ``down`` has a bias, which starts at zero; ``up`` has none.
    """

    def __init__(
        self, in_features: int, rank: int, out_features: int, *, std: float, eps: float, bias: bool = False
    ) -> None:
        super().__init__()
        self.down = Linear(in_features, rank, std=std, bias=bias)
        self.norm = RMSNorm(rank, eps=eps)
        self.up = Linear(rank, out_features, std=std)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in_features] to [..., out_features]."""
        out: Tensor = self.up(self.norm(self.down(x)))
        return out


class LatentCore(AttentionCore):
    """Core of latent attention. Context parallelism by ``all_gather`` gathers latents instead of keys and values.

    Args:
        heads: N.
        head_dim: D.
        value_dim: V.
        latent_dim: L.
        rotary_dim: R.
        window: number of positions that a query attends to, including its own; ``None`` for all.
        mask: kind of the mask: ``causal``, ``bidirectional`` or ``blocks``, see :mod:`d9d_core.attention`.
    """

    def __init__(
        self,
        *,
        heads: int,
        head_dim: int,
        value_dim: int,
        latent_dim: int,
        rotary_dim: int,
        window: int | None,
        mask: MaskKind = "causal",
    ) -> None:
        super().__init__(
            query_heads=heads, key_value_heads=heads, head_dim=head_dim, value_dim=value_dim, window=window, mask=mask
        )
        self._latent = latent_dim, rotary_dim
        self._share: ContextShare | None = None

    def latent_features(self) -> int:
        """Number of elements that :meth:`gathered` gathers for each position: L + R."""
        return sum(self._latent)

    def gather_by(self, share: ContextShare) -> None:
        """Let :meth:`gathered` gather over the ``cp`` ranks of this share from now on."""
        self._share = share

    def gathered(self, latent: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
        """Gather the latents and shared keys of all positions; without :meth:`gather_by`, return the arguments.

        After :meth:`gather_by`, collective over ``cp``, also in the backward, which sums the gradients of all ranks.

        Args:
            latent: [B, S / cp, L].
            shared: [B, S / cp, 1, R].

        Returns:
            [B, S, L] and [B, S, 1, R].
        """
        if self._share is None:
            return latent, shared
        both = self._share.gather(torch.cat((latent, shared.flatten(2)), dim=-1))
        latent, shared = both.split(list(self._latent), dim=-1)  # type: ignore[no-untyped-call]
        return latent, shared.unsqueeze(2)


class MultiHeadLatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1).

    ``kv_down`` maps a position to a latent and to one rotary key, which all heads share; ``kv_up`` maps the normalised
    latent to the keys without positions and the values of all heads. Neighbouring rotary features 2 i and 2 i + 1 are a
    pair that rotates.

    The attention op divides scores by sqrt(D), so another factor of the scores multiplies the queries. If V < D and the
    bound backend or a method of context parallelism needs heads of one size, the values are padded with zeros, which
    add nothing to the output: see :meth:`d9d_nn.attention.core.AttentionCore.fit`.

    Under ``tp``, ``q_proj.up``, ``kv_up`` and ``o_proj`` are split by heads; the layers before the latents are computed
    by every rank, and their gradients are sums over the ranks. Under ``cp`` with method ``all_gather``, ranks exchange
    latents and shared keys, and each computes the keys and values of all positions from them; the other methods
    exchange keys and values.

    Args:
        hidden_size: H.
        heads: N.
        query_rank: features between the two matrices of queries; ``None`` for queries from one matrix.
        latent_dim: L.
        nope_dim: P.
        rotary_dim: R, an even number.
        value_dim: V, at most D.
        std: initial standard deviation of all projections but the output's.
        output_std: initial standard deviation of the output projection.
        eps: epsilon of the norms of the latents.
        score_factor: factor of the scores in addition to 1 / sqrt(D), such as the square of YaRN's ``mscale``.
        biases: names of layers that have biases: ``down`` of the queries, ``kv_down`` and ``o_proj``.
        window: number of positions that a token attends to, including its own; ``None`` for all.
        mask: kind of the mask, see :mod:`d9d_core.attention`.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        heads: int,
        query_rank: int | None,
        latent_dim: int,
        nope_dim: int,
        rotary_dim: int,
        value_dim: int,
        std: float,
        output_std: float,
        eps: float = 1e-6,
        score_factor: float = 1.0,
        biases: Collection[str] = (),
        window: int | None = None,
        mask: MaskKind = "causal",
    ) -> None:
        super().__init__()
        self.nope_dim, self.rotary_dim, self.value_dim, self.latent_dim = nope_dim, rotary_dim, value_dim, latent_dim
        self.head_dim = nope_dim + rotary_dim
        self.score_factor = score_factor
        self._heads = heads
        queries = heads * self.head_dim
        self.q_proj: Linear | LowRankProjection = (
            Linear(hidden_size, queries, std=std)
            if query_rank is None
            else LowRankProjection(hidden_size, query_rank, queries, std=std, eps=eps, bias="down" in biases)
        )
        self.kv_down = Linear(hidden_size, latent_dim + rotary_dim, std=std, bias="kv_down" in biases)
        self.kv_norm = RMSNorm(latent_dim, eps=eps)
        self.kv_up = Linear(latent_dim, heads * (nope_dim + value_dim), std=std)
        self.o_proj = Linear(heads * value_dim, hidden_size, std=output_std, bias="o_proj" in biases)
        self.core = LatentCore(
            heads=heads,
            head_dim=self.head_dim,
            value_dim=value_dim,
            latent_dim=latent_dim,
            rotary_dim=rotary_dim,
            window=window,
            mask=mask,
        )
        self.rope = OpSlot("rope", rope, head_dim=rotary_dim)

    def op_slots(self) -> Mapping[str, OpSlot]:
        """Slot of the rotation. The slot of the attention belongs to the core."""
        return {"rope": self.rope}

    def attention_cores(self) -> Mapping[str, nn.Module]:
        """Attention core of this layer."""
        return {"core": self.core}

    def divisibility(self) -> Mapping[str, Mapping[str, int]]:
        """Number of heads, which must be divisible by the number of ranks of ``tp``."""
        return {"tp": {"query heads": self._heads}}

    def tensor_parallel_plan(self) -> Mapping[str, TensorStyle]:
        """Styles of the projections; layers before the latents are replicated."""
        queries = {"q_proj": TensorStyle.COLUMN}
        if isinstance(self.q_proj, LowRankProjection):
            before = dict.fromkeys(("q_proj.down", "q_proj.norm"), TensorStyle.PARTIAL)
            queries = {**before, "q_proj.up": TensorStyle.COLUMN}
        return {
            **queries,
            "kv_down": TensorStyle.PARTIAL,
            "kv_norm": TensorStyle.PARTIAL,
            "kv_up": TensorStyle.COLUMN,
            "o_proj": TensorStyle.ROW,
        }

    def tensor_parallel_heads(self) -> Mapping[str, int]:
        """Number of heads of each projection that is split by heads."""
        return {self._query_child(): self._heads, "kv_up": self._heads}

    def computed_inputs(self) -> Collection[str]:
        """Names of the projections that read latents instead of the hidden states."""
        return {"kv_up", "q_proj.up"} & self.tensor_parallel_heads().keys()

    def forward(self, hidden: Tensor, rotation: Rotation, documents: AttentionMasks | Documents) -> Tensor:
        """Mix tokens of the same document by attention.

        Args:
            hidden: [B, S, H].
            rotation: rotation of each position, of R features.
            documents: int64 [B, S] or ``DocumentBlocks``, or the masks shared by all layers; ``None`` if a sample is
                one document.

        Returns:
            [B, S, H].
        """
        query, latent, shared = self._inputs(hidden, rotation)  # [B, S, N, D], [B, S, L], [B, S, 1, R]
        key, value = self._expanded(*self.core.gathered(latent, shared))  # [B, S, N, D], [B, S, N, V]
        mixed = self.core(query, key, self.core.fit(value), documents)[..., : self.value_dim]  # [B, S, N, V]
        return self.o_proj(mixed.flatten(2))  # type: ignore[no-any-return]  # [B, S, H]

    def _inputs(self, hidden: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Scaled queries, normalised latents, and the rotated shared key."""
        # The number of heads is inferred from the features, because with tp a rank has only some of the heads.
        query = self.q_proj(hidden).unflatten(-1, (-1, self.head_dim))  # [B, S, N, D]
        if self.score_factor != 1.0:
            query = query * self.score_factor
        latent, shared = self.kv_down(hidden).split([self.latent_dim, self.rotary_dim], dim=-1)
        plain, turning = query.split([self.nope_dim, self.rotary_dim], dim=-1)
        turned, shared = self.rope(_by_halves(turning), _by_halves(shared.unsqueeze(2)), rotation.cos, rotation.sin)
        return torch.cat((plain, turned), dim=-1), self.kv_norm(latent), shared

    def _expanded(self, latent: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of this rank's heads."""
        both = self.kv_up(latent).unflatten(-1, (-1, self.nope_dim + self.value_dim))  # [B, S, N, P + V]
        plain, value = both.split([self.nope_dim, self.value_dim], dim=-1)
        return torch.cat((plain, shared.expand(-1, -1, plain.shape[2], -1)), dim=-1), value

    def _query_child(self) -> str:
        return "q_proj.up" if isinstance(self.q_proj, LowRankProjection) else "q_proj"


def _by_halves(pairs: Tensor) -> Tensor:
    """Reorder neighbouring pairs, so that a pair is at features i and i + R/2; queries and keys alike."""
    return torch.cat((pairs[..., 0::2], pairs[..., 1::2]), dim=-1)
