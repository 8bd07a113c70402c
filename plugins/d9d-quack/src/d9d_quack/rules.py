"""Decisions of the backends, and their priorities. Does not import the library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from d9d_core.kernel import Decision, OpSignature

#: Priority and reason on CUDA; 0 is by name only.
RMS_NORM = (0, "one pass in each direction; by name only: nobody measured it beside triton and torch")
#: The same of the feed-forward layer. A dense step on an H200 has 10 ms less of passes over memory and 10 ms more of
#: products, for the chip is at its limit of power: 349.2 against 347.4 ms.
SWIGLU = (0, "no pass over memory for the gate, but slower products: a dense step takes as long; by name only")
#: The same of products of experts, in a MoE step on an H200: 131,072 rows, 128 experts of 2,048 x 768.
GROUPED_LINEAR = (20, "0.64 ms a product where grouped_mm takes 0.79; the host reads no counts")
#: The same where nobody measured them.
_UNMEASURED = (0, "products of experts were measured on compute capability 9.x only; by name")
_FLOATS = ("bfloat16", "float16", "float32")
#: Major numbers of the compute capabilities that the library is for.
_CAPABILITIES = (9, 10)
#: Of these, the one that times of products of experts were measured on.
_MEASURED = 9
#: Elements of 16 bytes.
_ALIGNED = 8


def rms_norm(signature: OpSignature) -> Decision:
    """Accept on Hopper and Blackwell."""
    if signature.device != "cuda":
        return Decision(False, f"QuACK is for CUDA, the device is {signature.device}")
    if signature.dtype not in _FLOATS:
        return Decision(False, f"reads {', '.join(_FLOATS)}; the tensors are {signature.dtype}")
    major = capability()
    # A laptop that checks a job for a cluster sees no GPU, and trusts.
    if major is not None and major not in _CAPABILITIES:
        known = " or ".join(f"{number}.x" for number in _CAPABILITIES)
        return Decision(False, f"QuACK is for compute capability {known}, this GPU has {major}.x")
    features = signature.static.get("features")
    if features is not None and features % 2 and signature.dtype != "float32":
        return Decision(False, f"copies of QuACK take 4 bytes at least: features {features} is odd")
    priority, reason = RMS_NORM
    return Decision(True, reason, priority)


def swiglu(signature: OpSignature) -> Decision:
    """Accept rows that tensor copies can read."""
    if refusal := _refusal(signature, signature.static):
        return Decision(False, refusal)
    priority, reason = SWIGLU
    return Decision(True, reason, priority)


def grouped_linear(signature: OpSignature) -> Decision:
    """Accept rows that tensor copies can read; experts may be of any number."""
    sizes = {name: size for name, size in signature.static.items() if name != "experts"}
    if refusal := _refusal(signature, sizes):
        return Decision(False, refusal)
    priority, reason = GROUPED_LINEAR if capability() in (_MEASURED, None) else _UNMEASURED
    return Decision(True, reason, priority)


def _refusal(signature: OpSignature, sizes: Mapping[str, Any]) -> str | None:
    """Why products of rows of these sizes are not computed."""
    if signature.device != "cuda":
        return f"QuACK is for CUDA, the device is {signature.device}"
    if signature.dtype not in _FLOATS[:2]:
        return f"multiplies {' or '.join(_FLOATS[:2])}; the tensors are {signature.dtype}"
    if odd := [f"{name} {size}" for name, size in sizes.items() if size % _ALIGNED]:
        return f"tensor copies take rows of 16 bytes: {', '.join(odd)} is no multiple of {_ALIGNED}"
    major = capability()
    if major not in (*_CAPABILITIES, None):
        return f"QuACK is for compute capability 9.x or 10.x, this GPU has {major}.x"
    return None


def capability() -> int | None:
    """Major number of this GPU's compute capability; ``None`` without one."""
    import torch

    return torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else None
