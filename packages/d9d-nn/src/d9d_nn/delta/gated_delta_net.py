"""Gated DeltaNet as a module (Yang et al. 2024, "Gated Delta Networks", arXiv:2412.06464).

Shapes: B samples, S positions, H features, K key heads, N value heads, D_k and D_v features of a key and value head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from d9d_core.kernel import OpSlot
from d9d_core.model import ContextShare
from d9d_core.strategy import ContextCall, StepShape
from d9d_core.traits import TensorStyle
from torch import Tensor, nn
from torch.nn import functional

from d9d_nn.delta.chain import ContextChain, head_ranks, joined, stacked
from d9d_nn.delta.gates import MambaDecay
from d9d_nn.delta.short_convolution import ShortConvolution
from d9d_nn.linear import Linear, outputs_of
from d9d_nn.ops.gated_delta_rule import chunked_from, counted, gated_delta_rule

__all__ = ["GatedDeltaNet", "GatedRMSNorm"]


class GatedDeltaNet(nn.Module):
    """Gated DeltaNet: short convolutions, a decaying state per value head, a gated norm, and an output projection.

    Tensor parallelism splits the key heads, each with its value heads. Under context parallelism, ranks exchange the
    last positions and the states of their chunks, see :mod:`d9d_nn.delta.chain`; the layer then calls the op
    ``gated_delta_rule_from`` instead of ``gated_delta_rule``.

    Args:
        hidden_size: H.
        key_heads: K, number of query and key heads.
        value_heads: N, a multiple of K.
        key_dim: D_k.
        value_dim: D_v.
        std: initial standard deviation of the input projections.
        output_std: initial standard deviation of the output projection.
        norm_eps: epsilon of the norm of the outputs.
        width: positions that a short convolution reads.
        decay: decay gate of the value heads; :class:`~d9d_nn.delta.gates.MambaDecay` by default.
        negative_eigenvalues: whether the strength of the correction is between 0 and 2 instead of 0 and 1, so that a
            token may reverse the sign of a part of the state (Grazzi et al. 2024, arXiv:2411.12537).

    Raises:
        ValueError: the number of value heads is no multiple of the number of key heads.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        std: float,
        output_std: float,
        norm_eps: float,
        width: int = 4,
        decay: nn.Module | None = None,
        negative_eigenvalues: bool = False,
    ) -> None:
        super().__init__()
        if value_heads % key_heads:
            raise ValueError(
                f"GatedDeltaNet: {value_heads} value heads are no multiple of {key_heads} key heads; give each key "
                "head the same number of value heads"
            )
        self.key_dim, self.value_dim = key_dim, value_dim
        self._key_heads, self._value_heads = key_heads, value_heads
        self._chain: ContextChain | None = None
        self.q_proj = Linear(hidden_size, key_heads * key_dim, std=std)
        self.k_proj = Linear(hidden_size, key_heads * key_dim, std=std)
        self.v_proj = Linear(hidden_size, value_heads * value_dim, std=std)
        self.gate_proj = Linear(hidden_size, value_heads * value_dim, std=std)
        self.decay_proj = Linear(hidden_size, value_heads, std=std)
        self.beta_proj = Linear(hidden_size, value_heads, std=std)
        self.q_conv = ShortConvolution(key_heads * key_dim, width)
        self.k_conv = ShortConvolution(key_heads * key_dim, width)
        self.v_conv = ShortConvolution(value_heads * value_dim, width)
        self.decay = MambaDecay(value_heads) if decay is None else decay
        self.norm = GatedRMSNorm(value_dim, eps=norm_eps)
        self.o_proj = Linear(value_heads * value_dim, hidden_size, std=output_std)
        self._strength = 2.0 if negative_eigenvalues else 1.0
        self.gated_delta_rule = OpSlot(
            "gated_delta_rule", gated_delta_rule,
            key_dim=key_dim, value_dim=value_dim, key_heads=key_heads, value_heads=value_heads,
        )  # fmt: skip
        self.gated_delta_rule_from = OpSlot(
            "gated_delta_rule_from", chunked_from,
            key_dim=key_dim, value_dim=value_dim + key_dim, key_heads=key_heads, value_heads=value_heads,
        )  # fmt: skip

    def op_slots(self) -> Mapping[str, OpSlot]:
        """Slot of the op ``gated_delta_rule``, or of ``gated_delta_rule_from`` under context parallelism."""
        if self._chain is None:
            return {"gated_delta_rule": self.gated_delta_rule}
        return {"gated_delta_rule_from": self.gated_delta_rule_from}

    def divisibility(self) -> Mapping[str, Mapping[str, int]]:
        """Number of key heads, which must be divisible by the number of ranks of ``tp``."""
        return {"tp": {"key heads": self._key_heads}}

    def tensor_parallel_plan(self) -> Mapping[str, TensorStyle]:
        """Styles of the children: heads are split; the norm of the outputs is replicated."""
        projections = ("q_proj", "k_proj", "v_proj", "gate_proj", "decay_proj", "beta_proj")
        return {
            **dict.fromkeys(projections, TensorStyle.COLUMN),
            **dict.fromkeys(("q_conv", "k_conv", "v_conv", "decay"), TensorStyle.HEADS),
            "norm": TensorStyle.PARTIAL,
            "o_proj": TensorStyle.ROW,
        }

    def tensor_parallel_heads(self) -> Mapping[str, int]:
        """Number of heads of each split child, by name: key heads or value heads."""
        of_values = ("v_proj", "gate_proj", "decay_proj", "beta_proj", "v_conv", "decay")
        return {
            **dict.fromkeys(("q_proj", "k_proj", "q_conv", "k_conv"), self._key_heads),
            **dict.fromkeys(of_values, self._value_heads),
        }

    def see_context(self, share: ContextShare) -> None:
        """Expect this rank's positions in inputs and outputs from now on; ``documents`` still cover all positions."""
        self._chain = ContextChain(share)

    def context_collectives(self, step: StepShape) -> Iterator[ContextCall]:
        """Collectives of a step, see :meth:`~d9d_nn.delta.chain.ContextChain.collectives`."""
        assert self._chain is not None  # see_context() comes first
        ranks, width = head_ranks(self.decay_proj.weight), self.q_conv.weight.shape[1]
        keys, values = self._key_heads // ranks * self.key_dim, self._value_heads // ranks * self.value_dim
        numbers = values * self.key_dim + self._value_heads // ranks * self.key_dim**2
        return self._chain.collectives(step, width=width, features=2 * keys + values, numbers=numbers)

    def forward(self, hidden: Tensor, documents: Tensor | None = None) -> Tensor:
        """Mix tokens of the same document by the states of the heads.

        Collective over ``cp`` after :meth:`see_context`.

        Args:
            hidden: [B, S, H], or this rank's own positions [B, S / cp, H].
            documents: int64 [B, S], number of the document of each token; ``None`` if a sample is one document.

        Returns:
            The shape of ``hidden``.
        """
        documents = None if documents is None else counted(documents)
        decay = self.decay(self.decay_proj(hidden))  # [B, S, N]
        beta = self.beta_proj(hidden).sigmoid() * self._strength  # [B, S, N]
        *inputs, gates = outputs_of(hidden, self.q_proj, self.k_proj, self.v_proj, self.gate_proj)
        layers, chain = (self.q_conv, self.k_conv, self.v_conv), self._chain
        if chain is None:
            parts = [layer(x, documents) for layer, x in zip(layers, inputs, strict=True)]
            mixed = self.gated_delta_rule(*self._heads(*parts), decay, beta, documents)  # [B, S, N, D_v]
        else:
            parts = chain.convolve(layers, inputs, documents)
            tensors = (*self._heads(*parts), stacked(decay), stacked(beta))
            mixed = joined(chain.rule(self.gated_delta_rule_from, *tensors, documents))
        gate = torch.unflatten(gates, -1, (-1, self.value_dim))  # [B, S, N, D_v]
        return self.o_proj(self.norm(mixed, gate).flatten(2))  # type: ignore[no-any-return]  # [B, S, H]

    def _heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split features of query, key and value into heads: [B, S, K, D_k], [B, S, K, D_k] and [B, S, N, D_v]."""
        query, key = (torch.unflatten(x, -1, (-1, self.key_dim)) for x in (query, key))
        return query, key, torch.unflatten(value, -1, (-1, self.value_dim))


class GatedRMSNorm(nn.Module):
    """RMSNorm of groups of features, scaled by a weight per feature and by ``silu(gate)``, in float32.

    Args:
        features: size of the last dim.
        eps: added to the mean square.
        group_size: features of a group; ``None`` for all.
        norm_before_gate: whether to multiply by the gate after the norm; otherwise before it.
    """

    def __init__(
        self, features: int, *, eps: float, group_size: int | None = None, norm_before_gate: bool = True
    ) -> None:
        super().__init__()
        self.eps, self.group_size, self.norm_before_gate = eps, group_size or features, norm_before_gate
        self.weight = nn.Parameter(torch.empty(features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to one."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Normalise ``x`` [..., features] and multiply it by ``silu(gate)``; the result has the dtype of ``x``."""
        wide = torch.promote_types(x.dtype, torch.float32)
        factor = functional.silu(gate.to(wide))
        gated = x.to(wide) if self.norm_before_gate else x.to(wide) * factor
        groups = torch.unflatten(gated, -1, (-1, self.group_size))
        out = self.weight * functional.rms_norm(groups, groups.shape[-1:], eps=self.eps).flatten(-2).to(x.dtype)
        return (out.to(wide) * factor if self.norm_before_gate else out).to(x.dtype)
