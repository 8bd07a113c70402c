"""Conditions and priorities of the backends."""

from __future__ import annotations

import pytest
from d9d_cce import rules
from d9d_core.kernel import OpSignature


@pytest.mark.parametrize("supports", [rules.supports, rules.supports_filtered])
def test_losses_are_in_16_bits_on_cuda_with_a_weight_that_32_bits_index(supports: object) -> None:
    def asked(dtype: str = "bfloat16", device: str = "cuda", **static: int) -> tuple[bool, int, str]:
        decision = supports(OpSignature("linear_cross_entropy", device, dtype, static))  # type: ignore[operator]
        return decision.accept, decision.priority, decision.reason

    assert asked(features=2048, vocabulary=150_000)[:2] == (True, 0)
    assert asked("float16")[:2] == (True, 0)
    assert asked(features=1, vocabulary=2**31 - 1)[0]
    assert asked(features=2, vocabulary=2**30) == (
        False, 0, f"its kernels have 32-bit indices; the weight has {2**31} elements",
    )  # fmt: skip
    assert asked("float32") == (False, 0, "reads bfloat16 and float16; the tensors are float32")
    assert asked(device="cpu") == (False, 0, "its Triton kernels need CUDA; the device is cpu")


def test_the_two_backends_have_reasons_of_their_own() -> None:
    signature = OpSignature("linear_cross_entropy", "cuda", "bfloat16", {})
    assert rules.supports(signature).reason.startswith("no logits in memory")
    assert "approximation" in rules.supports_filtered(signature).reason
