"""Expert modules of stand-in models are replaced if they compute SwiGLU, and replaced ones route as they are told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_core.kernel import OpSlot
from d9d_moe.dispatch.local import LocalDispatcher
from d9d_moe.router.routing import TopKRouting
from d9d_transformers.experts import RoutedExperts, replace_experts
from torch import Tensor, nn
from torch.nn import functional

EXPERTS, HIDDEN, INSIDE = 7, 10, 6


class Experts(nn.Module):
    """Experts in the layout of transformers."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        gate_up = shapes.pop("gate_up", (EXPERTS, 2 * INSIDE, HIDDEN))
        self.gate_up_proj = nn.Parameter(torch.empty(gate_up, device="meta"))
        self.down_proj = nn.Parameter(torch.empty(shapes.pop("down", (EXPERTS, HIDDEN, INSIDE)), device="meta"))
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, device="meta")))
        self.num_experts, self.config = EXPERTS, SimpleNamespace(_experts_implementation="grouped")
        self.calls: list[int] = []

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        assert self.config._experts_implementation == "eager"
        self.calls.append(self.num_experts)
        out = torch.zeros_like(hidden)
        for token in range(len(hidden)):
            for expert, weight in zip(index[token].tolist(), weights[token], strict=True):
                assert 0 <= expert < self.num_experts
                gate, up = functional.linear(hidden[token], self.gate_up_proj[expert]).chunk(2)
                out[token] += weight * functional.linear(self.act(gate) * up, self.down_proj[expert])
        return out

    def act(self, gate: Tensor) -> Tensor:
        return functional.silu(gate)


class Gelu(Experts):
    """Experts with another activation."""

    def act(self, gate: Tensor) -> Tensor:
        return functional.gelu(gate)


class Broken(Experts):
    """Experts that need more attributes."""

    def act(self, gate: Tensor) -> Tensor:
        return gate * self.limit  # type: ignore[operator]


def test_expert_modules_that_compute_swiglu_are_replaced_by_banks_of_their_sizes() -> None:
    base = nn.ModuleDict({
        "first": nn.ModuleDict({"experts": Experts()}), "gelu": Gelu(), "second": Experts(), "broken": Broken(),
        "biased": Experts(gate_up_proj_bias=(EXPERTS, 2 * INSIDE)), "linear": nn.Linear(2, 2),
        "flat": Experts(down=(HIDDEN, INSIDE)), "joined": Experts(gate_up=(EXPERTS, INSIDE, HIDDEN)),
    })  # fmt: skip
    first, second = base["first"]["experts"], base["second"]  # type: ignore[index]
    kept = {name: base[name] for name in ("gelu", "broken", "biased", "linear", "flat", "joined")}
    assert replace_experts(base, 0.5) == ["first.experts", "second"]
    assert {name: base[name] for name in kept} == kept
    for path in ("first.experts", "second"):
        ours = base.get_submodule(path)
        assert isinstance(ours, RoutedExperts)
        assert ours.num_experts == EXPERTS
        assert {name: tuple(bank.shape) for name, bank in ours.bank.banks().items()} == {
            "gate_proj": (EXPERTS, HIDDEN, INSIDE), "up_proj": (EXPERTS, HIDDEN, INSIDE),
            "down_proj": (EXPERTS, INSIDE, HIDDEN),
        }  # fmt: skip
    assert (len(first.calls), len(second.calls)) == (1, 0)  # one module of each class is tried
    assert first.num_experts == EXPERTS
    assert first.config._experts_implementation == "grouped"
    assert first.gate_up_proj.is_meta


@pytest.mark.parametrize("std", [0.5, 2.0])
def test_all_projections_start_with_the_standard_deviation_of_the_model(std: float) -> None:
    torch.manual_seed(0)
    experts = RoutedExperts(40, 30, 4, std=std)
    experts.bank.reset_parameters()
    for bank in experts.bank.banks().values():
        assert bank.std().item() == pytest.approx(std, rel=0.05)


def test_a_token_leaves_the_numbers_of_other_experts_unused() -> None:
    experts = RoutedExperts(5, 4, 7, std=1.0)
    assert experts.unused_numbers() == 3 * 5 * 4 * 6
    experts.chosen = 3
    assert experts.unused_numbers() == 3 * 5 * 4 * 4
    assert dict(experts.expert_banks()) == {"bank": experts.bank}


class Recorder(LocalDispatcher):
    """Dispatcher that records its routings, with a slot of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[TopKRouting] = []
        self.outside: list[Any] = []
        self.slot = OpSlot("permute", torch.clone)

    def op_slots(self) -> dict[str, OpSlot]:
        return {"permute": self.slot}

    def dispatch(self, tokens: Tensor, routing: Any) -> Any:
        self.seen.append(routing)
        return super().dispatch(tokens, routing)


def mixed(experts: RoutedExperts, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    gate, up, down = experts.bank.banks().values()
    out = torch.zeros_like(hidden)
    for token, choice in enumerate(index.tolist()):
        for slot, expert in enumerate(choice):
            inside = functional.silu(hidden[token] @ gate[expert]) * (hidden[token] @ up[expert])
            out[token] += weights[token, slot] * (inside @ down[expert])
    return out


@pytest.mark.parametrize(
    ("given", "wide"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_experts_mix_the_outputs_of_the_chosen_experts(given: torch.dtype, wide: torch.dtype) -> None:
    torch.manual_seed(0)
    experts = RoutedExperts(5, 4, 3, std=1.0)
    experts.bank.reset_parameters()
    experts.dispatcher = dispatcher = Recorder()
    hidden, index = torch.randn(6, 5), torch.tensor([[0, 1], [2, 0], [1, 2], [1, 0], [0, 2], [2, 1]])
    weights = torch.rand(6, 2).to(given)
    out = experts(hidden, index, weights)
    torch.testing.assert_close(out, mixed(experts, hidden, index, weights.float()), check_dtype=False)
    (routing,) = dispatcher.seen
    assert (routing.weights.dtype, routing.counts.tolist()) == (wide, [4, 4, 4])
    assert experts.chosen == 1  # only an examination sets it
    assert dict(experts.op_slots()) == {"dispatcher.permute": dispatcher.slot}


def test_a_dispatcher_may_run_the_experts_outside_of_a_graph_and_a_balance_changes_weights() -> None:
    torch.manual_seed(0)
    experts = RoutedExperts(5, 4, 3, std=1.0)
    experts.bank.reset_parameters()
    experts.dispatcher = dispatcher = Recorder()
    hidden, index, weights = torch.randn(2, 5), torch.tensor([[0, 1], [2, 0]]), torch.rand(2, 2)

    def outside(function: Any, tokens: Tensor, routing: TopKRouting) -> Any:
        dispatcher.outside.append((tokens, routing))
        return 2 * function(tokens, routing)

    def doubled(tokens: Tensor, choices: Tensor, factors: Tensor) -> Tensor:
        assert tokens is hidden
        assert choices is index
        return 3 * factors

    dispatcher.outside_graph = outside  # type: ignore[attr-defined]
    experts.balance = doubled  # type: ignore[assignment]
    torch.testing.assert_close(experts(hidden, index, weights), 6 * mixed(experts, hidden, index, weights))
    assert dispatcher.outside == [(hidden, dispatcher.seen[0])]


def test_an_examination_on_the_meta_device_notes_the_number_of_chosen_experts() -> None:
    experts = RoutedExperts(5, 4, 7, std=1.0).to("meta")
    given = torch.empty(6, 5, device="meta"), torch.empty(6, 3, dtype=torch.int64, device="meta")
    weights = torch.empty(6, 3, device="meta")

    def outside(*_: Any) -> str:
        return "computed"

    experts.dispatcher.outside_graph = outside  # type: ignore[attr-defined]
    assert experts(*given, weights) == "computed"
    assert experts.chosen == 1
    with torch.no_grad():
        out = experts(*given, weights)
    assert (experts.chosen, out.shape, out.is_meta) == (3, (6, 5), True)
    alone = RoutedExperts(5, 4, 7, std=1.0)
    with torch.no_grad():
        alone(torch.zeros(1, 5), torch.tensor([[0, 1]]), torch.ones(1, 2))
    assert alone.chosen == 1
