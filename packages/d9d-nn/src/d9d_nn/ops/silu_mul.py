"""Op ``silu_mul``: the gate of SwiGLU (Shazeer 2020, "GLU Variants Improve Transformer", equation 6)."""

from __future__ import annotations

from collections.abc import Callable

from d9d_core.kernel import Decision, OpSignature
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Reference: ``gate * sigmoid(gate) * up``.

    Args:
        gate: [..., I], I features of the feed-forward layer.
        up: [..., I].

    Returns:
        [..., I] in the dtype of the arguments.
    """
    return functional.silu(gate) * up


def recomputed_supports(signature: OpSignature) -> Decision:
    """Accept compiled modules: on CUDA by itself, where activations are what fills the memory."""
    if not signature.compiled:
        return Decision(
            accept=False, reason="without a compiler, the product behind it keeps what it returns all the same"
        )
    if signature.checkpointed:
        # Torch 2.11 keeps the inputs of what is marked inside of a marked block.
        return Decision(accept=False, reason="the backward computes the whole block again")
    if signature.device != "cuda":
        return Decision(accept=True, reason="less memory for one pass more; by name only", priority=0)
    return Decision(
        accept=True, reason="the backward computes it again in a pass that reads its inputs anyway", priority=5
    )


def recomputed_build(_signature: OpSignature) -> Callable[[Tensor, Tensor], Tensor]:
    """Backend that the compiler is told not to keep for the backward."""

    def recomputed(gate: Tensor, up: Tensor) -> Tensor:
        out: Tensor = checkpoint(silu_mul, gate, up, use_reentrant=False, preserve_rng_state=False)
        return out

    return recomputed
