"""Declaration of the Triton kernels."""

from __future__ import annotations

from collections.abc import Iterator

from d9d_core.plugin import KernelSpec, Ref, hookimpl

D9D_API = 1

_TRITON = frozenset({"import:triton"})


@hookimpl
def d9d_kernels() -> Iterator[KernelSpec]:
    """Backends named ``triton``."""
    yield from ()
