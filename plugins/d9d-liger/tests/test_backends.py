"""Choices of jobs, and calls for which the suites have none: gradients that others read, any content, whole graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from d9d_core.errors import BuildError
from d9d_core.kernel import OpSignature, OpSlot
from d9d_core.registry.capabilities import Circumstances, Judge
from d9d_engine.compose.kernels import bind_kernels
from d9d_liger import linear_cross_entropy, rms_norm, rope, rules, silu_mul
from d9d_nn.ops import linear_cross_entropy as plain
from d9d_testing.tolerances import assert_close_gradients, assert_close_values
from torch import Tensor, nn


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


ANGLES = normal(1, 5, 4, seed=7)
OPS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "rms_norm": (lambda x, w: rms_norm.rms_norm(x, w, 1e-6), (normal(3, 8, seed=0), normal(8, seed=1))),
    "silu_mul": (silu_mul.silu_mul, (normal(3, 8, seed=0), normal(3, 8, seed=1))),
    "rope": (
        lambda q, k: rope.rope(q, k, ANGLES.cos(), ANGLES.sin()),
        (normal(2, 5, 4, 8, seed=0), normal(2, 5, 2, 8, seed=1)),
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("op", OPS)
def test_a_gradient_that_arrives_is_only_read_and_a_graph_can_be_walked_twice(op: str) -> None:
    """The library computes several of them in place."""
    function, tensors = OPS[op]
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    outs = function(*leaves)
    outs = outs if isinstance(outs, tuple) else (outs,)
    grads = [normal(*out.shape, seed=9) for out in outs]
    kept = [grad.clone() for grad in grads]
    first, second = (torch.autograd.grad(outs, leaves, grads, retain_graph=True) for _ in range(2))
    assert all(torch.equal(grad, before) for grad, before in zip(grads, kept, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.thorough
@pytest.mark.parametrize("op", ["silu_mul", "rope"])
def test_these_are_one_operation_for_the_compiler(op: str) -> None:
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    tensors = OPS[op][1]
    if op == "rope":
        tensors = (*tensors, ANGLES.cos(), ANGLES.sin())
        torch.library.opcheck(rope.rope.overload, tensors, test_utils=checks)
        torch.library.opcheck(rope.backward.overload, tensors, test_utils=checks)
        return
    torch.library.opcheck(silu_mul.forward.overload, tensors, test_utils=checks)
    torch.library.opcheck(silu_mul.backward.overload, (tensors[0], *tensors), test_utils=checks)


def test_gates_of_two_dtypes_come_out_in_the_wider_one() -> None:
    gate, up = normal(3, 8, seed=0).half(), normal(3, 8, seed=1)
    assert_close_values(silu_mul.silu_mul(gate, up), nn.functional.silu(gate.float()) * up)
    with pytest.raises(ValueError, match=r"gate \[3, 8\] and up \[8\] must have the same shape"):
        silu_mul.silu_mul(gate, up[0])


def test_each_token_has_the_gradient_of_its_own_loss() -> None:
    """As tasks with weights need it."""
    hidden, weight = normal(6, 16, seed=0), normal(50, 16, seed=1)
    targets, grad = torch.tensor([3, plain.IGNORE, 49, 0, 7, 7]), normal(6, seed=2)
    found, expected = (
        dict(zip(("hidden", "weight"), torch.autograd.grad(f(*leaves, targets), leaves, grad), strict=True))
        for f in (linear_cross_entropy.linear_cross_entropy, plain.linear_cross_entropy)
        for leaves in [[hidden.clone().requires_grad_(), weight.clone().requires_grad_()]]
    )
    assert_close_gradients(found, expected)


def test_nothing_of_a_token_without_a_target_reaches_a_gradient() -> None:
    hidden, weight = normal(4, 16, seed=0), normal(50, 16, seed=1).requires_grad_()
    hidden[1] = torch.nan
    hidden.requires_grad_()
    losses = linear_cross_entropy.linear_cross_entropy(hidden, weight, torch.tensor([3, plain.IGNORE, 49, 0]))
    losses.sum().backward()
    assert losses[1] == 0
    assert not hidden.grad[1].any()
    assert weight.grad.isfinite().all()


# --- choices of jobs


class Slots(nn.Module):
    """A module with all of the ops."""

    def op_slots(self) -> dict[str, OpSlot]:
        return {op: OpSlot(op, lambda *_: None) for op in rules.RULES}


def bound(registry: Any, requested: dict[str, str]) -> dict[str, str]:
    offers = registry("d9d_liger.plugin")
    judge = Judge([], offers, Circumstances(device="cuda"))
    choices = bind_kernels([("", Slots())], offers, requested, "cuda", "bfloat16", judge.verdicts)
    return {choice.op: choice.backend for choice in choices}


def test_a_job_gets_them_by_name_only(registry: Any) -> None:
    assert set(bound(registry, {}).values()) == {"reference"}
    for op in rules.RULES:
        assert bound(registry, {op: "liger"})[op] == "liger"


@pytest.mark.parametrize("op", rules.RULES)
def test_each_reason_says_that_it_is_by_name_only(op: str) -> None:
    decision = getattr(rules, op)(OpSignature(op, "cuda", "bfloat16", {}))
    assert decision.accept
    assert ("used only if the job names it" in decision.reason) == (decision.priority == 0)


def test_without_the_library_they_are_refused(registry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None)
    with pytest.raises(BuildError, match="needs import:liger_kernel: .*'pip install d9d-liger' installs it"):
        bound(registry, {"rope": "liger"})


def test_without_rows_nothing_is_launched() -> None:
    x, weight = torch.zeros(0, 8, dtype=torch.bfloat16), torch.ones(8)
    out = rms_norm.rms_norm(x, weight, 1e-6)
    assert (out.shape, out.dtype) == (x.shape, x.dtype)


def test_rows_longer_than_a_program_are_refused() -> None:
    for features, accepted in ((65536, True), (65537, False)):
        decision = rules.rms_norm(OpSignature("rms_norm", "cuda", "float32", {"features": features}))
        assert decision.accept == accepted
    assert decision.reason == "a program handles whole rows: at most 65536 features, not 65537"
