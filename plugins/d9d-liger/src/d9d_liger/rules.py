"""Decisions of the backends, and their priorities. Imports neither the library nor Triton."""

from __future__ import annotations

from collections.abc import Mapping

from d9d_core.kernel import Decision, OpSignature

_FLOATS = ("bfloat16", "float16", "float32")
#: Features of the longest rows that a program of the library takes.
MOST_FEATURES = 65536

#: Op -> priority and reason on CUDA; 0 is by name only.
RULES: Mapping[str, tuple[int, str]] = {
    "rms_norm": (0, "one pass in each direction; by name only"),
    "silu_mul": (0, "one pass in each direction, and a copy of both inputs in the backward; by name only"),
    "rope": (0, "one launch in each direction, and a copy before, as it rotates in place; by name only"),
    "linear_cross_entropy": (
        0,
        "exact, in little memory; the backward computes the logits again, and the host waits for the device twice in "
        "each microbatch; by name only",
    ),
}


def rms_norm(signature: OpSignature) -> Decision:
    """Accept rows that a program can take as a whole."""
    features = signature.static.get("features", 1)
    if features > MOST_FEATURES:
        return Decision(False, f"a program takes whole rows: at most {MOST_FEATURES} features, not {features}")
    return _decide(signature)


def silu_mul(signature: OpSignature) -> Decision:
    """Accept what the kernels read, on CUDA."""
    return _decide(signature)


def rope(signature: OpSignature) -> Decision:
    """Accept what the kernels read, on CUDA."""
    return _decide(signature)


def linear_cross_entropy(signature: OpSignature) -> Decision:
    """Accept what the kernels read, on CUDA."""
    return _decide(signature)


def _decide(signature: OpSignature) -> Decision:
    if signature.device != "cuda":
        return Decision(False, f"its Triton kernels run on cuda; the device is {signature.device}")
    if signature.dtype not in _FLOATS:
        return Decision(False, f"reads {', '.join(_FLOATS)}; the tensors are {signature.dtype}")
    priority, reason = RULES[signature.op]
    return Decision(True, reason, priority)
