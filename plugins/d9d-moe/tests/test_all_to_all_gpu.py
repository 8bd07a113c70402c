"""Dispatch between GPUs: the same numbers as everywhere, and no wait of the host where sizes are known."""

from __future__ import annotations

import pytest
import torch
from d9d_moe.all_to_all.dispatcher import AllToAllDispatcher
from d9d_moe.router.routing import TopKRouting
from d9d_testing.suites.moe.dispatcher import DispatcherSuite
from d9d_testing.world import World
from torch import distributed as dist


@pytest.mark.gpus(2)
@pytest.mark.gpu
class TestOnTwoDevices(DispatcherSuite):
    factory = "d9d_moe.all_to_all.dispatcher:AllToAllDispatcher"
    ranks = (2,)
    device = "cuda"


def step_without_waiting(limit: int) -> bool:
    torch.cuda.set_device(dist.get_rank())
    dispatcher = AllToAllDispatcher(dist.group.WORLD, 8)

    def step() -> torch.Tensor:
        generator = torch.Generator("cuda").manual_seed(dist.get_rank())
        tokens = torch.randn(64, 32, device="cuda", generator=generator).bfloat16().requires_grad_()
        weights = torch.rand(64, 2, device="cuda", generator=generator).requires_grad_()
        indices = torch.arange(128, device="cuda").view(64, 2) % 8
        sent = dispatcher.dispatch(tokens, TopKRouting.of(indices, weights, 8, limit)).wait()
        out = dispatcher.combine(sent.tokens * 2, sent.handle).wait()
        out.backward(torch.ones_like(out))
        return tokens.grad

    first = step()  # the first call sets up communicators
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return torch.equal(first, second)


@pytest.mark.gpus(2)
@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_with_a_limit_the_host_waits_for_nothing() -> None:
    assert World(2, backend="cpu:gloo,cuda:nccl").run(step_without_waiting, 16) == [True, True]
