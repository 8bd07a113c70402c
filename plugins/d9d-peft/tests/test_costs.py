"""Costs of fine-tuning methods, computed by hand for 7 rows in bfloat16 and small weights whose sizes all differ."""

from __future__ import annotations

from typing import Any

import pytest
from d9d_core.cost import AdapterCost, Share, Weight, WeightKind
from d9d_peft import costs
from d9d_peft.config import DoraConfig, FullTuneConfig, LoraConfig, StackConfig
from d9d_peft.ia3.config import Ia3Config

ROWS = 7.0
PLAIN, COMPILED = Share(1, 7, width=2), Share(1, 7, width=2, compiled=True)
NOTHING = AdapterCost()


def weight(kind: WeightKind = "linear", shape: tuple[int, ...] = (5, 3)) -> Weight:
    return Weight("any", shape, kind)


def of_lora(kind: WeightKind, shape: tuple[int, ...], share: Share = PLAIN, **fields: Any) -> AdapterCost:
    config = LoraConfig(r=2, targets=("q_proj", "experts.up"), **fields)
    name = "experts.up" if kind == "bank" else "block.q_proj.weight"
    return costs.lora(config, name, weight(kind, shape), ROWS, share)


def test_an_update_is_two_small_products_and_passes_over_inputs_and_outputs() -> None:
    # A rank of 2 with 3 features in and 5 out: 16 numbers. A row is 2 bytes for each of 7 rows: 14 bytes a feature.
    assert of_lora("linear", (5, 3)) == AdapterCost(
        parameters=16, flops=224, backward_flops=448, traffic=14 * (3 + 6 * 5), backward_traffic=14 * (5 * 3 + 4 * 5),
        kept=14 * 2,
    )  # fmt: skip
    compiled = of_lora("linear", (5, 3), COMPILED)
    assert (compiled.traffic, compiled.backward_traffic) == (14 * (3 + 4 * 5), 14 * (3 * 3 + 4 * 5))
    # The inputs that are left, in bfloat16, and a mask of bytes.
    dropping = of_lora("linear", (5, 3), dropout=0.5)
    assert (dropping.kept, dropping.traffic, dropping.backward_traffic) == (28 + 63, 462 + 126, 490 + 63)


def test_a_pattern_gives_the_rank_and_modules_to_save_are_trained() -> None:
    patterns = {"rank_pattern": {"block.*": 3, "q_proj": 9}}
    assert of_lora("linear", (5, 3), **patterns).parameters == 24
    assert of_lora("bank", (4, 3, 5), rank_pattern={"experts.up": 3}).parameters == 4 * 24
    dora = DoraConfig(r=2, **patterns, modules_to_save=("norm",))
    assert costs.dora(dora, "block.q_proj.weight", weight(), ROWS, PLAIN).parameters == 24 + 5
    saved = LoraConfig(targets=("q_proj",), modules_to_save=("heads.*", "norm"))
    for method in (saved, dora):
        kind: Any = costs.lora if method is saved else costs.dora
        assert kind(method, "norm.weight", weight("other", (5,)), ROWS, PLAIN) == AdapterCost(trains=True)
        assert kind(method, "k_norm.weight", weight("other", (5,)), ROWS, PLAIN) == NOTHING
    assert costs.lora(saved, "heads.lm.weight", weight("head"), ROWS, PLAIN).trains


def test_updates_of_banks_embeddings_and_heads_differ() -> None:
    # A bank has [experts, in, out]; all others have [out, in].
    assert of_lora("bank", (4, 3, 5)) == AdapterCost(
        parameters=4 * 16, flops=224, backward_flops=448, traffic=462, backward_traffic=490, kept=28
    )
    looked_up = AdapterCost(
        parameters=28, traffic=14 * (3 + 6 * 11), backward_traffic=14 * (5 * 3 + 4 * 11), kept=28
    )  # fmt: skip
    assert of_lora("embedding", (11, 3)) == looked_up
    head = of_lora("head", (11, 3))
    assert (head.flops, head.backward_flops) == (2 * 7 * 28, 2 * 2 * 7 * 28 + 2 * 7 * 33)
    assert (head.parameters, head.traffic) == (28, looked_up.traffic)


@pytest.mark.parametrize(
    ("kind", "name", "fields", "wanted"),
    [
        ("linear", "block.q_proj.weight", {}, True),
        ("head", "block.q_proj.weight", {}, False),
        ("linear", "block.q_proj.weight", {"targets": "k_proj"}, False),
        ("linear", "block.q_proj.weight", {"targets": "block.*"}, True),
        ("linear", "block.q_proj.weight", {"exclude": "q_proj"}, False),
        ("bank", "experts.up_proj", {"targets": "up_proj"}, True),
        ("bank", "experts.up_proj", {}, False),
        ("other", "q_proj.weight", {"targets": "q_proj"}, False),
    ],
)
def test_targets_are_chosen_by_kind_and_layer(
    kind: WeightKind, name: str, fields: dict[str, Any], wanted: bool
) -> None:
    shape = (4, 3, 5) if kind == "bank" else (5, 3)
    assert (costs.lora(LoraConfig(**fields), name, weight(kind, shape), ROWS, PLAIN) != NOTHING) == wanted


def test_magnitudes_take_the_norms_of_the_weights_rows_and_a_product() -> None:
    config = DoraConfig(r=2)
    assert costs.dora(config, "q_proj.weight", weight(), ROWS, PLAIN) == AdapterCost(
        parameters=16 + 5, flops=224 + 2 * 5 * 3 * 2, backward_flops=448, traffic=462 + 2 * 2 * 15 + 2 * 70,
        backward_traffic=490 + 4 * 70, kept=28 + 70,
    )  # fmt: skip
    for kind, name in (("head", "q_proj.weight"), ("linear", "k_proj.weight")):
        excluding = DoraConfig(targets=("all-linear", "q_proj"), exclude=("k_proj",))
        assert costs.dora(excluding, name, weight(kind), ROWS, PLAIN) == NOTHING  # type: ignore[arg-type]


def test_scales_are_of_outputs_or_of_the_inputs_of_feed_forward_layers() -> None:
    config = Ia3Config()
    assert costs.ia3(config, "a.k_proj.weight", weight(), ROWS, PLAIN) == AdapterCost(
        parameters=5, traffic=140, backward_traffic=350, kept=70
    )
    assert costs.ia3(config, "a.down_proj.weight", weight(), ROWS, PLAIN) == AdapterCost(
        parameters=3, traffic=84, backward_traffic=210, kept=42
    )
    assert costs.ia3(config, "a.q_proj.weight", weight(), ROWS, PLAIN) == NOTHING
    assert costs.ia3(config, "a.k_proj.weight", weight("head"), ROWS, PLAIN) == NOTHING


@pytest.mark.parametrize(
    ("match", "trains"),
    [("norm", True), ("norm.weight", False), ("block.norm.weight", True), ("block", True), ("nor", False)],
)
def test_weights_of_matching_modules_are_trained(match: str, trains: bool) -> None:
    config = FullTuneConfig(match=match)
    assert costs.full_tune(config, "block.norm.weight", weight("other", (5,)), ROWS, PLAIN) == AdapterCost(trains)


def test_a_stack_costs_all_of_its_methods() -> None:
    config = StackConfig(methods=(LoraConfig(r=2), FullTuneConfig(match="q_proj")))

    def inner(method: Any, *given: Any) -> AdapterCost:
        return (costs.lora if isinstance(method, LoraConfig) else costs.full_tune)(method, *given)

    found = costs.stack(config, "q_proj.weight", weight(), ROWS, PLAIN, inner)
    assert (found.trains, found.parameters, found.traffic) == (True, 16, 462)
