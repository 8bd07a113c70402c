"""The graph walk under FSDP2: its parameters are gathered, and its gradients are reduced once all are there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from d9d_core.tensors import full
from d9d_engine.compat import keep_fsdp_gradients, reduce_fsdp_gradients
from d9d_pipeline.runtime.split_backward import SplitBackward
from d9d_testing.tolerances import TOLERANCES, assert_close_gradients
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

FEATURES, SAMPLES, MICROBATCHES = 4, 3, 3


class Squared(nn.Module):
    """``x @ weight**2``: the gradient of the weight needs the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(FEATURES, FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.square()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(FEATURES), Squared(), nn.Tanh(), nn.Linear(FEATURES, FEATURES)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return x


def make() -> Model:
    torch.manual_seed(0)
    return Model()


def sample(microbatch: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * microbatch + rank)
    return torch.randn(SAMPLES, FEATURES, generator=generator).requires_grad_()


def sharded(dtype: torch.dtype | None) -> FSDPModule:
    model = make()
    policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=True)
    for unit in [*model.blocks, model]:
        fully_shard(unit, mp_policy=policy)
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    return model


def gradients_of(dtype: torch.dtype | None, program: str) -> dict[str, Tensor]:
    model = sharded(dtype)
    split = SplitBackward(model)
    leaves = [sample(microbatch, dist.get_rank()) for microbatch in range(MICROBATCHES)]
    outputs = [model(leaf) for leaf in leaves]
    model.set_is_last_backward(False)
    model.set_requires_gradient_sync(False)
    phases = {}
    for action in program.split():
        index = int(action[1])
        roots, seeds = [outputs[index]], [torch.ones_like(outputs[index])]
        if action[0] == "B":
            split.backward(roots, seeds)
        elif action[0] == "I":
            phases[index] = split.inputs(roots, seeds, [leaves[index]])
        else:
            phases.pop(index).run()
            keep_fsdp_gradients(model)
    assert all(parameter.grad is None for parameter in model.parameters())
    model.set_is_last_backward(True)
    model.set_requires_gradient_sync(True)
    reduce_fsdp_gradients(model)
    whole = {name: full(parameter.grad) for name, parameter in model.named_parameters()}
    return {**whole, **{f"input {index}": leaf.grad for index, leaf in enumerate(leaves)}}


def run(cases: list[tuple[torch.dtype | None, str]]) -> list[dict[str, Tensor]]:
    return [gradients_of(*case) for case in cases]


@pytest.mark.thorough
@pytest.mark.smoke
def test_sharded_foreign_modules_get_the_gradients_of_one_process(world: Any) -> None:
    expected = make()
    inputs = {rank: [sample(microbatch, rank) for microbatch in range(MICROBATCHES)] for rank in range(2)}
    for leaves in inputs.values():
        for leaf in leaves:
            expected(leaf).sum().backward()
    interleaved, whole = "I0 I1 W0 I2 W1 W2", "B0 B1 B2"
    cases = [(None, interleaved), (torch.bfloat16, interleaved), (torch.bfloat16, whole)]
    for rank, (exact, narrow, narrow_whole) in enumerate(world(2).run(run, cases)):
        gradients = {name: parameter.grad for name, parameter in expected.named_parameters()}
        gradients |= {f"input {index}": leaf.grad for index, leaf in enumerate(inputs[rank])}
        assert_close_gradients(exact, gradients, TOLERANCES[torch.float32])
        assert_close_gradients(narrow, narrow_whole, TOLERANCES[torch.float32])
