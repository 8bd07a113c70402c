"""Decisions of the backends: what each library computes, and where one is chosen by itself. Imports no library.

This is the one place to change when a measurement says that a library wins. The backends of d9d-nn have priority 10
(``sdpa``) and 15 (``flex``, where documents or windows leave something to skip).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from d9d_core.kernel import Decision, OpSignature

#: By name only.
BY_NAME = 0
_FLOATS = ("bfloat16", "float16")
#: All of the libraries load 16 bytes of a head at once.
_HEAD_MULTIPLE = 8


@dataclass(frozen=True, slots=True)
class Library:
    """Rules of a FlashAttention library: the signatures that it computes, and its priorities.

    Attributes:
        name: name of the library, as people say it.
        capabilities: major numbers of the compute capabilities that it has kernels for, with a backward.
        widest_head: greatest number of features of a head; by major number where it differs.
        heads: numbers of features of a head that it computes right, where those are not all up to the widest.
        whole: priority and reason where samples are of one document and there is no window: nothing is skipped.
        documents: priority and reason where samples may hold several documents, and there is no window.
        windows: priority and reason where there is a window.
        measured: capability that the priorities were measured on; on another one, the library is taken by name only.
    """

    name: str
    capabilities: tuple[int, ...]
    widest_head: Mapping[int | None, int]
    whole: tuple[int, str]
    documents: tuple[int, str]
    windows: tuple[int, str]
    heads: frozenset[int] | None = None
    measured: int | None = None


_UNMEASURED = (BY_NAME, "by name only: nobody measured it beside sdpa and flex")

#: Number of the version -> the library.
LIBRARIES: Mapping[int, Library] = {
    2: Library("FlashAttention 2", (8, 9, 10, 12), {None: 256}, _UNMEASURED, _UNMEASURED, _UNMEASURED),
    3: Library("FlashAttention 3", (9,), {None: 256}, _UNMEASURED, _UNMEASURED, _UNMEASURED),
    4: Library(
        "FlashAttention 4",
        (9, 10),
        {None: 256, 10: 128},
        whole=(20, "1.82 ms where cuDNN takes 2.07: an H200, 4 x 4096, 16 heads of 128, both directions"),
        # 1.07 ms where flex takes 1.35 with 14 documents in 4 x 4096, with 41 0.92 and 0.90; a step is 1 % faster.
        documents=(BY_NAME, "by name only: as fast as flex, and with room for one document in 64 tokens"),
        windows=_UNMEASURED,
        # Measured right on an H200, with samples of one document and of several. Release 4.0.0b36 pads heads to 16
        # features, and where that is no multiple of 32 (8, 16, 40, 48, 72, 80, 112) gradients are wrong: cosines to
        # those of the reference from 0.01 to 0.7.
        heads=frozenset({24, 32, 56, 64, 96, 128, 160, 192, 256}),
        measured=9,
    ),
}


def supports_2(signature: OpSignature) -> Decision:
    """Accept causal attention in 16 bits on CUDA since compute capability 8.0."""
    return decide(LIBRARIES[2], signature)


def supports_3(signature: OpSignature) -> Decision:
    """Accept causal attention in 16 bits on Hopper."""
    return decide(LIBRARIES[3], signature)


def supports_4(signature: OpSignature) -> Decision:
    """Accept causal attention in 16 bits on Hopper and Blackwell."""
    return decide(LIBRARIES[4], signature)


def decide(library: Library, signature: OpSignature) -> Decision:
    """Accept what the library computes, with its priority for this signature."""
    major = capability()
    if refusal := _refusal(library, signature, major):
        return Decision(accept=False, reason=refusal)
    priority, reason = library.whole if signature.documents is False else library.documents
    if signature.static.get("window") is not None:
        priority, reason = library.windows
    elif library.measured is not None and major not in (None, library.measured):
        priority, reason = _UNMEASURED
    return Decision(accept=True, reason=reason, priority=priority)


def capability() -> int | None:
    """Major number of this GPU's compute capability; ``None`` without one."""
    import torch

    return torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else None


def _refusal(library: Library, signature: OpSignature, major: int | None) -> str | None:
    if signature.device != "cuda":
        return f"{library.name} is for CUDA, the device is {signature.device}"
    if signature.dtype not in _FLOATS:
        return f"{library.name} needs one of {', '.join(_FLOATS)}, the model is {signature.dtype}"
    if not signature.static.get("causal", True):
        return "computes causal attention only"
    if signature.static.get("own_queries"):
        return f"{library.name} attends from all positions of a sample, but ranks of cp hold the queries of some"
    # A laptop that checks a job for a cluster sees no GPU, and trusts.
    if major is not None and major not in library.capabilities:
        known = " or ".join(f"{number}.x" for number in library.capabilities)
        return f"{library.name} is for compute capability {known}, this GPU has {major}.x"
    head_dim, widest = signature.static.get("head_dim"), library.widest_head.get(major, library.widest_head[None])
    if head_dim is None:
        return None
    if head_dim > widest or head_dim % _HEAD_MULTIPLE:
        return f"{library.name} needs head_dim up to {widest}, a multiple of {_HEAD_MULTIPLE}; here it is {head_dim}"
    if library.heads is not None and head_dim not in library.heads:
        known = ", ".join(map(str, sorted(library.heads)))
        return f"{library.name} has wrong or unmeasured gradients of head_dim {head_dim}; measured right are {known}"
    return None
