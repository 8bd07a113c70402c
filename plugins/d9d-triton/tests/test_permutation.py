"""Permutation of tokens to experts and back against float64, as custom ops, and in a layer of experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from d9d_core.kernel import OpSignature
from d9d_nn.ops import grouped_linear_torch
from d9d_testing.tolerances import TOLERANCES, assert_close_gradients, assert_close_values
from d9d_triton import permutation
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

reference = pytest.importorskip("d9d_moe.dispatch.permutation")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def shuffled(tokens: int, choices: int, rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Slots int64 [R] and places int64 [T, k] in random order; choices beyond the rows have none."""
    slots = torch.randperm(tokens * choices, generator=torch.Generator().manual_seed(seed))
    places = torch.empty_like(slots).scatter_(0, slots, torch.arange(len(slots)))
    return slots[:rows], places.view(tokens, choices)


@pytest.mark.thorough
def test_weights_of_another_shape_are_an_error() -> None:
    slots, places = shuffled(2, 2, 4, seed=0)
    with pytest.raises(ValueError, match=r"unpermute.triton: weights \[1, 2\] and places \[2, 2\] must have the same"):
        permutation.unpermute(normal(4, 8), slots, places, normal(1, 2))


def there_and_back(module: Any, x: Tensor, weights: Tensor, slots: Tensor, places: Tensor) -> dict[str, Tensor]:
    """Outputs of both ops, and gradients."""
    absent = len(slots) < places.numel()
    leaves = {"x": x.detach().requires_grad_(), "weights": weights.detach().requires_grad_()}
    rows = module.permute(leaves["x"], slots, places, absent=absent)
    out = module.unpermute(rows.sin(), slots, places, leaves["weights"], absent=absent)
    out.backward(normal(*out.shape, seed=9).to(out.dtype))
    return {"rows": rows.detach(), "out": out.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}


@pytest.mark.full
@given(
    tokens=st.integers(1, 6),
    choices=st.integers(1, 5),
    without=st.integers(0, 8),
    features=st.sampled_from([1, 2, 16, 33, 100]),
    dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
    seed=st.integers(0, 99),
)
@settings(max_examples=20)
def test_there_and_back_agrees_with_float64(
    tokens: int, choices: int, without: int, features: int, dtypes: tuple[torch.dtype, torch.dtype], seed: int
) -> None:
    numbers = shuffled(tokens, choices, max(1, tokens * choices - without), seed)
    # Positive weights: where the gradients of a token's rows cancel out, only their rounding is left to compare.
    x, weights = normal(tokens, features, dtype=dtypes[0]), normal(tokens, choices, seed=1, dtype=dtypes[1]).abs()
    found = there_and_back(permutation, x, weights, *numbers)
    exact = there_and_back(reference, x.double(), weights.double(), *numbers)
    assert [found[name].dtype for name in ("rows", "out", "x", "weights")] == [dtypes[0]] * 3 + [dtypes[1]]
    within = max((TOLERANCES[dtype] for dtype in dtypes), key=lambda tolerance: tolerance.rtol)
    assert torch.equal(found["rows"].double(), exact["rows"])
    assert_close_values(found["out"], exact["out"], within)
    assert_close_gradients(found, exact, within)


def test_rows_of_nobody_reach_nothing_and_get_zeros() -> None:
    slots, places = torch.tensor([3, 0, 1]), torch.tensor([[1, 9], [2, 7]])  # row 0 has no expert
    rows = torch.tensor([[float("nan")], [2.0], [5.0]]).requires_grad_()
    weights = torch.tensor([[3.0, 5.0], [7.0, 1.0]]).requires_grad_()
    out = permutation.unpermute(rows, slots, places, weights, absent=True)
    out.sum().backward()
    assert out.flatten().tolist() == [6, 35]
    assert rows.grad.flatten().tolist() == [0, 3, 7]
    assert weights.grad.tolist() == [[2, 0], [5, 0]]


def test_tokens_of_other_number_formats_are_refused() -> None:
    slots, places = shuffled(2, 2, 4, 0)
    with pytest.raises(TypeError, match=r"permute.triton: tokens is torch.float64"):
        permutation.permute(normal(2, 3).double(), slots, places)
    with pytest.raises(TypeError, match=r"unpermute.triton: weights is torch.float64"):
        permutation.unpermute(normal(4, 3), slots, places, normal(2, 2).double())


def _samples() -> list[tuple[Any, tuple[Any, ...]]]:
    slots, places = shuffled(3, 2, 5, 0)
    rows, weights = normal(5, 4).requires_grad_(), normal(3, 2, seed=1).requires_grad_()
    return [
        (permutation.copy_tokens, (normal(3, 4).requires_grad_(), slots, places, True)),
        (permutation.sum_copies, (normal(5, 4), places)),
        (permutation.weighted_sum, (rows, places, weights, True)),
        (permutation.weighted_sum, (rows, places, weights.detach(), True)),
        (
            permutation.weighted_sum_backward,
            (normal(3, 4), rows.detach(), places, weights.detach(), True, False, True),
        ),
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("sample", range(len(_samples())))
@pytest.mark.filterwarnings("ignore")  # of torch's own tools
def test_custom_ops_keep_torchs_rules(sample: int) -> None:
    op, arguments = _samples()[sample]
    torch.library.opcheck(op.differentiable, arguments)


def layer() -> Any:
    """Layer of experts in bfloat16, whose products torch 2.11 can compile."""
    local, swiglu, whole, router = (
        pytest.importorskip(f"d9d_moe.{name}")
        for name in ("dispatch.local", "experts.grouped_swiglu", "experts.layer", "router.top_k")
    )
    torch.manual_seed(0)
    experts = swiglu.GroupedSwiGLU(16, 24, 4, std=0.2, output_std=0.2)
    for slot in (experts.into, experts.out_of):
        slot.bind("grouped_mm", grouped_linear_torch.build(OpSignature(slot.op, "cpu", "bfloat16", slot.static)))
    return whole.MoELayer(router.TopKRouter(16, 4, 2, std=0.5), experts, local.LocalDispatcher()).bfloat16()


@pytest.mark.thorough
@pytest.mark.filterwarnings("default:.*should not be instantiated:DeprecationWarning")  # Dynamo's own, in torch 2.11
def test_a_layer_of_experts_computes_the_same_with_them_compiled_too() -> None:
    found = []
    for backend in ("reference", "triton", "compiled"):
        made = layer()
        for slot in made.op_slots().values() if backend != "reference" else ():
            slot.bind("triton", getattr(permutation, f"build_{slot.op}")(OpSignature(slot.op, "cpu", "bfloat16")))
        function = torch.compile(made, backend="aot_eager", fullgraph=True) if backend == "compiled" else made
        hidden = normal(2, 3, 16, dtype=torch.bfloat16).requires_grad_()
        out = function(hidden)
        out.backward(normal(*out.shape, seed=9).to(out.dtype))
        grads = {name: parameter.grad for name, parameter in made.named_parameters()}
        found.append({"out": out.detach(), "hidden": hidden.grad, **grads})
    assert_close_gradients(found[1], found[0])
    assert_close_gradients(found[2], found[1])


@pytest.mark.thorough
@pytest.mark.smoke
@pytest.mark.filterwarnings("default:.*should not be instantiated:DeprecationWarning")  # Dynamo's own, in torch 2.11
def test_a_compiler_keeps_them_in_one_graph() -> None:
    numbers = shuffled(3, 2, 5, 0)
    x, weights = normal(3, 8), normal(3, 2, seed=1)

    def function(x: Tensor, weights: Tensor) -> Tensor:
        rows = permutation.permute(x, *numbers, absent=True)
        return permutation.unpermute(rows.sin(), *numbers, weights, absent=True)

    found = []
    for called in (function, torch.compile(function, backend="aot_eager", fullgraph=True)):
        leaves = x.clone().requires_grad_(), weights.clone().requires_grad_()
        called(*leaves).backward(normal(3, 8, seed=9))
        found.append({"x": leaves[0].grad, "weights": leaves[1].grad})
    assert_close_gradients(*found)


def test_a_row_that_is_the_place_of_no_choice_has_a_copy_too() -> None:
    tokens, slots, places = normal(2, 5), torch.tensor([0, 0, 1]), torch.tensor([[1], [2]])
    assert torch.equal(permutation.permute(tokens, slots, places), tokens[slots])
    assert torch.equal(permutation.permute(tokens, slots[1:], places - 1), tokens)


@pytest.mark.parametrize("rows", [6, 4])
def test_rows_are_summed_without_weights_and_their_gradients_copied(rows: int) -> None:
    slots, places = shuffled(3, 2, rows, seed=4)
    found = []
    for module in (permutation, reference):
        leaf = normal(rows, 5, seed=2).requires_grad_()
        out = module.unpermute(leaf, slots, places, absent=rows < 6)
        out.backward(normal(3, 5, seed=3))
        found.append((out.detach(), leaf.grad))
    torch.testing.assert_close(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_shapes_are_known_without_values() -> None:
    slots, places = (
        torch.zeros(7, dtype=torch.int64, device="meta"),
        torch.zeros(3, 4, dtype=torch.int64, device="meta"),
    )
    tokens, rows = torch.zeros(3, 5, device="meta"), torch.zeros(7, 5, device="meta")
    weights = torch.zeros(3, 4, dtype=torch.bfloat16, device="meta")
    assert permutation.copy_tokens(tokens, slots, places, True).shape == (7, 5)
    for out in (
        permutation.sum_copies(rows, places),
        permutation.plain_sum(rows, slots, places, True),
        permutation.weighted_sum(rows, places, weights, True),
    ):
        assert (out.shape, out.dtype) == ((3, 5), torch.float32)
    for of_rows, of_weights in ((True, False), (False, True)):
        found = permutation.weighted_sum_backward(tokens, rows, places, weights, True, of_rows, of_weights)
        assert [one.numel() for one in found] == [35 * of_rows, 12 * of_weights]
        assert [one.dtype for one in found] == [torch.float32, torch.bfloat16]
