"""FlashAttention 4 compiles its kernels for the calls that are made of it, for GPUs that are not here; nothing runs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

#: Query heads, key and value heads, features of a head; positions, documents that there is room for.
HEADS, KEY_HEADS, HEAD_DIM, LENGTH, ROOM = 16, 8, 128, 4096, 64


def compile_calls() -> None:
    """Forward and backward over tensors without content, of which the library reads shapes only."""
    from d9d_flash_attention import cute
    from torch._subclasses.fake_tensor import FakeTensorMode

    calls = [(False, None, True), (True, 512, True)]
    if os.environ["FLASH_ATTENTION_ARCH"] == "sm_90":  # for Blackwell, the library asks a GPU for its size
        calls.append((False, None, False))
    for packed, window, causal in calls:
        leading = (2 * LENGTH,) if packed else (2, LENGTH)
        with FakeTensorMode():
            tensors = [
                torch.empty(*leading, heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
                for heads in (HEADS, KEY_HEADS, KEY_HEADS)
            ]
            starts = torch.empty(ROOM + 1, device="cuda", dtype=torch.int32) if packed else None
            # The ops themselves would be satisfied with what their fakes say.
            out, sums = cute.forward.__wrapped__(*tensors, starts, LENGTH, window, causal)
            fakes = cute._fake(*tensors, starts, LENGTH, window, causal)
            for found, expected in zip((out, sums), fakes, strict=True):
                assert (found.shape, found.dtype, found.stride()) == (expected.shape, expected.dtype, expected.stride())
            inputs = torch.empty_like(out), *tensors, out, sums, starts, LENGTH, window, causal
            grads = cute.backward.__wrapped__(*inputs)
            assert [grad.shape for grad in grads] == [tensor.shape for tensor in tensors]
        print(f"compiled: packed {packed}, window {window}, causal {causal}")


@pytest.mark.full
@pytest.mark.parametrize("architecture", ["sm_90", "sm_100"])
def test_the_library_compiles_forward_and_backward(architecture: str) -> None:
    pytest.importorskip("cutlass", reason="needs flash-attn-4")
    asked = {
        "FLASH_ATTENTION_ARCH": architecture,
        "CUTE_DSL_ARCH": f"{architecture}a",
        "FLASH_ATTENTION_NUM_SMS": "132",
    }
    done = subprocess.run(
        [sys.executable, __file__], env=os.environ | asked, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("compiled: ") == (3 if architecture == "sm_90" else 2)


if __name__ == "__main__":
    compile_calls()
