"""Parts of the fine-tuning methods that need no training: configs, selections and the order of a stack."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from d9d_core.errors import BuildError
from d9d_peft.config import DoraConfig, FullTuneConfig, LoraConfig, StackConfig
from d9d_peft.full_tune import FullTune
from d9d_peft.ia3.config import Ia3Config
from d9d_peft.lora.linear import Down, Up
from d9d_peft.stack import Stack, _layer
from d9d_weights.graph.mappers import Identity
from pydantic import ValidationError
from torch import nn


def model() -> nn.ModuleDict:
    made = nn.ModuleDict({"a": nn.Linear(2, 3), "norm": nn.LayerNorm(3), "act": nn.Tanh()})
    made["deep"] = nn.Sequential(nn.Linear(3, 3, bias=False))
    return made


@pytest.mark.parametrize(
    ("match", "trained"),
    [
        ("norm", {"norm.weight", "norm.bias"}),
        ("deep", {"deep.0.weight"}),
        ("*.weight", {"a.weight", "norm.weight", "deep.0.weight"}),
        ("a.bias", {"a.bias"}),
    ],
)
def test_full_tuning_trains_matching_modules_and_parameters(match: str, trained: set[str]) -> None:
    method, whole = FullTune(FullTuneConfig(match=(match,))), model()
    assert method.inject(whole) == trained
    assert type(method.merger(())) is Identity
    method.merge(whole)
    assert len(list(whole.parameters())) == 5


def test_full_tuning_of_modules_without_parameters_is_refused() -> None:
    with pytest.raises(BuildError, match=r"^peft.match: act have no parameters, so nothing would be trained; "):
        FullTune(FullTuneConfig(match=("act",))).inject(model())


@pytest.mark.parametrize("kind", [LoraConfig, DoraConfig])
def test_defaults_and_limits_of_low_rank_updates(kind: Any) -> None:
    config = kind()
    assert (config.targets, config.exclude, config.r, config.alpha) == (("all-linear",), (), 16, 32.0)
    assert (config.rs_lora, config.dropout, config.init_from, config.scale_of("x")) == (False, 0.0, None, 2.0)
    assert kind(r=1, alpha=0.5).scale_of("x") == 0.5
    assert kind(r=4, alpha=8.0, rs_lora=True).scale_of("x") == 4.0
    assert kind(targets="q_proj", exclude="k_proj").targets == ("q_proj",)
    for wrong in ({"r": 0}, {"alpha": 0}, {"dropout": 1}, {"dropout": -0.1}, {"targets": ()}):
        with pytest.raises(ValidationError):
            kind(**wrong)


def test_what_selects_nothing_is_refused() -> None:
    with pytest.raises(ValidationError, match="match is empty; name layers"):
        FullTuneConfig(match=())
    with pytest.raises(ValidationError, match="targets and feedforward are empty"):
        Ia3Config(targets=(), feedforward=())
    assert Ia3Config(targets=(), feedforward="down").feedforward == ("down",)
    assert Ia3Config(targets="k", feedforward=()).targets == ("k",)
    config = Ia3Config()
    assert (config.targets, config.feedforward, config.init_from) == (("k_proj", "v_proj"), ("down_proj",), None)


def test_a_stack_has_two_methods_and_none_that_starts_from_files() -> None:
    two = (LoraConfig(), FullTuneConfig(match="norm"))
    assert len(StackConfig(methods=two).methods) == 2
    with pytest.raises(ValidationError, match="methods has fewer than two"):
        StackConfig(methods=two[:1])
    with pytest.raises(ValidationError, match=r"methods\[1\].init_from: a stack cannot start from adapter files"):
        StackConfig(methods=(two[1], LoraConfig(init_from="adapter")))


class Method:
    """Stand-in of a method that adds a parameter to a layer, and notes its calls."""

    def __init__(self, name: str, layer: str, said: list[str]) -> None:
        self.name, self.layer, self.said = name, layer, said

    def inject(self, stage: nn.Module) -> frozenset[str]:
        if self.layer == "none":
            raise BuildError("peft.targets: nothing matches")
        stage.get_submodule(self.layer).register_parameter(self.name, nn.Parameter())
        return frozenset({f"{self.layer}.{self.name}"})

    def start(self, _stage: nn.Module) -> None:
        self.said.append(f"start {self.name}")

    def merge(self, _stage: nn.Module) -> None:
        self.said.append(f"merge {self.name}")

    @contextmanager
    def off(self, _stage: nn.Module) -> Iterator[None]:
        self.said.append(f"off {self.name}")
        yield
        self.said.append(f"on {self.name}")


class Plain:
    """Stand-in of a method with no more than the required functions."""

    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self.said = name, said

    def inject(self, _stage: nn.Module) -> frozenset[str]:
        return frozenset()

    def merge(self, _stage: nn.Module) -> None:
        self.said.append(f"merge {self.name}")


def stack(*methods: Any) -> Stack:
    left = iter(methods)
    config = StackConfig.model_construct(methods=tuple(LoraConfig() for _ in methods))
    return Stack(config, lambda _config: next(left))


def test_a_stack_starts_and_switches_off_in_order_and_merges_backwards() -> None:
    said: list[str] = []
    both = stack(Method("x", "a", said), Method("y", "norm", said))
    whole = model()
    assert both.inject(whole) == {"a.x", "norm.y"}
    both.start(whole)
    with both.off(whole):
        said.append("inside")
    both.merge(whole)
    assert said == ["start x", "start y", "off x", "off y", "inside", "on y", "on x", "merge y", "merge x"]
    assert not hasattr(both, "merger")


def test_a_stack_switches_off_only_if_all_its_methods_do() -> None:
    said: list[str] = []
    mixed = stack(Method("x", "a", said), Plain("p", said))
    assert not hasattr(mixed, "off")
    mixed.start(model())
    mixed.merge(model())
    assert said == ["start x", "merge p", "merge x"]


def test_two_methods_on_one_layer_and_a_failing_method_are_named() -> None:
    said: list[str] = []
    with pytest.raises(BuildError, match=r"peft.methods\[1\]: it adds to 'a', as does methods\[0\]; exclude"):
        stack(Method("x", "a", said), Method("y", "a", said)).inject(model())
    with pytest.raises(BuildError, match=r"^peft.methods\[1\].targets: nothing matches$"):
        stack(Method("x", "a", said), Method("y", "none", said)).inject(model())


def test_an_added_parameter_belongs_to_the_module_around_it_but_not_to_a_container() -> None:
    modules = {"a": nn.Linear(1, 1), "a.inner": nn.Module(), "a.terms": nn.ModuleDict()}
    found = {name: _layer(name, modules) for name in ("x", "a.x", "a.inner.x", "a.terms.bank.down", "b.c.x")}
    assert found == {"x": "", "a.x": "a", "a.inner.x": "a.inner", "a.terms.bank.down": "a.terms.bank", "b.c.x": ""}


def test_the_first_factor_is_drawn_like_a_linear_layer_and_the_second_one_is_zero() -> None:
    first, second = Down(400, 32, std=0.02), Up(32, 400, std=0.02)
    for factor in (first, second):
        factor.reset_parameters()
    assert 0.99 / 20 < first.weight.abs().max().item() <= 1 / 20  # U(-1/sqrt(400), 1/sqrt(400))
    assert not second.weight.any()
