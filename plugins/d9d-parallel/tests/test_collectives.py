"""Collectives of tensor parallelism and their gradients, with another rank's part known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_parallel.tensor_parallel import collectives
from d9d_parallel.tensor_parallel.collectives import OwnPositions, RankSum, gather, scatter_sum
from torch import Tensor


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Second of two ranks: the first has ten times its tensors in a gather, and a hundred times in a sum."""

    def all_gather(out: Tensor, tensor: Tensor, group: str) -> None:
        assert group == "tp"
        out.copy_(torch.cat([10 * tensor, tensor]))

    def reduce_scatter(out: Tensor, tensor: Tensor, group: str) -> None:
        assert group == "tp"
        out.copy_(101 * tensor.chunk(2)[1])

    def all_reduce(tensor: Tensor, group: str) -> None:
        assert group == "tp"
        tensor.mul_(101)

    stand_in = SimpleNamespace(
        all_gather_into_tensor=all_gather, reduce_scatter_tensor=reduce_scatter, all_reduce=all_reduce
    )
    monkeypatch.setattr(collectives, "dist", stand_in)
    return SimpleNamespace(rank=1, size=2, group="tp")


OWN = torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]]])  # [B, S / 2, 1]
GRAD = torch.tensor([[[1.0], [2.0], [3.0], [4.0]], [[5.0], [6.0], [7.0], [8.0]]])  # [B, S, 1]


@pytest.mark.parametrize(("summed", "gradient"), [(True, [[303, 404], [707, 808]]), (False, [[3, 4], [7, 8]])])
def test_gathered_positions_have_the_sum_of_all_gradients_or_a_part_of_equal_ones(
    ranks: Any, summed: bool, gradient: list[list[int]]
) -> None:
    own = OWN.clone().requires_grad_()
    whole = gather(own, ranks, summed=summed)
    assert whole.squeeze(-1).tolist() == [[10, 20, 1, 2], [30, 40, 3, 4]]
    whole.backward(GRAD)
    assert own.grad is not None
    assert own.grad.squeeze(-1).tolist() == gradient


@pytest.mark.parametrize("dim", [0, 2])
def test_other_dimensions_are_gathered_and_scattered_too(ranks: Any, dim: int) -> None:
    whole = gather(OWN, ranks, summed=True, dim=dim)
    assert torch.equal(whole, torch.cat([10 * OWN, OWN], dim=dim))
    assert torch.equal(scatter_sum(whole, ranks, dim=dim), 101 * OWN)


def test_a_sum_is_scattered_and_its_gradients_gathered(ranks: Any) -> None:
    whole = GRAD.clone().requires_grad_()
    own = scatter_sum(whole, ranks)
    assert own.squeeze(-1).tolist() == [[303, 404], [707, 808]]
    own.backward(OWN)
    assert whole.grad is not None
    assert whole.grad.squeeze(-1).tolist() == [[10, 20, 1, 2], [30, 40, 3, 4]]
    with pytest.raises(ValueError, match=r"mesh.tp = 2 ranks, which does not divide the 3 positions of this batch"):
        scatter_sum(GRAD[:, :3], ranks)


def test_a_module_sums_copies_and_knows_its_own_positions(ranks: Any) -> None:
    tensor = torch.ones(2, requires_grad=True)
    total = RankSum(ranks)(tensor)
    assert (total.tolist(), total.requires_grad, tensor.tolist()) == ([101.0, 101.0], False, [1.0, 1.0])
    share = OwnPositions(ranks)
    assert share.own(GRAD).squeeze(-1).tolist() == [[3, 4], [7, 8]]
    own = OWN.clone().requires_grad_()
    share.gather(own).backward(GRAD)
    assert own.grad is not None
    assert own.grad.squeeze(-1).tolist() == [[3, 4], [7, 8]]
    with pytest.raises(ValueError, match="does not divide the 3 positions"):
        share.own(GRAD[:, :3])
