"""Op ``gelu_mul`` of GeGLU: ``gelu(gate) * up``, with the tanh approximation of gelu.

Shazeer 2020, "GLU Variants Improve Transformer", equation 6.
"""

from __future__ import annotations

from collections.abc import Callable

from d9d_core.kernel import OpSignature
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


def gelu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Reference: ``gelu(gate) * up``, with the approximation of gelu by tanh (Hendrycks and Gimpel 2016, section 2).

    Args:
        gate: [..., I], I features of the feed-forward layer.
        up: [..., I].

    Returns:
        [..., I] in the dtype of the arguments.
    """
    return functional.gelu(gate, approximate="tanh") * up


def recomputed_build(_signature: OpSignature) -> Callable[[Tensor, Tensor], Tensor]:
    """Build a backend function whose result compiled code recomputes in the backward, as for ``silu_mul``."""

    def recomputed(gate: Tensor, up: Tensor) -> Tensor:
        out: Tensor = checkpoint(gelu_mul, gate, up, use_reentrant=False, preserve_rng_state=False)
        return out

    return recomputed
