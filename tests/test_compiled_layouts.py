"""Blocks that strategies have changed share their compiled graphs, however many layers there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from d9d_testing.layouts import job_of, topology_here
from d9d_testing.world import World

#: Mesh, strategies, and whether the model has experts.
CASES: dict[str, tuple[Mapping[str, int], Sequence[Any], bool]] = {
    "tp": ({"tp": 2}, ["tensor_parallel"], False),
    "tp, asynchronous": ({"tp": 2}, [{"name": "tensor_parallel", "asynchronous": True}], False),
    "cp, keys gathered": ({"cp": 2}, ["context_parallel"], False),
    "cp, heads swapped": ({"cp": 2}, [{"name": "context_parallel", "method": "ulysses"}], False),
    "cp, ring": ({"cp": 2}, [{"name": "context_parallel", "method": "ring"}], False),
    "ep": ({"dp_shard": 2, "ep": 2}, ["fsdp", "expert_parallel"], True),
    "fsdp, checkpointed": ({"dp_shard": 2}, ["fsdp", "activation_checkpointing"], False),
}


def compiled_graphs(cases: Sequence[Mapping[str, Any]], plugins: Sequence[str]) -> list[int]:
    """Number of graphs that a step of each job compiles; runs on every rank of a world."""
    # Dynamo counts nowhere that is public.
    from torch._dynamo.utils import counters
    from torch.compiler import reset

    found = []
    for values in cases:
        reset()
        counters.clear()
        job = job_of(values, plugins)
        job.build(lambda _text: None, topology_here(job)).train()
        found.append(counters["stats"]["unique_graphs"])
    return found


@pytest.mark.thorough
@pytest.mark.filterwarnings("default:.*should not be instantiated:DeprecationWarning")  # Dynamo's own, in torch 2.11
@pytest.mark.parametrize(
    "case", [name if name == "tp" else pytest.param(name, marks=pytest.mark.full) for name in CASES]
)
def test_the_number_of_graphs_is_that_of_a_few_layers(table: ModuleType, tmp_path: Path, case: str) -> None:
    mesh, parallel, experts = CASES[case]
    jobs = []
    for layers in (3, 5):
        model = dict(table.EXPERTS if experts else table.DENSE) | {"num_layers": layers}
        (directory := tmp_path / f"{layers} layers").mkdir()
        job = table.job(directory / "corpus", "float32", model=model)
        compiled = [*parallel, {"name": "compile", "backend": "aot_eager"}]
        jobs.append(
            {**job, "mesh": dict(mesh), "parallel": compiled, "steps": 1, "batch": {"size": 4, "microbatch": 2}}
        )
    few, many = World(2).run(compiled_graphs, jobs, table.PLUGINS)[0]
    assert few == many
    assert few <= 6  # one, and a few around what cannot be traced


def test_ops_between_dispatch_and_combine_are_not_compiled(table: ModuleType, tmp_path: Path) -> None:
    job = table.job(tmp_path / "corpus", "float32", model=table.EXPERTS)
    parallel = ["fsdp", "expert_parallel", {"name": "compile", "backend": "aot_eager"}]
    batch = {"size": 4, "microbatch": 2}
    values = {**job, "mesh": {"dp_shard": 2, "ep": 2}, "parallel": parallel, "batch": batch}
    found = {
        site: choice.compiled for choice in job_of(values, table.PLUGINS).plan(rank=0).kernels for site in choice.sites
    }
    assert not found["layers.0.ffn.experts.silu_mul"]
    assert not found["layers.0.ffn.dispatcher.permute"]
    assert found["layers.0.attention_norm.rms_norm"]
