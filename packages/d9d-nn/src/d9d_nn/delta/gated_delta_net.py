"""Gated DeltaNet as a module (Yang et al. 2024, "Gated Delta Networks", arXiv:2412.06464).

Shapes: B samples, S positions, H features, K key heads, N value heads, D_k and D_v features of a key and value head.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from d9d_core.kernel import OpSlot
from torch import Tensor, nn
from torch.nn import functional

from d9d_nn.delta.gates import MambaDecay
from d9d_nn.delta.short_convolution import ShortConvolution
from d9d_nn.linear import Linear
from d9d_nn.ops.gated_delta_rule import gated_delta_rule

__all__ = ["GatedDeltaNet", "GatedRMSNorm"]


class GatedDeltaNet(nn.Module):
    """Gated DeltaNet: short convolutions, a decaying state per value head, a gated norm, and an output projection.

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

    def op_slots(self) -> Mapping[str, OpSlot]:
        """Slot of the op ``gated_delta_rule``."""
        return {"gated_delta_rule": self.gated_delta_rule}

    def forward(self, hidden: Tensor, documents: Tensor | None = None) -> Tensor:
        """Mix tokens of the same document by the states of the heads.

        Args:
            hidden: [B, S, H].
            documents: int64 [B, S], number of the document of each token; ``None`` if a sample is one document.

        Returns:
            [B, S, H].
        """
        query = self.q_conv(self.q_proj(hidden), documents).unflatten(-1, (-1, self.key_dim))  # [B, S, K, D_k]
        key = self.k_conv(self.k_proj(hidden), documents).unflatten(-1, (-1, self.key_dim))  # [B, S, K, D_k]
        value = self.v_conv(self.v_proj(hidden), documents).unflatten(-1, (-1, self.value_dim))  # [B, S, N, D_v]
        decay = self.decay(self.decay_proj(hidden))  # [B, S, N]
        beta = self.beta_proj(hidden).sigmoid() * self._strength  # [B, S, N]
        mixed = self.gated_delta_rule(query, key, value, decay, beta, documents)  # [B, S, N, D_v]
        gate = self.gate_proj(hidden).unflatten(-1, (-1, self.value_dim))  # [B, S, N, D_v]
        return self.o_proj(self.norm(mixed, gate).flatten(2))  # type: ignore[no-any-return]  # [B, S, H]


class GatedRMSNorm(nn.Module):
    """RMSNorm of the last dim, scaled by a weight per feature and by ``silu(gate)``, in float32.

    Args:
        features: size of the last dim.
        eps: added to the mean square.
    """

    def __init__(self, features: int, *, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to one."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Normalise ``x`` [..., features] and multiply it by ``silu(gate)``; the result has the dtype of ``x``."""
        wide = torch.promote_types(x.dtype, torch.float32)
        normed = functional.rms_norm(x.to(wide), x.shape[-1:], eps=self.eps).to(x.dtype)
        return ((self.weight * normed).to(wide) * functional.silu(gate.to(wide))).to(x.dtype)
