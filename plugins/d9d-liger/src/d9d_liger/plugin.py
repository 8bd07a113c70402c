"""Plugin declaration of the Liger-Kernel backends."""

from __future__ import annotations

from collections.abc import Iterator

from d9d_core.plugin import KernelSpec, Ref, hookimpl

D9D_API = 2


@hookimpl
def d9d_kernels() -> Iterator[KernelSpec]:
    """Declare backends named ``liger`` of ``rms_norm``, ``silu_mul``, ``rope`` and ``linear_cross_entropy``."""
    for op, summary in (
        ("rms_norm", "RMSNorm of Liger-Kernel."),
        ("silu_mul", "SiLU-mul of SwiGLU by Liger-Kernel."),
        ("rope", "Rotations of queries and keys of Liger-Kernel."),
        ("linear_cross_entropy", "Loss of Liger-Kernel in chunks, exact; the host waits for the device."),
    ):
        yield KernelSpec(
            name="liger",
            summary=f"{summary} Never chosen by itself.",
            op=op,
            supports=Ref(f"d9d_liger.rules:{op}"),
            build=Ref(f"d9d_liger.{op}:build"),
            requires=frozenset({"import:liger_kernel"}),
        )
