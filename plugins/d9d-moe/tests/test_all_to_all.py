"""Tokens between ranks: the messages, their order, and refusals; that it computes the right thing is the suite's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from d9d_core.errors import BuildError
from d9d_core.traits import Dispatcher
from d9d_moe.all_to_all.dispatcher import AllToAllDispatcher
from d9d_moe.dispatch.local import LocalDispatcher
from d9d_moe.experts.grouped_swiglu import GroupedSwiGLU
from d9d_moe.experts.layer import MoELayer
from d9d_moe.router.routing import TopKRouting
from d9d_moe.router.top_k import TopKRouter
from d9d_nn.linear import Linear
from d9d_nn.swiglu import SwiGLU
from d9d_testing.tolerances import assert_close_gradients
from d9d_testing.world import RankFailedError, World
from torch import Tensor, nn
from torch import distributed as dist

HIDDEN, EXPERTS, TOP_K = 16, 8, 3


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- a whole layer ----------------------------------------------------------------------------------------------------


def layer(dispatcher: Dispatcher, capacity: float | None = None) -> MoELayer:
    torch.manual_seed(0)
    return MoELayer(
        TopKRouter(HIDDEN, EXPERTS, TOP_K, std=0.5, capacity=capacity),
        GroupedSwiGLU(HIDDEN, 12, EXPERTS, std=0.3, output_std=0.3),
        dispatcher,
        shared_expert=SwiGLU(HIDDEN, 20, std=0.3, output_std=0.3),
        shared_gate=Linear(HIDDEN, 1, std=0.3),
    )


def outcome(made: MoELayer, rank: int) -> dict[str, Tensor]:
    hidden = normal(2, 9, HIDDEN, seed=rank).requires_grad_()
    out = made(hidden)
    (out * normal(*out.shape, seed=50 + rank)).sum().backward()
    return {"out": out.detach(), "hidden": hidden.grad} | {name: p.grad for name, p in made.named_parameters()}


def spread_outcome(capacity: float | None) -> dict[str, Tensor]:
    """Of a layer of which this rank has its share of the experts."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    made = layer(AllToAllDispatcher(dist.group.WORLD, EXPERTS), capacity)
    local = EXPERTS // ranks
    for name, bank in list(made.experts.named_parameters()):
        setattr(made.experts, name, nn.Parameter(bank.detach()[rank * local : (rank + 1) * local].clone()))
    return outcome(made, rank)


@pytest.mark.thorough
@pytest.mark.parametrize("capacity", [None, 1.0], ids=["variable", "static"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_layer_spread_over_ranks_is_the_layer_of_one(world: type[World], ranks: int, capacity: float | None) -> None:
    found = world(ranks).run(spread_outcome, capacity)
    check_against_one_process(found, capacity)


def check_against_one_process(found: list[dict[str, Tensor]], capacity: float | None) -> None:
    made = layer(LocalDispatcher(), capacity)
    expected = [outcome(made, rank) for rank in range(len(found))]  # gradients of parameters add up
    for rank, mine in enumerate(found):
        names = [name for name in mine if name in ("out", "hidden")]
        assert_close_gradients({n: mine[n] for n in names}, {n: expected[rank][n] for n in names})
    for name in [name for name in found[0] if name not in ("out", "hidden")]:
        parts = [mine[name] for mine in found]
        whole = torch.cat(parts) if name.startswith("experts.") else torch.stack(parts).sum(0)
        assert_close_gradients({name: whole}, {name: expected[-1][name]})


def compiled() -> list[dict[str, Tensor]]:
    """The way there and back, as it is and compiled."""
    dispatcher = AllToAllDispatcher(dist.group.WORLD, 4)

    def there_and_back(tokens: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        sent = dispatcher.dispatch(tokens, TopKRouting.of(indices, weights, 4)).wait()
        return dispatcher.combine(sent.tokens.sin(), sent.handle).wait()

    found, count = [], 5 + dist.get_rank()
    for function in (there_and_back, torch.compile(there_and_back, backend="aot_eager")):
        tokens, weights = normal(count, HIDDEN).requires_grad_(), normal(count, 2, seed=1).requires_grad_()
        indices = torch.randint(4, (count, 2), generator=torch.Generator().manual_seed(count))
        out = function(tokens, weights, indices)
        (out * normal(count, HIDDEN, seed=2)).sum().backward()
        found.append({"out": out.detach(), "tokens": tokens.grad, "weights": weights.grad})
    return found


@pytest.mark.full
@pytest.mark.filterwarnings("default:.*should not be instantiated:DeprecationWarning")  # Dynamo's own, in torch 2.11
def test_compiled_it_computes_the_same(world: type[World]) -> None:
    for plain, traced_once in world(2).run(compiled):
        assert_close_gradients(traced_once, plain)


# --- what travels, and when -------------------------------------------------------------------------------------------


def traced(limit: int | None, meanwhile: bool) -> list[str]:
    """What rank 0 does, in order, in a forward and a backward with 4 tokens, of which 3 stay on rank 0."""
    log: list[str] = []
    send = dist.all_to_all_single

    class Traced:
        def __init__(self, what: str, work: Any) -> None:
            self.what, self.work = what, work

        def wait(self) -> None:
            log.append(f"await {self.what}")
            self.work.wait()

    def tracing(out: Tensor, rows: Tensor, *args: Any, **kwargs: Any) -> Traced:
        what = f"{len(rows)} x {rows.shape[1]}"
        log.append(f"send {what}")
        return Traced(what, send(out, rows, *args, **kwargs))

    class Meanwhile(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            log.append("meanwhile")
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            log.append("meanwhile")
            return grad

    dist.all_to_all_single = tracing
    try:
        tokens, weights = normal(4, HIDDEN).requires_grad_(), normal(4, 3).requires_grad_()
        indices = torch.tensor([[0, 1, 0], [1, 1, 0], [0, 1, 2], [3, 2, 3]])
        dispatcher = AllToAllDispatcher(dist.group.WORLD, 4)
        sending = dispatcher.dispatch(tokens, TopKRouting.of(indices, weights, 4, limit))
        beside = Meanwhile.apply(tokens) if meanwhile else 0
        sent = sending.wait()
        log.append("experts")
        out = dispatcher.combine(sent.tokens * 1.0, sent.handle).wait() + beside
        log.append("backward")
        out.sum().backward()
    finally:
        dist.all_to_all_single = send
    return log


def test_a_token_travels_once_to_each_rank_and_overlaps_with_what_is_computed_meanwhile(world: type[World]) -> None:
    log = world(2).run(traced, None, meanwhile=True)[0]
    rows, labels = f"5 x {HIDDEN}", "5 x 6"  # tokens 0, 1, 2 to rank 0; 2, 3 to rank 1; both ranks route alike
    back, label_grads = f"6 x {HIDDEN}", "6 x 3"  # 3 tokens of either rank come to rank 0
    assert log == [
        "send 2 x 3",  # tokens for the rank, and rows of both of its experts
        "await 2 x 3",
        "meanwhile",
        f"send {rows}",
        f"send {labels}",
        f"await {rows}",
        f"await {labels}",
        "experts",
        f"send {back}",
        f"await {back}",
        "backward",
        f"send {rows}",
        f"await {rows}",
        f"send {back}",
        f"send {label_grads}",
        "meanwhile",
        f"await {back}",
        f"await {label_grads}",
    ]


def test_with_a_limit_tokens_leave_before_what_is_computed_meanwhile(world: type[World]) -> None:
    log = world(2).run(traced, 100, meanwhile=True)[0]
    rows = f"8 x {HIDDEN}"  # 4 for each rank, some of them padding
    assert log[0] == "send 2 x 5"  # tokens, choices and limit of the ranks, and rows of both experts
    assert log[2:7] == [f"send {rows}", "send 8 x 6", "meanwhile", f"await {rows}", "await 8 x 6"]


# --- refusals -------------------------------------------------------------------------------------------------------


def unequal() -> None:
    tokens = dist.get_rank() + 1
    routing = TopKRouting.of(torch.zeros(tokens, 1, dtype=torch.int64), torch.ones(tokens, 1), 4, limit=2)
    AllToAllDispatcher(dist.group.WORLD, 4).dispatch(torch.zeros(tokens, HIDDEN), routing)


def test_unequal_ranks_are_an_error_with_a_limit_and_no_hang(world: type[World]) -> None:
    with pytest.raises(RankFailedError, match="all ranks must route equally many tokens") as caught:
        world(2).run(unequal)
    assert caught.value.reports.keys() == {0, 1}


def refusals() -> list[str]:
    texts = []
    for experts, routed in ((5, 5), (4, 6)):
        try:
            dispatcher = AllToAllDispatcher(dist.group.WORLD, experts)
            dispatcher.dispatch(
                torch.zeros(1, HIDDEN), TopKRouting.of(torch.zeros(1, 1).long(), torch.zeros(1, 1), routed)
            )
        except (BuildError, ValueError) as error:
            texts.append(str(error))
    return texts


def test_numbers_of_experts_that_do_not_fit_are_refused(world: type[World]) -> None:
    for texts in world(2).run(refusals):
        assert "5 experts cannot be divided equally over 2 ranks" in texts[0]
        assert "built for 4 experts, but the routing has 6" in texts[1]
