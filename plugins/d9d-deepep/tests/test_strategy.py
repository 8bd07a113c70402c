"""DeepEP is switched on by name, together with expert_parallel."""

from __future__ import annotations

import sys
from types import ModuleType

import d9d_deepep.plugin
import d9d_moe.plugin
import pytest
import torch
from d9d_core.registry.capabilities import Chosen, Circumstances, judge
from d9d_core.registry.registry import Registry
from d9d_core.strategy import StepShape
from d9d_deepep.config import DeepEPConfig
from d9d_deepep.dispatcher import DeepEPDispatcher
from d9d_deepep.strategy import DeepEP
from d9d_engine.distributed.mesh import Topology
from d9d_engine.distributed.simulate import simulated_world
from d9d_engine.plugin import d9d_views
from d9d_moe.dispatch.local import LocalDispatcher
from d9d_moe.expert_parallel.config import ExpertParallelConfig
from d9d_moe.expert_parallel.strategy import ExpertParallel
from d9d_moe.experts.grouped_swiglu import GroupedSwiGLU
from d9d_moe.experts.layer import MoELayer
from d9d_moe.router.top_k import TopKRouter
from torch import nn

REGISTRY = Registry.of(d9d_moe.plugin, d9d_deepep.plugin)


def layer() -> MoELayer:
    router = TopKRouter(16, 8, top_k=2, std=0.02)
    return MoELayer(router, GroupedSwiGLU(16, 8, 8, std=0.02, output_std=0.02), LocalDispatcher())


def test_all_layers_share_one_dispatcher_over_ep() -> None:
    with torch.device("meta"):
        stage = nn.ModuleList([layer(), layer()])
    topology = Topology(
        sizes={"pp": 1, "dp_replicate": 1, "dp_shard": 4, "cp": 1, "tp": 1, "ep": 2},
        world_size=4,
        views={view.name: view for view in d9d_views()},
        simulated=True,
    )
    with simulated_world(4):
        ExpertParallel(ExpertParallelConfig()).apply(stage, topology)
        applied = DeepEP(DeepEPConfig()).apply(stage, topology)
    first, second = (module.dispatcher for module in stage)
    assert isinstance(first, DeepEPDispatcher)
    assert first is second
    assert (first.experts, first.local) == (8, 4)
    assert applied.modules == ("0", "1")
    assert applied.collectives is not None
    listed = list(applied.collectives(StepShape(("forward", "backward"), samples=2, positions=8, itemsize=2)))
    assert [(one.kind, one.ranks, one.count) for one in listed] == [("all_to_all", (0, 1), 1)] * 8


def reasons(device: str = "cuda") -> list[str]:
    chosen = [
        Chosen(f"parallel[{index}]", REGISTRY.find("strategy", name))
        for index, name in enumerate(("expert_parallel", "deepep"))
    ]
    found = judge(chosen, REGISTRY, Circumstances(device=device, compute_capability=(9, 0)))
    return [f"{v.chosen.where}: {v.reason}" for v in found if v.satisfied is False and "trait" not in v.reason]


def test_without_the_library_it_is_refused_and_says_how_to_get_it() -> None:
    (reason,) = reasons()
    assert reason.startswith("parallel[1]")
    assert "deep_ep" in reason


def test_with_the_library_only_a_gpu_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("deep_ep")
    module.__spec__ = sys.__spec__
    monkeypatch.setitem(sys.modules, "deep_ep", module)
    assert reasons() == []
    (reason,) = reasons(device="cpu")
    assert "device:cuda" in reason
