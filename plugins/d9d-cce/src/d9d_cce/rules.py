"""Decisions of the backends, and their priorities. Imports neither the library nor Triton."""

from __future__ import annotations

from d9d_core.kernel import Decision, OpSignature

#: By name only. With the filter, for good: gradients are not those of the op.
BY_NAME = 0
#: Priority and reason of each backend on CUDA.
EXACT = (BY_NAME, "no logits in memory, all gradients, which are summed in the dtype of the model; by name only")
FILTERED = (
    BY_NAME,
    "leaves gradients out where all probabilities of a tile are small: an approximation; by name only",
)
#: The backward reads no others.
_FLOATS = ("bfloat16", "float16")
#: Elements of the weight that the kernels' indices of 32 bits can count.
_MOST_ELEMENTS = 2**31 - 1


def supports(signature: OpSignature) -> Decision:
    """Accept 16 bits on CUDA."""
    return _decide(signature, EXACT)


def supports_filtered(signature: OpSignature) -> Decision:
    """Accept, by name only, what :func:`supports` accepts."""
    return _decide(signature, FILTERED)


def _decide(signature: OpSignature, rule: tuple[int, str]) -> Decision:
    if signature.device != "cuda":
        return Decision(False, f"its Triton kernels run on cuda; the device is {signature.device}")
    if signature.dtype not in _FLOATS:
        return Decision(False, f"reads {' and '.join(_FLOATS)}; the tensors are {signature.dtype}")
    elements = signature.static.get("features", 1) * signature.static.get("vocabulary", 1)
    if elements > _MOST_ELEMENTS:
        return Decision(False, f"its kernels count to {_MOST_ELEMENTS}; the weight has {elements} elements")
    priority, reason = rule
    return Decision(True, reason, priority)
