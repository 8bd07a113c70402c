"""The suite over the three data-parallel strategies."""

from __future__ import annotations

import pytest
from d9d_testing.suites.strategy import StrategySuite

PLUGIN = "d9d_parallel.plugin"


class TestReplicate(StrategySuite):
    plugin = PLUGIN
    target = "replicate"
    meshes = ({"dp_replicate": 2}, {"dp_replicate": 3})
    settings = ({}, {"defer": "all_reduce"}, {"defer": "everything"}, {"ignore": ["layers.1.*"]})


class TestFsdp(StrategySuite):
    plugin = PLUGIN
    target = "fsdp"
    meshes = ({"dp_shard": 2}, {"dp_shard": 4})
    settings = (
        {},
        {"reshard_after_forward": False},
        {"reshard_after_forward": 2},
        {"defer": "everything"},
        {"forward_prefetch": 2, "backward_prefetch": 2},
        {"offload": True},
        {"ignore": ["*.0.weight", "unused"]},
    )


@pytest.mark.thorough
class TestHsdp(StrategySuite):
    plugin = PLUGIN
    target = "hsdp"
    meshes = ({"dp_replicate": 2, "dp_shard": 2},)
    settings = ({}, {"defer": "all_reduce"}, {"defer": "everything"}, {"ignore": ["layers.2.*"]})


@pytest.mark.thorough
class TestFsdpWithCheckpointing(StrategySuite):
    plugin = PLUGIN
    target = "fsdp"
    meshes = ({"dp_shard": 2},)
    beside = ({"name": "activation_checkpointing", "save": ["aten.mm"]},)


@pytest.mark.slow
class TestFsdpWithCompile(StrategySuite):
    plugin = PLUGIN
    target = "fsdp"
    meshes = ({"dp_shard": 2},)
    beside = (
        {"name": "compile", "backend": "aot_eager"},
        {"name": "activation_checkpointing", "every": 2, "save": ["aten.mm"]},
    )
    model = {"dropout": 0.0}  # Dynamo draws other numbers than eager torch
