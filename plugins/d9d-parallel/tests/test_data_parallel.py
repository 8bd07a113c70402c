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


@pytest.mark.thorough
class TestFsdpOfParts(StrategySuite):
    """Two entries of ``fsdp`` with different settings, an entry of ``replicate``, and a block that no entry matches."""

    plugin = PLUGIN
    target = "fsdp"
    meshes = ({"dp_shard": 2},)
    model = {"blocks": 4}
    settings = ({"match": ["layers.1", "layers.2"]}, {"match": ["*.1"], "defer": "everything"})
    beside = (
        {"name": "fsdp", "match": ["layers.0"], "reshard_after_forward": False, "backward_prefetch": 1},
        {"name": "replicate", "match": ["*.3"]},
    )


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
class TestHsdpOfParts(StrategySuite):
    plugin = PLUGIN
    target = "hsdp"
    meshes = ({"dp_replicate": 2, "dp_shard": 2},)
    settings = ({"match": ["layers.1"]}, {"match": ["layers.2"], "defer": "all_reduce", "offload": True})
    beside = ({"name": "replicate", "match": ["layers.0"], "defer": "all_reduce"},)


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
