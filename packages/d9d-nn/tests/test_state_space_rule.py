"""State-space rule in chunks against one position after another: values and gradients, at document borders too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from d9d_core.kernel import OpSignature
from d9d_nn.ops.state_space_rule import chunked, chunked_with_state, state_space_rule, supports
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

Rule = Callable[..., Tensor]


def inputs(
    samples: int, length: int, groups: int, shared: int, dtype: torch.dtype = torch.float64, seed: int = 0
) -> list[Tensor]:
    """Inputs, steps, rates, and vectors B and C of random numbers, which need gradients."""
    torch.manual_seed(seed)
    heads = groups * shared
    x, dt, rates = torch.randn(samples, length, heads, 5), torch.rand(samples, length, heads), -4 * torch.rand(heads)
    found = [x, dt, rates, *(torch.randn(samples, length, groups, 3) for _ in range(2))]
    return [tensor.to(dtype).requires_grad_() for tensor in found]


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
    documents = None if starts is None else torch.tensor([[False, *starts]])[:, :length].cumsum(1)
    tensors = inputs(1, length, 2, shared)
    expected = results(state_space_rule, tensors, documents)
    found = results(lambda *arguments: chunked(*arguments, chunk=chunk), tensors, documents)
    for one, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-7, atol=1e-9)


def test_the_last_state_is_the_decayed_sum_of_the_last_document() -> None:
    x, dt, rates, into, _ = tensors = inputs(1, 20, 1, 2)
    documents = torch.tensor([[0] * 7 + [1] * 13])
    _, state = chunked_with_state(*tensors, documents, chunk=6)
    expected = torch.zeros(2, 3, 5, dtype=torch.float64)
    for position in range(7, 20):
        keep = (dt[0, position] * rates).exp()
        added = into[0, position, 0][None, :, None] * (dt[0, position, :, None] * x[0, position])[:, None]
        expected = expected * keep[:, None, None] + added
    torch.testing.assert_close(state[0], expected)


def test_chunks_are_chosen_for_floating_point_numbers() -> None:
    for dtype, accepted in (("bfloat16", True), ("float64", True), ("int8", False)):
        decision = supports(OpSignature("state_space_rule", "cpu", dtype, {}))
        assert decision.accept == accepted
        assert (decision.priority > 0) == accepted


@pytest.mark.parametrize("rule", [state_space_rule, chunked])
def test_documents_are_computed_as_if_they_were_alone(rule: Rule) -> None:
    documents = torch.tensor([[4] * 5 + [9] + [4] * 70, [7] * 64 + [3] * 12])  # a number that returns starts anew
    tensors = inputs(2, 76, 1, 2)
    whole = rule(*tensors, documents)
    for sample, start, end in ((0, 0, 5), (0, 5, 6), (0, 6, 76), (1, 0, 64), (1, 64, 76)):
        part = [tensor if tensor.ndim == 1 else tensor[sample : sample + 1, start:end] for tensor in tensors]
        torch.testing.assert_close(whole[sample : sample + 1, start:end], rule(*part))


@pytest.mark.parametrize("rule", [state_space_rule, chunked])
@pytest.mark.parametrize("step", [1e4, 1e38, 3e38])
def test_a_step_that_overflows_empties_the_state(rule: Rule, step: float) -> None:
    x, dt, rates, into, out_of = inputs(1, 20, 1, 1, torch.float32)
    rates = rates - 1
    strong = dt.detach().clone()
    strong[:, [0, 7]] = step
    x = x.detach()
    x[:, [0, 7]] = 0  # these tokens only empty the state
    documents = torch.tensor([[0] * 7 + [1] * 13])
    expected = state_space_rule(x, dt, rates, into, out_of, documents)
    found = rule(x, strong, rates, into, out_of)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rule", [state_space_rule, chunked])
def test_autocast_does_not_round_states(rule: Rule) -> None:
    tensors = inputs(1, 80, 2, 2, torch.float32)

    def under_autocast(*arguments: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return rule(*arguments)

    expected, found = (results(one, tensors, None) for one in (rule, under_autocast))
    assert all(torch.equal(one, wanted) for one, wanted in zip(found, expected, strict=True))


def test_narrow_inputs_are_computed_in_float32() -> None:
    tensors = [tensor.detach() for tensor in inputs(1, 80, 2, 2, torch.float32)]
    narrow = [tensor.bfloat16() if index in (0, 3, 4) else tensor for index, tensor in enumerate(tensors)]
    found = chunked(*narrow)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, chunked(*(tensor.float() for tensor in narrow)).bfloat16())


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
