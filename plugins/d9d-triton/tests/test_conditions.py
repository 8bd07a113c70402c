"""Conditions and priorities of all backends, for each op, device, dtype and size."""

from __future__ import annotations

from typing import Any

import pytest
from d9d_core.kernel import OpSignature
from d9d_triton import rules, support
from d9d_triton.plugin import d9d_kernels


def asked(
    supports: Any, op: str, dtype: str = "bfloat16", device: str = "cuda", *, compiled: bool = False, **more: Any
) -> tuple[bool, int, str]:
    decision = supports(OpSignature(op, device, dtype, more.pop("static", {}), compiled, **more))
    return decision.accept, decision.priority, decision.reason


@pytest.mark.parametrize(
    ("op", "compiled"),
    [
        ("rms_norm", 0), ("add_rms_norm", 20), ("silu_mul", 0), ("swiglu", 20), ("rope", 0), ("normed_rope", 20),
        ("attention_inputs", 20), ("low_rank_linear", 20), ("permute", 0), ("unpermute", 0),
    ],
)  # fmt: skip
def test_kernels_of_layers_are_chosen_in_eager_code_and_where_they_win_in_compiled_code(op: str, compiled: int) -> None:
    assert asked(rules.by_rule, op) == (True, *rules.RULES[op].eager)
    assert rules.RULES[op].eager[0] == 20
    assert asked(rules.by_rule, op, compiled=True) == (True, *rules.RULES[op].compiled)
    assert rules.RULES[op].compiled[0] == compiled
    assert ("used only if the job names it" in rules.RULES[op].compiled[1]) == (compiled == 0)
    assert len(rules.RULES) == 10


def test_a_norm_has_rows_that_fit_into_a_program() -> None:
    assert asked(rules.rms_norm, "rms_norm", static={"features": 16384})[:2] == (True, 20)
    assert asked(rules.rms_norm, "rms_norm")[:2] == (True, 20)
    assert asked(rules.rms_norm, "add_rms_norm", static={"features": 16385}) == (
        False, 0, "a program holds whole rows: at most 16384 features, not 16385",
    )  # fmt: skip
    refused = asked(rules.rms_norm, "rms_norm", "float64", static={"features": 16385})
    assert refused == (False, 0, "reads bfloat16, float16, float32; the tensors are float64")


def test_products_inside_an_op_are_used_in_checkpointed_blocks_by_name_only() -> None:
    assert asked(rules.joint, "swiglu")[:2] == (True, 20)
    assert asked(rules.joint, "swiglu", checkpointed=True) == (
        True, 0, "activation checkpointing cannot save products inside this op (save: [aten.mm]); used only if the job "
        "names it",
    )  # fmt: skip
    assert asked(rules.joint, "swiglu", device="xpu", checkpointed=True)[0] is False


@pytest.mark.parametrize(
    ("supports", "dtypes", "priority"),
    [
        (support.adamw, "bfloat16, float16, float32", 20),
        (support.stochastic_adamw, "bfloat16, float32", 20),
        (support.linear_cross_entropy, "bfloat16, float16, float32", 20),
        (support.vocabulary_parallel_cross_entropy, "bfloat16, float16, float32", 20),
        (support.linear_cross_entropy_sum, "bfloat16, float16, float32", 0),
        (support.linear_cross_entropy_sum_narrow, "bfloat16, float32", 0),
        (support.linear_cross_entropy_words, "bfloat16, float16, float32", 0),
    ],
)
def test_losses_and_optimizers_run_on_cuda_in_some_dtypes(supports: Any, dtypes: str, priority: int) -> None:
    for dtype in dtypes.split(", "):
        assert asked(supports, "an op", dtype)[:2] == (True, priority)
    others = {"bfloat16", "float16", "float32", "float64"} - {*dtypes.split(", ")}
    for dtype in others:
        assert asked(supports, "an op", dtype) == (False, 0, f"reads {dtypes}; the tensors are {dtype}")
    assert ("used only if the job names it" in asked(supports, "an op")[2]) == (priority == 0)


def test_the_power_of_gradients_is_that_of_the_euclidean_norm() -> None:
    assert asked(support.gradient_power, "gradient_power", static={"p": 2})[:2] == (True, 20)
    for p in (1, 3, float("inf"), None):
        assert asked(support.gradient_power, "gradient_power", static={"p": p}) == (
            False, 0, f"sums squares, for p: 2; here p is {p}",
        )  # fmt: skip


def test_on_a_cpu_kernels_are_interpreted_if_the_environment_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert asked(support.adamw, "adamw", device="cpu") == (
        True, 0, "interpreted on the CPU, for tests; used only if the job names it",
    )  # fmt: skip
    assert asked(support.adamw, "adamw", device="xpu") == (False, 0, "Triton kernels run on cuda; the device is xpu")
    assert asked(support.adamw, "adamw", static={"amsgrad": False, "maximize": False})[:2] == (True, 20)
    for value in ("0", "2", ""):
        monkeypatch.setenv("TRITON_INTERPRET", value)
        assert asked(support.adamw, "adamw", device="cpu") == (
            False, 0, "Triton kernels run on cuda; the device is cpu",
        )  # fmt: skip
    monkeypatch.delenv("TRITON_INTERPRET")
    assert not support.interpreted()


def test_each_backend_is_declared_with_its_condition_and_its_function() -> None:
    declared = {(spec.op, spec.name): (spec.supports.target, spec.build.target) for spec in d9d_kernels()}
    loss = "d9d_triton.linear_cross_entropy.backend:build"
    assert declared[("linear_cross_entropy", "triton_words")] == (
        "d9d_triton.support:linear_cross_entropy_words", f"{loss}_words",
    )  # fmt: skip
    assert declared[("linear_cross_entropy", "triton_sum")] == (
        "d9d_triton.support:linear_cross_entropy_sum", f"{loss}_sum",
    )  # fmt: skip
    assert declared[("linear_cross_entropy", "triton_sum_narrow")] == (
        "d9d_triton.support:linear_cross_entropy_sum_narrow", f"{loss}_sum_narrow",
    )  # fmt: skip
    assert declared[("unpermute", "triton")] == ("d9d_triton.rules:by_rule", "d9d_triton.permutation:build_unpermute")
    assert declared[("rms_norm", "triton")][0] == "d9d_triton.rules:rms_norm"
