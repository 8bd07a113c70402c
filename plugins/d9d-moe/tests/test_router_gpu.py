"""Routers on CUDA: nothing in a step waits for the device, and the choice equals the CPU's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from d9d_core.traits import HasTallies, modules_with
from d9d_moe.balancing.balancers import BatchBalance, SignUpdate, ZLoss
from d9d_moe.router.metric import RouterMetric
from d9d_moe.router.metric_config import RouterMetricConfig
from d9d_moe.router.top_k import TopKRouter
from d9d_testing.tolerances import assert_close_gradients, assert_close_values
from torch import Tensor, nn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),  # inductor's own
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def stage(device: str) -> nn.ModuleDict:
    """A layer; W is small enough for scores to be well apart in float32."""
    made = TopKRouter(64, 16, 4, std=0.5, balancing=(BatchBalance(0.1), ZLoss(0.01), SignUpdate(0.001)), capacity=1.0)
    torch.manual_seed(0)
    made.reset_parameters()
    for factor in made.loss_factors().values():
        factor.fill_(0.01)
    return nn.ModuleDict({"layer": made}).to(device)


def step(made: nn.ModuleDict, metric: RouterMetric, tokens: Tensor) -> dict[str, Any]:
    router = made["layer"]
    router.zero_grad()
    routing = router(tokens, samples=4)
    routing.weights.sum().backward()
    modules = modules_with(made, HasTallies)
    metric.update({f"{name}/{key}": tally for name, m in modules.items() for key, tally in m.tallies().items()})
    router.adapt(router.tallies(), torch.isfinite(routing.weights.sum()))
    return {"weights": routing.weights.detach(), "weight": router.weight.grad.clone()}


def test_a_step_waits_for_nothing_and_agrees_with_the_cpu() -> None:
    found, tokens = {}, torch.randn(400, 64, generator=torch.Generator().manual_seed(1))
    for device in ("cuda", "cpu"):
        made, here = stage(device), tokens.to(device)
        metric = RouterMetric(RouterMetricConfig())
        metric.attach(made)
        step(made, metric, here)  # the first call may set up libraries, and moves the metric
        torch.cuda.set_sync_debug_mode("error")
        try:
            found[device] = step(made, metric, here)
            values = metric.compute()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found[device] |= {"bias": made["layer"].selection_bias, "load": values["router/load"].values}
    assert_close_gradients({name: value.cpu() for name, value in found["cuda"].items()}, found["cpu"])


@pytest.mark.filterwarnings("default:.*should not be instantiated:DeprecationWarning")  # Dynamo's own, in torch 2.11
@pytest.mark.parametrize("compiled", [False, True])
def test_logits_of_bfloat16_are_those_of_float32(compiled: bool) -> None:
    torch.manual_seed(0)
    made = TopKRouter(2048, 128, 8, std=0.02).to("cuda", torch.bfloat16)
    exact = TopKRouter(2048, 128, 8, std=0.02).to("cuda", torch.float64)
    tokens = torch.randn(1000, 2048, device="cuda").bfloat16()
    with torch.no_grad():
        exact.weight.copy_(made.weight)
    found, right = tokens.clone().requires_grad_(), tokens.double().requires_grad_()
    scores = (torch.compile(made) if compiled else made)(found).scores
    wanted = exact(right).scores
    assert_close_values(scores, wanted.float())
    scores.square().sum().backward()
    wanted.square().sum().backward()
    results = {"tokens": found.grad, "weight": made.weight.grad}
    assert_close_gradients(results, {"tokens": right.grad.bfloat16(), "weight": exact.weight.grad.bfloat16()})
