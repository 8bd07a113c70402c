"""Conditions of the backends, and their priorities. Imports neither the library nor Triton."""

from __future__ import annotations

from collections.abc import Mapping

from d9d_core.kernel import Decision, OpSignature

_FLOATS = ("bfloat16", "float16", "float32")
#: Largest number of features that the library's RMSNorm kernel supports.
MOST_FEATURES = 65536

#: Op -> priority and reason on CUDA; a backend of priority 0 is used only if a job names it.
RULES: Mapping[str, tuple[int, str]] = {
    "rms_norm": (0, "one pass in each direction; used only if the job names it"),
    "silu_mul": (
        0,
        "one pass in each direction, but a copy of both inputs in the backward; used only if the job names it",
    ),
    "rope": (
        0,
        "one launch in each direction, after a copy, because it rotates in place; used only if the job names it",
    ),
    "linear_cross_entropy": (
        0,
        "exact, in little memory; the backward recomputes the logits, and the host waits for the device twice per "
        "microbatch; used only if the job names it",
    ),
}


def rms_norm(signature: OpSignature) -> Decision:
    """Accept calls of ``rms_norm`` on CUDA whose rows fit into one Triton program."""
    features = signature.static.get("features", 1)
    if features > MOST_FEATURES:
        return Decision(False, f"a program handles whole rows: at most {MOST_FEATURES} features, not {features}")
    return _decide(signature)


def silu_mul(signature: OpSignature) -> Decision:
    """Accept calls of ``silu_mul`` on CUDA in bfloat16, float16 or float32."""
    return _decide(signature)


def rope(signature: OpSignature) -> Decision:
    """Accept calls of ``rope`` on CUDA in bfloat16, float16 or float32."""
    return _decide(signature)


def linear_cross_entropy(signature: OpSignature) -> Decision:
    """Accept calls of ``linear_cross_entropy`` on CUDA in bfloat16, float16 or float32."""
    return _decide(signature)


def _decide(signature: OpSignature) -> Decision:
    if signature.device != "cuda":
        return Decision(False, f"its Triton kernels need CUDA; the device is {signature.device}")
    if signature.dtype not in _FLOATS:
        return Decision(False, f"reads {', '.join(_FLOATS)}; the tensors are {signature.dtype}")
    priority, reason = RULES[signature.op]
    return Decision(True, reason, priority)
