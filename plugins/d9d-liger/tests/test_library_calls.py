"""Arguments that the library is called with, over stand-ins of its functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from d9d_core.kernel import OpSignature
from d9d_liger import linear_cross_entropy, rms_norm, rope, rules, silu_mul
from d9d_nn.ops.linear_cross_entropy import IGNORE
from torch import Tensor


class Applied:
    """Stand-in of an autograd function of the library that notes its arguments."""

    def __init__(self, result: Any) -> None:
        self.result = result
        self.given: list[tuple[Any, ...]] = []

    def apply(self, *given: Any) -> Any:
        self.given.append(given)
        return self.result


def test_a_loss_is_asked_for_each_token_without_options(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Applied((torch.tensor([1.0, 0.0, 2.0, 3.0]), None))
    monkeypatch.setattr(linear_cross_entropy, "LigerFusedLinearCrossEntropyFunction", library)
    hidden, weight, targets = torch.ones(2, 2, 3), torch.ones(5, 3), torch.tensor([[4, IGNORE], [0, 2]])
    losses = linear_cross_entropy.linear_cross_entropy(hidden, weight, targets)
    assert losses.tolist() == [[1.0, 0.0], [2.0, 3.0]]
    ((tokens, given, words, *options),) = library.given
    assert tokens.tolist() == [[1.0] * 3, [0.0] * 3, [1.0] * 3, [1.0] * 3]
    assert given is weight
    assert words.tolist() == [4, IGNORE, 0, 2]
    assert options == [None, None, IGNORE, 0.0, 0.0, "none", None, False, torch.float32]
    assert linear_cross_entropy.linear_cross_entropy(hidden[:0], weight, targets[:0]).shape == (0, 2)
    assert len(library.given) == 1


def test_a_norm_is_computed_in_float32_and_leaves_its_gradient_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.ones(2, 3), torch.ones(3)
    library = Applied(x)
    monkeypatch.setattr(rms_norm, "LigerRMSNormFunction", library)
    assert rms_norm.rms_norm(x, weight, 1e-5) is x
    assert library.given == [(x, weight, 1e-5, 0.0, "gemma", False)]


def test_heads_come_before_positions_in_copies_that_are_rotated(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []

    def turn(name: str) -> Any:
        def library(query: Tensor, key: Tensor, *angles: Tensor, rotary_dim: int) -> tuple[Tensor, ...]:
            called.append((name, tuple(query.shape), tuple(key.shape), angles, rotary_dim))
            query.add_(1)
            key.add_(2)
            return query, key

        return library

    monkeypatch.setattr(rope, "rope_forward", turn("forward"))
    monkeypatch.setattr(rope, "rope_backward", turn("backward"))
    query, key = (torch.zeros(2, 3, heads, 8).transpose(1, 3).contiguous().transpose(1, 3) for heads in (4, 1))
    cos, sin = torch.ones(1, 3, 4), torch.zeros(1, 3, 4)
    for function in (rope.rope, rope.backward):
        turned = function(query, key, cos, sin)
        assert [tensor.unique().tolist() for tensor in turned] == [[1.0], [2.0]]
        assert all(tensor.is_contiguous() for tensor in turned)
    assert not query.any()
    assert not key.any()
    assert [call[:3] + call[4:] for call in called] == [
        ("forward", (2, 4, 3, 8), (2, 1, 3, 8), 8), ("backward", (2, 4, 3, 8), (2, 1, 3, 8), 8),
    ]  # fmt: skip
    assert all(torch.equal(one, other) for one, other in zip(called[0][3], (cos, sin), strict=True))
    assert rope.rope(query[:0], key[:0], cos, sin)[0].shape == (0, 3, 4, 8)
    assert len(called) == 2


def test_a_gate_is_the_third_result_and_its_gradients_overwrite_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []

    def forward(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        called.append((gate.is_contiguous(), up.is_contiguous()))
        return gate, up, gate + 10 * up

    def backward(gate: Tensor, up: Tensor, grad: Tensor) -> None:
        called.append((gate.is_contiguous(), up.is_contiguous(), grad.is_contiguous()))
        gate.add_(grad)
        up.sub_(grad)

    monkeypatch.setattr(silu_mul, "swiglu_forward", forward)
    monkeypatch.setattr(silu_mul, "swiglu_backward", backward)
    gate, up, grad = torch.tensor([[1.0, 2.0]] * 2).T, torch.tensor([[3.0, 4.0]] * 2).T, torch.ones(1).expand(2, 2)
    assert silu_mul.forward(gate, up).tolist() == [[31.0, 31.0], [42.0, 42.0]]
    found = silu_mul.backward(grad, gate, up)
    assert [tensor.tolist() for tensor in found] == [[[2.0, 2.0], [3.0, 3.0]], [[2.0, 2.0], [3.0, 3.0]]]
    assert gate.tolist() == [[1.0, 1.0], [2.0, 2.0]]
    assert called == [(True, True), (True, True, True)]
    assert silu_mul.forward(gate[:0], up[:0]).shape == (0, 2)
    assert [tensor.shape for tensor in silu_mul.backward(grad[:0], gate[:0], up[:0])] == [(0, 2), (0, 2)]
    assert len(called) == 2


@pytest.mark.parametrize("op", rules.RULES)
def test_kernels_are_accepted_by_name_in_three_dtypes_on_cuda(op: str) -> None:
    def asked(device: str, dtype: str) -> tuple[bool, int, str]:
        decision = getattr(rules, op)(OpSignature(op, device, dtype, {}))
        return decision.accept, decision.priority, decision.reason

    for dtype in ("bfloat16", "float16", "float32"):
        assert asked("cuda", dtype) == (True, 0, rules.RULES[op][1])
    assert asked("cuda", "float64") == (False, 0, "reads bfloat16, float16, float32; the tensors are float64")
    assert asked("cpu", "float32") == (False, 0, "its Triton kernels need CUDA; the device is cpu")
