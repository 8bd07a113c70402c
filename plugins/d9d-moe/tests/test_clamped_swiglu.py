"""Experts with biases and a clamped gate, and the router with a bias, compute what gpt-oss defines."""

from __future__ import annotations

import pytest
import torch
from d9d_core.deferral import Deferral
from d9d_core.kernel import OpSignature
from d9d_moe.dispatch.local import LocalDispatcher
from d9d_moe.experts.clamped_swiglu import ClampedSwiGLU, clamped_silu_mul
from d9d_moe.experts.expert_bias import add_expert_bias, experts_of_rows
from d9d_moe.experts.layer import MoELayer
from d9d_moe.router.biased import BiasedTopKRouter
from d9d_nn.ops import grouped_linear_torch
from torch import Tensor

HIDDEN, INNER, EXPERTS = 16, 8, 4
COUNTS = torch.tensor([3, 0, 4, 1])


def bank(*, limit: float = 0.5, kernel: bool = False) -> ClampedSwiGLU:
    torch.manual_seed(0)
    made = ClampedSwiGLU(HIDDEN, INNER, EXPERTS, std=0.4, output_std=0.4, limit=limit)
    for bias in made.biases().values():
        torch.nn.init.normal_(bias, std=0.4)
    for slot in (made.into, made.out_of) if kernel else ():
        slot.bind(
            "grouped_mm", grouped_linear_torch.build(OpSignature("grouped_linear", "cpu", "float32", slot.static))
        )
    return made


def plain(of: ClampedSwiGLU, tokens: Tensor, limit: float = 0.5) -> Tensor:
    """Definition, row by row, by differentiable operations of torch."""
    out = []
    for row, expert in zip(tokens, torch.arange(EXPERTS).repeat_interleave(COUNTS), strict=True):
        gate = (row @ of.gate_proj[expert] + of.gate_bias[expert]).clamp(max=limit)
        up = (row @ of.up_proj[expert] + of.up_bias[expert]).clamp(-limit, limit)
        out.append((gate * (1.702 * gate).sigmoid() * (up + 1)) @ of.down_proj[expert] + of.down_bias[expert])
    return torch.stack(out)


@pytest.mark.parametrize("kernel", [False, True])
def test_outputs_and_every_gradient_are_those_of_the_definition(kernel: bool) -> None:
    ours, tokens = bank(kernel=kernel), torch.randn(8, HIDDEN)
    weights = torch.randn(8, HIDDEN)
    mine, theirs = (tokens.clone().requires_grad_() for _ in range(2))
    found, expected = ours(mine, COUNTS, spare_rows=False), plain(ours, theirs)
    torch.testing.assert_close(found, expected)
    parameters = list(ours.parameters())
    assert len(parameters) == 6
    got = torch.autograd.grad((found * weights).sum(), [mine, *parameters])
    wanted = torch.autograd.grad((expected * weights).sum(), [theirs, *parameters])
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b)
    assert not got[1][1].any()  # the second expert has no rows
    assert ((tokens[:3] @ ours.gate_proj[0] + ours.gate_bias[0]) > 0.5).any()  # the clamp acts


def test_spare_rows_get_no_bias_and_no_gradient() -> None:
    ours = bank()
    tokens = torch.randn(10, HIDDEN)
    tokens[8:] = torch.nan
    tokens.requires_grad_()
    out = ours(tokens, COUNTS)
    assert not out[8:].any()
    torch.testing.assert_close(out[:8], ours(tokens[:8], COUNTS))
    out.sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in ours.parameters())


def test_the_gradient_of_the_gate_is_exact() -> None:
    gate, up = (torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    gate, up = gate.mul(2).requires_grad_(), up.mul(2).requires_grad_()
    assert torch.autograd.gradcheck(lambda g, u: clamped_silu_mul(g, u, alpha=1.702, limit=1.0), (gate, up))


def test_biases_are_added_in_the_dtype_of_the_rows_and_their_gradient_is_in_the_dtype_of_the_biases() -> None:
    experts = experts_of_rows(COUNTS, 9)
    assert experts.tolist() == [0, 0, 0, 2, 2, 2, 2, 3, 4]
    bias = torch.randn(EXPERTS, 5, requires_grad=True)
    out = add_expert_bias(torch.zeros(9, 5, dtype=torch.bfloat16), bias, experts)
    assert torch.equal(out[3], bias[2].bfloat16())
    assert not out[8].any()
    out.sum().backward()
    assert bias.grad is not None
    assert bias.grad.dtype == torch.float32
    assert bias.grad[:, 0].tolist() == COUNTS.tolist()


def test_weight_gradients_of_the_banks_are_deferred_and_biases_get_theirs_at_once() -> None:
    ours, deferral = bank(), Deferral()
    assert ours.defer_to(deferral) == ("gate_proj", "up_proj", "down_proj")
    with deferral.collect() as left:
        ours(torch.randn(8, HIDDEN, requires_grad=True), COUNTS).sum().backward()
    assert {name for name, own in ours.named_parameters() if own.grad is not None} == ours.biases().keys()
    left.run()
    assert all(own.grad is not None for own in ours.parameters())


def test_a_layer_routes_by_the_softmax_of_the_chosen_logits() -> None:
    torch.manual_seed(0)
    router = BiasedTopKRouter(HIDDEN, EXPERTS, 2, std=0.5)
    assert not router.bias.any()
    torch.nn.init.normal_(router.bias)
    tokens = torch.randn(7, HIDDEN)
    logits = tokens @ router.weight.T + router.bias
    best, chosen = logits.topk(2)
    routing = router(tokens)
    assert torch.equal(routing.indices, chosen)
    torch.testing.assert_close(routing.weights, best.softmax(-1))
    layer = MoELayer(router, bank(), LocalDispatcher())
    layer(tokens.unsqueeze(0)).sum().backward()
    assert router.bias.grad is not None
    assert router.bias.grad.any()
    router.reset_parameters()
    assert not router.bias.any()
