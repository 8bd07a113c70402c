"""Conditions of the backend, and its priority. Imports neither the library nor Triton."""

from __future__ import annotations

import importlib.util
import re
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from d9d_core.kernel import Decision, OpSignature

#: Priority and reason of the backend; ``chunked`` of d9d-nn has the lower priority 10.
_CHOSEN = (20, "Triton kernels that keep 16-bit tensors; the host does not wait")
#: Priority and reason where the library calls TileLang instead of a Triton kernel.
_WITH_TILELANG = (
    0,
    "the library computes a part of the gradients by TileLang, and no test has compared them; used only if the job "
    "names it",
)
_FLOATS = ("bfloat16", "float16")
#: Release of the library whose interface the backend calls.
_RELEASE = (0, 6)
#: Largest number of features of a key that the library's Triton programs support.
_MOST_FEATURES = 256
#: Triton computes wrong gradients on GPUs of this major compute capability, from the first of these releases up to, but
#: excluding, the second.
_HOPPER = 9
_WRONG_TRITON = (3, 4), (3, 7, 1)


def gated_delta_rule(signature: OpSignature) -> Decision:
    """Accept calls of ``gated_delta_rule`` in 16 bits on CUDA, if the installed libraries compute them correctly."""
    if refusal := _unsupported_call(signature) or _unsupported_library():
        return Decision(False, refusal)
    triton = _wrong_triton()
    if triton and importlib.util.find_spec("tilelang") is None:
        return Decision(
            False,
            f"Triton {triton} computes wrong gradients on Hopper GPUs, so the library refuses them; use torch with "
            "Triton 3.7.1 or later, or install tilelang",
        )
    priority, reason = _WITH_TILELANG if triton else _CHOSEN
    return Decision(True, reason, priority)


def _unsupported_call(signature: OpSignature) -> str | None:
    if signature.device != "cuda":
        return f"its Triton kernels need CUDA; the device is {signature.device}"
    if signature.dtype not in _FLOATS:
        return f"computes in {' or '.join(_FLOATS)}; the tensors are {signature.dtype}"
    features = signature.static.get("key_dim", 2)
    if features > _MOST_FEATURES:
        return f"a program holds at most {_MOST_FEATURES} features of a key; key_dim is {features}"
    for name in ("key_dim", "value_dim"):
        if signature.static.get(name, 2) % 2:
            return f"16-bit heads need an even number of features; {name} is {signature.static[name]}"
    return None


def _unsupported_library() -> str | None:
    found = installed("fla-core")
    if found is not None and _numbers(found)[:2] == _RELEASE:
        return None
    return f"needs fla-core 0.6; found {found or 'no release'}; run pip install 'd9d-fla[fla]'"


def _wrong_triton() -> str | None:
    """Installed release of Triton, if its gradients are wrong on this GPU; ``None`` otherwise."""
    found = installed("triton", "pytorch-triton") if capability() == _HOPPER else None
    first, fixed = _WRONG_TRITON
    return found if found is not None and first <= _numbers(found) < fixed else None


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", release)[:3])


def installed(*distributions: str) -> str | None:
    """Release of the first of these distributions that is installed; ``None`` if none is."""
    for name in distributions:
        with suppress(PackageNotFoundError):
            return version(name)
    return None


def capability() -> int | None:
    """Major compute capability of this GPU; ``None`` without a GPU."""
    import torch

    return torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else None
