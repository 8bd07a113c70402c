"""Condition and priority of the backend. Imports neither torch nor the library."""

from __future__ import annotations

from d9d_core.kernel import Decision, OpSignature

#: Priority and reason of the backend; d9d-triton's backend, of which it is a variant, has a lower priority.
PRIORITY = 25
REASON = (
    "measured algorithms for the products: on an H200 up to 9 % less time than cuBLAS's defaults "
    "(0.568 instead of 0.611 ms, 0.599 instead of 0.656 ms); 338.6 ms for a dense step, not 340.1"
)
_FLOATS = ("bfloat16", "float16")
#: Number of 2-byte elements in 16 bytes.
_ALIGNED = 8


def swiglu(signature: OpSignature) -> Decision:
    """Accept calls of ``swiglu`` on CUDA whose row sizes are multiples of 16 bytes."""
    if signature.device != "cuda":
        return Decision(False, f"cuBLASLt needs CUDA, the device is {signature.device}")
    if signature.dtype not in _FLOATS:
        return Decision(False, f"multiplies {' or '.join(_FLOATS)}; the tensors are {signature.dtype}")
    odd = {name: size for name, size in signature.static.items() if size % _ALIGNED}
    if odd:
        sizes = ", ".join(f"{name} {size}" for name, size in odd.items())
        return Decision(
            False, f"its algorithms need rows of 16 bytes or multiples: {sizes} is no multiple of {_ALIGNED}"
        )
    if signature.checkpointed:
        reason = (
            "activation checkpointing cannot save products inside this op (save: [aten.mm]); used only if the job "
            "names it"
        )
        return Decision(True, reason)
    return Decision(True, REASON, PRIORITY)
