"""The loss whose gradients are summed in their own memory; interpreted here, and compiled where there is a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import sqrt
from typing import Any

import pytest
import torch
from d9d_core.kernel import OpSignature
from d9d_nn.ops.linear_cross_entropy import IGNORE, linear_cross_entropy, linear_cross_entropy_with_ranks
from d9d_testing.suites.kernel import KernelSuite
from d9d_testing.tolerances import TOLERANCES, assert_close_gradients
from d9d_triton import support
from d9d_triton.linear_cross_entropy import backend, narrow
from d9d_triton.linear_cross_entropy.backend import LinearCrossEntropy, LinearCrossEntropyNarrow, narrow_rows
from d9d_triton.linear_cross_entropy.parts import parts_of
from d9d_triton.linear_cross_entropy.passes import columns
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.smoke

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FEATURES, WORDS, TOKENS = 8, 40, 6
GIB = 2**30
Large = Callable[..., tuple[Tensor, Tensor, Tensor]]
Need = Callable[[int], None]
Weigh = Callable[[Tensor], Tensor]


def summed(losses: Tensor) -> Tensor:
    """Loss that is a number times the sum of all."""
    return losses.sum() * 0.3


def weighted(losses: Tensor) -> Tensor:
    """Loss that is none."""
    return (losses.flatten() * torch.linspace(-1, 2, losses.numel(), device=losses.device).to(losses.dtype)).sum()


WEIGH = pytest.mark.parametrize("weigh", [summed, weighted])


@pytest.mark.thorough
class TestTritonSumNarrow(KernelSuite):
    target = "linear_cross_entropy.triton_sum_narrow"
    device = DEVICE
    dtypes = ("float32", "bfloat16")
    refused = ({"dtype": "int8"}, {"dtype": "float16"}, {"dtype": "float64"}, {"device": "mps"})


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context")
class TestTritonSumNarrowOnCuda(TestTritonSumNarrow):
    device = "cuda"


def example(tokens: int = TOKENS, words: int = WORDS, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Hidden states, a weight, and targets of which each fourth is not predicted."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, FEATURES, generator=generator) for n in (tokens, words))
    targets = torch.randint(words, (tokens,), generator=generator)
    targets[1::4] = IGNORE
    return *(tensor.to(DEVICE, dtype).requires_grad_() for tensor in (hidden, weight)), targets.to(DEVICE)


def found_by(function: Any, weigh: Weigh, *inputs: Tensor, **options: Any) -> dict[str, Tensor]:
    """Losses, and gradients of hidden states and weight."""
    hidden, weight = (tensor.detach().clone().requires_grad_() for tensor in inputs[:2])
    losses = function(hidden, weight, inputs[2], **options)
    weigh(losses).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return {"loss": losses.detach(), "hidden": hidden.grad, "weight": weight.grad}


class Calls(TorchDispatchMode):
    """Counts our operators, and notes where the gradients are that the forward returns."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()
        self.memory: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.name().startswith("d9d_triton"):
            self.count[func.name().removeprefix("d9d_triton::linear_cross_entropy_")] += 1
        if func.name() == "d9d_triton::linear_cross_entropy_narrow":
            self.memory = [grad.data_ptr() for grad in out[3:]]
        return out


@pytest.mark.full
@settings(max_examples=12)
@given(
    tokens=st.integers(0, 6),
    words=st.integers(2, 70),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    rows=st.integers(1, 4),
    weigh=st.sampled_from([summed, weighted]),
)
def test_chunks_do_not_change_the_result(tokens: int, words: int, dtype: torch.dtype, rows: int, weigh: Weigh) -> None:
    hidden, weight, targets = example(tokens, words, dtype)
    found = found_by(LinearCrossEntropyNarrow(), weigh, hidden, weight, targets, rows=rows)
    expected = found_by(linear_cross_entropy, weigh, hidden.double(), weight.double(), targets)
    within = TOLERANCES[dtype]
    loss = found.pop("loss")
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected.pop("loss"), rtol=within.rtol, atol=within.atol * 10)
    assert_close_gradients(found, expected, within)


@pytest.mark.thorough
@WEIGH
def test_in_float32_it_is_triton_sum_bit_for_bit(weigh: Weigh) -> None:
    inputs = example(9)
    found = found_by(LinearCrossEntropyNarrow(), weigh, *inputs, rows=4)
    expected = found_by(LinearCrossEntropy(ahead=True), weigh, *inputs, rows=4)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_in_bfloat16_what_a_chunk_adds_below_half_of_the_last_place_is_lost() -> None:
    hidden = torch.ones(9, 1, dtype=torch.bfloat16, device=DEVICE)
    hidden[0] = 512
    inputs = hidden, hidden.new_zeros(2, 1), torch.zeros(9, dtype=torch.int64, device=DEVICE)
    op = LinearCrossEntropyNarrow()
    for rows, total in ((9, 260), (1, 256)):
        found = found_by(op, torch.sum, *inputs, rows=rows)
        assert found["weight"].flatten().tolist() == [-total, total]


@pytest.mark.full
@WEIGH
def test_chunks_of_bfloat16_add_no_more_error_than_one_rounding_each(weigh: Weigh) -> None:
    """After n of N chunks, the square of a sum of random signs, and of its rounding, is n/N of its final value.

    So all roundings but the last one add (N - 1) / 2 times the square of that one's error.
    """
    count, rows = 8, 16
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 64, generator=generator).to(DEVICE, torch.bfloat16) for n in (count * rows, 96))
    inputs = hidden, weight / 8, torch.randint(96, (count * rows,), generator=generator).to(DEVICE)
    exact = found_by(linear_cross_entropy, weigh, hidden.double(), inputs[1].double(), inputs[2])["weight"]
    one, many = (
        (found_by(LinearCrossEntropyNarrow(), weigh, *inputs, rows=size)["weight"] - exact).norm().item()
        for size in (len(hidden), rows)
    )
    rounding = (exact.bfloat16() - exact).norm().item()
    assert one < many < 1.05 * sqrt(one**2 + (count - 1) / 2 * rounding**2)


def test_the_factor_of_the_loss_is_not_rounded_to_the_dtype_of_the_gradients() -> None:
    inputs = example(dtype=torch.bfloat16)
    unit, found = (
        found_by(LinearCrossEntropyNarrow(), lambda losses, by=by: losses.sum() * by, *inputs) for by in (1, 1 / 3)
    )
    for name in ("hidden", "weight"):
        assert torch.equal(found[name], (unit[name].float() * (1 / 3)).bfloat16())


@pytest.mark.parametrize(
    ("weigh", "steps"),
    [
        (summed, {"narrow": 1, "narrow_scale": 1}),
        (weighted, {"narrow": 1, "narrow_again": 1}),
        (lambda losses: losses.sum(-1).square().sum(), {"narrow": 1, "narrow_again": 1}),
    ],
)
def test_gradients_of_the_forward_are_used_if_the_loss_is_a_sum_and_their_memory_in_any_case(
    weigh: Weigh, steps: dict[str, int]
) -> None:
    hidden, weight, targets = example()
    hidden, targets = hidden.detach().view(2, 3, FEATURES).requires_grad_(), targets.view(2, 3)
    with Calls() as calls:
        weigh(LinearCrossEntropyNarrow()(hidden, weight, targets)).backward()
    expected = found_by(linear_cross_entropy, weigh, hidden, weight, targets)
    assert calls.count == steps
    assert hidden.grad is not None
    assert weight.grad is not None
    assert calls.memory == [hidden.grad.data_ptr(), weight.grad.data_ptr()]
    found = {"hidden": hidden.grad, "weight": weight.grad}
    assert_close_gradients(found, {name: expected[name] for name in found})


@WEIGH
def test_below_a_frozen_weight_any_loss_costs_one_forward(weigh: Weigh) -> None:
    hidden, weight, targets = example()
    with Calls() as calls:
        weigh(LinearCrossEntropyNarrow()(hidden, weight.detach(), targets, rows=4)).backward()
    expected = found_by(linear_cross_entropy, weigh, hidden, weight, targets)
    assert calls.count == {"narrow": 1, "narrow_scale": 1}
    assert hidden.grad is not None
    assert_close_gradients({"hidden": hidden.grad}, {"hidden": expected["hidden"]})


@pytest.mark.thorough
@WEIGH
def test_only_the_gradient_that_is_asked_for_is_computed(weigh: Weigh) -> None:
    inputs = example()
    expected = found_by(LinearCrossEntropyNarrow(), weigh, *inputs, rows=4)
    for place, name in enumerate(("hidden", "weight")):
        losses = LinearCrossEntropyNarrow()(*inputs, rows=4)
        (grad,) = torch.autograd.grad(weigh(losses), (inputs[place],))
        assert torch.equal(grad, expected[name])
        alone = [tensor.detach() for tensor in inputs]
        alone[place].requires_grad_()
        weigh(LinearCrossEntropyNarrow()(*alone, rows=4)).backward()
        assert alone[1 - place].grad is None
        assert alone[place].grad is not None
        assert_close_gradients({name: alone[place].grad}, {name: expected[name]})


@pytest.mark.parametrize("frozen", [False, True])
@WEIGH
def test_a_graph_is_not_walked_again(weigh: Weigh, frozen: bool) -> None:
    hidden, weight, targets = example()
    loss = weigh(LinearCrossEntropyNarrow()(hidden, weight.requires_grad_(not frozen), targets))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_without_gradients_there_is_one_product() -> None:
    inputs = example()
    with Calls() as calls, torch.no_grad():
        losses = LinearCrossEntropyNarrow()(*inputs, rows=4)
    assert not calls.memory
    assert torch.equal(losses, LinearCrossEntropyNarrow()(*inputs, rows=4))


@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_ranks_are_those_of_the_reference_and_the_loss_keeps_its_bits() -> None:
    targets = example(8)[2]
    # Small whole numbers: products are exact, and many logits are equal.
    draw = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randint(-2, 3, (n, FEATURES), generator=draw).float().to(DEVICE) for n in (8, WORDS))
    hidden[6] = torch.nan
    inputs = hidden, weight.requires_grad_(), targets
    op = LinearCrossEntropyNarrow()
    losses, ranks = op.with_ranks(*inputs, rows=3)
    assert torch.equal(ranks, linear_cross_entropy_with_ranks(*inputs)[1])
    assert ranks[6] == WORDS
    assert ranks[1] == -1
    assert not ranks.requires_grad
    assert torch.equal(losses.nan_to_num(), op(*inputs, rows=3).nan_to_num())


def test_a_chunk_has_so_many_tokens_that_its_logits_fit() -> None:
    hidden, weight = (torch.empty(n, 2048, dtype=torch.bfloat16, device="meta") for n in (8192, 151_936))
    rows = narrow_rows(hidden, weight)
    assert rows == 1024
    parts = parts_of(len(hidden), hidden.new_empty(0, columns(len(weight))), rows, narrow.TILE)
    assert [(part.stop - part.start, len(space)) for part, space in parts] == [(1024, 1024)] * 8
    assert parts[0][1].nbytes + hidden[parts[0][0]].nbytes < 0.295 * GIB
    assert narrow_rows(hidden.float(), weight.float()) == 512
    assert narrow_rows(hidden, weight.new_empty(1 << 20, 2048)) == 256


@pytest.mark.parametrize("trained", [False, True])
def test_chunks_are_as_large_as_they_may_be_unless_their_size_is_given(
    monkeypatch: pytest.MonkeyPatch, trained: bool
) -> None:
    asked: list[int] = []

    def note(_hidden: Tensor, _weight: Tensor, _targets: Tensor, rows: int, *_: Any) -> tuple[None, None]:
        asked.append(rows)
        return None, None

    monkeypatch.setattr(narrow, "token_losses_narrow", note if trained else None)
    monkeypatch.setattr(backend, "token_losses", None if trained else note)
    hidden, weight = (torch.empty(n, 2048, dtype=torch.bfloat16, device="meta") for n in (8192, 151_936))
    op, targets = LinearCrossEntropyNarrow(), torch.empty(8192, dtype=torch.int64, device="meta")
    monkeypatch.setattr(backend, "autocast_operands", lambda *operands: operands)  # meta has no autocast
    op(hidden.requires_grad_(trained), weight, targets)
    op.with_ranks(hidden, weight, targets, rows=7)
    assert asked == [1024, 7]


@pytest.mark.full
@pytest.mark.parametrize("ranked", [False, True])
@WEIGH
def test_a_compiled_graph_is_whole_and_computes_the_same_bits(weigh: Weigh, ranked: bool) -> None:
    op = LinearCrossEntropyNarrow()

    def step(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        inputs = hidden, weight, targets
        return weigh(op.with_ranks(*inputs, rows=2)[0] if ranked else op(*inputs, rows=2))

    torch.compiler.reset()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (5, 3):
        found, expected = (found_by(f, lambda loss: loss * 2, *example(tokens)) for f in (compiled, step))
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of the clones that opcheck makes
def test_operators_keep_what_torch_asks_of_them() -> None:
    hidden, weight, targets = example(2)
    # The graph that opcheck traces returns the gradients, which the backward overwrites; no graph of ours does.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    inputs = hidden, weight, targets, 2, True, True, True
    torch.library.opcheck(narrow.token_losses_narrow, inputs, test_utils=checks)
    losses, _, statistics, *grads = (tensor.detach() for tensor in narrow.token_losses_narrow(*inputs))
    hidden, weight = hidden.detach(), weight.detach()
    torch.library.opcheck(narrow.scale, (losses, targets, *grads))
    torch.library.opcheck(narrow.compute_again, (losses, hidden, weight, targets, statistics, *grads, 2))


def test_it_is_never_chosen_by_itself() -> None:
    decision = support.linear_cross_entropy_sum_narrow(OpSignature("linear_cross_entropy", "cuda", "bfloat16", {}))
    assert decision.accept
    assert decision.priority == 0
    assert "used only if the job names it" in decision.reason


def test_float16_is_refused_which_lacks_the_range() -> None:
    with pytest.raises(TypeError, match=r"too large for torch\.float16; train in bfloat16, or choose triton_sum"):
        LinearCrossEntropyNarrow()(*example(dtype=torch.float16))


# --- on a GPU, of the size of a model


@pytest.mark.gpu
@pytest.mark.parametrize("frozen", [False, True])
@WEIGH
def test_beyond_its_gradients_it_needs_less_than_a_third_of_a_gibibyte(
    weigh: Weigh, frozen: bool, large: Large, need: Need
) -> None:
    need(4 * GIB)
    hidden, weight, targets = large()
    leaves = (hidden,) if frozen else (hidden, weight)
    weight.requires_grad_(not frozen)
    for attempt in range(2):  # the first call also takes the workspaces of libraries
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        grads = torch.autograd.grad(weigh(LinearCrossEntropyNarrow()(hidden, weight, targets)), leaves)
        extra = torch.cuda.max_memory_allocated() - before - sum(grad.nbytes for grad in grads)
        del grads
        if attempt:
            assert 0.1 * GIB <= extra <= 0.3 * GIB


@pytest.mark.gpu
@WEIGH
def test_in_bfloat16_it_is_near_the_exact_loss_and_the_same_bits_again(weigh: Weigh, large: Large, need: Need) -> None:
    need(16 * GIB)
    inputs = large()
    op = LinearCrossEntropyNarrow()
    first, second = (found_by(op, weigh, *inputs) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    exact = found_by(linear_cross_entropy, weigh, *(tensor.detach().float() for tensor in inputs[:2]), inputs[2])
    torch.testing.assert_close(first.pop("loss"), exact.pop("loss"), rtol=2e-2, atol=2e-2)
    assert_close_gradients(first, exact, TOLERANCES[torch.bfloat16])


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@WEIGH
def test_the_host_never_waits(weigh: Weigh, large: Large, need: Need) -> None:
    need(4 * GIB)
    inputs = large(tokens=2048)
    op = LinearCrossEntropyNarrow()
    weigh(op.with_ranks(*inputs)[0]).backward()  # the first call compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        weigh(op.with_ranks(*inputs)[0]).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
