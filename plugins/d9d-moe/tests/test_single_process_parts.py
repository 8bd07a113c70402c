"""Parts of the exchange of experts' rows and of the router, without other ranks and without a GPU."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_core.kernel import OpSlot
from d9d_core.model import ContextShare
from d9d_core.strategy import ContextCall, StepShape
from d9d_core.traits import Dispatched
from d9d_moe.all_to_all import streams
from d9d_moe.all_to_all.separate import SeparateDispatcher
from d9d_moe.all_to_all.streams import HostNumbers, SideStream
from d9d_moe.balancing.balancers import SequenceBalance, ZLoss
from d9d_moe.dispatch.async_exchange import AsyncExchange
from d9d_moe.dispatch.permutation import permute, unpermute
from d9d_moe.router.routing import TopKRouting
from d9d_moe.router.top_k import TopKRouter
from torch import Tensor


class Inner:
    """Stand-in of the dispatcher that sends rows: notes the rows that it sends, and returns rows as they are."""

    group, outside_graph = "experts", True

    def __init__(self) -> None:
        self.permute, self.unpermute = OpSlot("permute", permute), OpSlot("unpermute", unpermute)
        self.sent: list[tuple[Tensor, TopKRouting]] = []
        self.returned: list[Any] = []

    def op_slots(self) -> dict[str, OpSlot]:
        return {"permute": self.permute}

    def dispatch(self, tokens: Tensor, routing: TopKRouting) -> Any:
        self.sent.append((tokens, routing))
        return SimpleNamespace(wait=lambda: Dispatched(tokens, routing.counts, False, "of the inner one"))

    def combine(self, outputs: Tensor, handle: Any) -> Any:
        self.returned.append(handle)
        return SimpleNamespace(wait=lambda: outputs)


def test_each_choice_is_sent_as_a_token_of_one_expert_and_summed_here() -> None:
    inner: Any = Inner()
    dispatcher = SeparateDispatcher(inner)
    assert (dispatcher.group, dispatcher.outside_graph) == ("experts", True)
    assert dispatcher.op_slots() == {"permute": inner.permute}
    tokens = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    weights = torch.tensor([[0.25, 0.75], [0.5, 2.0]])
    counts = torch.tensor([1, 2, 1])
    routing = TopKRouting(torch.tensor([[2, 0], [1, 1]]), weights, torch.zeros(2, 3), counts, 7, incomplete=True)
    sent = dispatcher.dispatch(tokens, routing).wait()
    ((rows, each),) = inner.sent
    assert rows.tolist() == [[1.0, 2.0], [1.0, 2.0], [3.0, 4.0], [3.0, 4.0]]
    assert each.indices.tolist() == [[2], [0], [1], [1]]
    assert each.weights.tolist() == [[1.0]] * 4
    assert (tuple(each.scores.shape), each.limit, each.incomplete) == ((4, 0), 7, True)
    assert each.counts is counts
    outputs = torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0], [4.0, 40.0]])
    total = dispatcher.combine(outputs, sent.handle).wait()
    assert total.tolist() == [[1.75, 17.5], [9.5, 95.0]]
    assert inner.returned == ["of the inner one"]


class Cuda:
    """Stand-in of ``torch.cuda`` that notes its arguments."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def Stream(self, device: str) -> Any:
        self.said.append(("new stream", device))
        return SimpleNamespace(wait_stream=lambda other: self.said.append(("waits for", other)))

    def current_stream(self, device: str) -> str:
        return f"current of {device}"

    @contextmanager
    def stream(self, _stream: Any) -> Any:
        self.said.append("enter")
        yield
        self.said.append("leave")

    def Event(self) -> Any:
        return SimpleNamespace(
            record=lambda: self.said.append("record"), synchronize=lambda: self.said.append("synchronise")
        )


def test_a_side_stream_is_made_once_and_follows_only_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda()
    monkeypatch.setattr(streams, "torch", SimpleNamespace(cuda=cuda))
    side, there = SideStream(), SimpleNamespace(is_cuda=True, device="d")
    with side.active(SimpleNamespace(is_cuda=False)):  # type: ignore[arg-type]
        cuda.said.append("inside")
    with side.active(there):  # type: ignore[arg-type]
        cuda.said.append("inside")
    with side.active(there, follow=True):  # type: ignore[arg-type]
        cuda.said.append("inside")
    assert cuda.said == [
        "inside", ("new stream", "d"), "enter", "inside", "leave", ("waits for", "current of d"), "enter", "inside",
        "leave",
    ]  # fmt: skip


def test_numbers_on_a_gpu_are_copied_to_pinned_memory_and_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, made = Cuda(), torch.zeros(2, dtype=torch.int64)
    asked: list[Any] = []

    def empty(shape: Any, dtype: Any, pin_memory: bool) -> Tensor:
        asked.append((shape, dtype, pin_memory))
        return made

    class There(Tensor):
        is_cuda = True  # type: ignore[assignment]

    monkeypatch.setattr(streams, "torch", SimpleNamespace(cuda=cuda, empty=empty))
    numbers = HostNumbers(torch.tensor([3, 5]).as_subclass(There))
    assert asked == [((2,), torch.int64, True)]
    assert cuda.said == ["record"]
    assert numbers.wait() == [3, 5]
    assert cuda.said == ["record", "synchronise"]
    assert HostNumbers(torch.tensor([7])).wait() == [7]
    assert len(cuda.said) == 2


def router(**options: Any) -> TopKRouter:
    return TopKRouter(4, 6, 2, std=0.3, **options)


def test_capacity_makes_a_router_depend_on_the_layout() -> None:
    assert list(router().layout_dependence()) == []
    assert list(router(capacity=1.5).layout_dependence()) == [
        "capacity drops tokens of each microbatch on each rank separately"
    ]


def test_a_router_of_a_share_of_the_positions_gathers_logits_of_at_least_four_bytes() -> None:
    for itemsize, bytes_of_logits in ((2, 4), (8, 8)):
        step = StepShape(("forward",), samples=3, positions=5, itemsize=itemsize)
        assert router().forward_collectives(step) == [("all_gather", 3 * 5 * 6 * bytes_of_logits)]


def test_losses_over_split_samples_gather_logits_choices_and_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    made = router()
    step = StepShape(("forward",), samples=3, positions=5, itemsize=2)
    assert made.context_collectives(step) == ()
    share: ContextShare = SimpleNamespace(ranks=4)  # type: ignore[assignment]
    made.see_context(share)
    assert made.context_collectives(step) == ()  # no losses
    monkeypatch.setattr(made, "loss_terms", lambda: ["balance"])
    assert made.context_collectives(step) == (
        ContextCall("all_gather", 3 * 5 * 4 * 6 * 4, "logits"),
        ContextCall("all_gather", 3 * 5 * 4 * 2 * 8, "chosen experts"),
        ContextCall("all_gather", 3 * 5 * 4, "padding, if there is any", at_most=True),
        ContextCall("reduce_scatter", 3 * 5 * 4 * 6 * 4, "gradients of logits", backward=True),
    )


class SecondHalf:
    """Second half of the positions of each sample, and tensors from the rank with the first half."""

    ranks = 2

    def __init__(self, *others: Tensor) -> None:
        self.others = list(others)

    def gather(self, tensor: Tensor) -> Tensor:
        return torch.cat([self.others.pop(0), tensor], dim=1)

    def own(self, tensor: Tensor) -> Tensor:
        return tensor.chunk(2, dim=1)[1]


def routers(**options: Any) -> tuple[TopKRouter, TopKRouter]:
    """Router of all positions, and one with the same weight."""
    torch.manual_seed(5)
    whole, other = router(**options), router(**options)
    other.load_state_dict(whole.state_dict())
    return whole, other


#: Two samples of four positions, of which the first ends in padding.
TOKENS = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(1))
PADDING = torch.tensor([[False] * 3 + [True], [False] * 4])


def second_half(tensor: Tensor) -> Tensor:
    return tensor.view(2, 4, *tensor.shape[1:])[:, 2:].flatten(0, 1)


def test_ranks_with_a_share_of_the_positions_choose_experts_as_one_rank_with_all() -> None:
    whole, made = routers(capacity=1.0)
    expected = whole(TOKENS.flatten(0, 1), samples=2, padding=PADDING.flatten())
    share: Any = SecondHalf(torch.nn.functional.linear(TOKENS[:, :2], whole.weight))
    made.see_sequence(share)
    found = made(TOKENS[:, 2:].flatten(0, 1), samples=2, padding=PADDING.flatten())
    assert torch.equal(found.indices, second_half(expected.indices))
    torch.testing.assert_close(found.weights, second_half(expected.weights))
    torch.testing.assert_close(found.scores, second_half(expected.scores))
    assert found.counts.tolist() == [int((found.indices == expert).sum()) for expert in range(6)]
    assert (found.limit, found.incomplete) == (3, True)  # 8 positions with 2 experts each, over 6 experts
    for name, tally in whole.tallies().items():
        torch.testing.assert_close(made.tallies()[name], tally)


@pytest.mark.parametrize("padded", [False, True])
def test_losses_of_ranks_with_a_part_of_the_context_cover_all_positions(padded: bool) -> None:
    whole, made = routers(balancing=(SequenceBalance(0.5), ZLoss(0.25)))
    padding = PADDING if padded else None
    expected = whole(TOKENS.flatten(0, 1), samples=2, padding=None if padding is None else padding.flatten())
    sent = [torch.nn.functional.linear(TOKENS[:, :2], whole.weight), expected.indices.view(2, 4, 2)[:, :2]]
    share: Any = SecondHalf(*([] if padding is None else [padding[:, :2].byte()]), *sent)
    made.see_context(share)
    found = made(TOKENS[:, 2:].flatten(0, 1), samples=2, padding=None if padding is None else padding[:, 2:].flatten())
    assert share.others == []
    assert torch.equal(found.indices, second_half(expected.indices))
    for term, total in whole.loss_sums().items():
        torch.testing.assert_close(made.loss_sums()[term], total)
    assert made.tallies()["tokens"] == (3 if padded else 4)  # of this rank alone


def test_tensors_and_their_gradients_are_exchanged_between_two_functions() -> None:
    said: list[Any] = []

    def arriving(what: str, *tensors: Tensor) -> Any:
        return SimpleNamespace(wait=lambda: (said.append(f"wait for {what}"), tensors)[1])

    def send(grads: tuple[Tensor, ...], saved: tuple[Tensor, ...]) -> Any:
        said.append(("send", [grad.tolist() for grad in grads], [tensor.tolist() for tensor in saved]))
        return arriving("gradients", *(grad.repeat(2) * 10 for grad in grads))

    def to_gradients(arrived: tuple[Tensor, ...], saved: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        said.append(("received", [tensor.tolist() for tensor in arrived], [tensor.tolist() for tensor in saved]))
        return tuple(tensor.float() + 1 for tensor in arrived)

    rows = torch.tensor([1.0, 2.0], dtype=torch.bfloat16, requires_grad=True)
    weights = torch.tensor([3.0, 4.0], requires_grad=True)
    exchange = AsyncExchange((rows, weights), (torch.tensor([7]), torch.tensor([8])), to_gradients)
    arrived = torch.tensor([5.0], dtype=torch.bfloat16), torch.tensor([6.0]), torch.tensor([2])
    found = exchange.wait(arriving("tensors", *arrived), (torch.tensor([9]),), send)
    assert [(one.tolist(), one.requires_grad) for one in found] == [([5.0], True), ([6.0], True), ([2], False)]
    assert said == ["wait for tensors"]
    (found[0].float() * 0.5 + found[1] * 0.25).sum().backward()
    assert said[1:] == [
        ("send", [[0.5], [0.25]], [[9]]), "wait for gradients",
        ("received", [[5.0, 5.0], [2.5, 2.5]], [[7], [8]]),
    ]  # fmt: skip
    assert rows.grad is not None
    assert weights.grad is not None
    assert (rows.grad.tolist(), rows.grad.dtype) == ([6.0, 6.0], torch.bfloat16)
    assert (weights.grad.tolist(), weights.grad.dtype) == ([3.5, 3.5], torch.float32)
