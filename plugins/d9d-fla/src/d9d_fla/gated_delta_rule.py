"""Backend ``fla`` of the op ``gated_delta_rule``.

Shapes: B samples, S positions, K key heads, N value heads, D_k and D_v features of a key and value head.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from d9d_core.kernel import OpSignature
from torch import Tensor
from torch.nn import functional

#: Smallest logarithm of a decay. A state times exp(-50) = 2e-22 adds nothing to a float32 sum. A smaller value would
#: cost precision, because the library takes differences of sums of up to 64 logarithms.
FORGETS = -50.0


def build(_signature: OpSignature) -> GatedDeltaRule:
    """Build the backend ``fla``; its function is the same for every signature."""
    # Imported here, because it takes seconds and the conditions of the backend do not need it.
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return GatedDeltaRule(chunk_gated_delta_rule)


class GatedDeltaRule:
    """Gated delta rule by flash-linear-attention, see :func:`d9d_nn.ops.gated_delta_rule.gated_delta_rule`.

    Args:
        rule: the library's ``chunk_gated_delta_rule``, which returns outputs and last states.
    """

    def __init__(self, rule: Callable[..., tuple[Tensor, Tensor | None]]) -> None:
        self._rule = rule

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        beta: Tensor,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Apply the rule.

        Args:
            query: [B, S, K, D_k].
            key: [B, S, K, D_k].
            value: [B, S, N, D_v], bfloat16 or float16.
            decay: [B, S, N].
            beta: [B, S, N].
            documents: int64 [B, S]; ``None`` if a sample is one document.

        Returns:
            [B, S, N, D_v] in the dtype of ``value``.
        """
        out, _ = self._rule(
            query.to(value.dtype),
            key.to(value.dtype),
            value,
            forgetting(decay, documents),
            beta,
            scale=key.shape[-1] ** -0.5,
            use_qk_l2norm_in_kernel=True,
        )
        return out


def forgetting(decay: Tensor, documents: Tensor | None) -> Tensor:
    """Change the logarithms of decays so that the first token of a document forgets the state of earlier documents.

    The library could separate documents by their lengths, but then the host would wait for the device in every layer.

    Args:
        decay: [B, S, N].
        documents: int64 [B, S]; ``None`` if a sample is one document.

    Returns:
        float32 [B, S, N].
    """
    decay = decay.to(torch.float32).clamp(min=FORGETS)
    if documents is None:
        return decay
    # The state before the first position is zero, so that position needs no mark.
    starts = functional.pad(documents[:, 1:] != documents[:, :-1], (1, 0)).to(decay.device)
    return decay.masked_fill(starts.unsqueeze(-1), FORGETS)
