"""Matrices of modules that do not defer their weights: which count, which are late, and in which units they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from d9d_core.deferral import Deferral
from d9d_pipeline.runtime import foreign_weights
from d9d_pipeline.runtime.foreign_weights import ForeignWeights
from d9d_testing.toy.deferring import Deferring
from torch import nn


@pytest.mark.parametrize(("features", "worthwhile"), [(15, False), (16, True)])
def test_foreign_matrices_are_deferred_from_a_sixteenth_of_all_matrices_on(features: int, worthwhile: bool) -> None:
    # Of 225 elements that are deferred anyway, 15 are a sixteenth of all, and 16 are more.
    stage = nn.ModuleDict({"own": Deferring(15), "foreign": nn.Linear(features, 1), "norm": nn.LayerNorm(99)})
    assert ForeignWeights(stage, Deferral(), ()).worthwhile == worthwhile


def test_only_trained_matrices_outside_of_embeddings_and_whole_modules_are_late() -> None:
    stage = nn.ModuleDict({
        "linear": nn.Linear(3, 2), "frozen": nn.Linear(3, 2).requires_grad_(False), "embedding": nn.Embedding(4, 3),
        "own": Deferring(3), "whole": nn.Sequential(nn.Linear(3, 2)),
    })  # fmt: skip
    deferral = Deferral()
    found = ForeignWeights(stage, deferral, ["whole"])
    late = [name for name, parameter in stage.named_parameters() if found.is_late(parameter)]
    assert late == ["linear.weight"]
    assert stage["own"].deferral is deferral
    assert not found.is_late(torch.zeros(2, 3))
    found.at_once([stage["linear"].weight])
    assert not found.is_late(stage["linear"].weight)
    assert not found.worthwhile


class Unit(nn.Module):
    """Stand-in of a unit of FSDP2 that notes its calls."""

    def __init__(self, name: str, said: list[Any], *layers: nn.Module) -> None:
        super().__init__()
        self.name, self.said, self.layers = name, said, nn.ModuleList(layers)

    def set_reshard_after_backward(self, reshards: bool, recurse: bool) -> None:
        self.said.append((self.name, reshards, recurse))

    def unshard(self) -> None:
        self.said.append((self.name, "gather"))

    def reshard(self) -> None:
        self.said.append((self.name, "free"))


def test_units_of_foreign_matrices_stay_gathered_in_the_weight_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_weights, "FSDPModule", Unit)
    said: list[Any] = []
    inner = Unit("inner", said, nn.Linear(2, 2))
    stage = Unit("outer", said, inner, nn.Linear(2, 2), Unit("without any", said, Deferring(2)))
    found = ForeignWeights(stage, Deferral(), ())
    with found.unsharded():
        said.append("inside")
    assert said == [
        ("inner", False, False), ("inner", "gather"), ("outer", False, False), ("outer", "gather"), "inside",
        ("inner", True, False), ("inner", "free"), ("outer", True, False), ("outer", "free"),
    ]  # fmt: skip


def test_a_tensor_that_a_unit_has_in_the_place_of_a_parameter_is_late_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_weights, "FSDPModule", Unit)
    layer = nn.Linear(2, 2)
    stage = Unit("unit", [], layer)
    found, sharded = ForeignWeights(stage, Deferral(), ()), layer.weight
    whole = layer.weight = nn.Parameter(torch.ones(2, 2))
    assert not found.is_late(whole)
    layer(torch.ones(1, 2))
    assert found.is_late(whole)
    assert found.is_late(sharded)
    found.at_once([whole])
    assert not found.is_late(whole)
    assert not found.is_late(sharded)
