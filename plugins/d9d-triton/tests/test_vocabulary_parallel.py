"""The loss from shares of the vocabulary; kernels are interpreted here, and compiled where each rank has a GPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from d9d_core.kernel import OpSignature
from d9d_core.model import VocabularyShare
from d9d_nn.ops.linear_cross_entropy import IGNORE, linear_cross_entropy_with_ranks
from d9d_nn.ops.vocabulary_parallel import VocabularyParallelCrossEntropy, VocabularyParallelSlot
from d9d_testing.tolerances import assert_close_gradients, assert_close_values
from d9d_testing.world import RankFailedError, World
from d9d_triton import support
from d9d_triton.linear_cross_entropy import shares
from d9d_triton.linear_cross_entropy.shares import VocabularyShareCrossEntropy
from torch import Tensor
from torch import distributed as dist

pytestmark = pytest.mark.smoke
interpreted = pytest.mark.skipif(not support.interpreted(), reason="for tensors of a CPU: TRITON_INTERPRET=1")

OP = "vocabulary_parallel_cross_entropy"
FEATURES, TOKENS = 8, 10

#: Number of words, name of a dtype, and options of the call; ``kept`` tokens may be kept where it is said.
Case = tuple[int, str, dict[str, Any]]


def here() -> torch.device:
    """This rank's device."""
    if support.interpreted():
        return torch.device("cpu")
    device = torch.device("cuda", dist.get_rank())
    torch.cuda.set_device(device)
    return device


def drawn(words: int, dtype: str) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [2, 5, H], a weight and targets, some of which are not predicted and have NaN before them."""
    generator = torch.Generator().manual_seed(words)
    hidden, weight = torch.randn(2, 5, FEATURES, generator=generator), torch.randn(words, FEATURES, generator=generator)
    targets = torch.randint(words, (2, 5), generator=generator)
    targets[:, 1] = IGNORE
    hidden[0, 1] = torch.nan
    return hidden.to(getattr(torch, dtype)), weight.to(getattr(torch, dtype)), targets


def cut(weight: Tensor) -> tuple[Tensor, int]:
    """This rank's rows, as DTensors cut, and the first of them."""
    rank, most = dist.get_rank(), -(-len(weight) // dist.get_world_size())
    return weight[rank * most : (rank + 1) * most], min(len(weight), rank * most)


def joined(mine: Tensor, words: int) -> Tensor:
    """Rows of all ranks."""
    parts = [mine.new_zeros(-(-words // dist.get_world_size()), FEATURES) for _ in range(dist.get_world_size())]
    padded = torch.zeros_like(parts[0])
    padded[: len(mine)] = mine
    dist.all_gather(parts, padded)
    return torch.cat(parts)[:words]


def gradients(losses: Tensor) -> None:
    """Run the backward from a gradient that is another number for each token."""
    losses.backward(torch.linspace(-1, 2, TOKENS).view(2, 5).to(losses))


def found_by(kind: type[VocabularyParallelCrossEntropy], case: Case) -> dict[str, Tensor]:
    words, dtype, options = case
    device = here()
    hidden, weight, targets = (tensor.to(device) for tensor in drawn(words, dtype))
    share, first = cut(weight)
    leaves = hidden.requires_grad_(), share.clone().requires_grad_()
    loss, options = kind(first, dist.group.WORLD), dict(options)
    kept = options.pop("kept", None)
    with (
        pytest.MonkeyPatch.context() as patch,
        torch.autocast(device.type, torch.bfloat16, enabled=options.pop("autocast", False)),
    ):
        if kept is not None:
            patch.setattr(shares, "may_be_kept", lambda _hidden: kept * shares.columns(len(share)))
        losses, ranks = loss.with_ranks(*leaves, targets, **options)
        alone = loss(*leaves, targets, **options)
        assert torch.equal(losses, alone)
    gradients(losses)
    of_hidden, of_weight = leaves[0].grad, leaves[1].grad
    assert of_hidden is not None
    assert of_weight is not None
    assert of_hidden.dtype == of_weight.dtype == hidden.dtype
    both = [of_hidden.clone(), of_weight.clone()]
    of_hidden.zero_(), of_weight.zero_()
    gradients(alone)
    assert torch.equal(of_hidden, both[0])
    assert torch.equal(of_weight, both[1])
    whole = both[0].float()
    dist.all_reduce(whole)
    found = {"loss": losses.detach(), "ranks": ranks, "hidden": whole, "weight": joined(both[1], words).float()}
    return {name: tensor.cpu() for name, tensor in found.items()}


def many(cases: list[Case]) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    kinds = VocabularyShareCrossEntropy, VocabularyParallelCrossEntropy
    return [(found_by(kinds[0], case), found_by(kinds[1], without_kept(case))) for case in cases]


def without_kept(case: Case) -> Case:
    return case[0], case[1], {name: value for name, value in case[2].items() if name != "kept"}


CASES: list[Case] = [
    (150, "float32", {}),
    (151, "bfloat16", {}),
    (150, "float16", {"rows": 3, "keep": False}),
    (150, "float32", {"rows": 3, "keep": False}),
    (33, "bfloat16", {"rows": 2, "kept": 5}),
    (33, "float32", {"rows": 2, "kept": 5}),
    (33, "float32", {"autocast": True}),
    (7, "float32", {"keep": True}),
    (2, "float32", {}),
    (1, "float32", {}),
]


@pytest.mark.thorough
@interpreted
def test_losses_ranks_and_gradients_are_those_of_the_reference_and_of_one_process() -> None:
    """Of vocabularies that two ranks do not divide, and of which the last has no word at all, in each way to chunk."""
    assert_are_those_of_one(World(2, timeout=240))


def assert_are_those_of_one(world: World) -> None:
    for of_rank in world.run(many, CASES):
        for case, (found, plain) in zip(CASES, of_rank, strict=True):
            words, dtype, options = case
            hidden, weight, targets = drawn(words, dtype)
            narrow = torch.bfloat16 if options.get("autocast") else hidden.dtype
            leaves = hidden.to(narrow).requires_grad_(), weight.to(narrow).requires_grad_()
            losses, ranks = linear_cross_entropy_with_ranks(*leaves, targets)
            gradients(losses)
            one = {"loss": losses.detach(), "ranks": ranks, "hidden": leaves[0].grad, "weight": leaves[1].grad}
            for expected in (plain, one):
                assert_close_values(found["loss"], expected["loss"], what=f"losses of {case}")
                assert torch.equal(found["ranks"], expected["ranks"]), case
                assert (found["loss"][:, 1] == 0).all()
                assert not found["hidden"][:, 1].any()
                if words > 1:  # the gradient of one word's loss is rounding only
                    exact = {name: expected[name].to(narrow) for name in ("hidden", "weight")}
                    assert_close_gradients({name: found[name].to(narrow) for name in exact}, exact)


def wrong(word: int) -> None:
    hidden, weight, targets = drawn(12, "float32")
    targets[1, 3] = word
    share, first = cut(weight)
    VocabularyShareCrossEntropy(first, dist.group.WORLD)(hidden, share, targets)


@pytest.mark.thorough
@interpreted
@pytest.mark.parametrize("word", [12, -1])
def test_a_target_that_no_rank_has_is_an_error(word: int) -> None:
    with pytest.raises(RankFailedError, match=f"the target id {word} is not in the vocabulary"):
        World(2).run(wrong, word)


def alone() -> tuple[VocabularyShareCrossEntropy, Tensor, Tensor, Tensor]:
    """Loss of a single rank, and its arguments."""
    hidden, weight, targets = drawn(20, "float32")
    loss = VocabularyShareCrossEntropy(0, dist.group.WORLD)
    return loss, hidden.requires_grad_(), weight.requires_grad_(), targets


def twice() -> None:
    loss, *inputs = alone()
    losses = loss(*inputs, keep=False).sum()
    losses.backward(retain_graph=True)
    losses.backward()
    losses = loss(*inputs).sum()
    losses.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses.backward()


@pytest.mark.thorough
@interpreted
def test_a_second_backward_is_an_error_if_the_first_has_overwritten_the_logits() -> None:
    World(1).run(twice)


def products() -> int:
    """Number of products that make logits, where logits of five of ten tokens are kept and two are a chunk."""
    loss, *inputs = alone()
    count, real = 0, shares.project

    def counted(*args: Any) -> None:
        nonlocal count
        count += 1
        real(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shares, "may_be_kept", lambda _hidden: 5 * shares.columns(20))
        patch.setattr(shares, "project", counted)
        loss(*inputs, rows=2).sum().backward()
    return count


@interpreted
def test_only_logits_that_are_not_kept_are_computed_again() -> None:
    assert World(1).run(products) == [(1 + 3) + 3]


def of_one_of_both() -> None:
    loss, hidden, weight, targets = alone()
    losses = loss(hidden, weight, targets, keep=False).sum()
    of_both = torch.autograd.grad(losses, (hidden, weight))
    for place, (one, other) in enumerate([(hidden, weight.detach()), (hidden.detach(), weight)]):
        operands = (one, other) if place == 0 else (one, weight)
        (of_one,) = torch.autograd.grad(loss(*operands, targets).sum(), operands[place])
        assert torch.equal(of_one, of_both[place])
    with torch.no_grad():
        assert torch.equal(loss(hidden, weight, targets).sum(), losses)


@pytest.mark.thorough
@interpreted
def test_gradients_that_nobody_asks_for_are_left_out() -> None:
    World(1).run(of_one_of_both)


def refusals() -> None:
    loss, hidden, weight, targets = alone()
    with pytest.raises(TypeError, match=f"{OP}.triton: hidden is torch.float64"):
        loss(hidden.double(), weight.double(), targets)
    with pytest.raises(TypeError, match=r"hidden is torch.float32, weight torch.bfloat16"):
        loss(hidden, weight.bfloat16(), targets)
    with pytest.raises(ValueError, match=r"hidden \[2, 5, 8\] and targets \[2\]"):
        loss(hidden, weight, targets[:, 0])


@interpreted
def test_operands_that_do_not_fit_are_refused_before_anything_is_exchanged() -> None:
    World(1).run(refusals)


def bound() -> None:
    slot = VocabularyParallelSlot(VocabularyShare(3, 5, dist.group.WORLD))
    signature = OpSignature(slot.op, "cuda", "bfloat16")
    slot.bind("triton", shares.build(signature))
    for one in (slot, copy.deepcopy(slot)):
        function = one.function
        assert isinstance(function, VocabularyShareCrossEntropy)
        assert (function.first, function.group, one.backend) == (3, dist.group.WORLD, "triton")


def test_a_slot_gives_its_share_to_the_function_of_a_backend() -> None:
    World(1).run(bound)


def test_it_is_chosen_on_cuda_and_by_name_where_kernels_are_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cuda = support.vocabulary_parallel_cross_entropy(OpSignature(OP, "cuda", "bfloat16"))
    assert (on_cuda.accept, on_cuda.priority) == (True, support.PRIORITY)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    on_cpu = support.vocabulary_parallel_cross_entropy(OpSignature(OP, "cpu", "float32"))
    assert (on_cpu.accept, on_cpu.priority) == (True, 0)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert not support.vocabulary_parallel_cross_entropy(OpSignature(OP, "cpu", "float32")).accept
    assert not support.vocabulary_parallel_cross_entropy(OpSignature(OP, "cuda", "float64")).accept


def on_a_gpu() -> None:
    hidden, weight, targets = (tensor.to(here()) for tensor in drawn(150, "bfloat16"))
    share, first = cut(weight)
    leaves = hidden.requires_grad_(), share.clone().requires_grad_()
    loss = VocabularyShareCrossEntropy(first, dist.group.WORLD)
    gradients(loss.with_ranks(*leaves, targets)[0])  # compiles kernels and connects ranks
    grad = torch.ones(2, 5, device=hidden.device)
    torch.cuda.set_sync_debug_mode("error")
    loss.with_ranks(*leaves, targets)[0].backward(grad)
    targets[1, 3].fill_(150)  # an assignment would wait
    losses = loss(*leaves, targets)
    torch.cuda.set_sync_debug_mode("default")
    assert losses[1, 3].isnan()
    assert losses.isnan().sum() == 1


@pytest.mark.gpu
@pytest.mark.gpus(2)
def test_on_gpus_too() -> None:
    assert_are_those_of_one(World(2, timeout=240, backend="cpu:gloo,cuda:nccl"))


@pytest.mark.gpu
@pytest.mark.gpus(2)
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_nobody_waits_for_a_gpu_not_even_for_a_target_that_is_no_word() -> None:
    World(2, timeout=240, backend="cpu:gloo,cuda:nccl").run(on_a_gpu)
