"""A loss term that a module adds by itself, against the same term in the open."""

from __future__ import annotations

import pytest
import torch
from d9d_nn.auxiliary_loss import add_auxiliary_loss
from d9d_testing.tolerances import assert_close_gradients
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

FACTOR = 0.25


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Shy(nn.Module):
    """A product that adds the sum of its squared results, in float32, to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(normal(4, 4, seed=1))
        self.register_buffer("factor", torch.tensor(FACTOR))
        self.register_buffer("total", torch.tensor(0.0))

    def term(self, out: Tensor) -> Tensor:
        return out.float().square().sum()

    def forward(self, x: Tensor) -> Tensor:
        out = x @ self.weight.to(x.dtype)
        total = self.term(out)
        with torch.no_grad():
            self.total.copy_(total)
        return add_auxiliary_loss(out, total, self.factor)


def expected(x: Tensor) -> dict[str, Tensor]:
    """The gradients with the term in the open."""
    module, x = Shy(), x.clone().requires_grad_()
    out = x @ module.weight.to(x.dtype)
    (out.float().sin().sum() + FACTOR * module.term(out)).backward()
    return {"x": x.grad, "weight": module.weight.grad}


def found(x: Tensor, how: str) -> dict[str, Tensor]:
    module, x = Shy(), x.clone().requires_grad_()
    if how == "compiled":
        out = torch.compile(module, backend="aot_eager", fullgraph=True)(x)
    elif how == "checkpointed":
        out = checkpoint(module, x, use_reentrant=False)
    elif how == "compiled and checkpointed":
        compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
        out = checkpoint(compiled, x, use_reentrant=False)
    else:
        out = module(x)
    out.float().sin().sum().backward()
    assert module.total == module.term(x.detach() @ module.weight.detach().to(x.dtype))
    return {"x": x.grad, "weight": module.weight.grad}


@pytest.mark.thorough
@pytest.mark.filterwarnings("default:.*should not be instantiated:DeprecationWarning")  # Dynamo's own, in torch 2.11
@pytest.mark.parametrize("how", ["eager", "compiled", "checkpointed", "compiled and checkpointed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_those_of_the_sum_of_losses(how: str, dtype: torch.dtype) -> None:
    x = normal(3, 4).to(dtype)
    assert_close_gradients(found(x, how), expected(x))


def test_the_carrier_keeps_its_bits_and_its_gradient() -> None:
    carrier = normal(5).bfloat16().requires_grad_()
    total = normal(1, seed=1).requires_grad_()
    out = add_auxiliary_loss(carrier, total.sum(), torch.tensor(2.0))
    assert torch.equal(out, carrier)
    grad = normal(5, seed=2).bfloat16()
    out.backward(grad)
    assert torch.equal(carrier.grad, grad)
    assert total.grad.tolist() == [2.0]


def test_the_term_has_a_gradient_even_if_the_carrier_needs_none() -> None:
    total = torch.ones((), requires_grad=True)
    add_auxiliary_loss(torch.zeros(0, 3), total, torch.tensor(3.0)).sum().backward()
    assert total.grad == 3.0


def test_a_wide_term_has_a_wide_gradient() -> None:
    total = torch.ones((), dtype=torch.float64, requires_grad=True)
    add_auxiliary_loss(torch.ones(2), total, torch.tensor(3.0)).sum().backward()
    assert total.grad.dtype == torch.float64


@pytest.mark.smoke
def test_without_gradients_nothing_is_recorded() -> None:
    with torch.no_grad():
        out = add_auxiliary_loss(normal(2).requires_grad_(), torch.ones(()), torch.ones(()))
    assert out.grad_fn is None
    assert torch.equal(out, normal(2))


def test_a_factor_that_changes_before_the_backward_is_an_error() -> None:
    factor = torch.tensor(1.0)
    out = add_auxiliary_loss(torch.ones(2, requires_grad=True), torch.ones((), requires_grad=True), factor)
    factor.fill_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
