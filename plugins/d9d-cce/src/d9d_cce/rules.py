"""Conditions of the backends, and their priorities. Imports neither the library nor Triton."""

from __future__ import annotations

from d9d_core.kernel import Decision, OpSignature

#: Priority of a backend that is used only if a job names it. ``cce_filtered`` must keep this priority, because its
#: gradients are approximate.
BY_NAME = 0
#: Priority and reason of each backend on CUDA.
EXACT = (BY_NAME, "no logits in memory; all gradients, summed in the dtype of the model; used only if the job names it")
FILTERED = (
    BY_NAME,
    "skips the gradients of tiles whose probabilities are all small: an approximation; used only if the job names it",
)
#: Dtypes that the backward supports.
_FLOATS = ("bfloat16", "float16")
#: Largest number of elements of a weight that the kernels' 32-bit indices can address.
_MOST_ELEMENTS = 2**31 - 1


def supports(signature: OpSignature) -> Decision:
    """Accept calls of ``linear_cross_entropy`` on CUDA in bfloat16 or float16, if the kernels can index the weight."""
    return _decide(signature, EXACT)


def supports_filtered(signature: OpSignature) -> Decision:
    """Accept the same calls as :func:`supports`, for the backend ``cce_filtered``."""
    return _decide(signature, FILTERED)


def _decide(signature: OpSignature, rule: tuple[int, str]) -> Decision:
    if signature.device != "cuda":
        return Decision(False, f"its Triton kernels need CUDA; the device is {signature.device}")
    if signature.dtype not in _FLOATS:
        return Decision(False, f"reads {' and '.join(_FLOATS)}; the tensors are {signature.dtype}")
    elements = signature.static.get("features", 1) * signature.static.get("vocabulary", 1)
    if elements > _MOST_ELEMENTS:
        return Decision(False, f"its kernels have 32-bit indices; the weight has {elements} elements")
    priority, reason = rule
    return Decision(True, reason, priority)
