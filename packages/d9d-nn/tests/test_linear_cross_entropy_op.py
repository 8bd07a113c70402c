from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_core.kernel import Decision, OpSignature
from d9d_nn.ops import linear_cross_entropy as op
from d9d_nn.ops.linear_cross_entropy import IGNORE, linear_cross_entropy
from d9d_testing.suites.kernel import KernelSuite
from d9d_testing.tolerances import TOLERANCES, assert_close_gradients, assert_close_values
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.smoke

TOKENS, FEATURES, WORDS = 13, 4, 24


class TestReference(KernelSuite):
    """The reference keeps what backends have to keep; it has no record."""

    target = "linear_cross_entropy.reference"

    def decision(self, signature: OpSignature) -> Decision:
        return Decision(signature.dtype != "int8", "runs everywhere")

    def function(self, signature: OpSignature) -> Callable[..., Any]:
        return linear_cross_entropy

    def operators(self) -> tuple[str, ...]:
        return ()


def example(dtype: torch.dtype = torch.float32, tokens: int = TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, FEATURES, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(WORDS, FEATURES, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randint(WORDS, (tokens,), generator=generator)
    targets[::4] = IGNORE
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = functional.linear(hidden, weight)
    return functional.cross_entropy(logits.float(), targets, reduction="none", ignore_index=IGNORE)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("rows", [1, 5, 100])
def test_gradients_are_the_derivatives(rows: int, keep: bool) -> None:
    hidden, weight, targets = example(torch.float64, tokens=6)
    assert torch.autograd.gradcheck(
        lambda h, w: linear_cross_entropy(h, w, targets, rows=rows, keep=keep), (hidden, weight)
    )


@settings(max_examples=15)
@given(tokens=st.integers(1, 30), rows=st.integers(1, 40), keep=st.booleans())
def test_chunks_do_not_change_the_result(tokens: int, rows: int, keep: bool) -> None:
    hidden, weight, targets = example(tokens=tokens)
    upstream = torch.linspace(-1, 2, tokens)
    expected = plain(hidden, weight, targets)
    wanted = dict(zip(("hidden", "weight"), torch.autograd.grad(expected @ upstream, (hidden, weight)), strict=True))
    actual = linear_cross_entropy(hidden, weight, targets, rows=rows, keep=keep)
    found = dict(zip(("hidden", "weight"), torch.autograd.grad(actual @ upstream, (hidden, weight)), strict=True))
    assert_close_values(actual, expected)
    assert_close_gradients(found, wanted)


def test_ignored_targets_have_neither_loss_nor_gradient() -> None:
    hidden, weight, targets = example()
    loss = linear_cross_entropy(hidden, weight, targets)
    loss.sum().backward()
    assert (loss[targets == IGNORE] == 0).all()
    assert (hidden.grad[targets == IGNORE] == 0).all()
    assert (hidden.grad[targets != IGNORE] != 0).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize(("rows", "keep"), [(5, True), (5, False), (100, True)])
def test_nothing_of_ignored_rows_reaches_a_gradient_whatever_they_hold(value: float, rows: int, keep: bool) -> None:
    hidden, weight, targets = example()
    linear_cross_entropy(hidden, weight, targets, rows=rows, keep=keep).sum().backward()
    odd = hidden.detach().masked_fill((targets == IGNORE).unsqueeze(1), value).requires_grad_()
    same = weight.detach().clone().requires_grad_()
    loss = linear_cross_entropy(odd, same, targets, rows=rows, keep=keep)
    torch.autograd.backward(loss, torch.ones_like(loss).masked_fill(targets == IGNORE, value))
    assert (loss[targets == IGNORE] == 0).all()
    assert torch.equal(same.grad, weight.grad)
    assert torch.equal(odd.grad, hidden.grad)


@pytest.mark.parametrize("target", [-1, WORDS])
def test_a_target_outside_of_the_vocabulary_is_an_error(target: int) -> None:
    hidden, weight, targets = example()
    targets[1] = target
    with pytest.raises((IndexError, RuntimeError), match="index"):
        linear_cross_entropy(hidden, weight, targets)


def test_only_ignored_targets_give_zero_gradients() -> None:
    hidden, weight, targets = example()
    linear_cross_entropy(hidden, weight, torch.full_like(targets, IGNORE)).sum().backward()
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_many_bfloat16_chunks_sum_up_in_float32() -> None:
    tokens = 1024  # in bfloat16 a sum of equal terms stops growing after 256 of them
    hidden, weight = torch.ones(tokens, 1, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.bfloat16)
    weight.requires_grad_()
    targets = torch.zeros(tokens, dtype=torch.int64)
    linear_cross_entropy(hidden, weight, targets, rows=1, keep=False).sum().backward()
    assert weight.grad.flatten().tolist() == [-tokens / 2, tokens / 2]


def test_bfloat16_has_a_float32_loss_and_gradients_of_its_own_dtype() -> None:
    exact_hidden, exact_weight, targets = example(torch.bfloat16)
    hidden, weight = (t.detach().float().requires_grad_() for t in (exact_hidden, exact_weight))
    plain(hidden, weight, targets).sum().backward()
    loss = linear_cross_entropy(exact_hidden, exact_weight, targets, rows=1, keep=False)
    loss.sum().backward()
    assert loss.dtype == torch.float32
    assert exact_weight.grad.dtype == torch.bfloat16
    assert_close_gradients(
        {"hidden": exact_hidden.grad, "weight": exact_weight.grad},
        {"hidden": hidden.grad, "weight": weight.grad},
        within=TOLERANCES[torch.bfloat16],
    )


def test_a_frozen_weight_gets_no_gradient() -> None:
    hidden, weight, targets = example()
    linear_cross_entropy(hidden, weight.detach(), targets).sum().backward()
    assert hidden.grad is not None
    linear_cross_entropy(hidden.detach(), weight, targets).sum().backward()
    assert weight.grad is not None


class LargestResult(TorchDispatchMode):
    """Notes the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.elements = max(self.elements, out.numel())
        return out


def test_the_full_logits_never_exist() -> None:
    hidden, weight, targets = example(tokens=64)
    with LargestResult() as chunked:
        linear_cross_entropy(hidden, weight, targets, rows=8, keep=False).sum().backward()
    assert chunked.elements <= max(8 * WORDS, hidden.numel(), weight.numel())
    with LargestResult() as whole:
        plain(hidden, weight, targets).sum().backward()
    assert whole.elements == 64 * WORDS


@pytest.mark.parametrize("keep", [True, False])
def test_under_autocast_it_is_a_bfloat16_head_with_gradients_in_float32(keep: bool) -> None:
    hidden, weight, targets = example()
    narrow = [tensor.detach().bfloat16().requires_grad_() for tensor in (hidden, weight)]
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, targets, rows=5, keep=keep)
    loss.sum().backward()
    expected = linear_cross_entropy(*narrow, targets, rows=5, keep=keep)
    expected.sum().backward()
    assert torch.equal(loss, expected)
    assert hidden.grad is not None
    assert weight.grad is not None
    assert (loss.dtype, hidden.grad.dtype, weight.grad.dtype) == (torch.float32,) * 3
    for tensor, other in zip((hidden, weight), narrow, strict=True):
        assert torch.equal(tensor.grad, other.grad.float())  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize(
    ("device", "vocabulary", "rows"),
    [("cpu", 1 << 10, 512), ("cpu", 1 << 17, 256), ("meta", 1 << 17, 1 << 11), ("meta", 1 << 30, 256)],
)
def test_a_chunk_is_as_large_as_the_device_can_use_and_never_tiny(
    monkeypatch: pytest.MonkeyPatch, device: str, vocabulary: int, rows: int
) -> None:
    chosen: list[Any] = []
    monkeypatch.setattr(
        op, "_LinearCrossEntropy", SimpleNamespace(apply=lambda *arguments: chosen.append(arguments[3]))
    )
    one = torch.zeros(1, 1, device=device)
    linear_cross_entropy(one, one.expand(vocabulary, 1), torch.zeros(1, dtype=torch.int64, device=device))
    assert chosen == [rows]
