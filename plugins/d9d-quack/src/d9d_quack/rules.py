"""Decision of the backend, and its priority. Does not import the library."""

from __future__ import annotations

from d9d_core.extend import Decision, OpSignature

#: Priority and reason on CUDA; 0 is by name only.
RMS_NORM = (0, "one pass in each direction; by name only: nobody measured it beside triton and torch")
_FLOATS = ("bfloat16", "float16", "float32")
#: Major numbers of the compute capabilities that the library is for.
_CAPABILITIES = (9, 10)


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


def capability() -> int | None:
    """Major number of this GPU's compute capability; ``None`` without one."""
    import torch

    return torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else None
