"""The metric ``router`` keeps what holds for every metric."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from d9d_core.traits import HasTallies, modules_with
from d9d_moe.router.top_k import TopKRouter
from d9d_testing.suites.metric import MetricSuite
from torch import Tensor, nn

FEATURES = 6


class TestRouterMetric(MetricSuite):
    target = "router"
    config: ClassVar = {"per_layer": True}

    def stage(self) -> nn.Module:
        routers = {str(experts): TopKRouter(FEATURES, experts, 2, std=0.0, capacity=100.0) for experts in (4, 8)}
        generator = torch.Generator().manual_seed(0)
        for router in routers.values():
            nn.init.normal_(router.weight, generator=generator)
        return nn.ModuleDict(routers)

    def observations(self, samples: slice) -> Mapping[str, Tensor]:
        tokens = torch.randn(self.samples, FEATURES, generator=torch.Generator().manual_seed(1))[samples]
        stage = self.stage()
        for router in stage.values():
            router(tokens)
        tallies = {name: module.tallies() for name, module in modules_with(stage, HasTallies).items()}
        # Dropped tokens depend on the microbatches, so the tally is replaced by one that does not.
        dropped = {"dropped": (tokens[:, 0] > 0).sum()}
        return {f"{name}/{key}": t for name, found in tallies.items() for key, t in {**found, **dropped}.items()}
