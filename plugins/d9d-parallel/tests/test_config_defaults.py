"""Defaults and limits of the fields of the strategies' configs."""

from __future__ import annotations

from typing import Any

import pytest
from d9d_parallel.activation_checkpointing.config import ActivationCheckpointingConfig
from d9d_parallel.compile.config import CompileConfig
from d9d_parallel.context_parallel.config import ContextParallelConfig
from d9d_parallel.data_parallel.config import FsdpConfig, HsdpConfig, ReplicateConfig
from d9d_parallel.tensor_parallel.config import TensorParallelConfig
from pydantic import BaseModel, ValidationError

DATA_PARALLEL = {
    "compute_dtype": None, "reduce_dtype": None, "output_dtype": None, "defer": "nothing", "forward_prefetch": 0,
    "backward_prefetch": 0, "offload": False, "ignore": (), "match": (),
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "defaults"),
    [
        (ReplicateConfig, DATA_PARALLEL),
        (FsdpConfig, {**DATA_PARALLEL, "reshard_after_forward": True}),
        (HsdpConfig, {**DATA_PARALLEL, "reshard_after_forward": True}),
        (ActivationCheckpointingConfig, {"match": ("*",), "every": 1, "save": (), "preserve_rng_state": True}),
        (
            CompileConfig,
            {"backend": "inductor", "mode": None, "fullgraph": False, "dynamic": None, "cudagraphs": False},
        ),
        (ContextParallelConfig, {"method": "all_gather", "head_ranks": None}),
        (TensorParallelConfig, {"asynchronous": False, "match": ()}),
    ],
)
def test_fields_have_their_documented_defaults(config: type[BaseModel], defaults: dict[str, Any]) -> None:
    found = config().model_dump()
    assert {name: value for name, value in found.items() if name != "name"} == defaults


@pytest.mark.parametrize(
    ("config", "field", "least"),
    [
        (FsdpConfig, "forward_prefetch", 0),
        (FsdpConfig, "backward_prefetch", 0),
        (ActivationCheckpointingConfig, "every", 1),
    ],
)
def test_numbers_have_a_smallest_value(config: type[BaseModel], field: str, least: int) -> None:
    assert getattr(config.model_validate({field: least}), field) == least
    with pytest.raises(ValidationError, match=field):
        config.model_validate({field: least - 1})
