"""The grouped linear layer multiplies each group's rows by the group's matrix, in every kernel and trait."""

from __future__ import annotations

import pytest
import torch
from d9d_core.deferral import Deferral
from d9d_core.kernel import OpSignature
from d9d_core.traits import DefersWeights, HasBanks, HasOps, LateInit
from d9d_nn.grouped_linear import GroupedLinear
from d9d_nn.ops import grouped_linear_torch
from torch import Tensor, nn

COUNTS = torch.tensor([3, 0, 4])


def layer() -> GroupedLinear:
    torch.manual_seed(0)
    return GroupedLinear(3, 8, 4, std=0.5)


def plain(of: GroupedLinear, rows: Tensor) -> Tensor:
    groups = torch.arange(3).repeat_interleave(COUNTS)
    return torch.stack([row @ of.weight[group] for row, group in zip(rows, groups, strict=True)])


@pytest.mark.parametrize("kernel", [False, True])
def test_each_group_has_its_own_matrix_and_spare_rows_are_zeros(kernel: bool) -> None:
    grouped, rows = layer(), torch.randn(9, 8)
    if kernel:
        signature = OpSignature("grouped_linear", "cpu", "float32", grouped.product.static)
        assert grouped_linear_torch.supports(signature).accept
        grouped.product.bind("grouped_mm", grouped_linear_torch.build(signature))
    out = grouped(rows, COUNTS)
    torch.testing.assert_close(out[:7], plain(grouped, rows[:7]))
    assert not out[7:].any()
    assert torch.equal(grouped(rows[:7], COUNTS, spare_rows=False), out[:7])


def test_its_weight_starts_with_the_deviation_asked_for() -> None:
    assert layer().weight.std().item() == pytest.approx(0.5, rel=0.2)
    assert all(isinstance(layer(), trait) for trait in (LateInit, HasOps, HasBanks, DefersWeights))


def test_its_weight_gradient_can_be_deferred() -> None:
    grouped, deferral, rows = layer(), Deferral(), torch.randn(7, 8, requires_grad=True)
    (expected,) = torch.autograd.grad(plain(grouped, rows).sum(), grouped.weight)
    assert grouped.defer_to(deferral) == ("weight",)
    with deferral.collect() as left:
        grouped(rows, COUNTS).sum().backward()
    assert grouped.weight.grad is None
    left.run()
    torch.testing.assert_close(grouped.weight.grad, expected)


def test_an_update_of_the_matrices_is_added_to_the_product() -> None:
    class Ones(nn.Module):
        def forward(self, rows: Tensor, counts: Tensor, *, spare_rows: bool) -> Tensor:
            assert spare_rows
            assert counts is COUNTS
            return torch.ones(len(rows), 4)

    grouped, rows = layer(), torch.randn(7, 8)
    before = grouped(rows, COUNTS)
    assert grouped.banks() == {"weight": grouped.weight}
    grouped.bank_terms()["weight"] = Ones()
    torch.testing.assert_close(grouped(rows, COUNTS), before + 1)
