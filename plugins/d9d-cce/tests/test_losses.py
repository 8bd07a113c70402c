"""Losses for which the suite has no calls: unpredicted tokens of any content, autocast, the filter, no waiting."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from d9d_cce import backend
from d9d_cce.backend import CutCrossEntropy
from d9d_core.errors import BuildError
from d9d_core.kernel import OpSignature, OpSlot
from d9d_core.registry.capabilities import Circumstances, Judge
from d9d_engine.compose.kernels import KernelChoice, bind_kernels
from d9d_nn.ops.linear_cross_entropy import IGNORE, linear_cross_entropy
from d9d_testing.tolerances import assert_close_gradients, assert_close_values
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

FEATURES = 16


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).half()


def gradients(losses: Tensor, *leaves: Tensor) -> dict[str, Tensor]:
    names = ("hidden", "weight")
    return dict(zip(names, torch.autograd.grad(losses.sum(), leaves), strict=True))


@pytest.mark.thorough
def test_nothing_of_a_token_without_a_target_reaches_a_gradient() -> None:
    hidden, weight = normal(4, FEATURES, seed=0), normal(50, FEATURES, seed=1).requires_grad_()
    hidden[1] = torch.nan
    hidden.requires_grad_()
    losses = CutCrossEntropy()(hidden, weight, torch.tensor([3, IGNORE, 49, 0]))
    assert losses[1] == 0
    found = gradients(losses, hidden, weight)
    assert not found["hidden"][1].any()
    assert found["weight"].isfinite().all()


def test_a_microbatch_without_any_target_has_no_loss_and_no_gradient() -> None:
    hidden, weight = normal(3, FEATURES, seed=0).requires_grad_(), normal(50, FEATURES, seed=1).requires_grad_()
    losses = CutCrossEntropy()(hidden, weight, torch.full((3,), IGNORE))
    assert not losses.any()
    assert not any(gradient.any() for gradient in gradients(losses, hidden, weight).values())


def test_autocast_narrows_both_factors() -> None:
    hidden, weight = (normal(*shape, seed=0).float().requires_grad_() for shape in ((3, FEATURES), (50, FEATURES)))
    targets = torch.tensor([3, 49, 0])
    with torch.autocast("cpu", torch.float16):
        losses = CutCrossEntropy()(hidden, weight, targets)
    assert losses.dtype == torch.float32
    exact = linear_cross_entropy(hidden, weight, targets)
    assert_close_values(losses.half(), exact.half())
    found, expected = (gradients(x, hidden, weight) for x in (losses, exact))
    assert found["weight"].dtype == torch.float32
    assert_close_gradients({n: g.half() for n, g in found.items()}, expected)


@pytest.fixture
def eager() -> Iterator[None]:
    """The library compiles the function that sorts the vocabulary."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.thorough
@pytest.mark.usefixtures("eager")
def test_the_filter_keeps_losses_and_leaves_out_gradients_of_improbable_words() -> None:
    probable, words = 128, 256  # as many words as a tile has, and another tile
    hidden, weight = torch.zeros(5, FEATURES).half(), normal(words, FEATURES, seed=1)
    hidden[:, 0] = 1
    weight[:, 0] = 0
    weight[probable:, 0] = -14
    hidden += 0.1 * normal(5, FEATURES, seed=2)
    hidden.requires_grad_(), weight.requires_grad_()
    targets = torch.arange(5)
    exact, filtered = (CutCrossEntropy(filtered=choice)(hidden, weight, targets) for choice in (False, True))
    assert_close_values(filtered, exact)
    all_of_them, found = (gradients(losses, hidden, weight) for losses in (exact, filtered))
    assert all_of_them["weight"][probable:].any()
    assert not found["weight"][probable:].any()
    assert_close_gradients({"kept": found["weight"][:probable]}, {"kept": all_of_them["weight"][:probable]})


class NoWaiting(TorchDispatchMode):
    """Refuses what reads a number, or a shape, back from the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in {"_local_scalar_dense", "nonzero", "masked_select", "index", "equal"}, name
        return func(*args, **(kwargs or {}))


@pytest.mark.thorough
@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.usefixtures("eager")
def test_the_host_never_waits_for_the_device(filtered: bool) -> None:
    hidden, weight = normal(3, FEATURES, seed=0).requires_grad_(), normal(50, FEATURES, seed=1).requires_grad_()
    targets = torch.tensor([3, IGNORE, 0])
    with NoWaiting():
        CutCrossEntropy(filtered=filtered)(hidden, weight, targets).sum().backward()


@pytest.mark.parametrize("name", ["cce", "cce_filtered"])
def test_a_job_gets_them_by_name_only(registry: Any, name: str) -> None:
    offers = registry("d9d_cce.plugin")
    judge = Judge([], offers, Circumstances(device="cuda"))

    def bound(requested: dict[str, str], dtype: str = "bfloat16") -> KernelChoice:
        (choice,) = bind_kernels([("", Head())], offers, requested, "cuda", dtype, judge.verdicts)
        return choice

    assert bound({}).backend == "reference"
    choice = bound({"linear_cross_entropy": name})
    assert choice.backend == name
    assert choice.considered[name].priority == 0
    assert ("approximation" in choice.considered[name].reason) == (name == "cce_filtered")
    with pytest.raises(BuildError, match="reads bfloat16 and float16; the tensors are float32"):
        bound({"linear_cross_entropy": name}, dtype="float32")
    with pytest.raises(BuildError, match="is not deterministic"):
        bind_kernels([("", Head())], offers, {"linear_cross_entropy": name}, "cuda", "bfloat16", judge.verdicts, True)


def test_without_the_library_they_are_refused(registry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    offers = registry("d9d_cce.plugin")
    judge = Judge([], offers, Circumstances(device="cuda"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None)
    with pytest.raises(BuildError, match="needs import:cut_cross_entropy: .*'pip install d9d-cce' installs it"):
        bind_kernels([("", Head())], offers, {"linear_cross_entropy": "cce"}, "cuda", "bfloat16", judge.verdicts)


class Head(nn.Module):
    """A module with the op."""

    def op_slots(self) -> dict[str, OpSlot]:
        slot = OpSlot("linear_cross_entropy", linear_cross_entropy, features=FEATURES, vocabulary=50)
        return {"loss": slot}


@pytest.mark.parametrize(("filtered", "threshold"), [(False, None), (True, 2**-10 / 32)])
def test_the_library_gets_all_tokens_and_no_options(
    monkeypatch: pytest.MonkeyPatch, filtered: bool, threshold: float | None
) -> None:
    asked: list[Any] = []

    def apply(tokens: Tensor, weight: Tensor, parameters: Any) -> Tensor:
        asked.append((tokens, weight, parameters))
        return torch.arange(1.0, 1 + len(tokens))

    monkeypatch.setattr(backend, "linear_cross_entropy_apply", apply)
    hidden, weight = torch.ones(2, 2, 3).half(), torch.ones(3, 5).half().T
    targets = torch.tensor([[4, IGNORE], [0, 2]])
    made = backend.build_filtered if filtered else backend.build
    losses = made(OpSignature("linear_cross_entropy", "cuda", "float16", {}))(hidden, weight, targets)
    assert losses.tolist() == [[1.0, 0.0], [3.0, 4.0]]
    ((tokens, given, parameters),) = asked
    assert tokens.tolist() == [[1.0] * 3, [0.0] * 3, [1.0] * 3, [1.0] * 3]
    assert given.is_contiguous()
    assert parameters.targets.tolist() == [4, 0, 0, 2]
    assert parameters.batch_shape == (4,)
    assert (parameters.valids, parameters.softcap, parameters.reduction) == (None, None, "none")
    assert (parameters.filter_eps, parameters.shift) == (threshold, False)
    none = made(OpSignature("linear_cross_entropy", "cuda", "float16", {}))(hidden[:0], weight, targets[:0])
    assert none.shape == (0, 2)
    assert len(asked) == 1
