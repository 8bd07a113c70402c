"""Forwards of split modules, and sizes of exchanges, without other ranks."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_core.cost import AttentionShape, ContextCost, Exchange, OpCost
from d9d_core.errors import BuildError
from d9d_core.strategy import ContextCall, StepShape
from d9d_parallel.context_parallel.communication import ContextCommunication, Heads, Meeting
from d9d_parallel.context_parallel.config import ContextParallelConfig
from d9d_parallel.context_parallel.costs import AttentionCosts, alternatives
from d9d_parallel.data_parallel.strategy import _SHARDED, _units
from d9d_parallel.tensor_parallel import forwards, symmetric_memory
from d9d_parallel.tensor_parallel.async_forwards import AsyncColumns, Column, HandedProduct, RowProduct
from d9d_parallel.tensor_parallel.async_products import AsyncProducts
from d9d_parallel.tensor_parallel.forwards import (
    EmbeddingForward,
    GatheredSequence,
    OwnHeadsForward,
    RowForward,
    WholeSequence,
)
from torch import Tensor, nn


def ranks_of(rank: int, size: int, numbers: tuple[int, ...] = ()) -> Any:
    return SimpleNamespace(rank=rank, size=size, numbers=numbers or tuple(range(size)), group="group", name="ranks")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collectives as of ranks that all hold zeros but this one."""

    def scatter_sum(whole: Tensor, ranks: Any) -> Tensor:
        return whole.chunk(ranks.size, dim=1)[ranks.rank]

    def gather(part: Tensor, ranks: Any, *, summed: bool) -> Tensor:
        assert summed
        return torch.cat([part * (number + 1) for number in range(ranks.size)], dim=1)

    monkeypatch.setattr(forwards, "scatter_sum", scatter_sum)
    monkeypatch.setattr(forwards, "gather", gather)


@pytest.mark.usefixtures("alone")
def test_the_bias_of_a_row_wise_layer_is_added_once() -> None:
    layer = nn.Linear(2, 1)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, 10.0]]))
        layer.bias.fill_(100.0)
    x = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])
    for rank, (plain, scaled) in enumerate(((121.0, 121.0), (143.0, 43.0))):
        assert RowForward(layer, ranks_of(rank, 2))(x).tolist() == [[[plain]]]
        assert RowForward(layer, ranks_of(rank, 2), scaled=True)(x).tolist() == [[[scaled]]]
    assert layer.bias is not None
    bare = nn.Linear(2, 1, bias=False)
    bare.weight = layer.weight
    for scaled_too in (False, True):
        assert RowForward(bare, ranks_of(1, 2), scaled=scaled_too)(x).tolist() == [[[43.0]]]


def test_a_rank_computes_its_own_head_of_a_whole_weight() -> None:
    layer = nn.Linear(1, 4)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0], [2.0], [3.0], [4.0]]))
        layer.bias.copy_(torch.tensor([10.0, 20.0, 30.0, 40.0]))
    found = [OwnHeadsForward(layer, 2, ranks_of(rank, 4))(torch.ones(1, 1)).tolist() for rank in range(4)]
    assert found == [[[11.0, 22.0]]] * 2 + [[[33.0, 44.0]]] * 2
    assert layer.weight.shape == (4, 1)


@pytest.mark.usefixtures("alone")
def test_an_embedding_looks_up_its_share_of_the_vocabulary() -> None:
    table = nn.Embedding(3, 1)
    with torch.no_grad():
        table.weight.copy_(torch.tensor([[1.0], [2.0], [3.0]]))
    tokens = torch.tensor([[3, 4, 5, 6], [2, 0, 9, 4]])
    for rank, expected in ((0, [[0.0, 1.0], [0.0, 0.0]]), (1, [[2.0, 3.0], [0.0, 1.0]])):
        out = EmbeddingForward(table, 4, 10, ranks_of(rank, 2))(tokens)
        assert out.squeeze(-1).tolist() == expected
    for wrong in (10, -1):
        with pytest.raises(IndexError, match=f"token id {wrong} is not in the vocabulary of 10 ids"):
            EmbeddingForward(table, 4, 10, ranks_of(0, 2))(torch.tensor([[0, wrong]]))
    empty = nn.Embedding(0, 1)
    assert EmbeddingForward(empty, 10, 10, ranks_of(1, 2))(tokens).squeeze(-1).tolist() == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.usefixtures("alone")
def test_an_embedding_that_scales_features_keeps_its_scale_and_the_zero_gradient_of_its_padding() -> None:
    class Scaled(nn.Embedding):
        def forward(self, tokens: Tensor) -> Tensor:
            return 10 * super().forward(tokens)

    for padding, gradients in ((5, [10.0, 0.0, 10.0]), (0, [10.0, 10.0, 10.0])):
        table = Scaled(3, 1)
        table.padding_idx = padding  # of the whole vocabulary; this rank has the tokens 4 to 6
        with torch.no_grad():
            table.weight.copy_(torch.tensor([[1.0], [2.0], [3.0]]))
        out = EmbeddingForward(table, 4, 10, ranks_of(1, 2))(torch.tensor([[0, 0, 4, 5], [0, 0, 6, 0]]))
        assert out.squeeze(-1).tolist() == [[10.0, 20.0], [30.0, 0.0]]
        out.sum().backward()
        assert table.weight.grad is not None
        assert table.weight.grad.flatten().tolist() == gradients
        assert table.padding_idx == padding


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("rank", [0, 1])
def test_attention_that_cannot_be_split_returns_a_ranks_own_positions(rank: int) -> None:
    module = nn.Module()
    hidden = torch.tensor([[1.0, 2.0]])  # the ranks' positions, gathered as they are in one process
    for returns in (lambda x: x.cumsum(1), lambda x: (x.cumsum(1), None)):
        module.forward = returns
        out = GatheredSequence(module, ranks_of(rank, 2))(hidden)
        whole = WholeSequence(module, ranks_of(rank, 2), summed=True)(hidden)
        if isinstance(out, tuple):
            assert out[1] is None
            (out, _), (whole, _) = out, whole
        assert torch.equal(out, whole.chunk(2, dim=1)[rank])


@pytest.mark.usefixtures("alone")
def test_a_caller_may_pass_the_first_argument_by_name() -> None:
    module = nn.Module()
    module.forward = lambda hidden, other=0: (hidden.tolist(), other)
    gathers = WholeSequence(module, ranks_of(0, 2), summed=True)
    assert gathers(hidden=torch.tensor([[1.0, 2.0]]), other=3) == gathers(torch.tensor([[1.0, 2.0]]), 3)


@pytest.mark.usefixtures("alone")
def test_a_module_of_the_whole_sequence_gathers_its_first_argument() -> None:
    module = nn.Module()
    module.forward = lambda hidden, other, name: (hidden.tolist(), other, name)
    found = WholeSequence(module, ranks_of(0, 2), summed=True)(torch.tensor([[1.0, 2.0]]), 3, name=4)
    assert found == ([[1.0, 2.0, 2.0, 4.0]], 3, 4)


def test_a_product_computed_ahead_is_taken_once_and_for_its_rows_only() -> None:
    product, rows, out = HandedProduct(), torch.ones(2), torch.zeros(3)
    product.hand(rows, out)
    assert product(torch.ones(2)) is None
    assert product(rows) is out
    assert product(rows) is None


def test_products_of_columns_are_lent_during_the_forward_alone() -> None:
    hidden, whole, out = torch.ones(1), torch.ones(2), torch.zeros(3)
    asked: list[Any] = []

    class Products:
        def columns(self, rows: Tensor, weights: list[Any], deferrals: list[Any]) -> Any:
            asked.append((rows, weights, deferrals))
            return whole, [out]

        def row(self, rows: Tensor, weight: Any, deferral: Any) -> Any:
            return rows, weight, deferral

    layer = SimpleNamespace(weight="weight", deferral="deferral")
    column = Column(layer, lambda weight: f"own {weight}", HandedProduct())  # type: ignore[arg-type,return-value]
    module = nn.Module()
    module.forward = lambda rows, scale, add: (rows, column.handed(rows), scale, add)
    products: Any = Products()
    found = AsyncColumns(module, [column], products)(hidden, 2, add=3)
    assert found[0] is whole
    assert found[1] is out
    assert found[2:] == (2, 3)
    assert asked == [(hidden, ["own weight"], ["deferral"])]
    module.forward = lambda rows: rows
    AsyncColumns(module, [column], products)(hidden)
    assert column.handed(whole) is None  # removed, though the layer has not taken it
    assert RowProduct(layer, products)(hidden) == (hidden, "weight", "deferral")


def test_memory_of_other_gpus_is_used_only_if_all_ranks_can(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, backend = torch.device("cuda"), "nccl"
    answers: dict[str, Any] = {"same": True, "memory": "memory", "met": True}
    reduced: list[int] = []

    def smallest(number: int, *_: Any) -> int:
        reduced.append(int(number))
        return int(number)

    monkeypatch.setattr(symmetric_memory.dist, "get_backend", lambda _group: backend)
    monkeypatch.setattr(symmetric_memory, "_same_on_all", lambda *_: answers["same"])
    monkeypatch.setattr(symmetric_memory, "_memory", lambda *_: answers["memory"])
    monkeypatch.setattr(symmetric_memory, "_met", lambda *_: answers["met"])
    monkeypatch.setattr(symmetric_memory, "_smallest", smallest)
    two = ranks_of(0, 2)
    assert symmetric_memory.is_usable(two, cuda)
    assert reduced == [1, 1]
    assert not symmetric_memory.is_usable(two, torch.device("cpu"))
    assert not symmetric_memory.is_usable(ranks_of(0, 1), cuda)
    for name, value in (("same", False), ("memory", None), ("met", False)):
        answers[name], before = value, answers[name]
        assert not symmetric_memory.is_usable(two, cuda)
        answers[name] = before
    backend = "fake"
    assert not symmetric_memory.is_usable(two, cuda)


SHAPE = AttentionShape(rows=5, query_heads=4, key_value_heads=2, features=3, width=2)
OP = OpCost("attention", "memory", kept=1000.0, attention=SHAPE)


def copies(name: str, traffic: float, backward: float) -> OpCost:
    return OpCost(name, "memory", traffic=traffic, backward_traffic=backward)


def test_gathered_keys_and_values_are_stored_and_their_gradients_scattered() -> None:
    """Of 2 heads of 3 features, 5 rows and 2 bytes: 120 bytes of keys and values."""
    assert AttentionCosts("all_gather", None)(OP, 4) == ContextCost(
        (replace(OP, kept=1360.0), copies("gathered keys", 1200.0, 1200.0)),
        (Exchange("all_gather", "cp", 480.0),),
        (Exchange("reduce_scatter", "cp", 480.0),),
    )


def test_swapped_heads_repeat_few_keys() -> None:
    """Queries 120 bytes; 4 repeated heads of keys and values 240."""
    one, other = (Exchange("all_to_all", "cp", size, 4) for size in (360.0, 120.0))
    assert AttentionCosts("ulysses", None)(OP, 4) == ContextCost(
        (replace(OP, kept=1240.0), copies("swapped heads", 2640.0, 2640.0)), (one, other), (other, one)
    )
    for heads, pairs in ((3, 3), (4, 3)):
        odd = replace(OP, attention=replace(SHAPE, query_heads=heads, key_value_heads=pairs))
        with pytest.raises(BuildError, match=f"over 4 ranks of cp, which does not fit {heads} query"):
            AttentionCosts("ulysses", None)(odd, 4)


def test_a_ring_sends_keys_and_their_wide_gradients() -> None:
    turn, travelling = (Exchange("send", "cp", size, 4, 1, 3) for size in (120.0, 240.0))
    assert AttentionCosts("ring", None)(OP, 4) == ContextCost(
        (OP, copies("merged turns", 2400.0, 4800.0)), (), (Exchange("send", "cp", 240.0, 4, 1),), (turn,),
        (turn, travelling), 1200.0,
    )  # fmt: skip


def test_a_hybrid_swaps_heads_among_neighbours_and_rings_over_the_groups() -> None:
    one, other = (Exchange("all_to_all", "cp", size, 2) for size in (240.0, 120.0))
    turn, travelling = (Exchange("send", "cp", size, 2, 2, 1) for size in (120.0, 240.0))
    home = Exchange("send", "cp", 240.0, 2, 2)
    inner = replace(OP, kept=1120.0)
    assert AttentionCosts("hybrid", 2)(OP, 4) == ContextCost(
        (inner, copies("merged turns", 1200.0, 2400.0), copies("swapped heads", 1920.0, 1920.0)), (one, other),
        (other, one, home), (turn,), (turn, travelling), 1200.0,
    )  # fmt: skip
    for inner_ranks in (3, 4):
        with pytest.raises(
            BuildError,
            match=f"^context_parallel: head_ranks is {inner_ranks}, not a smaller divisor of mesh.cp, 4; choose one$",
        ):
            AttentionCosts("hybrid", inner_ranks)(OP, 4)


def test_plans_try_the_method_that_is_not_chosen() -> None:
    found = {
        method: [(other.method, other.head_ranks) for other in alternatives(ContextParallelConfig(**fields))]
        for method, fields in {
            "all_gather": {"method": "all_gather"}, "ulysses": {"method": "ulysses"},
            "hybrid": {"method": "hybrid", "head_ranks": 2},
        }.items()
    }  # fmt: skip
    assert found == {
        "all_gather": [("ulysses", None)],
        "ulysses": [("all_gather", None)],
        "hybrid": [("all_gather", None)],
    }


STEP = StepShape(("forward", "forward", "backward"), samples=2, positions=5, itemsize=2)


def listed(communication: ContextCommunication) -> list[tuple[Any, ...]]:
    return [(c.kind, c.group, c.ranks, c.bytes, c.count, c.purpose, c.module, c.at_most) for c in communication(STEP)]


def test_collectives_of_gathered_keys_and_of_other_modules_are_stated() -> None:
    stage, ranks = nn.Linear(1, 1), ranks_of(1, 2, (4, 6))
    head = SimpleNamespace(context_collectives=lambda step: [
        ContextCall("all_gather", step.samples * 7, "hidden states", at_most=True),
        ContextCall("reduce_scatter", None, "gradients", backward=True),
    ])  # fmt: skip
    meeting = Meeting(tp=1, keys=SimpleNamespace(all_ranks=ranks))  # type: ignore[arg-type]
    cores = {"a": Heads(query=4, key_value=3, features=8), "b": None}
    found = ContextCommunication(stage, ranks, meeting, cores, {"head": head})  # type: ignore[dict-item]
    size = 2 * 5 * 2 * (2 * 3 * 8 * 2)  # samples, positions, bytes; keys and values of both ranks
    both = (4, 6)
    expected = [
        ("all_gather", "cp", both, size, 2, "keys and values at a, forward", "a", False),
        ("reduce_scatter", "cp", both, size, 1, "gradients of keys and values at a, backward", None, False),
        ("all_gather", "cp", both, None, 2, "keys and values at b, forward", "b", False),
        ("reduce_scatter", "cp", both, None, 1, "gradients of keys and values at b, backward", None, False),
        ("all_gather", "cp", both, 14, 2, "hidden states at head, forward", "head", True),
        ("reduce_scatter", "cp", both, None, 1, "gradients at head, backward", None, False),
    ]
    assert listed(found) == expected
    stage.bias.requires_grad_(False)
    assert [row[-1] for row in listed(found)] == [False, True, False, True, True, True]


def test_collectives_of_swapped_heads_and_of_a_ring_are_stated() -> None:
    ranks = ranks_of(1, 6, (0, 1, 2, 3, 4, 5))
    heads, ring = ranks_of(1, 2, (0, 1)), ranks_of(0, 3, (1, 3, 5))
    cores = {"a": Heads(query=4, key_value=1, features=8)}
    found = listed(ContextCommunication(nn.Linear(1, 1), ranks, Meeting(1, heads, ring), cores))  # type: ignore[arg-type]
    each = 2 * 5  # samples, positions
    there, back, keys = (each * 2 * numbers for numbers in (4 * 8 + 2 * 2 * 8, 4 * 8, 2 * 2 * 8))
    pair, triple = (0, 1), "2 ranks of cp"
    assert found == [
        ("all_to_all", triple, pair, there, 2, "queries, keys and values at a, forward", "a", False),
        ("all_to_all", triple, pair, back, 2, "outputs at a, forward", "a", False),
        ("all_to_all", triple, pair, back, 1, "gradients of outputs at a, backward", None, False),
        ("all_to_all", triple, pair, there, 1, "gradients of queries, keys and values at a, backward", None, False),
        ("send", triple, (1, 3), keys, 4, "keys and values at a, forward", "a", False),
        ("receive", triple, (1, 5), keys, 4, "keys and values at a, forward", "a", False),
        ("send", triple, (1, 3), keys, 2, "keys and values at a, backward", None, False),
        ("send", triple, (1, 3), 2 * keys, 3, "gradients of keys and values at a, backward", None, False),
        ("receive", triple, (1, 5), keys, 2, "keys and values at a, backward", None, False),
        ("receive", triple, (1, 5), 2 * keys, 3, "gradients of keys and values at a, backward", None, False),
    ]


def test_a_model_without_blocks_is_one_unit_that_stays_gathered() -> None:
    stage = nn.Linear(2, 3)
    (unit,) = _units(stage, {}, {}, {"": stage}, frozenset(), _SHARDED, reshard_after_forward=True, prefetch=1)
    assert (unit.name, dict(unit.parameters)) == ("", {"weight": (3, 2), "bias": (3,)})
    assert (unit.reshards, unit.prefetches) == (False, False)


def test_a_module_that_every_rank_computes_whole_refuses_a_share_of_a_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    class Split(Tensor):
        pass

    monkeypatch.setattr(forwards, "DTensor", Split)
    layer = WholeSequence(nn.Identity(), ranks_of(0, 2), summed=False)
    with pytest.raises(ValueError, match="a module of style whole got a weight that is split over tp"):
        layer(torch.zeros(1, 2, 3), torch.zeros(4, 3).as_subclass(Split))


@pytest.mark.parametrize("is_compiling", [False, True])
@pytest.mark.parametrize("trained", ["rows", "weight", "both"])
def test_a_row_product_has_the_gradients_of_a_linear_layer(
    monkeypatch: pytest.MonkeyPatch, is_compiling: bool, trained: str
) -> None:
    rows = torch.tensor([[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]]).requires_grad_(trained != "weight")
    weight = torch.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, 1.0]]).requires_grad_(trained != "rows")
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: is_compiling)
    out = AsyncProducts(ranks_of(0, 1), symmetric=False).row(rows, weight, None)
    assert out.tolist() == [[[7.0, 9.0], [16.0, 21.0]]]
    (out * torch.tensor([[[1.0, 10.0], [100.0, 1000.0]]])).sum().backward()
    of_rows, of_weight = rows.grad, weight.grad
    assert (of_rows is None, of_weight is None) == (trained == "weight", trained == "rows")
    assert of_rows is None or of_rows.tolist() == [[[1.0, 30.0, 12.0], [100.0, 3000.0, 1200.0]]]
    assert of_weight is None or of_weight.tolist() == [[401.0, 502.0, 603.0], [4010.0, 5020.0, 6030.0]]
