"""Conditions of the backends and their priorities. Imports no library.

If new measurements differ, change the priorities in this file. The backends of d9d-nn have priority 10 (``sdpa``) and
15 (``flex``, with documents or windows to skip).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from d9d_core.kernel import Decision, OpSignature

#: Priority of a backend that is used only if a job names it.
BY_NAME = 0
_FLOATS = ("bfloat16", "float16")
#: Multiple of features per head that all libraries need, because they load 16 bytes at once.
_HEAD_MULTIPLE = 8


@dataclass(frozen=True, slots=True)
class Library:
    """Conditions and priorities of a FlashAttention library.

    Attributes:
        name: name of the library for messages.
        capabilities: major compute capabilities for which the library has kernels with a backward.
        widest_head: largest number of features of a head, by major compute capability; the key ``None`` has the value
            of all capabilities that are not listed.
        heads: numbers of features of a head whose gradients were measured to be right; ``None`` for all up to the
            widest.
        whole: priority and reason for samples of one document, without a window. No block of scores can be skipped
            there, except above the diagonal.
        documents: priority and reason for samples that may hold several documents, without a window.
        windows: priority and reason with a window.
        measured: major compute capability on which the priorities were measured; on others, the library is used only if
            a job names it.
    """

    name: str
    capabilities: tuple[int, ...]
    widest_head: Mapping[int | None, int]
    whole: tuple[int, str]
    documents: tuple[int, str]
    windows: tuple[int, str]
    heads: frozenset[int] | None = None
    measured: int | None = None


_UNMEASURED = (BY_NAME, "used only if the job names it, because it was not compared with sdpa and flex")
#: Version -> library.
LIBRARIES: Mapping[int, Library] = {
    2: Library("FlashAttention 2", (8, 9, 10, 12), {None: 256}, _UNMEASURED, _UNMEASURED, _UNMEASURED),
    3: Library("FlashAttention 3", (9,), {None: 256}, _UNMEASURED, _UNMEASURED, _UNMEASURED),
    4: Library(
        "FlashAttention 4",
        (9, 10),
        {None: 256, 10: 128},
        whole=(20, "1.82 ms instead of cuDNN's 2.07: an H200, 4 x 4096, 16 heads of 128, forward and backward"),
        # Forward and backward for 14 documents in 4 x 4096 tokens: 1.07 ms (flex 1.35 ms); for 41 documents: 0.92 ms
        # (flex 0.90 ms). A step of a model with 2 billion parameters is 1 % faster than with flex.
        documents=(BY_NAME, "used only if the job names it: as fast as flex, but one document per 64 tokens at most"),
        windows=_UNMEASURED,
        # Measured to be right on an H200, with one and several documents. Release 4.0.0b36 pads heads to 16 features;
        # where that is no multiple of 32 (8, 16, 40, 48, 72, 80, 112) its gradients are wrong: cosines with the
        # reference's gradients from 0.01 to 0.7.
        heads=frozenset({24, 32, 56, 64, 96, 128, 160, 192, 256}),
        measured=9,
    ),
}


def supports_2(signature: OpSignature) -> Decision:
    """Accept causal and bidirectional attention in 16 bits on CUDA from compute capability 8.0."""
    return decide(LIBRARIES[2], signature)


def supports_3(signature: OpSignature) -> Decision:
    """Accept causal and bidirectional attention in 16 bits on Hopper."""
    return decide(LIBRARIES[3], signature)


def supports_4(signature: OpSignature) -> Decision:
    """Accept causal and bidirectional attention in 16 bits on Hopper and Blackwell."""
    return decide(LIBRARIES[4], signature)


def decide(library: Library, signature: OpSignature) -> Decision:
    """Accept signatures that the library supports, with its priority for them."""
    major = capability()
    if refusal := _refusal(library, signature, major):
        return Decision(accept=False, reason=refusal)
    priority, reason = library.whole if signature.documents is False else library.documents
    if not signature.static.get("causal", True):
        priority, reason = _UNMEASURED
    elif signature.static.get("window") is not None:
        priority, reason = library.windows
    elif library.measured is not None and major not in (None, library.measured):
        priority, reason = _UNMEASURED
    return Decision(accept=True, reason=reason, priority=priority)


def capability() -> int | None:
    """Major compute capability of this GPU; ``None`` without a GPU."""
    import torch

    return torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else None


def _refusal(library: Library, signature: OpSignature, major: int | None) -> str | None:
    if signature.device != "cuda":
        return f"{library.name} needs CUDA, the device is {signature.device}"
    if signature.dtype not in _FLOATS:
        return f"{library.name} needs one of {', '.join(_FLOATS)}, the model is {signature.dtype}"
    kind = signature.static.get("mask", "causal" if signature.static.get("causal", True) else "unknown")
    if kind not in ("causal", "bidirectional"):
        return f"{library.name} computes causal and bidirectional attention only, here it is {kind}"
    if signature.static.get("own_queries"):
        return f"{library.name} needs the queries of all positions of a sample, but ranks of cp hold only some"
    # Without a GPU, as on a laptop that checks a cluster's job, assume a suitable one.
    if major is not None and major not in library.capabilities:
        known = " or ".join(f"{number}.x" for number in library.capabilities)
        return f"{library.name} needs compute capability {known}, this GPU has {major}.x"
    head_dim, widest = signature.static.get("head_dim"), library.widest_head.get(major, library.widest_head[None])
    if head_dim is None:
        return None
    if head_dim > widest or head_dim % _HEAD_MULTIPLE:
        return f"{library.name} needs head_dim up to {widest}, a multiple of {_HEAD_MULTIPLE}; here it is {head_dim}"
    if library.heads is not None and head_dim not in library.heads:
        known = ", ".join(map(str, sorted(library.heads)))
        return f"{library.name} has wrong or unmeasured gradients for head_dim {head_dim}; known to be right: {known}"
    return None
