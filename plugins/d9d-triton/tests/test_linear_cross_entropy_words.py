"""The loss in chunks of words; kernels are interpreted here, and compiled where there is a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from d9d_core.kernel import OpSignature
from d9d_nn.ops.linear_cross_entropy import IGNORE, linear_cross_entropy, linear_cross_entropy_with_ranks
from d9d_testing.suites.kernel import KernelSuite
from d9d_testing.tolerances import TOLERANCES, assert_close_gradients, assert_close_values
from d9d_triton import support
from d9d_triton.linear_cross_entropy import backend, words
from d9d_triton.linear_cross_entropy.backend import LinearCrossEntropyByWords
from d9d_triton.linear_cross_entropy.passes import LOWEST, columns, count_chunk, gradient_in_place, include_chunk
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.smoke

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FEATURES, WORDS, TOKENS = 8, 150, 5
GIB = 2**30
Large = Callable[..., tuple[Tensor, Tensor, Tensor]]
Need = Callable[[int], None]


@pytest.mark.thorough
class TestTritonWords(KernelSuite):
    target = "linear_cross_entropy.triton_words"
    device = DEVICE
    refused = ({"dtype": "int8"}, {"dtype": "float64"}, {"device": "mps"})


@pytest.mark.gpu
class TestTritonWordsOnCuda(TestTritonWords):
    device = "cuda"


def example(tokens: int = TOKENS, number: int = WORDS) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, a weight, and targets of which each fourth is not predicted."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, FEATURES, generator=generator).to(DEVICE) for n in (tokens, number))
    targets = torch.randint(number, (tokens,), generator=generator)
    targets[1::4] = IGNORE
    return hidden.requires_grad_(), weight.requires_grad_(), targets.to(DEVICE)


def found_by(function: Any, *inputs: Tensor, **options: Any) -> dict[str, Tensor]:
    """Losses, and gradients of hidden states and weight where each token counts otherwise."""
    hidden, weight = (tensor.detach().clone().requires_grad_() for tensor in inputs[:2])
    losses = function(hidden, weight, inputs[2], **options)
    losses.backward(torch.linspace(-1, 2, len(losses), device=DEVICE).to(losses.dtype))
    assert hidden.grad is not None
    assert weight.grad is not None
    return {"loss": losses.detach(), "hidden": hidden.grad, "weight": weight.grad}


class Calls(TorchDispatchMode):
    """Counts our operators and matrix products, and notes the numbers of logits that our operators return."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()
        self.kept: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.count[func.name()] += 1
        if func.name() == "d9d_triton::linear_cross_entropy_words":
            self.kept.append(out[3].numel())
        return out


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counter of the products that compute logits."""
    count: Counter[str] = Counter()
    real = words._project

    def project(*arguments: Any) -> Tensor:
        count["logits"] += 1
        return real(*arguments)

    monkeypatch.setattr(words, "_project", project)
    return count


@pytest.mark.full
@settings(max_examples=12)
@given(
    tokens=st.integers(0, 6),
    number=st.integers(2, 300),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    size=st.integers(1, 200),
    keep=st.booleans(),
)
def test_chunks_and_kept_logits_do_not_change_the_result(
    tokens: int, number: int, dtype: torch.dtype, size: int, keep: bool
) -> None:
    hidden, weight, targets = example(tokens, number)
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    size = max(size, number // 4)  # interpreted, each chunk takes milliseconds
    found = found_by(LinearCrossEntropyByWords(), hidden, weight, targets, size=size, keep=keep)
    expected = found_by(linear_cross_entropy, hidden.double(), weight.double(), targets)
    within = TOLERANCES[dtype]
    loss = found.pop("loss")
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected.pop("loss"), rtol=within.rtol, atol=within.atol * 10)
    if tokens:
        assert_close_gradients(found, expected, within)


@pytest.mark.parametrize("number", [4096, 8192 + 1, 20003])
def test_chunks_of_several_blocks_are_read_to_their_end_and_no_further(number: int) -> None:
    halves = (0, number // 2 // 16 * 16), (number // 2 // 16 * 16, number)
    logits = torch.randn(3, number, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    logits[0, 5] = 30.0  # far above the rest, in the first chunk
    logits[1, -1] = 30.0  # and in the last one
    logits[1, : halves[0][1]] = -torch.inf  # nothing but words that are impossible
    targets = torch.tensor([number - 1, number - 1, IGNORE], device=DEVICE)
    own, ranks = logits.new_zeros(3), torch.zeros_like(targets)
    statistics = torch.tensor([[LOWEST] * 3, [0.0] * 3], device=DEVICE)
    chunks = []
    for start, stop in halves:
        memory = torch.full((3, columns(stop - start)), torch.nan, device=DEVICE)
        memory[:, : stop - start] = logits[:, start:stop]
        chunks.append((start, stop, memory))
        include_chunk(memory, targets, own, statistics, first=start, words=stop - start, ignored=IGNORE)
    exact = logits.double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(exact, targets, ignore_index=IGNORE, reduction="none")
    assert_close_values(statistics[1].log() + statistics[0] - own, expected)
    upstream = torch.tensor([2.0, -0.5, torch.nan], device=DEVICE)
    expected[:2].backward(upstream[:2].double())
    assert exact.grad is not None
    for start, stop, memory in chunks:
        count_chunk(memory, targets, own, ranks, words=stop - start, ignored=IGNORE)
        gradient_in_place(memory, targets, statistics, upstream, words=stop - start, ignored=IGNORE, first=start)
        assert_close_values(memory[:, : stop - start], exact.grad[:, start:stop])
    assert ranks.tolist() == [(logits[0] > logits[0, -1]).sum(), 0, -1]


def test_the_last_chunk_s_logits_are_the_only_ones_that_are_kept_and_not_computed_again(
    products: Counter[str],
) -> None:
    with Calls() as calls:
        found = found_by(LinearCrossEntropyByWords(), *example(), size=64)
    assert products["logits"] == 3 + 2
    assert calls.kept == [TOKENS * 64]
    expected = found_by(LinearCrossEntropyByWords(), *example(), size=64, keep=False)
    assert products["logits"] == 5 + 3 + 3
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_chunk_has_so_many_words_that_its_logits_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_LEAST_WORDS", 64)
    for size, per_chunk in ((TOKENS * 4 * 200, WORDS), (TOKENS * 4 * 140, 128), (1, 64)):
        monkeypatch.setattr(backend, "_SMALL_BYTES", size)
        with Calls() as calls:
            LinearCrossEntropyByWords()(*example())
        assert calls.kept == [TOKENS * columns(per_chunk)]


def test_chunks_are_even() -> None:
    assert [(c.start, c.stop) for c in words._chunks(1000, 640)] == [(0, 512), (512, 1000)]
    assert [(c.start, c.stop) for c in words._chunks(7, 3)] == [(0, 3), (3, 6), (6, 7)]
    assert words._chunks(7, 8) == [slice(0, 7)]
    of_issue = words._chunks(151_936, 12_288)
    assert {c.stop - c.start for c in of_issue[:-1]} == {11_712}
    assert of_issue[-1] == slice(140_544, 151_936)


@pytest.mark.thorough
def test_many_chunks_of_words_add_up_in_float32() -> None:
    """Each further part of the gradient is below half of the last place that a sum in bfloat16 has."""
    number = 64 * 33
    weight = torch.full((number, 1), 24.0, dtype=torch.bfloat16, device=DEVICE)
    weight[-64:] = 512  # whose part, the first one, is -496
    hidden = torch.zeros(1, 1, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    targets = torch.tensor([number - 1], device=DEVICE)
    LinearCrossEntropyByWords()(hidden, weight.requires_grad_(), targets, size=64).sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.item() == pytest.approx((64 * 512 + (number - 64) * 24) / number - 512, rel=1e-2)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_ranks_are_those_of_the_reference_and_change_no_bits(products: Counter[str]) -> None:
    draw = torch.Generator().manual_seed(1)
    # Small whole numbers: products are exact, and many logits are equal.
    hidden, weight = (torch.randint(-2, 3, (n, FEATURES), generator=draw).float().to(DEVICE) for n in (8, WORDS))
    targets = example(8)[2]
    hidden[6] = torch.nan
    inputs = hidden.requires_grad_(), weight.requires_grad_(), targets
    op = LinearCrossEntropyByWords()
    losses, ranks = op.with_ranks(*inputs, size=64)
    assert products["logits"] == 3 + 2
    assert torch.equal(ranks, linear_cross_entropy_with_ranks(*inputs)[1])
    assert ranks[6] == WORDS
    assert ranks[1] == -1
    assert not ranks.requires_grad
    plain = op(*inputs, size=64)
    assert torch.equal(losses.nan_to_num(), plain.nan_to_num())
    finite = torch.arange(8, device=DEVICE) != 6
    grads, expected = (torch.autograd.grad(loss[finite].sum(), inputs[:1]) for loss in (losses, plain))
    assert torch.equal(grads[0][finite], expected[0][finite])


def test_without_a_gradient_of_the_weight_chunks_have_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_LEAST_ROWS", 2)
    monkeypatch.setattr(backend, "_SMALL_BYTES", 1)
    hidden, weight, targets = example()
    expected = found_by(linear_cross_entropy, hidden, weight, targets)
    with Calls() as calls:
        losses = LinearCrossEntropyByWords()(hidden, weight.detach(), targets)
        losses.backward(torch.linspace(-1, 2, TOKENS, device=DEVICE))
        with torch.no_grad():
            ranks = LinearCrossEntropyByWords().with_ranks(hidden, weight, targets)[1]
    own = {name: n for name, n in calls.count.items() if name.startswith("d9d_triton")}
    assert own == {f"d9d_triton::linear_cross_entropy{name}": 1 for name in ("", "_ahead", "_scale")}
    assert torch.equal(ranks, linear_cross_entropy_with_ranks(hidden, weight, targets)[1])
    assert hidden.grad is not None
    assert_close_gradients({"hidden": hidden.grad}, {"hidden": expected["hidden"]})


def test_a_graph_is_walked_again_only_without_kept_logits() -> None:
    hidden, weight, targets = example()
    op = LinearCrossEntropyByWords()
    for losses in (op(hidden, weight, targets, keep=False), op.with_ranks(hidden, weight, targets)[0]):
        first, second = (torch.autograd.grad(losses.sum(), (hidden, weight), retain_graph=True) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    loss = LinearCrossEntropyByWords()(hidden, weight, targets).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_only_the_gradient_that_is_asked_for_is_computed() -> None:
    hidden, weight, targets = example()
    expected = found_by(LinearCrossEntropyByWords(), hidden, weight, targets, size=64)
    for place, name in enumerate(("hidden", "weight")):
        losses = LinearCrossEntropyByWords()(hidden, weight, targets, size=64)
        (grad,) = torch.autograd.grad(losses, ((hidden, weight)[place],), torch.linspace(-1, 2, TOKENS, device=DEVICE))
        assert torch.equal(grad, expected[name])


@pytest.mark.full
@pytest.mark.parametrize("ranked", [False, True])
def test_a_compiled_graph_is_whole_and_computes_the_same_bits(ranked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_LEAST_WORDS", 64)
    monkeypatch.setattr(backend, "_SMALL_BYTES", 400 * 4)  # 128 and 64 words for 3 and 5 tokens
    op = LinearCrossEntropyByWords()

    def step(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return op.with_ranks(hidden, weight, targets)[0] if ranked else op(hidden, weight, targets)

    torch.compiler.reset()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (5, 3):
        found, expected = (found_by(f, *example(tokens)) for f in (compiled, step))
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of the clones that opcheck makes
def test_operators_keep_what_torch_asks_of_them() -> None:
    inputs = example(2)
    torch.library.opcheck(words.token_losses_by_words, (*inputs, 64, False, True))
    # The graph that opcheck traces returns the logits, which the backward overwrites; no graph of ours does.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(words.token_losses_by_words, (*inputs, 64, True, False), test_utils=checks)


def test_it_is_never_chosen_by_itself() -> None:
    signature = OpSignature("linear_cross_entropy", "cuda", "bfloat16", {"features": 8, "vocabulary": 16})
    decision = support.linear_cross_entropy_words(signature)
    assert decision.accept
    assert decision.priority == 0
    assert "used only if the job names it" in decision.reason


# --- on a GPU, of the size of a model


@pytest.mark.gpu
def test_beyond_its_gradients_it_needs_less_than_a_third_of_a_gibibyte(large: Large, need: Need) -> None:
    need(4 * GIB)
    hidden, weight, targets = large()
    op = LinearCrossEntropyByWords()
    for attempt in range(2):  # the first call also takes the workspaces of libraries
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        losses = op(hidden, weight, targets)
        forward = torch.cuda.max_memory_allocated() - before
        grads = torch.autograd.grad(losses.sum(), (hidden, weight))
        extra = torch.cuda.max_memory_allocated() - before - sum(grad.nbytes for grad in grads)
        del losses, grads
        if attempt:
            assert forward <= 0.2 * GIB
            assert 0.1 * GIB <= extra <= 0.3 * GIB


@pytest.mark.gpu
def test_in_bfloat16_it_is_the_exact_loss_and_the_same_bits_again(large: Large, need: Need) -> None:
    need(16 * GIB)
    hidden, weight, targets = large(tokens=2048)
    op = LinearCrossEntropyByWords()
    first, second = (found_by(op, hidden, weight, targets) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    exact = found_by(linear_cross_entropy, hidden.detach().float(), weight.detach().float(), targets)
    torch.testing.assert_close(first.pop("loss"), exact.pop("loss"), rtol=2e-2, atol=2e-2)
    assert_close_gradients(first, exact, TOLERANCES[torch.bfloat16])


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_the_host_never_waits(large: Large, need: Need) -> None:
    need(4 * GIB)
    inputs = large(tokens=1024)
    op = LinearCrossEntropyByWords()
    op.with_ranks(*inputs)[0].sum().backward()  # the first call compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        op.with_ranks(*inputs)[0].sum().backward()
        op(*inputs).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_offsets_beyond_32_bits_are_right(large: Large, need: Need) -> None:
    """Of a chunk that has more logits than 32 bits can count: rows at its end belong to a few tokens."""
    need(24 * GIB)
    few = 64
    hidden, weight, targets = (tensor.detach()[:4096] for tensor in large(few, 4096))
    hidden, weight, targets = hidden[:, :64].contiguous(), weight[:, :64].contiguous(), targets.clamp(min=0)
    many = 2**31 // 4096 // few + 1
    op = LinearCrossEntropyByWords()
    inputs = hidden.repeat(many, 1).requires_grad_(), weight.clone().requires_grad_(), targets.repeat(many)
    losses = op(*inputs)
    (grad,) = torch.autograd.grad(losses.sum(), inputs[:1])
    assert torch.equal(losses[:few], losses[-few:])
    assert torch.equal(grad[:few], grad[-few:])
    torch.cuda.empty_cache()
