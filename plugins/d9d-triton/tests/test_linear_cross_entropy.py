"""The loss against its reference; kernels are interpreted here, and compiled where there is a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from d9d_core.kernel import OpSignature
from d9d_nn.heads.causal_lm import CausalLMHead
from d9d_nn.ops.linear_cross_entropy import IGNORE, linear_cross_entropy, linear_cross_entropy_with_ranks
from d9d_testing.suites.kernel import KernelSuite
from d9d_testing.tolerances import TOLERANCES, assert_close_gradients, assert_close_values
from d9d_triton import support
from d9d_triton.linear_cross_entropy import backend, operators
from d9d_triton.linear_cross_entropy.backend import (
    LinearCrossEntropy,
    LinearCrossEntropyByWords,
    LinearCrossEntropyNarrow,
)
from d9d_triton.linear_cross_entropy.passes import columns, gradient_in_place, row_statistics
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.smoke

#: Triton interprets kernels where there is no GPU, and only there.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FEATURES, WORDS = 8, 40
AHEAD = pytest.mark.parametrize("ahead", [False, True])
OPS = pytest.mark.parametrize(
    "op",
    [LinearCrossEntropy(), LinearCrossEntropy(ahead=True), LinearCrossEntropyNarrow(), LinearCrossEntropyByWords()],
    ids=["kept", "ahead", "narrow", "words"],
)


Op = Callable[[Tensor, Tensor, Tensor], Tensor]


@pytest.mark.thorough
class TestTriton(KernelSuite):
    target = "linear_cross_entropy.triton"
    device = DEVICE
    refused = ({"dtype": "int8"}, {"dtype": "float64"}, {"device": "mps"})


@pytest.mark.full
class TestTritonSum(TestTriton):
    target = "linear_cross_entropy.triton_sum"


@pytest.mark.gpu
class TestTritonOnCuda(TestTriton):
    device = "cuda"


@pytest.mark.gpu
class TestTritonSumOnCuda(TestTritonSum):
    device = "cuda"


def test_factors_of_two_dtypes_are_an_error() -> None:
    with pytest.raises(TypeError, match="hidden is torch.bfloat16, weight torch.float32; the matrix product reads one"):
        LinearCrossEntropy()(torch.zeros(2, 8).bfloat16(), torch.zeros(4, 8), torch.zeros(2, dtype=torch.int64))


def example(tokens: int = 5, words: int = WORDS, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, FEATURES, generator=generator)
    weight = torch.randn(words, FEATURES, generator=generator)
    targets = torch.randint(words, (tokens,), generator=generator)
    targets[1::4] = IGNORE
    hidden, weight = (tensor.to(DEVICE).requires_grad_() for tensor in (hidden, weight))
    return hidden, weight, targets.to(DEVICE)


def ramp(start: float, end: float, length: int = 5) -> Tensor:
    return torch.linspace(start, end, length, device=DEVICE)


def repeated(value: float, *shape: int) -> Tensor:
    """One number in memory."""
    return torch.tensor(value, device=DEVICE).expand(shape)


def backward(function: Callable[..., Tensor], upstream: Tensor, *inputs: Tensor) -> dict[str, Tensor]:
    """Loss, and the gradients of hidden states and weight."""
    hidden, weight = (tensor.detach().clone().requires_grad_() for tensor in inputs[:2])
    loss = function(hidden, weight, inputs[2])
    loss.backward(upstream.to(loss.dtype))
    assert hidden.grad is not None
    assert weight.grad is not None
    return {"loss": loss.detach(), "hidden": hidden.grad, "weight": weight.grad}


class Calls(TorchDispatchMode):
    """Counts our operators, and records the shapes of their outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()
        self.shapes: list[list[int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        space, _, name = func.name().partition("::")
        if space == "d9d_triton":
            self.count[name.removeprefix("linear_cross_entropy").removeprefix("_")] += 1
            self.shapes += [list(tensor.shape) for tensor in out]
        return out


@pytest.mark.full
@settings(max_examples=12)
@given(
    tokens=st.integers(0, 6),
    words=st.integers(1, 70),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    rows=st.integers(1, 4),
    keep=st.sampled_from([True, False, None]),
    ahead=st.booleans(),
    expanded=st.booleans(),
)
def test_chunks_and_kept_logits_do_not_change_the_result(
    tokens: int, words: int, dtype: torch.dtype, rows: int, keep: bool | None, ahead: bool, expanded: bool
) -> None:
    hidden, weight, targets = example(tokens, words)
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    upstream = repeated(0.37, tokens) if expanded else ramp(-1, 2, tokens)
    op = LinearCrossEntropy(ahead=ahead)
    found = backward(lambda *inputs: op(*inputs, rows=rows, keep=keep), upstream, hidden, weight, targets)
    expected = backward(linear_cross_entropy, upstream, hidden.double(), weight.double(), targets)
    within = TOLERANCES[dtype]
    assert found["loss"].dtype == torch.float32
    torch.testing.assert_close(
        found.pop("loss").double(), expected.pop("loss"), rtol=within.rtol, atol=within.atol * 10
    )
    if words == 1:  # a softmax of one word is one, so gradients are rounding
        assert all(gradient.abs().max() < 1e-6 for gradient in found.values() if gradient.numel())
    elif tokens:
        assert_close_gradients(found, expected, within)


@pytest.mark.parametrize("words", [8192, 16384 + 1, 40003])
def test_rows_of_several_blocks_are_read_to_their_end_and_no_further(words: int) -> None:
    memory = torch.full((3, columns(words)), torch.nan, device=DEVICE)
    logits = memory[:, :words]
    logits.copy_(torch.randn(3, words, generator=torch.Generator().manual_seed(0)))
    logits[0, 5] = 30.0  # far above the rest, in the first block
    logits[1, -1] = 30.0  # and in the last one
    logits[1, : words // 2] = -torch.inf
    exact = logits.double().requires_grad_()
    targets = torch.tensor([words - 1, words - 1, IGNORE], device=DEVICE)
    own = logits.gather(1, targets.clamp(min=0).unsqueeze(1)).squeeze(1)
    losses, ranks = memory.new_empty(3), torch.empty_like(targets)
    statistics = memory.new_empty(2, 3)
    above = (logits > own.unsqueeze(1)).sum(1)
    row_statistics(memory, own, targets, losses, statistics, ranks, words=words, ignored=IGNORE)
    expected = torch.nn.functional.cross_entropy(exact, targets, ignore_index=IGNORE, reduction="none")
    assert_close_values(losses, expected)
    assert ranks.tolist() == [above[0], 0, -1]
    upstream = torch.tensor([2.0, -0.5, torch.nan], device=DEVICE)
    expected[:2].backward(upstream[:2].double())
    gradient_in_place(memory, targets, statistics, upstream, words=words, ignored=IGNORE)
    assert exact.grad is not None
    assert_close_values(logits, exact.grad)
    assert_close_gradients({"logits": logits}, {"logits": exact.grad})


@pytest.mark.thorough
@OPS
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nothing_of_ignored_rows_reaches_a_gradient_whatever_they_hold(value: float, op: Op) -> None:
    hidden, weight, targets = example()
    clean = backward(op, ramp(1, 2), hidden, weight, targets)
    ignored = targets == IGNORE
    odd = hidden.detach().masked_fill(ignored.unsqueeze(1), value)
    found = backward(op, ramp(1, 2).masked_fill(ignored, value), odd, weight, targets)
    assert not found["loss"][ignored].any()
    assert not found["hidden"][ignored].any()
    assert all(torch.equal(found[name], clean[name]) for name in clean)


@pytest.mark.skipif(DEVICE == "cuda", reason="after an assertion on the device, the process cannot use it any more")
@OPS
@pytest.mark.parametrize("target", [-1, WORDS, -101])
def test_a_target_outside_of_the_vocabulary_is_an_error(target: int, op: Op) -> None:
    hidden, weight, targets = example()
    targets[2] = target
    with pytest.raises((IndexError, RuntimeError), match="index"):
        op(hidden, weight, targets)


@OPS
def test_only_ignored_targets_give_zero_gradients(op: Op) -> None:
    hidden, weight, targets = example()
    found = backward(op, repeated(1.0, 5), hidden, weight, torch.full_like(targets, IGNORE))
    assert not any(tensor.any() for tensor in found.values())


@AHEAD
def test_chunks_of_bfloat16_add_up_in_float32(ahead: bool) -> None:
    hidden = torch.ones(9, 1, dtype=torch.bfloat16, device=DEVICE)
    hidden[0] = 512  # a sum in bfloat16 would not notice the others, each less than half of its last place
    weight, targets = hidden.new_zeros(2, 1), torch.zeros(9, dtype=torch.int64, device=DEVICE)
    op = LinearCrossEntropy(ahead=ahead)
    found = backward(lambda *inputs: op(*inputs, rows=1, keep=False), repeated(1.0, 9), hidden, weight, targets)
    assert found["weight"].flatten().tolist() == [-260, 260]


def test_as_many_logits_are_kept_as_the_reference_may_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, targets = example()
    monkeypatch.setattr(backend, "may_be_kept", lambda _: 3 * columns(WORDS))
    whole = backward(linear_cross_entropy, ramp(1, 2), hidden, weight, targets)
    with Calls() as calls:
        found = backward(LinearCrossEntropy(), ramp(1, 2), hidden, weight, targets)
    assert calls.count == {"": 1, "backward": 1}
    assert [3, columns(WORDS)] in calls.shapes
    assert_close_gradients(found, whole)


def test_no_logits_are_kept_that_no_gradient_needs() -> None:
    hidden, weight, targets = example()
    for inputs in ((hidden.detach(), weight.detach()), (hidden, weight)):
        with Calls() as calls, torch.set_grad_enabled(not inputs[0].requires_grad):
            LinearCrossEntropy()(*inputs, targets, keep=True)
        assert calls.count == {"": 1}
        assert [0, columns(WORDS)] in calls.shapes


def test_below_a_frozen_weight_any_loss_costs_one_forward() -> None:
    hidden, weight, targets = example()
    upstream = ramp(-1, 2)
    with Calls() as calls:
        LinearCrossEntropy()(hidden, weight.detach(), targets, keep=True).backward(upstream)
    expected = backward(linear_cross_entropy, upstream, hidden, weight, targets)
    assert calls.count == {"ahead": 1, "scale": 1}
    assert hidden.grad is not None
    assert_close_gradients({"hidden": hidden.grad}, {"hidden": expected["hidden"]})


@pytest.mark.parametrize(
    ("weigh", "steps"),
    [
        (lambda loss: loss.sum() * 0.3, {"ahead": 1, "scale": 1}),
        (lambda loss: (loss * ramp(-1, 2, 6).view(2, 3)).sum(), {"ahead": 1, "backward": 1}),
        (lambda loss: loss.sum(-1).square().sum(), {"ahead": 1, "backward": 1}),
    ],
)
def test_gradients_ahead_are_used_if_the_loss_is_a_sum(
    weigh: Callable[[Tensor], Tensor], steps: dict[str, int]
) -> None:
    hidden, weight, targets = example(6)
    hidden, targets = hidden.view(2, 3, FEATURES), targets.view(2, 3)
    with Calls() as calls:
        found = torch.autograd.grad(weigh(LinearCrossEntropy(ahead=True)(hidden, weight, targets)), (hidden, weight))
    expected = torch.autograd.grad(weigh(linear_cross_entropy(hidden, weight, targets)), (hidden, weight))
    assert calls.count == steps
    names = ("hidden", "weight")
    assert_close_gradients(dict(zip(names, found, strict=True)), dict(zip(names, expected, strict=True)))


def test_a_graph_whose_kept_logits_are_gone_is_not_walked_again() -> None:
    hidden, weight, targets = example()
    loss = LinearCrossEntropy()(hidden, weight, targets).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(("ahead", "keep"), [(False, False), (True, None)])
def test_a_graph_without_kept_logits_may_be_walked_again(ahead: bool, keep: bool | None) -> None:
    hidden, weight, targets = example()
    loss = LinearCrossEntropy(ahead=ahead)(hidden, weight, targets, keep=keep).sum()
    first, second = (torch.autograd.grad(loss, (hidden, weight), retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_gradient_of_the_gradient_is_an_error() -> None:
    hidden, weight, targets = example()
    loss = LinearCrossEntropy()(hidden, weight, targets).sum()
    (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        gradient.sum().backward()


@OPS
def test_under_autocast_it_is_a_bfloat16_head_with_gradients_in_float32(op: Op) -> None:
    upstream = repeated(1.0, 5)
    hidden, weight, targets = example()
    expected = backward(op, upstream, hidden.bfloat16(), weight.bfloat16(), targets)
    with torch.autocast(DEVICE, torch.bfloat16):
        found = backward(op, upstream, hidden, weight, targets)
    assert all(tensor.dtype == torch.float32 for tensor in found.values())
    for name, tensor in found.items():
        # The product of a GPU adds up the weight's gradient in float32, and nothing rounds it then.
        within = {"rtol": 2**-8, "atol": 1e-6} if name == "weight" and DEVICE == "cuda" else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(tensor, expected[name].float(), **within)


def test_under_autocast_chunks_add_up_a_gradient_that_nothing_rounds() -> None:
    op = LinearCrossEntropy()
    hidden, weight, targets = example(8)
    with torch.autocast(DEVICE, torch.bfloat16):
        found = backward(lambda *inputs: op(*inputs, rows=2, keep=False), repeated(1.0, 8), hidden, weight, targets)
    wide = [tensor.detach().bfloat16().double() for tensor in (hidden, weight)]
    expected = backward(linear_cross_entropy, repeated(1.0, 8), *wide, targets)["weight"]
    assert (found["weight"] != found["weight"].bfloat16().float()).double().mean() > 0.5
    torch.testing.assert_close(found["weight"].double(), expected, rtol=2e-2, atol=2e-2)


@AHEAD
@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_ranks_are_those_of_the_reference_and_the_loss_keeps_its_bits(ahead: bool) -> None:
    op = LinearCrossEntropy(ahead=ahead)
    _, _, targets = example(8)
    # Small whole numbers: products are exact, and many logits are equal.
    draw = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randint(-2, 3, (n, FEATURES), generator=draw).float().to(DEVICE) for n in (8, WORDS))
    weight.requires_grad_()
    hidden[6] = torch.nan
    loss, ranks = op.with_ranks(hidden, weight, targets, rows=3, keep=False)
    assert torch.equal(ranks, linear_cross_entropy_with_ranks(hidden, weight, targets)[1])
    assert ranks[6] == WORDS
    assert ranks.dtype == torch.int64
    assert not ranks.requires_grad
    assert torch.equal(loss.nan_to_num(), op(hidden, weight, targets, rows=3, keep=False).nan_to_num())


def test_a_head_takes_its_ranks_from_the_same_pass() -> None:
    head = CausalLMHead(FEATURES, WORDS, std=1.0).to(DEVICE)
    head.observe("token_ranks", "training")
    hidden, _, targets = example(6)
    given_ = hidden.view(2, 3, FEATURES), targets.view(2, 3)
    expected = head(*given_)
    head.linear_cross_entropy.bind("triton", LinearCrossEntropy())
    with Calls() as calls:
        found = head(*given_)
    assert calls.count == {"": 1}
    assert torch.equal(found["token_ranks"], expected["token_ranks"])
    assert_close_values(found["token_loss"], expected["token_loss"])


@pytest.mark.full
@AHEAD
@pytest.mark.parametrize("keep", [True, False])
def test_a_compiled_graph_is_whole_and_computes_the_same_bits(keep: bool, ahead: bool) -> None:
    op = LinearCrossEntropy(ahead=ahead)

    def step(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        loss, ranks = op.with_ranks(hidden, weight, targets, rows=2, keep=keep)
        return loss.sum() * 0.5 + ranks.sum()

    torch.compiler.reset()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (5, 3):
        found, expected = (backward(f, repeated(2.0), *example(tokens)) for f in (compiled, step))
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.thorough
@AHEAD
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of the clones that opcheck makes
def test_operators_keep_what_torch_asks_of_them(ahead: bool) -> None:
    """Schema, shapes of fake tensors, and autograd, where nothing is overwritten also through a traced graph."""
    inputs = example(2)
    if ahead:
        torch.library.opcheck(operators.token_losses_ahead, (*inputs, 2, True, True, True))
    else:
        # The graph that opcheck traces returns the logits, which the backward overwrites; no graph of ours does.
        checks = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(operators.token_losses, (*inputs, 2, 2, True), test_utils=checks)


def test_what_does_not_fit_is_refused_with_a_way_out() -> None:
    hidden, weight, targets = example()
    op = backend.build(OpSignature("linear_cross_entropy", "cuda", "bfloat16", {}))
    with pytest.raises(
        TypeError, match=r"hidden is torch\.float64, .* set 'kernels: \{linear_cross_entropy: reference\}'"
    ):
        op(hidden.double(), weight.double(), targets)
    with pytest.raises(ValueError, match=r"hidden \[5, 8\] and targets \[4\]"):
        op(hidden, weight, targets[:4])


def test_the_variant_for_sums_is_never_chosen_by_itself() -> None:
    signature = OpSignature("linear_cross_entropy", "cuda", "bfloat16", {"features": 8, "vocabulary": 16})
    assert support.linear_cross_entropy(signature).priority > 10
    assert support.linear_cross_entropy_sum(signature).accept
    assert support.linear_cross_entropy_sum(signature).priority == 0


@OPS
@pytest.mark.parametrize("frozen", [False, True])
def test_no_tokens_have_no_losses_and_gradients_of_zeros(op: Op, frozen: bool) -> None:
    hidden = torch.zeros(2, 0, FEATURES, device=DEVICE, requires_grad=True)
    weight = example()[1].detach().requires_grad_(not frozen)
    losses = op(hidden, weight, torch.zeros(2, 0, dtype=torch.int64, device=DEVICE))
    assert losses.shape == (2, 0)
    losses.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.shape == (2, 0, FEATURES)
    assert frozen or torch.equal(weight.grad, torch.zeros_like(weight))  # type: ignore[arg-type]


def test_each_backend_of_the_loss_has_its_entry_point() -> None:
    signature = OpSignature("linear_cross_entropy", "cpu", "bfloat16", {})
    plain, summed = backend.build(signature), backend.build_sum(signature)
    assert (type(plain), plain._ahead, summed._ahead) == (LinearCrossEntropy, False, True)
    assert isinstance(backend.build_sum_narrow(signature), LinearCrossEntropyNarrow)
    assert isinstance(backend.build_words(signature), LinearCrossEntropyByWords)


def test_chunks_of_words_have_logits_of_192_mebibytes_in_whole_tiles_but_4096_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []

    class Stopped(Exception):
        pass

    def by_words(_hidden: Tensor, _weight: Tensor, _targets: Tensor, size: int, *_: Any) -> None:
        sizes.append(size)
        raise Stopped

    monkeypatch.setattr(backend, "token_losses_by_words", by_words)
    op = LinearCrossEntropyByWords()
    rows: list[Any] = []
    monkeypatch.setattr(
        op._by_tokens, "compute", lambda *given, ranked: (rows.append((*given[3:], ranked)), (None, None))[1]
    )
    weight = torch.zeros(151_936, 1, dtype=torch.bfloat16, device="meta", requires_grad=True)
    for tokens in (0, 8192, 16_384, 100_000):
        hidden = torch.zeros(tokens, 1, dtype=torch.bfloat16, device="meta")
        with pytest.raises(Stopped):
            op(hidden, weight, torch.zeros(tokens, dtype=torch.int64, device="meta"))
    # 192 MiB are 100,663,296 numbers of two bytes: 12,288 words for 8,192 tokens, 6,144 for twice as many.
    assert sizes == [100_663_296, 12_288, 6144, 4096]
    hidden = torch.zeros(3, 1, dtype=torch.bfloat16, device="meta")
    targets = torch.zeros(3, dtype=torch.int64, device="meta")
    for words in (151_936, 1 << 20):
        op.with_ranks(hidden, weight.detach()[:1].expand(words, 1), targets)
    # For a frozen weight, tokens: 662 fit, 640 in whole tiles of 64; 256 at least.
    assert rows == [(640, False, True), (256, False, True)]
