"""Conditions and priorities of the backends, for any GPU and without one."""

from __future__ import annotations

from typing import Any

import pytest
from d9d_core.kernel import OpSignature
from d9d_quack import rules


def on(monkeypatch: pytest.MonkeyPatch, major: int | None) -> None:
    monkeypatch.setattr(rules, "capability", lambda: major)


def asked(op: str, dtype: str = "bfloat16", device: str = "cuda", **static: Any) -> tuple[bool, int, str]:
    decision = getattr(rules, op)(OpSignature(op, device, dtype, static))
    return decision.accept, decision.priority, decision.reason


@pytest.mark.parametrize(("available", "major"), [(True, 9), (False, None)])
def test_the_major_capability_of_this_gpu_counts(
    monkeypatch: pytest.MonkeyPatch, available: bool, major: int | None
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: available)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 3))
    assert rules.capability() == major


def test_norms_have_even_rows_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    for major in (None, 9, 10):
        on(monkeypatch, major)
        assert asked("rms_norm", features=8)[:2] == (True, 0)
    assert asked("rms_norm", features=7)[2] == "QuACK copies at least 4 bytes at a time: features 7 is odd"
    assert asked("rms_norm", "float32", features=7)[0]
    assert asked("rms_norm")[0]
    assert asked("rms_norm", device="cpu")[2] == "QuACK needs CUDA, the device is cpu"
    assert asked("rms_norm", "float64")[2] == "reads bfloat16, float16, float32; the tensors are float64"
    for major in (8, 11):
        on(monkeypatch, major)
        expected = f"QuACK needs compute capability 9.x or 10.x, this GPU has {major}.x"
        assert asked("rms_norm", features=8) == (False, 0, expected)
        assert asked("swiglu", hidden=8) == (False, 0, expected)


def test_products_have_rows_of_16_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, 9)
    assert asked("swiglu", hidden=16, features=8)[:2] == (True, 0)
    why = "tensor copies need rows of a multiple of 16 bytes: hidden 12, features 7 is no multiple of 8"
    assert asked("swiglu", hidden=12, features=7)[2] == why
    assert asked("swiglu", "float32", hidden=8)[2] == "multiplies bfloat16 or float16; the tensors are float32"
    assert asked("swiglu", "float16", hidden=8)[0]
    assert asked("swiglu", device="cpu")[2] == "QuACK needs CUDA, the device is cpu"


def test_products_of_experts_are_chosen_where_they_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"in_features": 8, "out_features": 16, "experts": 3}
    for major, priority in ((9, 20), (None, 20), (10, 0)):
        on(monkeypatch, major)
        assert asked("grouped_linear", **sizes)[:2] == (True, priority)
    assert not asked("grouped_linear", **{**sizes, "in_features": 4})[0]
