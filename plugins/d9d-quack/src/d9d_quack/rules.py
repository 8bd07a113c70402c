"""Decisions of the backends, and their priorities. Does not import the library."""

from __future__ import annotations

from d9d_core.extend import Decision, OpSignature

#: Priority and reason on CUDA; 0 is by name only.
RMS_NORM = (0, "one pass in each direction; by name only: nobody measured it beside triton and torch")
#: The same of the feed-forward layer. A dense step on an H200 has 10 ms less of passes over memory and 10 ms more of
#: products, for the chip is at its limit of power: 349.2 against 347.4 ms.
SWIGLU = (0, "no pass over memory for the gate, but slower products: a dense step takes as long; by name only")
_FLOATS = ("bfloat16", "float16", "float32")
#: Major numbers of the compute capabilities that the library is for.
_CAPABILITIES = (9, 10)
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
    if signature.device != "cuda":
        return Decision(False, f"QuACK is for CUDA, the device is {signature.device}")
    if signature.dtype not in _FLOATS[:2]:
        return Decision(False, f"multiplies {' or '.join(_FLOATS[:2])}; the tensors are {signature.dtype}")
    odd = {name: size for name, size in signature.static.items() if size % _ALIGNED}
    if odd:
        sizes = ", ".join(f"{name} {size}" for name, size in odd.items())
        return Decision(False, f"tensor copies take rows of 16 bytes: {sizes} is no multiple of {_ALIGNED}")
    major = capability()
    if major not in (*_CAPABILITIES, None):
        return Decision(False, f"QuACK is for compute capability 9.x or 10.x, this GPU has {major}.x")
    priority, reason = SWIGLU
    return Decision(True, reason, priority)


def capability() -> int | None:
    """Major number of this GPU's compute capability; ``None`` without one."""
    import torch

    return torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else None
