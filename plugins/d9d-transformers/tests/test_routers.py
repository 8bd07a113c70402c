"""Routers are found in stand-in models with several kinds of scores and biases."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from d9d_transformers.routers import RouterFacts, find_routers, scores_of
from torch import Tensor, nn
from torch.nn import functional

EXPERTS, FEATURES, CHOSEN = 4, 6, 2


class Experts(nn.Module):
    """Experts that return the tokens; with their number, or without."""

    def __init__(self, numbered: bool) -> None:
        super().__init__()
        if numbered:
            self.num_experts = EXPERTS
        self.inner = nn.Linear(FEATURES, EXPERTS, bias=False)
        self.scale = nn.Parameter(torch.ones(EXPERTS))

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor, scale: int = 1) -> Tensor:
        return scale * hidden * weights.sum(1, keepdim=True) + 0 * index.sum()


class Block(nn.Module):
    """Block with a router, and with other tensors that look like parts of a router."""

    def __init__(self, scoring: str, *, numbered: bool = True, **given: Any) -> None:
        super().__init__()
        self.scoring, self.chosen, self.given = scoring, given.pop("chosen", CHOSEN), given
        self.register_buffer("steps", torch.zeros(EXPERTS, dtype=torch.int64))
        self.unused = nn.Parameter(torch.zeros(EXPERTS))
        self.norm = nn.LayerNorm(FEATURES)
        self.wider = nn.Linear(FEATURES + 1, EXPERTS + 1, bias=False)
        self.shorter = nn.Linear(FEATURES, EXPERTS - 1, bias=False)
        self.gate = nn.Linear(FEATURES, EXPERTS, bias=given.get("linear_bias", False))
        self.experts = Experts(numbered)
        self.experts.inner.weight = nn.Parameter(self.gate.weight.detach().clone())
        if given.get("selection"):
            self.register_buffer("selection", torch.zeros(1, EXPERTS))

    def forward(self, hidden: Tensor) -> Tensor:
        scores = scores_of(self.gate(hidden), self.scoring)
        index = (scores + self.get_buffer("selection") if self.given.get("selection") else scores).topk(self.chosen)[1]
        weights = scores.gather(1, index)
        if self.given.get("normed"):
            weights = 2.5 * weights / weights.sum(1, keepdim=True)
        if self.given.get("squared"):
            weights = weights**2
        if self.given.get("by_keyword"):
            out: Tensor = self.experts(hidden, weights=weights, index=index)
            return out
        others = (1,) if self.given.get("others") else ()
        result: Tensor = self.experts(hidden, index, weights, *others)
        return result


class Other(Block):
    """Block of another class."""


class Model(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(blocks)
        self.hidden = 3 * torch.randn(24, FEATURES)

    def run(self) -> None:
        hidden = self.hidden
        for block in self.blocks:
            hidden = block(hidden)


def found(*blocks: nn.Module) -> dict[str, RouterFacts]:
    model = Model(*blocks)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        result = dict(find_routers(model, model.run))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())
    return result


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize(
    ("given", "bias"),
    [
        ({}, None),
        ({"normed": True}, None),
        ({"linear_bias": True}, None),
        ({"others": True}, None),
        ({"selection": True}, "selection"),
        ({"selection": True, "numbered": False}, "selection"),
        ({"chosen": 3, "normed": True}, None),
    ],
)
def test_a_router_is_its_matrix_its_function_and_its_selection_bias(
    scoring: str, given: dict[str, Any], bias: str | None
) -> None:
    torch.manual_seed(0)
    assert found(Block(scoring, **given)) == {"Block": RouterFacts("gate", scoring, bias)}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("scoring", "given"),
    [
        ("softmax", {"squared": True}),
        ("softmax", {"chosen": 1}),  # one weight is a multiple of any score
        ("sigmoid", {"by_keyword": True}),  # in another order
    ],
)
def test_a_router_that_computes_otherwise_is_left_out(scoring: str, given: dict[str, Any]) -> None:
    torch.manual_seed(0)
    assert found(Block(scoring, **given)) == {}


def test_a_router_of_two_equal_matrices_is_left_out() -> None:
    torch.manual_seed(0)
    block = Block("softmax")
    block.copy = nn.Linear(FEATURES, EXPERTS, bias=False)
    block.copy.weight = block.gate.weight
    assert found(block) == {}


def test_the_first_block_of_each_class_decides() -> None:
    torch.manual_seed(0)
    blocks = Block("softmax"), Block("sigmoid"), Other("sigmoid", selection=True)
    assert found(*blocks) == {
        "Block": RouterFacts("gate", "softmax", None),
        "Other": RouterFacts("gate", "sigmoid", "selection"),
    }


def test_a_failing_run_leaves_no_hooks() -> None:
    model = Model(Block("softmax"))

    def fail() -> None:
        model.run()
        raise KeyError("run")

    with pytest.raises(KeyError):
        find_routers(model, fail)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_scores_are_a_softmax_over_experts_or_sigmoids() -> None:
    logits = torch.tensor([[0.0, 2.0, -1.0], [1.0, 1.0, 1.0]])
    assert torch.equal(scores_of(logits, "softmax"), functional.softmax(logits, 1))
    assert torch.equal(scores_of(logits, "sigmoid"), 1 / (1 + torch.exp(-logits)))
