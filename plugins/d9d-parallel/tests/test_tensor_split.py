"""Tensor parallelism of each module of a plan: shards, forwards, collectives and owners of gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from d9d_core.errors import BuildError
from d9d_core.job_file.job import Mesh
from d9d_core.plugin import ViewSpec
from d9d_core.registry.registry import Registry
from d9d_core.tensors import local
from d9d_core.traits import TensorStyle
from d9d_engine.distributed.mesh import Topology
from d9d_engine.distributed.simulate import simulated_world
from d9d_parallel.tensor_parallel.async_forwards import HandedProduct, RowProduct
from d9d_parallel.tensor_parallel.collectives import OwnPositions, RankSum
from d9d_parallel.tensor_parallel.communication import Site
from d9d_parallel.tensor_parallel.config import TensorParallelConfig
from d9d_parallel.tensor_parallel.forwards import OwnHeads, local_of
from d9d_parallel.tensor_parallel.strategy import TensorParallel
from torch import distributed as dist
from torch import nn

VIEWS = {e.spec.key: e.spec for e in Registry.of().entries("view") if isinstance(e.spec, ViewSpec)}


class Scale(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))


class Adapted(nn.Linear):
    """Linear layer with an adapter, which records its calls."""

    deferral = None

    def __init__(self, features: int, out: int, *, lends: bool = True, scales: bool = False) -> None:
        super().__init__(features, out)
        self.low, self.high = nn.Linear(features, 2, bias=False), nn.Linear(2, out, bias=False)
        self.terms: dict[str, Any] = {"low": "in", "high": "out"}
        if scales:
            self.inputs, self.outputs = Scale(features), Scale(out)
            self.terms |= {"inputs": "in_scale", "outputs": "out_scale"}
        self.lends, self.told = lends, list[Any]()

    def tensor_parallel_terms(self) -> Mapping[str, Any]:
        return self.terms

    def split_features(self, own: Any, add_up: Any = None) -> None:
        self.told.append((own, add_up))

    def share_inputs(self, part: int, parts: int) -> None:
        self.told.append((part, parts))

    def lend_product(self, compute: Callable[..., Any]) -> bool:
        self.told.append(compute)
        return self.lends


class Norm(Scale):
    def see_sequence(self, share: OwnPositions) -> None:
        self.share = share


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(7, 6))

    def split_vocabulary(self, share: Any) -> None:
        self.share = (share.first, share.size)

    def forward_collectives(self, _step: Any) -> list[Any]:
        return []


class Layer(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.query, self.key, self.plain = Adapted(6, 8, **options), Adapted(6, 2), nn.Linear(6, 4)
        self.out, self.norm = Adapted(8, 6, **options), Norm(6)

    def tensor_parallel_plan(self) -> Mapping[str, TensorStyle]:
        columns = dict.fromkeys(("query", "key", "plain"), TensorStyle.COLUMN)
        return {**columns, "out": TensorStyle.ROW, "norm": TensorStyle.SEQUENCE}

    def tensor_parallel_heads(self) -> Mapping[str, int]:
        return {"query": 4, "key": 1}


class Stage(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embedding, self.layer, self.pool, self.head = nn.Embedding(7, 6), Layer(**options), Scale(6), Head()
        self.ranks = 0

    def split_sequence(self, ranks: int) -> None:
        self.ranks = ranks

    def tensor_parallel_plan(self) -> Mapping[str, TensorStyle]:
        return {"embedding": TensorStyle.VOCAB, "pool": TensorStyle.WHOLE, "head": TensorStyle.VOCAB}


def split(stage: nn.Module, tp: int = 2, *, asynchronous: bool = False) -> Any:
    """Apply the strategy on the first rank."""
    with simulated_world(tp):
        topology = Topology(sizes=Mesh(tp=tp).sizes(), rank=dist.get_rank(), world_size=tp, views=VIEWS)
        return TensorParallel(TensorParallelConfig(asynchronous=asynchronous)).apply(stage, topology)


def made(**options: Any) -> Stage:
    with torch.device("meta"):
        return Stage(**options)


def forwards(stage: nn.Module) -> dict[str, str]:
    """Class of the forward of each changed module."""
    return {
        name: type(module.forward.__self__).__name__
        for name, module in stage.named_modules()
        if "forward" in vars(module)
    }


class Recurrent(nn.Module):
    """Module with vectors of heads and with a filter for each feature, which have no style of a matrix."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.plain, self.out, self.heads = nn.Linear(6, 4), nn.Linear(4, 6), heads
        self.decay = nn.ParameterDict({"rate": torch.zeros(heads), "time": torch.zeros(heads)})
        self.filter = nn.Module()
        self.filter.weight = nn.Parameter(torch.zeros(4 * heads, 3))

    def tensor_parallel_plan(self) -> Mapping[str, TensorStyle]:
        of_heads = dict.fromkeys(("decay", "filter"), TensorStyle.HEADS)
        return {"plain": TensorStyle.COLUMN, **of_heads, "out": TensorStyle.ROW}

    def tensor_parallel_heads(self) -> Mapping[str, int]:
        return {"filter": self.heads}


def test_all_parameters_of_style_heads_are_split_over_their_first_dimension() -> None:
    stage = made()
    stage.layer = Recurrent(4).to("meta")  # type: ignore[assignment]
    applied = split(stage)
    shapes = {name: list(local(parameter).shape) for name, parameter in stage.layer.named_parameters()}
    assert shapes == {
        "plain.weight": [2, 6], "plain.bias": [2], "decay.rate": [2], "decay.time": [2], "filter.weight": [8, 3],
        "out.weight": [6, 2], "out.bias": [6],
    }  # fmt: skip
    owners = {owner.parameter: owner.owner for owner in applied.gradients}
    assert all(owners[f"layer.{name}"] == "none" for name in ("decay.rate", "decay.time", "filter.weight"))
    assert forwards(stage)["layer.filter"] == "LocalShards"


@pytest.mark.parametrize(("heads", "said"), [(3, "3 heads of 'layer.decay'"), (2, "2 heads of 'layer.decay'")])
def test_heads_that_the_ranks_do_not_divide_are_refused(heads: int, said: str) -> None:
    stage = made()
    stage.layer = Recurrent(heads).to("meta")  # type: ignore[assignment]
    with pytest.raises(BuildError, match=f"mesh.tp is 4, which does not divide the {said}; choose a divisor"):
        split(stage, tp=4)


def test_features_of_fewer_heads_than_ranks_are_not_split() -> None:
    stage = made()
    layer = Recurrent(2).to("meta")
    layer.decay = nn.ParameterDict()
    stage.layer = layer  # type: ignore[assignment]
    with pytest.raises(BuildError, match="does not divide the 2 heads of 'layer.filter'"):
        split(stage, tp=4)


def test_each_style_of_a_plan_has_its_shards_forwards_and_collectives() -> None:
    stage = made(scales=True)
    applied = split(stage)
    assert {name: list(local(parameter).shape) for name, parameter in stage.named_parameters()} == {
        "embedding.weight": [4, 6],
        "layer.query.weight": [4, 6], "layer.query.bias": [4],
        "layer.query.low.weight": [2, 6], "layer.query.high.weight": [4, 2],
        "layer.query.inputs.weight": [6], "layer.query.outputs.weight": [4],
        "layer.key.weight": [2, 6], "layer.key.bias": [2],  # one head on both ranks
        "layer.key.low.weight": [2, 6], "layer.key.high.weight": [2, 2],
        "layer.plain.weight": [2, 6], "layer.plain.bias": [2],
        "layer.out.weight": [6, 4], "layer.out.bias": [6],
        "layer.out.low.weight": [2, 4], "layer.out.high.weight": [6, 2],
        "layer.out.inputs.weight": [4], "layer.out.outputs.weight": [6],
        "layer.norm.weight": [6], "pool.weight": [6], "head.weight": [4, 6],
    }  # fmt: skip
    assert forwards(stage) == {
        "embedding": "EmbeddingForward", "layer": "WholeSequence",
        "layer.query": "LocalShards", "layer.query.high": "LocalShards", "layer.query.outputs": "LocalShards",
        "layer.key": "OwnHeadsForward", "layer.key.high": "OwnHeadsForward", "layer.plain": "LocalShards",
        "layer.out": "RowForward", "layer.out.low": "LocalShards", "layer.out.inputs": "LocalShards",
        "pool": "WholeSequence", "head": "WholeSequence",
    }  # fmt: skip
    assert [stage.get_submodule(name).forward.__self__.summed for name in ("layer", "pool", "head")] == [
        True, False, True,
    ]  # fmt: skip
    embedding: Any = stage.embedding.forward.__self__  # type: ignore[attr-defined]
    assert (embedding.first, embedding.vocabulary) == (0, 7)
    assert stage.layer.out.forward.__self__.scaled is True
    query, key, out = stage.layer.query.told, stage.layer.key.told, stage.layer.out.told
    assert query == [(local_of, None)]
    assert isinstance(key[0][0], OwnHeads)
    assert (key[0][0].heads, key[0][1]) == (1, None)
    assert out[0][0] is local_of
    assert isinstance(out[0][1], RankSum)
    assert out[1:] == [(0, 2)]
    assert stage.head.share == (0, 4)
    assert isinstance(stage.layer.norm.share, OwnPositions)
    communication = applied.collectives
    assert communication.sites == [
        Site("embedding", "reduce_scatter", "all_gather", 6),
        Site("pool", "all_gather", None, None),
        Site("head", "all_gather", "reduce_scatter", 6),
        Site("layer.out", "reduce_scatter", "all_gather", 6),
        Site("layer", "all_gather", "reduce_scatter", 6),
    ]
    assert communication.alone == {"head": stage.head}
    assert applied.notes == (
        "layer.out (Adapted) does not declare its communication: forward_collectives()",
        "layer.norm (Norm) does not declare its communication: forward_collectives()",
    )
    assert applied.modules == (
        "embedding", "pool", "head", "layer.query", "layer.key", "layer.plain", "layer.out", "layer.norm", "layer",
    )  # fmt: skip
    assert (stage.ranks, applied.sequence_ranks) == (2, 2)
    assert {owner.axis for owner in applied.gradients} == {"tp"}
    assert {owner.parameter for owner in applied.gradients if owner.owner == "sync"} == {
        "layer.query.low.weight", "layer.query.inputs.weight", "layer.key.weight", "layer.key.bias",
        "layer.key.low.weight", "layer.key.high.weight", "layer.out.bias", "layer.out.high.weight",
        "layer.out.outputs.weight", "layer.norm.weight",
    }  # fmt: skip


@pytest.mark.parametrize("lends", [True, False])
def test_asynchronous_layers_lend_their_products_if_they_can(lends: bool) -> None:
    stage = made(lends=lends)
    applied = split(stage, asynchronous=True)
    layer = stage.layer
    columns = layer.forward.__self__  # type: ignore[attr-defined]
    assert type(columns).__name__ == "AsyncColumns"
    lent = [layer.query, layer.key] if lends else [layer.key]
    assert [column.layer for column in columns.columns] == lent
    assert [column.handed for column in columns.columns] == [
        next(one for one in child.told if isinstance(one, HandedProduct)) for child in lent
    ]
    own = columns.columns[-1].own  # of the head that both ranks compute
    assert isinstance(own, OwnHeads)
    assert (own.heads, [column.own for column in columns.columns[:-1]]) == (1, [local_of] * (len(lent) - 1))
    assert (columns.products.symmetric, columns.products.in_graphs) == (False, True)
    products = [one for one in layer.out.told if isinstance(one, RowProduct)]
    assert [product.layer is layer.out for product in products] == [True]
    found = forwards(stage)
    assert found["layer.out"] == ("LocalShards" if lends else "RowForward")
    assert found["layer.out.low"] == ("RowForward" if lends else "LocalShards")
    inside = [Site("layer.out.low", "reduce_scatter", "all_gather", 2)] if lends else []
    assert applied.collectives.sites[3:] == [
        *inside,
        Site("layer.out", "reduce_scatter", "all_gather", 6, lends),
        Site("layer", "all_gather", "reduce_scatter", 6, True),
    ]


def test_a_layer_that_scales_its_inputs_keeps_its_product() -> None:
    stage = made(scales=True)
    split(stage, asynchronous=True)
    assert [column.layer for column in stage.layer.forward.__self__.columns] == [stage.layer.key]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("tp", "problem"),
    [
        (3, "mesh.tp is 3, but the 4 heads of 'layer.query' can be neither split evenly over 3 ranks nor repeated on"),
        (8, "mesh.tp is 8, which does not divide the 4 features of 'layer.plain'"),
    ],
)
def test_heads_and_features_that_ranks_cannot_share_are_refused(tp: int, problem: str) -> None:
    with pytest.raises(BuildError, match=f"^strategy 'tensor_parallel': {problem}"):
        split(made(), tp)


def test_a_stage_that_cannot_split_positions_is_refused() -> None:
    with torch.device("meta"):
        stage = Layer()
    with pytest.raises(BuildError, match=r"splits positions between layers, but Layer lacks split_sequence\(\)"):
        split(stage)
