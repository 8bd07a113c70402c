"""Gated delta rule in chunks against one position after another: values and gradients, at document borders too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from d9d_core.kernel import OpSignature
from d9d_nn.ops.chunks import affine_scan
from d9d_nn.ops.gated_delta_rule import chunked, chunked_from, gated_delta_rule, supports
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

Rule = Callable[..., Tensor]


def inputs(
    samples: int, length: int, key_heads: int, shared: int, dtype: torch.dtype = torch.float64, seed: int = 0
) -> list[Tensor]:
    """Queries, keys, values, decays and strengths of random numbers, which need gradients."""
    torch.manual_seed(seed)
    heads = key_heads * shared
    query, key = (torch.randn(samples, length, key_heads, 4) for _ in range(2))
    decay, beta = -3 * torch.rand(samples, length, heads), torch.rand(samples, length, heads)
    found = [query, key, torch.randn(samples, length, heads, 6), decay, beta]
    return [tensor.to(dtype).requires_grad_() for tensor in found]


def numbered(starts: list[bool], length: int) -> Tensor:
    return torch.tensor([False, *starts])[:length].cumsum(0).unsqueeze(0)


def results(rule: Rule, given_inputs: list[Tensor], documents: Tensor | None) -> list[Tensor]:
    """Output and all gradients of a weighted sum."""
    out = rule(*given_inputs, documents)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return [out, *torch.autograd.grad((out * weights).sum(), given_inputs)]


@settings(max_examples=40)
@given(
    length=st.integers(1, 40),
    chunk=st.integers(1, 17),
    shared=st.integers(1, 3),
    starts=st.lists(st.booleans(), min_size=39, max_size=39) | st.none(),
)
def test_chunks_compute_what_single_positions_do(
    length: int, chunk: int, shared: int, starts: list[bool] | None
) -> None:
    documents = None if starts is None else numbered(starts, length)
    tensors = inputs(1, length, 2, shared)
    expected = results(gated_delta_rule, tensors, documents)
    found = results(lambda *arguments: chunked(*arguments, chunk=chunk), tensors, documents)
    for one, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-9, atol=1e-10)


def test_chunks_are_chosen_where_triangular_systems_are_solved() -> None:
    for device, accepted in (("cpu", True), ("cuda", True), ("mps", False)):
        decision = supports(OpSignature("gated_delta_rule", device, "bfloat16", {}))
        assert decision.accept == accepted
        assert (decision.priority > 0) == accepted


@settings(max_examples=20)
@given(
    length=st.integers(2, 40),
    cut=st.integers(1, 39),
    chunk=st.integers(1, 17),
    starts=st.lists(st.booleans(), min_size=39, max_size=39),
)
def test_a_rule_continues_from_the_state_of_earlier_positions(
    length: int, cut: int, chunk: int, starts: list[bool]
) -> None:
    cut = min(cut, length - 1)
    documents, tensors = numbered(starts, length), inputs(1, length, 2, 2)
    whole, last = chunked_from(None, *tensors, documents, chunk=chunk)
    _, state = chunked_from(None, *(tensor[:, :cut] for tensor in tensors), documents[:, :cut], chunk=chunk)
    if documents[0, cut] != documents[0, cut - 1]:
        state = torch.zeros_like(state)  # the second part begins with a document
    rest, end = chunked_from(state, *(tensor[:, cut:] for tensor in tensors), documents[:, cut:], chunk=chunk)
    torch.testing.assert_close(rest, whole[:, cut:])
    torch.testing.assert_close(end, last)


def test_a_compiler_sees_a_graph_that_does_not_grow_with_the_number_of_chunks() -> None:
    sizes = []

    def count(graph: torch.fx.GraphModule, _inputs: object) -> torch.fx.GraphModule:
        sizes.append(len(graph.graph.nodes))
        return graph

    for length in (40, 400):
        torch._dynamo.reset()
        tensors = [tensor.detach() for tensor in inputs(1, length, 1, 1, torch.float32)]
        found = torch.compile(chunked, backend=count, fullgraph=True)(*tensors, chunk=20)
        torch.testing.assert_close(found, chunked(*tensors, chunk=20))
    assert sizes[0] == sizes[1]


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of opcheck itself
def test_the_scan_over_chunks_is_a_sound_op() -> None:
    factors, added, begun = (torch.randn(2, 3, *size, dtype=torch.float64) for size in ((4, 2, 2), (4, 2, 5), (2, 5)))
    tensors = tuple(tensor.requires_grad_() for tensor in (factors, added, begun))
    torch.library.opcheck(affine_scan, tensors)
    assert torch.autograd.gradcheck(affine_scan, tensors)


@pytest.mark.parametrize("rule", [gated_delta_rule, chunked])
def test_documents_are_computed_as_if_they_were_alone(rule: Rule) -> None:
    documents = torch.tensor([[4] * 5 + [9] + [2] * 70, [7] * 64 + [3] * 12])
    tensors = inputs(2, 76, 1, 2)
    whole = rule(*tensors, documents)
    for sample, start, end in ((0, 0, 5), (0, 5, 6), (0, 6, 76), (1, 0, 64), (1, 64, 76)):
        alone = rule(*(tensor[sample : sample + 1, start:end] for tensor in tensors))
        torch.testing.assert_close(whole[sample : sample + 1, start:end], alone)


@pytest.mark.parametrize("rule", [gated_delta_rule, chunked])
def test_a_document_that_returns_with_the_same_number_starts_anew(rule: Rule) -> None:
    tensors = inputs(1, 12, 1, 1)
    numbers = torch.tensor([[1] * 4 + [2] * 4 + [1] * 4])
    torch.testing.assert_close(rule(*tensors, numbers), rule(*tensors, torch.arange(3).repeat_interleave(4)[None]))


def test_the_state_is_the_sum_of_values_for_equal_keys_without_decay() -> None:
    # With orthogonal keys, an output is the value of the last token with the query's key.
    key = torch.eye(3, dtype=torch.float64)[[0, 1, 0, 2, 1, 0]].view(1, 6, 1, 3)
    value = torch.arange(6.0, dtype=torch.float64).view(1, 6, 1, 1)
    query = torch.eye(3, dtype=torch.float64)[[0, 0, 1, 0, 0, 2]].view(1, 6, 1, 3)
    ones = torch.ones(1, 6, 1, dtype=torch.float64)
    for rule in (gated_delta_rule, chunked):
        found = rule(query, key, value, 0 * ones, ones).flatten() * 3**0.5
        torch.testing.assert_close(found, torch.tensor([0.0, 0, 1, 2, 2, 3], dtype=torch.float64), rtol=0, atol=1e-5)


@pytest.mark.parametrize("rule", [gated_delta_rule, chunked])
@pytest.mark.parametrize("decay", [-1e4, -1e38, float("-inf")])
def test_a_decay_that_underflows_empties_the_state(rule: Rule, decay: float) -> None:
    query, key, value, gentle, beta = inputs(1, 20, 1, 1, torch.float32)
    strong = gentle.detach().clone()
    strong[:, [0, 7]] = decay
    out = rule(query, key, value, strong, beta)
    documents = torch.tensor([[0] * 7 + [1] * 13])
    torch.testing.assert_close(out, gated_delta_rule(query, key, value, gentle, beta, documents), rtol=1e-4, atol=1e-5)


def test_large_decays_do_not_round_the_decays_of_another_document() -> None:
    tensors = inputs(1, 40, 1, 1, torch.float32)
    strong = tensors[3].detach().clone()
    strong[:, :20] = -80
    documents = torch.tensor([[0] * 20 + [1] * 20])
    expected = chunked(*tensors, documents)[:, 20:]
    found = chunked(*tensors[:3], strong.requires_grad_(), tensors[4], documents)[:, 20:]
    assert torch.equal(found, expected)
    (gradient,) = torch.autograd.grad(found.square().sum(), strong)
    assert not gradient[:, :20].any()


@pytest.mark.parametrize("rule", [gated_delta_rule, chunked])
def test_autocast_does_not_round_states(rule: Rule) -> None:
    tensors = inputs(1, 80, 2, 2, torch.float32)

    def under_autocast(*arguments: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return rule(*arguments)

    expected, found = (results(one, tensors, None) for one in (rule, under_autocast))
    assert all(torch.equal(one, wanted) for one, wanted in zip(found, expected, strict=True))


def test_narrow_inputs_are_computed_in_float32() -> None:
    tensors = [tensor.detach() for tensor in inputs(1, 80, 2, 2, torch.float32)]
    narrow = [tensor.bfloat16() if index != 3 else tensor for index, tensor in enumerate(tensors)]
    wide = [tensor.float() for tensor in narrow]
    found = chunked(*narrow)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, chunked(*wide).bfloat16(), rtol=0, atol=0)
