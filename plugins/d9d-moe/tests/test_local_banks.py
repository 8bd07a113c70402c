"""Experts that are spread over ranks compute with what this rank holds of them."""

from __future__ import annotations

import copy

import pytest
import torch
from d9d_core.errors import BuildError
from d9d_moe.expert_parallel.dispatchers import experts_of
from d9d_moe.expert_parallel.local_banks import compute_with_local_banks
from d9d_moe.expert_parallel.strategy import spread_bank
from d9d_testing.world import World
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard


class Bank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
        part = torch.full((2, 3), float(dist.get_rank() + 1))
        self.weight = nn.Parameter(DTensor.from_local(part, mesh, [Shard(0)], run_check=False))

    def forward(self, x: Tensor) -> Tensor:
        assert not isinstance(self.weight, DTensor)
        return x @ self.weight.T


def outputs() -> tuple[list[float], list[float], list[float], dict[str, list[int]]]:
    bank = Bank()
    compute_with_local_banks(bank)
    other = copy.deepcopy(bank)
    with torch.no_grad():
        other.weight.to_local().zero_()
    x = torch.ones(1, 3)
    first = bank(x)
    first.sum().backward()
    inner = nn.Sequential(nn.Linear(3, 4, device="meta"))
    spread_bank(inner, bank.weight.device_mesh, "inner")
    spread = {name: list(part.to_local().shape) for name, part in inner.named_parameters()}
    spread["output"] = list(inner(torch.ones(1, 3, device="meta")).shape)
    return first.flatten().tolist(), other(x).flatten().tolist(), bank.weight.grad.to_local().flatten().tolist(), spread


@pytest.mark.thorough
def test_each_rank_computes_with_its_own_experts_and_a_copy_with_the_copys(world: type[World]) -> None:
    spread = {"0.weight": [2, 3], "0.bias": [2], "output": [1, 2]}
    assert world(2).run(outputs) == [
        ([3.0, 3.0], [0.0, 0.0], [1.0] * 6, spread),
        ([6.0, 6.0], [0.0, 0.0], [1.0] * 6, spread),
    ]


class Layer(nn.Module):
    def __init__(self, *experts: int) -> None:
        super().__init__()
        self.banks = nn.ModuleDict({f"bank{n}": nn.Linear(1, count, bias=False) for n, count in enumerate(experts)})

    def expert_banks(self) -> dict[str, nn.Module]:
        return dict(self.banks.items())


def test_banks_of_different_numbers_of_experts_are_refused() -> None:
    assert experts_of(Layer(4, 4)) == 4
    with pytest.raises(BuildError, match=r"^Layer has parameters for different numbers of experts, \[3, 4\]"):
        experts_of(Layer(4, 3))
