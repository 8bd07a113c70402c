"""Plugin declaration of FlashAttention 2, 3 and 4."""

from __future__ import annotations

from collections.abc import Iterator

from d9d_core.plugin import KernelSpec, Ref, hookimpl

D9D_API = 2


@hookimpl
def d9d_kernels() -> Iterator[KernelSpec]:
    """Declare the backends of ``attention``, one per version of FlashAttention."""
    for number, module, kind, when in (
        # Versions 2 and 4 install into the same package, so version 2 is recognised by a module that 4 lacks.
        (2, "flash_attn.flash_attn_interface", "Ampere and later", "never chosen by itself"),
        (3, "flash_attn_interface", "Hopper", "never chosen by itself"),
        (4, "flash_attn.cute", "Hopper, Blackwell", "by itself on Hopper without either"),
    ):
        yield KernelSpec(
            name=f"flash_attention_{number}",
            summary=f"FlashAttention {number}: {kind}; windows, documents; {when}.",
            op="attention",
            supports=Ref(f"d9d_flash_attention.rules:supports_{number}"),
            build=Ref(f"d9d_flash_attention.backend:build_{number}"),
            requires=frozenset({f"import:{module}"}),
            deterministic=False,  # query gradients are added in arbitrary order
            operators=("d9d_flash_attention.forward",) if number == 4 else (),
        )
