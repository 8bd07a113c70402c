"""Decisions of the backends, and their priorities. Does not import the library."""

from __future__ import annotations

import re
from importlib import metadata

from d9d_core.extend import Decision, OpSignature

#: Priority and reason on CUDA; 0 is by name only.
RMS_NORM = (0, "one pass in each direction; by name only: nobody measured it beside triton and torch")
#: The same of the feed-forward layer, measured on an H200.
SWIGLU = (20, "no pass over memory for the gate: 5.5 ms both ways where products and passes take 5.8")
_FLOATS = ("bfloat16", "float16", "float32")
#: Major numbers of the compute capabilities that the library is for.
_CAPABILITIES = (9, 10)
#: Elements of 16 bytes.
_ALIGNED = 8
#: Last QuACK that cannot describe functions of the CuTe DSL from this version on, which have context variables.
_LAST_BEFORE, _FIRST_UNKNOWN = (0, 6, 5), (4, 8)


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
    priority, reason = RMS_NORM
    return Decision(True, reason, priority)


def swiglu(signature: OpSignature) -> Decision:
    """Accept rows that tensor copies can read; by itself on Hopper, where it was measured."""
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
    if reason := unfit():
        return Decision(False, reason)
    if signature.checkpointed:
        return Decision(
            True, "a block that is computed again may keep single products, which these are not; by name", 0
        )
    if major == _CAPABILITIES[1]:
        return Decision(True, "nobody measured it on this GPU; by name only", 0)
    priority, reason = SWIGLU
    return Decision(True, reason, priority)


def unfit() -> str | None:
    """Reason why the installed QuACK cannot make products with the installed CuTe DSL; ``None`` if it can."""
    try:
        ours, theirs = (metadata.version(name) for name in ("quack-kernels", "nvidia-cutlass-dsl"))
    except metadata.PackageNotFoundError:
        return None  # a stand-in, or a source tree; requires says whether it is there at all
    if _numbers(ours) <= _LAST_BEFORE and _numbers(theirs) >= _FIRST_UNKNOWN:
        return (
            f"QuACK {ours} knows the CuTe DSL up to 4.7, installed is {theirs}: its products raise a TypeError; "
            "install 'nvidia-cutlass-dsl<4.8', which FlashAttention 4 takes too"
        )
    return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def capability() -> int | None:
    """Major number of this GPU's compute capability; ``None`` without one."""
    import torch

    return torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else None
