"""The suite over the three data-parallel strategies."""

from __future__ import annotations

import pytest
from d9d_testing.suites.strategy import StrategySuite

PLUGIN = "d9d_parallel.plugin"


@pytest.mark.thorough
class TestReplicate(StrategySuite):
    plugin = PLUGIN
    target = "replicate"
    meshes = ({"dp_replicate": 2},)
    settings = ({}, {"defer": "all_reduce"}, {"defer": "everything"}, {"ignore": ["layers.1.*"]})


@pytest.mark.full
class TestReplicateOnThree(TestReplicate):
    meshes = ({"dp_replicate": 3},)


@pytest.mark.thorough
class TestFsdp(StrategySuite):
    plugin = PLUGIN
    target = "fsdp"
    meshes = ({"dp_shard": 2},)
    settings = ({}, {"defer": "everything"}, {"offload": True}, {"ignore": ["*.0.weight", "unused"]})


@pytest.mark.full
class TestFsdpOnFour(TestFsdp):
    meshes = ({"dp_shard": 4},)
    settings = (
        *TestFsdp.settings,
        {"reshard_after_forward": False},
        {"reshard_after_forward": 2},
        {"forward_prefetch": 2, "backward_prefetch": 2},
    )


@pytest.mark.full
class TestHsdp(StrategySuite):
    plugin = PLUGIN
    target = "hsdp"
    meshes = ({"dp_replicate": 2, "dp_shard": 2},)
    settings = ({}, {"defer": "all_reduce"}, {"defer": "everything"}, {"ignore": ["layers.2.*"]})


@pytest.mark.full
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
