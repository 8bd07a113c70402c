"""Collectives that data and tensor parallelism declare, counted by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_core.cost import StrategyCost
from d9d_core.strategy import Pass, StepShape
from d9d_parallel.activation_checkpointing.config import ActivationCheckpointingConfig
from d9d_parallel.compile.config import CompileConfig
from d9d_parallel.context_parallel.config import ContextParallelConfig
from d9d_parallel.context_parallel.costs import AttentionCosts, context_parallel
from d9d_parallel.costs import alternatives, checkpointed, compiled, replicated, sharded, tensor_parallel
from d9d_parallel.data_parallel.communication import FsdpCommunication, Unit, times_gathered
from d9d_parallel.data_parallel.config import FsdpConfig, HsdpConfig, ReplicateConfig
from d9d_parallel.tensor_parallel.communication import Site, TensorCommunication
from d9d_parallel.tensor_parallel.config import TensorParallelConfig
from torch import nn

F: Pass = "forward"
B: Pass = "backward"


def unit(name: str, *, reshards: bool = True, prefetches: bool = False) -> Unit:
    return Unit(name, {}, "dense", ("dp_shard",), reshards, prefetches)


@pytest.mark.parametrize(
    ("units", "passes", "times"),
    [
        ([unit("a"), unit("", reshards=False)], (F, B), [(1, 1), (1, 0)]),
        # The stage's own unit is freed after each backward, and gathered again for the next.
        ([unit("a"), unit("", reshards=False)], (F, F, B, B), [(2, 2), (1, 1)]),
        ([unit("a", prefetches=True), unit("", reshards=False, prefetches=True)], (F, F, B, B), [(2, 2), (1, 1)]),
        ([unit("a"), unit("b")], (F, F, B, B), [(2, 2), (2, 2)]),
        # In its second backward, the first unit prefetches the last one of the first forward, which nothing needs.
        ([unit("a"), unit("b")], (F, B, F, B), [(2, 2), (2, 3)]),
        ([unit("a", prefetches=True), unit("b", prefetches=True)], (F, B, F, B), [(2, 2), (2, 2)]),
        ([unit("a", reshards=False), unit("b", reshards=False)], (F, F, B), [(1, 0), (1, 1)]),
        ([unit("a", reshards=False)], (F, F), [(1, 0)]),
        ([], (F, B), []),
    ],
)
def test_parameters_are_gathered_where_they_were_freed(
    units: list[Unit], passes: tuple[Pass, ...], times: list[tuple[int, int]]
) -> None:
    assert times_gathered(passes, units) == times


GROUPS = {"dp_shard": (0, 1, 2, 3), "dp_replicate": (1, 5), "alone": (1,)}
TOPOLOGY: Any = SimpleNamespace(
    rank=1, grid=lambda view: SimpleNamespace(group=lambda rank, dims: GROUPS[dims[0]] if view == "dense" else None)
)


def fsdp(defer: Any = "nothing", *, step: StepShape | None = None, frozen: str = "bias", **changes: Any) -> list[Any]:
    stage = nn.Linear(3, 5)
    for name in frozen.split():
        stage.get_parameter(name).requires_grad_(False)
    parameters = {name: parameter.shape for name, parameter in stage.named_parameters()}
    fields = {"name": "", "view": "dense", "dims": ("dp_replicate", "dp_shard"), "reshards": 2} | changes
    dtypes = torch.bfloat16, torch.float32
    found = FsdpCommunication(stage, TOPOLOGY, [Unit(parameters=parameters, **fields)], defer, *dtypes)
    step = step or StepShape((F, F, B, B), samples=1, positions=1, itemsize=2)
    return [(c.kind, c.group, c.ranks, c.bytes, c.count, c.purpose, c.approximate) for c in found(step)]


def test_a_unit_gathers_padded_parameters_and_reduces_the_gradients_of_trained_ones() -> None:
    shards, replicas = GROUPS["dp_shard"], GROUPS["dp_replicate"]
    # Five rows are padded to eight for four ranks: 8 * 3 + 8 numbers of 2 bytes. Gradients of the weight: 24 of 4.
    gathered = ("all_gather", "dp_shard", shards, 64, 2, "parameters of the rest, forward", False)
    near = ("all_gather", "2 ranks of dp_shard", (0, 1), 64, 2, "parameters of the rest, backward", True)
    scattered = ("reduce_scatter", "dp_shard", shards, 96, 2, "gradients of the rest", False)
    reduced = ("all_reduce", "dp_replicate", replicas, 24, 2, "gradients of the rest", False)
    assert fsdp() == [gathered, near, scattered, reduced]
    once = [(*one[:4], 1, *one[5:]) for one in (scattered, reduced)]
    assert fsdp("all_reduce") == [gathered, near, scattered, once[1]]
    assert fsdp("everything") == [gathered, near, *once]
    assert fsdp(frozen="weight bias") == [gathered, near]
    # Evenly sharded parameters have no padding.
    assert [one[3] for one in fsdp(even=True)] == [40, 40, 60, 15]


def test_a_unit_that_is_freed_gathers_among_all_ranks_and_one_that_is_whole_not_again() -> None:
    freed = fsdp(reshards=True, name="weight")
    assert [(one[0], one[1], one[4], one[5]) for one in freed[:2]] == [
        ("all_gather", "dp_shard", 2, "parameters of weight, forward"),
        ("all_gather", "dp_shard", 2, "parameters of weight, backward"),
    ]
    assert freed[1][2] == GROUPS["dp_shard"]
    kept = fsdp(reshards=False, step=StepShape((F, B), samples=1, positions=1, itemsize=2))
    assert [one[0] for one in kept] == ["all_gather", "reduce_scatter", "all_reduce"]
    assert [one[0] for one in fsdp(dims=("dp_replicate", "alone"))] == ["all_reduce"]
    assert [one[0] for one in fsdp(dims=("alone", "dp_shard"))] == ["all_gather", "all_gather", "reduce_scatter"]
    assert [one[0] for one in fsdp(dims=("dp_shard",))] == ["all_gather", "all_gather", "reduce_scatter"]
    assert [one[0] for one in fsdp(reshards=1)] == ["all_gather", "reduce_scatter", "all_reduce"]


STEP = StepShape((F, F, B), samples=2, positions=5, itemsize=2)


def tensor(
    *sites: Site, ranks: tuple[int, ...] = (4, 5, 6), stage: nn.Module | None = None, **fields: Any
) -> list[Any]:
    found = TensorCommunication(stage or nn.Linear(1, 1), ranks, list(sites), **fields)
    return [(c.kind, c.group, c.ranks, c.bytes, c.count, c.purpose, c.module, c.at_most) for c in found(STEP)]


def test_sites_exchange_hidden_states_and_their_gradients() -> None:
    sites = Site("a", "all_gather", "reduce_scatter", 7), Site("", "reduce_scatter", None, None)
    size, ranks = 2 * 5 * 2 * 7, (4, 5, 6)
    # A site that declares no features has as many as the first site that does.
    assert tensor(*sites) == [
        ("all_gather", "tp", ranks, size, 2, "hidden states at a, forward", "a", False),
        ("reduce_scatter", "tp", ranks, size, 1, "hidden states at a, backward", None, False),
        ("reduce_scatter", "tp", ranks, size, 2, "hidden states at the model, forward", "", False),
    ]
    assert [one[3] for one in tensor(Site("a", "all_gather", None, None))] == [None]
    assert tensor(*sites, ranks=(4,)) == []
    frozen = nn.Linear(1, 1)
    frozen.bias.requires_grad_(False)
    assert [one[-1] for one in tensor(*sites, stage=frozen)] == [False, True, False]


def test_exchanges_in_turns_are_one_for_each_other_rank() -> None:
    ranks, size = (4, 5, 6), 2 * 5 * 2 * 7
    assert tensor(Site("a", "all_gather", "reduce_scatter", 7, in_turns=True)) == [
        ("all_to_all", "tp", ranks, size // 3, 4, "hidden states at a, all_gather in turns, forward", "a", False),
        ("all_to_all", "tp", ranks, size // 3, 2, "hidden states at a, reduce_scatter in turns, backward", None, False),
    ]
    assert tensor(Site("a", "all_gather", "reduce_scatter", 7, in_turns=True, fused=("forward",))) == [
        ("all_gather", "tp", ranks, size, 2, "hidden states at a, through symmetric memory, forward", "a", False),
        ("all_to_all", "tp", ranks, size // 3, 2, "hidden states at a, reduce_scatter in turns, backward", None, False),
    ]
    head: Any = SimpleNamespace(forward_collectives=lambda step: [("all_reduce", step.samples * 3), ("send", None)])
    assert tensor(alone={"head": head}) == [
        ("all_reduce", "tp", ranks, 6, 2, "inside head, forward", "head", False),
        ("send", "tp", ranks, None, 2, "inside head, forward", "head", False),
    ]


def test_effects_of_strategies_are_those_of_their_configs() -> None:
    assert sharded(FsdpConfig()) == StrategyCost(shards=True, gathers="twice", reduces="each")
    assert sharded(HsdpConfig(reshard_after_forward=2, offload=True)) == StrategyCost(
        shards=True, gathers="twice", reduces="each", offloads=True
    )
    assert replicated(ReplicateConfig()) == StrategyCost(shards=True, gathers="once", reduces="each", in_place=True)
    wide = sharded(FsdpConfig(compute_dtype="float32", reduce_dtype="bfloat16"))
    assert (wide.compute_width, wide.reduce_width) == (4, 2)
    assert tensor_parallel(TensorParallelConfig()) == StrategyCost()
    assert tensor_parallel(TensorParallelConfig(asynchronous=True)) == StrategyCost(overlaps=frozenset({"tp"}))
    assert checkpointed(ActivationCheckpointingConfig()) == StrategyCost(recomputed=1.0)
    assert checkpointed(ActivationCheckpointingConfig(every=4, save=("attention",))) == StrategyCost(
        recomputed=0.25, keeps_attention=True
    )
    assert compiled(CompileConfig()) == StrategyCost(compiled=True)
    assert context_parallel(ContextParallelConfig(method="hybrid", head_ranks=2)) == StrategyCost(
        context=AttentionCosts("hybrid", 2)
    )


def test_alternatives_of_data_parallelism_are_those_that_communicate_less() -> None:
    def tried(config: Any) -> list[tuple[str, Any]]:
        return [(other.defer, getattr(other, "reshard_after_forward", None)) for other in alternatives(config)]

    assert tried(FsdpConfig(defer="all_reduce")) == [("everything", False)]
    assert tried(FsdpConfig(defer="everything", reshard_after_forward=False)) == []
    assert tried(HsdpConfig(reshard_after_forward=2)) == [("everything", 2)]
    assert tried(ReplicateConfig()) == [("everything", None)]
