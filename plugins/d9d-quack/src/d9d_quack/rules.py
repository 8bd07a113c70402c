"""Conditions of the backends, and their priorities. Does not import the library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from d9d_core.kernel import Decision, OpSignature

#: Priority and reason of RMSNorm; a backend of priority 0 is used only if a job names it.
RMS_NORM = (
    0,
    "one pass in each direction; used only if the job names it, because it was not compared with triton and torch",
)
#: Priority and reason of the SwiGLU layer. In a dense step on an H200, passes over memory take 10 ms less than with
#: separate kernels, but products take over 10 ms more, because the GPU is at its power limit: the whole step takes
#: 349.2 instead of 347.4 ms.
SWIGLU = (
    0,
    "no pass over memory for the gate, but slower products: a dense step takes as long; used only if the job names it",
)
#: Priority and reason of the experts' products. Times are of a MoE step on an H200: 131,072 rows, 128 experts of
#: 2,048 x 768.
GROUPED_LINEAR = (20, "0.64 ms a product, grouped_mm takes 0.79; the host reads no counts")
#: Priority and reason of the experts' products on GPUs where they were not measured.
_UNMEASURED = (0, "products of experts were measured on compute capability 9.x only; used only if the job names it")
_FLOATS = ("bfloat16", "float16", "float32")
#: Major compute capabilities that the library supports.
_CAPABILITIES = (9, 10)
#: Major compute capability on which the products of experts were measured.
_MEASURED = 9
#: Number of 2-byte elements in 16 bytes.
_ALIGNED = 8


def rms_norm(signature: OpSignature) -> Decision:
    """Accept calls of ``rms_norm`` on Hopper and Blackwell GPUs whose rows are a multiple of 4 bytes."""
    if signature.device != "cuda":
        return Decision(False, f"QuACK needs CUDA, the device is {signature.device}")
    if signature.dtype not in _FLOATS:
        return Decision(False, f"reads {', '.join(_FLOATS)}; the tensors are {signature.dtype}")
    major = capability()
    # Without a GPU, as on a laptop that checks a cluster's job, assume a suitable one.
    if major is not None and major not in _CAPABILITIES:
        known = " or ".join(f"{number}.x" for number in _CAPABILITIES)
        return Decision(False, f"QuACK needs compute capability {known}, this GPU has {major}.x")
    features = signature.static.get("features")
    if features is not None and features % 2 and signature.dtype != "float32":
        return Decision(False, f"QuACK copies at least 4 bytes at a time: features {features} is odd")
    priority, reason = RMS_NORM
    return Decision(True, reason, priority)


def swiglu(signature: OpSignature) -> Decision:
    """Accept calls of ``swiglu`` whose row sizes the GPU's tensor copies (TMA) support."""
    if refusal := _refusal(signature, signature.static):
        return Decision(False, refusal)
    priority, reason = SWIGLU
    return Decision(True, reason, priority)


def grouped_linear(signature: OpSignature) -> Decision:
    """Accept calls of ``grouped_linear`` with any number of experts, and row sizes that tensor copies (TMA) support."""
    sizes = {name: size for name, size in signature.static.items() if name != "experts"}
    if refusal := _refusal(signature, sizes):
        return Decision(False, refusal)
    priority, reason = GROUPED_LINEAR if capability() in (_MEASURED, None) else _UNMEASURED
    return Decision(True, reason, priority)


def _refusal(signature: OpSignature, sizes: Mapping[str, Any]) -> str | None:
    """Reason why products with these row sizes cannot be computed, or ``None``."""
    if signature.device != "cuda":
        return f"QuACK needs CUDA, the device is {signature.device}"
    if signature.dtype not in _FLOATS[:2]:
        return f"multiplies {' or '.join(_FLOATS[:2])}; the tensors are {signature.dtype}"
    if odd := [f"{name} {size}" for name, size in sizes.items() if size % _ALIGNED]:
        return f"tensor copies need rows of a multiple of 16 bytes: {', '.join(odd)} is no multiple of {_ALIGNED}"
    major = capability()
    if major not in (*_CAPABILITIES, None):
        return f"QuACK needs compute capability 9.x or 10.x, this GPU has {major}.x"
    return None


def capability() -> int | None:
    """Major compute capability of this GPU; ``None`` without a GPU."""
    import torch

    return torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else None
