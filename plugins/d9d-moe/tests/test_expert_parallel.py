"""Experts on several ranks compute what experts in one process do."""

from __future__ import annotations

from pathlib import Path

import pytest
from d9d_core.errors import BuildError
from d9d_testing.layouts import job_of
from d9d_testing.suites.strategy import StrategySuite

pytest.importorskip("d9d_parallel", reason="experts are spread over ranks that a data-parallel strategy uses")

_MODEL = {"name": "moe_toy", "features": 8, "experts": 8}


class _Spread(StrategySuite):
    plugin = "d9d_moe.plugin"
    target = "expert_parallel"
    model = _MODEL
    model_plugin = str(Path(__file__).with_name("moe_toy.py"))

    def plugins(self) -> list[str]:
        return [*super().plugins(), "d9d_parallel.plugin", "d9d_nn.plugin"]


@pytest.mark.parametrize("parallel", [[], ["expert_parallel"]])
def test_experts_of_another_format_than_their_inputs_are_refused(parallel: list[str]) -> None:
    suite = _Spread()
    fsdp = {"name": "fsdp", "compute_dtype": "bfloat16", "ignore": ["*experts*"]}
    job = job_of(suite.job_values(mesh={"dp_shard": 2}, parallel=[fsdp, *parallel]), suite.plugins())
    with pytest.raises(BuildError, match=r"'ignore' keeps 'layers.0.experts.gate_proj' in torch.float32"):
        job.plan()


@pytest.mark.full
class TestWithFsdp(_Spread):
    beside = ("fsdp",)
    meshes = ({"dp_shard": 2, "ep": 2},)
    large = ({"dp_shard": 64, "ep": 8},)


@pytest.mark.full
class TestWithFsdpOnFour(TestWithFsdp):
    meshes = ({"dp_shard": 4, "ep": 2},)


@pytest.mark.full
class TestOverReplicas(_Spread):
    """Fewer experts on each rank than ranks that share them: another dimension is split."""

    pytestmark = pytest.mark.smoke
    beside = ("hsdp",)
    model = {**_MODEL, "experts": 2}
    meshes = ({"dp_replicate": 2, "dp_shard": 2, "ep": 2}, {"dp_shard": 4, "ep": 2})
    large = ({"dp_replicate": 8, "dp_shard": 4, "ep": 2},)
