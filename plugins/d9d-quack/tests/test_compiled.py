"""QuACK compiles its kernels for the products of experts, for GPUs that are not here; nothing runs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

#: Rows, experts, features in and out.
ROWS, EXPERTS, IN, OUT = 96, 4, 128, 256


class CompiledError(Exception):
    """Raised where the library, which has compiled a kernel, asks for the driver of a GPU."""


def compile_products() -> None:
    """Product and both gradients over tensors without content, of which the library reads shapes only."""
    import quack.gemm
    from d9d_quack import grouped_linear
    from torch._subclasses.fake_tensor import FakeTensorMode

    def reached(*_args: object, **_options: object) -> int:
        raise CompiledError

    quack.gemm.get_max_active_clusters = reached
    with FakeTensorMode():
        x, grad, bank = (
            torch.empty(shape, device="cuda", dtype=torch.bfloat16)
            for shape in ((ROWS, IN), (ROWS, OUT), (EXPERTS, IN, OUT))
        )
        starts = torch.empty(EXPERTS + 1, device="cuda", dtype=torch.int32)
        # The ops themselves would be satisfied with what their fakes say.
        for op, inputs in (
            (grouped_linear._forward, (x, bank, starts, None)),
            (grouped_linear._rows_gradient, (grad, bank, starts, None)),
            (grouped_linear._bank_gradient, (x, grad, starts)),
        ):
            try:
                op.__wrapped__(*inputs)
            except CompiledError:
                print(f"compiled: {op}")


@pytest.mark.full
@pytest.mark.parametrize("architecture", ["90", "100"])
def test_the_library_compiles_products_and_their_gradients(architecture: str) -> None:
    pytest.importorskip("quack", reason="needs quack-kernels")
    asked = {"QUACK_ARCH": architecture, "CUTE_DSL_ARCH": f"sm_{architecture}a", "QUACK_CACHE_ENABLED": "0"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", __file__],
        env=os.environ | asked, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("compiled: ") == 3, done.stdout


if __name__ == "__main__":
    compile_products()
