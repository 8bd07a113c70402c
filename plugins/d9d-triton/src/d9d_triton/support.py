"""Decisions of the backends: where each runs, and in which number formats. Imports no Triton."""

from __future__ import annotations

import os
from collections.abc import Collection

from d9d_core.kernel import Decision, OpSignature

#: Number formats that the kernels read; they compute in float32.
FLOATS = ("bfloat16", "float16", "float32")
#: Above the backends of d9d-nn, which are at most at 15.
PRIORITY = 20


def adamw(signature: OpSignature) -> Decision:
    """Accept AdamW of narrow and float32 parameters, without ``amsgrad`` and ``maximize``."""
    for name in ("amsgrad", "maximize"):
        if signature.static.get(name):
            return Decision(False, f"does not compute {name}")
    return decide(signature, "one launch for all tensors; clipping divides inside, in every number format")


def stochastic_adamw(signature: OpSignature) -> Decision:
    """Accept AdamW of bfloat16 and float32 parameters with stochastic rounding."""
    return decide(signature, "one launch for all tensors, the rounding inside", ("bfloat16", "float32"))


def gradient_power(signature: OpSignature) -> Decision:
    """Accept the Euclidean norm."""
    if signature.static.get("p") != 2:
        return Decision(False, f"sums squares, for p: 2; here p is {signature.static.get('p')}")
    return decide(signature, "one launch for all: 0.50 ms for 2 GB on an H200, where torch's takes 0.91")


def linear_cross_entropy(signature: OpSignature) -> Decision:
    """Accept what the kernels read, on CUDA by itself."""
    return decide(signature, "each logit is read once for the loss, and once more to become its gradient in its place")


def linear_cross_entropy_sum(signature: OpSignature) -> Decision:
    """Accept, by name only, what :func:`linear_cross_entropy` accepts."""
    return decide(signature, "memory for one chunk, if the loss is a plain sum over tokens; by name only", priority=0)


def linear_cross_entropy_sum_narrow(signature: OpSignature) -> Decision:
    """Accept, by name only, bfloat16 and float32: float16 lacks the range for gradients before they are scaled."""
    reason = "a plain sum in a fraction of the memory, for a weight gradient rounded once per chunk; by name only"
    return decide(signature, reason, ("bfloat16", "float32"), priority=0)


def linear_cross_entropy_words(signature: OpSignature) -> Decision:
    """Accept, by name only, what :func:`linear_cross_entropy` accepts."""
    return decide(signature, "a fraction of the memory, for four products in place of three; by name only", priority=0)


def vocabulary_parallel_cross_entropy(signature: OpSignature) -> Decision:
    """Accept what the kernels read, on CUDA by itself."""
    return decide(
        signature, "each logit of the rank's words is read once for the statistics, and once for its gradient"
    )


def decide(signature: OpSignature, reason: str, dtypes: Collection[str] = FLOATS, priority: int = PRIORITY) -> Decision:
    """Accept on CUDA, and on a CPU by name where Triton interprets kernels.

    Args:
        signature: of the op's calls.
        reason: what speaks for the kernel, measured.
        dtypes: number formats that the kernel reads.
        priority: on CUDA.
    """
    if signature.dtype not in dtypes:
        return Decision(False, f"reads {', '.join(dtypes)}; the tensors are {signature.dtype}")
    if signature.device == "cuda":
        return Decision(True, reason, priority)
    if signature.device == "cpu" and interpreted():
        return Decision(True, "interpreted on the CPU, for tests: by name only", 0)
    return Decision(False, f"Triton kernels run on cuda; the device is {signature.device}")


def interpreted() -> bool:
    """Whether Triton runs kernels in Python, on tensors of the CPU: ``TRITON_INTERPRET=1``."""
    return os.environ.get("TRITON_INTERPRET") == "1"
