"""Decision of the backend, and its priority. Imports neither torch nor the library."""

from __future__ import annotations

from d9d_core.kernel import Decision, OpSignature

#: Priority and reason, above d9d-triton's backend, of which this is a variant.
PRIORITY = 25
REASON = (
    "measured algorithms of the products: on an H200 up to 9 % less time than those that cuBLAS guesses "
    "(0.568 for 0.611 ms, 0.599 for 0.656 ms); 338.6 ms a dense step, not 340.1"
)
_FLOATS = ("bfloat16", "float16")
#: Elements of 16 bytes.
_ALIGNED = 8


def swiglu(signature: OpSignature) -> Decision:
    """Accept layers on CUDA whose rows are multiples of 16 bytes."""
    if signature.device != "cuda":
        return Decision(False, f"cuBLASLt is for CUDA, the device is {signature.device}")
    if signature.dtype not in _FLOATS:
        return Decision(False, f"multiplies {' or '.join(_FLOATS)}; the tensors are {signature.dtype}")
    odd = {name: size for name, size in signature.static.items() if size % _ALIGNED}
    if odd:
        sizes = ", ".join(f"{name} {size}" for name, size in odd.items())
        return Decision(False, f"its algorithms take rows of 16 bytes: {sizes} is no multiple of {_ALIGNED}")
    if signature.checkpointed:
        reason = "checkpointing finds no products inside of it to keep (save: [aten.mm]); by name only"
        return Decision(True, reason)
    return Decision(True, REASON, PRIORITY)
