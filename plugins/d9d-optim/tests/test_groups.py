from __future__ import annotations

from typing import Any

import pytest
import torch
from d9d_core.errors import BuildError
from d9d_optim.optimizer.adamw import AdamW
from d9d_optim.optimizer.config import AdamWConfig, GroupRule, SGDConfig
from d9d_optim.optimizer.groups import group_parameters
from pydantic import ValidationError
from torch import nn

NAMES = {"model.embed_tokens.weight": 2, "model.layers.0.mlp.up.weight": 2, "model.layers.0.norm.weight": 1}


def parameters(frozen: tuple[str, ...] = ()) -> dict[str, nn.Parameter]:
    return {
        name: nn.Parameter(torch.zeros((2,) * ndim), requires_grad=name not in frozen) for name, ndim in NAMES.items()
    }


def config(*rules: GroupRule) -> AdamWConfig:
    return AdamWConfig(lr=0.1, weight_decay=0.3, groups=rules)


def test_only_matrices_decay_by_default() -> None:
    decay, rest = group_parameters(config(), parameters())
    assert (decay.weight_decay, decay.names) == (0.3, ("model.embed_tokens.weight", "model.layers.0.mlp.up.weight"))
    assert (rest.weight_decay, rest.names) == (0.0, ("model.layers.0.norm.weight",))


def test_biases_of_experts_do_not_decay_although_they_have_two_dimensions() -> None:
    named = {name: nn.Parameter(torch.zeros(2, 3)) for name in ("experts.up_proj", "experts.up_bias", "linear.bias")}
    decay, rest = group_parameters(config(), named)
    assert decay.names == ("experts.up_proj",)
    assert rest.names == ("experts.up_bias", "linear.bias")


def test_first_matching_pattern_wins() -> None:
    rules = GroupRule(match="*.embed_tokens.*", weight_decay=0.0), GroupRule(match="*", lr_scale=0.5)
    embed, decay, rest = group_parameters(config(*rules), parameters())
    assert (embed.weight_decay, embed.lr_scale, embed.names) == (0.0, 1.0, ("model.embed_tokens.weight",))
    assert (decay.weight_decay, decay.lr_scale, decay.names) == (0.3, 0.5, ("model.layers.0.mlp.up.weight",))
    assert (rest.weight_decay, rest.lr_scale) == (0.0, 0.5)


def test_weight_decay_of_a_rule_holds_for_vectors_too() -> None:
    groups = group_parameters(config(GroupRule(match="*norm*", weight_decay=0.7)), parameters())
    assert {group.weight_decay for group in groups if "model.layers.0.norm.weight" in group.names} == {0.7}


def test_pattern_without_a_match_names_near_parameters() -> None:
    with pytest.raises(BuildError, match=r"groups\[0\]: .*'model\.embed_token\.weight'.*model\.embed_tokens\.weight"):
        group_parameters(config(GroupRule(match="model.embed_token.weight", lr_scale=2)), parameters())


def test_pattern_far_from_everything_still_shows_names() -> None:
    named = {name: nn.Parameter(torch.zeros(1)) for name in "abcd"}
    with pytest.raises(BuildError, match=r"similar names: a, b, c \(\*"):
        group_parameters(config(GroupRule(match="zzz", lr_scale=2)), named)


def test_pattern_shadowed_by_earlier_groups_is_an_error() -> None:
    rules = GroupRule(match="*weight", lr_scale=2), GroupRule(match="*norm*", lr_scale=3)
    with pytest.raises(BuildError, match=r"groups\[1\].*earlier groups.*groups\[0\].*move this group"):
        group_parameters(config(*rules), parameters())


def test_pattern_that_matches_only_frozen_parameters_is_an_error() -> None:
    with pytest.raises(BuildError, match="only frozen"):
        group_parameters(config(GroupRule(match="*embed*", lr_scale=2)), parameters(("model.embed_tokens.weight",)))


def test_nothing_to_train_is_an_error() -> None:
    with pytest.raises(BuildError, match="none of the model's 3 parameters is trainable"):
        group_parameters(config(), parameters(tuple(NAMES)))


def test_description_names_groups_rates_and_parameters() -> None:
    described = AdamW(config(GroupRule(match="*embed*", lr_scale=0.5)), parameters()).describe()
    assert list(described) == ["decay", "no decay", "groups[0] '*embed*', decay"]
    assert described["groups[0] '*embed*', decay"] == {
        "lr": 0.05,
        "weight_decay": 0.3,
        "parameters": ["model.embed_tokens.weight"],
    }


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"lr": -1.0}, "greater than or equal to 0"),
        ({"lr": float("nan")}, "finite|greater"),
        ({"lr": float("inf")}, "finite"),
        ({"weight_decay": -1.0}, "greater than or equal to 0"),
        ({"weight_decay": float("inf")}, "finite"),
        ({"betas": (0.9, 1.0)}, "not in"),
        ({"groups": [{"match": "*"}]}, "changes nothing"),
        ({"groups": [{"match": "*", "weight_decay": None}]}, "changes nothing"),
        ({"weight_dekay": 1.0}, "did you mean 'weight_decay'"),
    ],
)
def test_impossible_adamw_values_are_refused(values: dict[str, object], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        AdamWConfig.model_validate(values)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"nesterov": True}, "nesterov needs a momentum above 0"),
        ({"dampening": 0.5}, "dampening needs a momentum above 0"),
        ({"nesterov": True, "dampening": 0.5, "momentum": 0.9}, "nesterov is defined only without dampening"),
        ({"nesterov": True, "momentum": 0.9}, None),
        ({"dampening": 0.5, "momentum": 0.9}, None),
    ],
)
def test_nesterov_needs_momentum_without_dampening(fields: dict[str, Any], problem: str | None) -> None:
    if problem is None:
        assert SGDConfig(lr=0.1, **fields).momentum == 0.9
        return
    with pytest.raises(ValidationError, match=problem):
        SGDConfig(lr=0.1, **fields)


def test_groups_are_in_the_order_of_their_rules_and_labelled_by_them() -> None:
    rules = (
        GroupRule(match="*norm*", lr_scale=0.5, weight_decay=0.7),
        GroupRule(match="*embed*", lr_scale=0.0),
    )
    groups = group_parameters(config(*rules), parameters())
    assert [(group.label, group.lr_scale, group.weight_decay, group.names) for group in groups] == [
        ("decay", 1.0, 0.3, ("model.layers.0.mlp.up.weight",)),
        ("groups[0] '*norm*', weight_decay set", 0.5, 0.7, ("model.layers.0.norm.weight",)),
        ("groups[1] '*embed*', decay", 0.0, 0.3, ("model.embed_tokens.weight",)),
    ]


def test_errors_of_rules_name_an_example_and_the_way_out() -> None:
    with pytest.raises(BuildError) as error:
        group_parameters(
            config(GroupRule(match="*weight", lr_scale=2), GroupRule(match="*norm*", lr_scale=3)), parameters()
        )
    assert str(error.value) == (
        "optimizer.groups[1]: the pattern '*norm*' applies to no parameter: earlier groups take all its matches, for "
        "example model.layers.0.norm.weight (groups[0]); move this group before them"
    )
    frozen = ("model.layers.0.norm.weight", "model.embed_tokens.weight")
    with pytest.raises(BuildError) as error:
        group_parameters(config(GroupRule(match="*e[mn]*", lr_scale=2)), parameters(frozen))
    assert str(error.value) == (
        "optimizer.groups[0]: the pattern '*e[mn]*' matches only frozen parameters, for example "
        "model.embed_tokens.weight; remove the group"
    )
