"""Sizes that no machine has: an error that names the field, before anything runs for ever or is allocated."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from d9d_core.errors import BuildError, JobError
from d9d_engine.job import Job

LARGE = 2**62


@pytest.mark.thorough
@pytest.mark.parametrize("field", ["vocab_size", "hidden_size", "intermediate_size", "head_dim"])
def test_sizes_whose_product_cannot_be_counted(small_job: Callable[..., Path], field: str) -> None:
    model = json.loads(small_job().read_text())["model"]
    with pytest.raises(BuildError, match="model: .*sizes in its config need a tensor larger than any memory"):
        Job.load(small_job(model={**model, field: LARGE})).plan()


def test_more_layers_than_can_be_built(small_job: Callable[..., Path]) -> None:
    model = json.loads(small_job().read_text())["model"]
    with pytest.raises(JobError, match=r"model.num_layers: .*less than or equal to 1024"):
        Job.load(small_job(model={**model, "num_layers": 10**18}))


def test_more_microbatches_than_can_be_scheduled(small_job: Callable[..., Path]) -> None:
    with pytest.raises(JobError, match=r"batch.size .* microbatches per step.*make batch.microbatch larger"):
        Job.load(small_job(batch={"size": 10**18, "microbatch": 1})).check()


def test_more_stages_than_can_be_placed(small_job: Callable[..., Path]) -> None:
    pipeline = {"name": "zb1p", "stages_per_rank": 2**40}
    with pytest.raises(JobError, match=r"pipeline.stages_per_rank: .*less than or equal to 1024"):
        Job.load(small_job(pipeline=pipeline, mesh={"pp": 2}))
