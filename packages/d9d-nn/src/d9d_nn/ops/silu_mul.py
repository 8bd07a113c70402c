"""Op ``silu_mul``: ``silu(gate) * up`` of SwiGLU (Shazeer 2020, "GLU Variants Improve Transformer", equation 6)."""

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
    """Accept compiled modules without checkpointing; the default on CUDA, where activations fill the memory."""
    if not signature.compiled:
        return Decision(accept=False, reason="without a compiler, the next product keeps the result anyway")
    if signature.checkpointed:
        # In a checkpointed block, torch 2.11 would also keep the inputs of this function for the backward.
        return Decision(accept=False, reason="the backward already computes the whole block again")
    if signature.device != "cuda":
        return Decision(accept=True, reason="less memory for one more pass; used only if the job names it", priority=0)
    return Decision(
        accept=True, reason="the backward computes the result again in a pass that already reads the inputs", priority=5
    )


def recomputed_build(_signature: OpSignature) -> Callable[[Tensor, Tensor], Tensor]:
    """Build a backend function whose result compiled code recomputes in the backward."""

    def recomputed(gate: Tensor, up: Tensor) -> Tensor:
        out: Tensor = checkpoint(silu_mul, gate, up, use_reentrant=False, preserve_rng_state=False)
        return out

    return recomputed
