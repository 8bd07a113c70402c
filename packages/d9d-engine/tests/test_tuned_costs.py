"""Costs of a model with a fine-tuning method: numbers by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import d9d_testing.toy.plugin as toy
import pytest
from d9d_core.cost import AdapterCost, BlockCost, Exchange, OpCost, Share, StageCost, Weight
from d9d_core.errors import JobError
from d9d_core.plugin import ModelSpec, PeftSpec, Ref
from d9d_core.registry.registry import Registry
from d9d_engine.costs import flops, tuning
from d9d_engine.costs.flops import tuning_flops
from d9d_engine.costs.tuning import adapter_costs, tuned
from d9d_testing.toy.config import ToyPeftConfig

SHARE = Share(2, 8)
NORM = OpCost("norm", "memory", traffic=10.0, backward_traffic=20.0, kept=5.0, weights=(Weight("norm.weight", (4,)),))
PROJ = OpCost(
    "proj",
    "product",
    flops=100.0,
    backward_flops=200.0,
    traffic=30.0,
    backward_traffic=60.0,
    kept=40.0,
    rows=7.0,
    weights=(Weight("q.weight", (4, 6), "linear"), Weight("k.weight", (2, 6), "linear")),
    workspace=16.0,
    kept_for_weights=24.0,
)
EXCHANGE = Exchange("all_reduce", "tp", 3.0)
BLOCK = BlockCost(
    "layer",
    (NORM, PROJ),
    parameters=40,
    input=9.0,
    workspace=50.0,
    exchanges=(EXCHANGE,),
    backward_exchanges=(EXCHANGE,),
    backward_beside=(EXCHANGE,),
    names=("layers.0",),
)
ADDED = AdapterCost(parameters=3, flops=1.0, backward_flops=2.0, traffic=4.0, backward_traffic=5.0, kept=6.0)


def frozen(_name: str, _weight: Weight, _rows: float, _share: Share) -> AdapterCost:
    return AdapterCost()


def adapts(*names: str) -> Any:
    def cost(name: str, weight: Weight, rows: float, share: Share) -> AdapterCost:
        assert name.endswith(weight.name)
        assert share is SHARE
        assert rows == (7.0 if weight.name != "norm.weight" else 0.0)
        return ADDED if name in names else AdapterCost()

    return cost


def trains(*names: str) -> Any:
    return lambda name, *_: AdapterCost(trains=name in names)


def one(cost: Any, block: BlockCost = BLOCK, stage: int = 0) -> BlockCost:
    """The only block of a stage, or of the second one."""
    other = StageCost(())
    stages = [StageCost((block,), 11.0), other] if stage == 0 else [other, StageCost((block,), 11.0)]
    found = tuned(stages, cost, SHARE)[stage]
    assert found.boundary == 11.0
    (only,) = found.blocks
    return only


def test_nothing_runs_backward_before_the_first_trained_weight() -> None:
    found = one(frozen)
    still = {"backward_flops": 0.0, "backward_traffic": 0.0, "kept": 0.0, "workspace": 0.0}
    assert [(op.backward_flops, op.backward_traffic, op.kept, op.workspace) for op in found.ops] == [(0.0,) * 4] * 2
    assert [replace(op, weights=(), **still) for op in found.ops] == [
        replace(op, weights=(), **still) for op in BLOCK.ops
    ]
    assert not any(weight.trains for op in found.ops for weight in op.weights)
    assert (found.parameters, found.frozen, found.expert_parameters, found.frozen_experts) == (40, 40, 0, 0)
    assert (found.input, found.workspace, found.exchanges) == (0.0, 0.0, (EXCHANGE,))
    assert (found.backward_exchanges, found.backward_beside, found.count) == ((), (), 1)


def test_the_first_adapted_weight_needs_no_gradient_of_its_input() -> None:
    found = one(adapts("layers.0.q.weight"))
    norm, proj, added = found.ops
    assert (norm.backward_traffic, norm.kept) == (0.0, 0.0)
    # Half of 200 are input gradients, which are left out here, and half weight gradients, which are frozen.
    assert (proj.flops, proj.backward_flops, proj.backward_traffic, proj.kept, proj.workspace) == (
        100.0, 0.0, 30.0, 16.0, 0.0,
    )  # fmt: skip
    assert added == OpCost("adapters", "product", 1.0, 2.0, 4.0, 5.0, 6.0)
    assert (found.parameters, found.frozen) == (43, 40)
    assert (found.input, found.workspace) == (9.0, 34.0)
    assert (found.backward_exchanges, found.backward_beside) == ((EXCHANGE,), (EXCHANGE,))


def test_later_blocks_and_stages_pass_gradients_through_frozen_weights() -> None:
    found = one(frozen, stage=1)
    norm, proj = found.ops
    assert (norm.backward_traffic, norm.kept) == (20.0, 5.0)
    assert (proj.backward_flops, proj.backward_traffic, proj.kept, proj.workspace) == (100.0, 30.0, 0.0, 0.0)
    assert (found.input, found.workspace, found.backward_exchanges) == (9.0, 34.0, (EXCHANGE,))
    several = replace(BLOCK, names=("layers.0", "layers.1", "layers.2"), count=3)
    blocks = tuned([StageCost((several,))], adapts("layers.1.k.weight"), SHARE)[0].blocks
    assert [(block.names, block.count, block.input) for block in blocks] == [
        (("layers.0",), 1, 0.0),
        (("layers.1",), 1, 9.0),
        (("layers.2",), 1, 9.0),
    ]
    assert blocks[1].ops[1].backward_flops == 0.0
    assert blocks[2].ops[1].backward_flops == 100.0


def test_weights_that_train_keep_their_share_of_the_backward() -> None:
    found = one(trains("layers.0.q.weight"), stage=1)
    proj = found.ops[1]
    # 12 of 36 elements are frozen: a third of the weight gradients, which are half of the backward, is left out.
    assert proj.backward_flops == pytest.approx(200 * 5 / 6)
    assert proj.backward_traffic == pytest.approx(60 * 5 / 6)
    assert (proj.kept, proj.workspace) == (40.0, 16.0)
    assert [weight.trains for weight in proj.weights] == [True, False]
    assert (found.parameters, found.frozen, found.workspace) == (40, 16, 50.0)
    whole = one(trains("layers.0.q.weight", "layers.0.k.weight"), stage=1)
    assert (whole.ops[1].backward_flops, whole.ops[1].kept, whole.frozen) == (200.0, 40.0, 4)
    first = one(trains("layers.0.q.weight", "layers.0.k.weight"))
    assert (first.ops[1].backward_flops, first.ops[0].backward_traffic) == (100.0, 0.0)


def block_of(op: OpCost, **more: Any) -> BlockCost:
    return BlockCost("b", (op,), parameters=24, is_block=False, **more)


def test_frozen_embeddings_keep_their_tokens_only_for_an_adapter_and_heads_what_their_inputs_need() -> None:
    table = OpCost("embedding", "memory", backward_flops=3.0, backward_traffic=7.0, kept=5.0, rows=7.0,
                   weights=(Weight("embed", (4, 6), "embedding"),))  # fmt: skip
    still = one(frozen, block_of(table), stage=1).ops[0]
    assert (still.backward_flops, still.backward_traffic, still.kept) == (0.0, 0.0, 0.0)
    adapted = one(adapts("embed"), block_of(table), stage=1).ops
    assert (adapted[0].backward_traffic, adapted[0].kept, adapted[1].kept) == (0.0, 5.0, 6.0)
    assert one(trains("embed"), block_of(table), stage=1).ops[0].backward_traffic == 7.0
    head = replace(PROJ, weights=(Weight("head", (4, 6), "head"),))
    assert one(frozen, block_of(head), stage=1).ops[0].kept == 16.0
    linear = replace(PROJ, weights=(Weight("q", (4, 6), "linear"),), kept_for_weights=0.0)
    assert one(frozen, block_of(linear), stage=1).ops[0].kept == 0.0
    assert one(adapts("q"), block_of(linear), stage=1).ops[0].kept == 40.0


def test_parameters_of_experts_are_counted_apart() -> None:
    bank = replace(PROJ, kind="grouped_product", weights=(
        Weight("bank", (2, 3, 4), "bank"), Weight("gate", (5,), "linear"),
    ))  # fmt: skip
    block = BlockCost("b", (bank,), parameters=5, expert_parameters=24, is_block=False)

    def cost(name: str, *_: Any) -> AdapterCost:
        return AdapterCost(trains=name == "bank", parameters=7 if name == "bank" else 2)

    found = one(cost, block, stage=1)
    assert (found.parameters, found.expert_parameters) == (7, 31)
    assert (found.frozen, found.frozen_experts) == (5, 0)
    shared = replace(block, parameters=0)
    assert one(cost, shared, stage=1).frozen == 0
    gated = one(lambda name, *_: AdapterCost(trains=name == "gate"), block, stage=1)
    assert (gated.frozen, gated.frozen_experts) == (0, 24)


def test_blocks_are_passed_in_the_order_of_their_numbers() -> None:
    op = replace(PROJ, weights=(Weight("w", (4, 6), "linear"),))
    embedding = BlockCost("embedding", (op,), is_block=False, parameters=24)
    dense = BlockCost("dense", (op,), names=("layers.0", "layers.10"), count=2, parameters=24)
    sparse = BlockCost("sparse", (op,), names=("layers.2", "layers.9"), count=2, parameters=24)
    head = BlockCost("head", (op,), is_block=False, parameters=24)
    asked: list[str] = []

    def cost(name: str, *_: Any) -> AdapterCost:
        asked.append(name)
        return ADDED if name == "layers.9.w" else AdapterCost()

    found = tuned([StageCost((embedding, dense, sparse, head))], cost, SHARE)[0].blocks
    assert asked == ["w", "layers.0.w", "layers.2.w", "layers.9.w", "layers.10.w", "w"]
    assert [(block.name, block.names, block.count, block.ops[0].backward_flops) for block in found] == [
        ("embedding", (), 1, 0.0),
        ("dense", ("layers.0",), 1, 0.0),
        ("sparse", ("layers.2",), 1, 0.0),
        ("sparse", ("layers.9",), 1, 0.0),
        ("dense", ("layers.10",), 1, 100.0),
        ("head", (), 1, 100.0),
    ]


def test_equal_blocks_stay_together() -> None:
    unnamed = replace(BLOCK, names=(), count=4)
    found = tuned([StageCost(()), StageCost((unnamed,))], frozen, SHARE)[1].blocks
    assert [(block.count, block.names) for block in found] == [(4, ())]


def test_a_cost_description_without_weights_is_refused() -> None:
    silent = BlockCost("layer", (replace(PROJ, weights=()),), expert_parameters=1)
    with pytest.raises(JobError, match=r"names no weights of 'layer'; its plugin must give OpCost.weights"):
        tuned([StageCost((silent,))], frozen, SHARE)
    tuned([StageCost((replace(silent, expert_parameters=0),))], frozen, SHARE)


PLAIN: Any = SimpleNamespace(selector="plain")


class Here(Ref):
    def load(self) -> Any:
        if self.target == "my:outer":
            return lambda config, *arguments: ("outer", config, arguments[:-1], arguments[-1](PLAIN, 5))
        return lambda config, *arguments: ("plain", config, arguments)


def test_a_method_without_a_cost_description_is_named_and_a_nested_method_is_asked_for_its_own() -> None:
    with pytest.raises(JobError, match="^peft: 'toy_peft' .* has no cost description"):
        adapter_costs(ToyPeftConfig(), Registry.of(toy))
    nowhere = Ref("nowhere:x")

    def spec(name: str, composite: bool) -> Any:
        cost = Here("my:outer" if composite else "my:plain")
        made = PeftSpec(name=name, summary="x", config=nowhere, build=nowhere, composite=composite, cost=cost)
        return SimpleNamespace(spec=made)

    registry: Any = SimpleNamespace(find=lambda _kind, name: spec(name, name == "outer"))
    assert adapter_costs(PLAIN, registry)(1, 2) == ("plain", PLAIN, (1, 2))  # type: ignore[call-arg, arg-type]
    outer: Any = SimpleNamespace(selector="outer")
    found = adapter_costs(outer, registry)(1, 2)  # type: ignore[call-arg, arg-type]
    assert found == ("outer", outer, (1, 2), ("plain", PLAIN, (5,)))


def test_the_operations_that_a_method_saves_and_adds_are_for_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = OpCost("attention", "attention", flops=10.0, backward_flops=25.0)
    block = replace(BLOCK, ops=(PROJ, attention), names=("a", "b"), count=2)
    seen: list[Any] = []

    class Cost(Ref):
        def load(self) -> Any:
            return lambda *given: seen.append(given) or StageCost((block,))

    nowhere = Ref("nowhere:x")
    model: Any = ModelSpec(name="m", summary="x", config=nowhere, build=nowhere, cost=Cost("my:cost"))
    monkeypatch.setattr(flops, "choose", lambda *_: SimpleNamespace(spec=model, entry="'m'"))
    monkeypatch.setattr(flops, "adapter_costs", lambda *_: lambda name, *__: ADDED if "q" in name else AdapterCost())
    job: Any = SimpleNamespace(model="config")
    found = tuning_flops(job, ToyPeftConfig(), 4, Registry.of(toy))
    # Before, each block: 100 + 200 + 10 + 20. After: 100 + 10 + 20 + 3 without, then 100 more with input gradients.
    assert found == pytest.approx((133 + 233 - 2 * 330) / 4)
    ((config, stage, share),) = seen
    assert (config, stage.index, stage.count) == ("config", 0, 1)
    assert (share.samples, share.length, share.tensor, share.context, share.experts) == (1, 4, 1, 1, 1)
    assert not share.compiled
    bare = ModelSpec(name="m", summary="x", config=nowhere, build=nowhere)
    monkeypatch.setattr(flops, "choose", lambda *_: SimpleNamespace(spec=bare, entry="'m'"))
    with pytest.raises(JobError, match="^model: 'm' has no cost description"):
        tuning_flops(job, ToyPeftConfig(), 4, Registry.of(toy))


def test_numbers_in_names_sort_as_numbers() -> None:
    names = ["layers.10", "layers.9", "layers.9.x", "head", "layers.2"]
    assert sorted(names, key=tuning._by_number) == ["head", "layers.2", "layers.9", "layers.9.x", "layers.10"]


def test_embeddings_come_before_blocks_whatever_their_names() -> None:
    words = replace(BLOCK, name="words", names=("words",), is_block=False)
    stage = StageCost(
        (words, replace(BLOCK, names=("layers.0",)), replace(BLOCK, name="head", names=("a",), is_block=False))
    )
    found = tuned([stage], trains("layers.0.q.weight"), SHARE)[0].blocks
    assert [block.name for block in found] == ["words", "layer", "head"]
    assert [sum(op.backward_flops for op in block.ops) > 0 for block in found] == [False, True, True]
