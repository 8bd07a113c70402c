"""Conditions of the backends: devices and dtypes for which each can be used. Imports no Triton."""

from __future__ import annotations

import os
from collections.abc import Collection

from d9d_core.kernel import Decision, OpSignature

#: Dtypes that the kernels read; they compute in float32.
FLOATS = ("bfloat16", "float16", "float32")
#: Priority above other backends of the same ops in d9d-nn, whose highest is 10.
PRIORITY = 20
#: Largest number of features of a key or value head of ``gated_delta_rule``: a program holds whole keys.
MOST_HEAD_FEATURES = 256
#: Largest number of features of a float32 key: larger tiles were never run, and exceed the shared memory of many GPUs.
_MOST_FLOAT32_FEATURES = 128
#: Priority of ``gated_delta_rule`` above ``chunked`` of d9d-nn (10) and ``fla`` of d9d-fla (20), which is not faster.
_FASTEST_RULE = 25


def adamw(signature: OpSignature) -> Decision:
    """Accept AdamW of parameters in a supported dtype, without ``amsgrad`` and ``maximize``."""
    for name in ("amsgrad", "maximize"):
        if signature.static.get(name):
            return Decision(False, f"does not compute {name}")
    return decide(signature, "one launch for all tensors of a group; divides gradients for clipping, in every dtype")


def stochastic_adamw(signature: OpSignature) -> Decision:
    """Accept AdamW of bfloat16 and float32 parameters with stochastic rounding."""
    return decide(signature, "one launch for all tensors of a group, rounding included", ("bfloat16", "float32"))


def gradient_power(signature: OpSignature) -> Decision:
    """Accept ``gradient_power`` for the Euclidean norm."""
    if signature.static.get("p") != 2:
        return Decision(False, f"sums squares, for p: 2; here p is {signature.static.get('p')}")
    return decide(signature, "one launch for all gradients: 0.50 ms for 2 GB on an H200; torch takes 0.91")


def gated_delta_rule(signature: OpSignature) -> Decision:
    """Accept ``gated_delta_rule`` on NVIDIA's GPUs for heads of at most 256 features, float32 keys of at most 128."""
    if on_amd():
        return Decision(False, "Triton's compiler for AMD's GPUs lacks the precision of its products")
    wide = signature.dtype == "float32"
    limits = {"key_dim": _MOST_FLOAT32_FEATURES if wide else MOST_HEAD_FEATURES, "value_dim": MOST_HEAD_FEATURES}
    for name, most in limits.items():
        features = signature.static.get(name, 1)
        if features > most:
            where = "a float32 head" if most == _MOST_FLOAT32_FEATURES else "a head"
            return Decision(False, f"a program holds at most {most} features of {where}; {name} is {features}")
    reason = "kernels for chunks of 64 positions that keep tensors in the dtype of the values; the host does not wait"
    return decide(signature, reason, priority=_FASTEST_RULE)


def linear_cross_entropy(signature: OpSignature) -> Decision:
    """Accept ``linear_cross_entropy`` in dtypes that the kernels read; chosen automatically on CUDA."""
    return decide(signature, "reads each logit once for the loss, and once more to overwrite it with its gradient")


def linear_cross_entropy_sum(signature: OpSignature) -> Decision:
    """Accept the same calls as :func:`linear_cross_entropy`; a job must name the backend."""
    reason = "memory for one chunk of logits, if the loss is an unweighted sum; used only if the job names it"
    return decide(signature, reason, priority=0)


def linear_cross_entropy_sum_narrow(signature: OpSignature) -> Decision:
    """Accept bfloat16 and float32; float16 lacks the range for unscaled gradients. A job must name the backend."""
    reason = (
        "for an unweighted sum of losses, in less memory; rounds weight gradients once per chunk; used only if the job "
        "names it"
    )
    return decide(signature, reason, ("bfloat16", "float32"), priority=0)


def linear_cross_entropy_words(signature: OpSignature) -> Decision:
    """Accept the same calls as :func:`linear_cross_entropy`; a job must name the backend."""
    reason = "takes much less memory, but four products instead of three; used only if the job names it"
    return decide(signature, reason, priority=0)


def vocabulary_parallel_cross_entropy(signature: OpSignature) -> Decision:
    """Accept ``vocabulary_parallel_cross_entropy`` in dtypes that the kernels read; chosen automatically on CUDA."""
    return decide(signature, "reads each logit of the rank once for the statistics, and once for its gradient")


def decide(signature: OpSignature, reason: str, dtypes: Collection[str] = FLOATS, priority: int = PRIORITY) -> Decision:
    """Accept calls on CUDA, and on a CPU if Triton interprets kernels and the job names the backend.

    Args:
        signature: signature of the op's calls.
        reason: measured advantage of the kernel.
        dtypes: dtypes that the kernel reads.
        priority: priority on CUDA.
    """
    if signature.dtype not in dtypes:
        return Decision(False, f"reads {', '.join(dtypes)}; the tensors are {signature.dtype}")
    if signature.device == "cuda":
        return Decision(True, reason, priority)
    if signature.device == "cpu" and interpreted():
        return Decision(True, "interpreted on the CPU, for tests; used only if the job names it", 0)
    return Decision(False, f"Triton kernels run on cuda; the device is {signature.device}")


def on_amd() -> bool:
    """Whether torch is built for AMD's GPUs, which it calls ``cuda`` too."""
    import torch

    return torch.version.hip is not None


def interpreted() -> bool:
    """Whether Triton interprets kernels in Python on CPU tensors, as ``TRITON_INTERPRET=1`` requests."""
    return os.environ.get("TRITON_INTERPRET") == "1"
