"""The backend against the op's reference, over a stand-in that is as demanding as the library."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import pytest
import torch
from d9d_core.kernel import OpSignature, OpSlot
from d9d_core.registry.capabilities import Circumstances, Judge
from d9d_engine.compose.kernels import bind_kernels
from d9d_fla import rules
from d9d_fla.gated_delta_rule import FORGETS, build, forgetting
from d9d_testing.suites.kernel import KernelSuite
from d9d_testing.tolerances import assert_close_gradients
from torch import Tensor, nn

op = pytest.importorskip("d9d_nn.ops.gated_delta_rule")
STATIC = {"key_dim": 128, "value_dim": 128, "key_heads": 16, "value_heads": 32}


def signature(**changes: Any) -> OpSignature:
    values = {"device": "cuda", "dtype": "bfloat16", "static": STATIC}
    return OpSignature("gated_delta_rule", **values | changes)


@pytest.mark.thorough
@pytest.mark.usefixtures("library")
class TestFla(KernelSuite):
    """Over the stand-in, with tensors on the CPU."""

    target = "gated_delta_rule.fla"
    asked = "cuda"
    dtypes = ("bfloat16", "float16")
    refused = (
        {"dtype": "float64"}, {"dtype": "float32"}, {"device": "cpu"},
        {"key_dim": 258}, {"key_dim": 3}, {"value_dim": 5},
    )  # fmt: skip


def test_the_largest_key_is_accepted() -> None:
    assert rules._unsupported_call(signature(static=STATIC | {"key_dim": 256})) is None
    refusal = rules._unsupported_call(signature(static=STATIC | {"key_dim": 257}))
    assert refusal == "a program holds at most 256 features of a key; key_dim is 257"


@pytest.mark.parametrize(("available", "major"), [(True, 9), (False, None)])
def test_the_major_capability_of_this_gpu_counts(
    monkeypatch: pytest.MonkeyPatch, available: bool, major: int | None
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: available)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 3))
    assert rules.capability() == major


def results(rule: Any, tensors: list[Tensor], documents: Tensor | None) -> dict[str, Tensor]:
    """Output and all gradients of a weighted sum."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    out = rule(*leaves, documents)
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype)
    gradients = torch.autograd.grad(out, leaves, weights)
    return dict(zip(("out", "query", "key", "value", "decay", "beta"), (out.detach(), *gradients), strict=True))


def inputs(length: int) -> list[Tensor]:
    torch.manual_seed(0)
    query, key, value = torch.randn(2, length, 1, 4), torch.randn(2, length, 1, 4), torch.randn(2, length, 2, 6)
    decay, beta = -torch.rand(2, length, 2), torch.rand(2, length, 2)
    return [*(tensor.bfloat16() for tensor in (query, key, value)), decay, beta.bfloat16()]


@pytest.mark.usefixtures("library")
def test_documents_forget_the_documents_before() -> None:
    documents = torch.tensor([[0, 0, 0, 1, 1, 0, 0], [4, 4, 4, 4, 4, 4, 5]])
    found, expected = (results(rule, inputs(7), documents) for rule in (build(signature()), op.gated_delta_rule))
    assert_close_gradients(found, expected)
    assert found["decay"][0, 3].tolist() == found["decay"][0, 5].tolist() == [0.0, 0.0]
    apart = results(build(signature()), inputs(7), None)
    assert not torch.allclose(found["out"][0, 3:].float(), apart["out"][0, 3:].float(), rtol=0.1)


@pytest.mark.usefixtures("library")
def test_a_document_is_computed_as_it_is_alone() -> None:
    documents, rule = torch.tensor([[0, 0, 0, 1, 1, 1, 1]] * 2), build(signature())
    tensors = inputs(7)
    tensors[2][:, :3] *= 1e4  # huge values of another document
    whole = rule(*tensors, documents)[:, 3:]
    torch.testing.assert_close(whole, rule(*(tensor[:, 3:] for tensor in tensors), None))


def test_decays_of_zero_are_cut_so_that_sums_stay_precise() -> None:
    decay = torch.tensor([[[-1.0], [-1e6], [-2.0]]], requires_grad=True)
    cut = forgetting(decay, torch.tensor([[0, 0, 1]]))
    assert cut.flatten().tolist() == [-1.0, FORGETS, FORGETS]
    cut.sum().backward()
    assert decay.grad is not None
    assert decay.grad.flatten().tolist() == [1.0, 0.0, 0.0]
    assert torch.tensor(1.0) + torch.tensor(1e4) * torch.tensor(FORGETS).exp() == 1
    assert forgetting(decay.bfloat16(), None).dtype == torch.float32


@pytest.mark.usefixtures("library")
def test_mixed_dtypes_follow_the_values() -> None:
    """Under autocast, a layer may return float32 queries and 16-bit values."""
    query, key, *others = inputs(3)
    rule = build(signature())
    assert torch.equal(rule(query.float(), key.float(), *others), rule(query, key, *others))


class Layer(nn.Module):
    """A module with the op."""

    def op_slots(self) -> dict[str, OpSlot]:
        return {"rule": OpSlot("gated_delta_rule", op.gated_delta_rule, **STATIC)}


def bound(registry: Any, **options: Any) -> str:
    offers = registry("d9d_fla.plugin", "d9d_nn.plugin")
    judge = Judge([], offers, Circumstances(device="cuda"))
    (choice,) = bind_kernels([("", Layer())], offers, {}, "cuda", "bfloat16", judge.verdicts, **options)
    return choice.backend


@pytest.mark.usefixtures("library")
def test_a_job_on_cuda_gets_it_automatically_unless_it_must_be_deterministic(registry: Any) -> None:
    assert bound(registry) == "fla"
    assert bound(registry, deterministic=True) == "chunked"


def test_without_the_library_the_rule_runs_in_chunks(registry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "installed", lambda *names: None)
    assert bound(registry) == "chunked"


@pytest.mark.parametrize(
    ("release", "accepted"),
    [("0.6.0", True), ("0.6.1.post1", True), ("0.5.2", False), ("0.10.0", False), (None, False)],
)
def test_other_releases_are_refused(monkeypatch: pytest.MonkeyPatch, release: str | None, accepted: bool) -> None:
    monkeypatch.setattr(rules, "installed", lambda *names: release if names == ("fla-core",) else "3.9.0")
    decision = rules.gated_delta_rule(signature())
    assert decision.accept == accepted
    assert accepted or f"found {release or 'no release'}; run pip install 'd9d-fla[fla]'" in decision.reason


@pytest.mark.parametrize(
    ("major", "triton", "tilelang", "accepted", "priority"),
    [
        (9, "3.6.0", False, False, 0), (9, "3.6.0", True, True, 0), (9, "3.4.0+git1", False, False, 0),
        (9, "3.3.1", False, True, 20), (9, "3.7.1", False, True, 20), (9, "3.10.0", False, True, 20),
        (8, "3.6.0", False, True, 20), (10, "3.6.0", False, True, 20), (9, None, False, True, 20),
    ],
)  # fmt: skip
def test_triton_with_wrong_gradients_on_hopper_is_refused(
    monkeypatch: pytest.MonkeyPatch, major: int, triton: str | None, tilelang: bool, accepted: bool, priority: int
) -> None:
    monkeypatch.setattr(rules, "installed", lambda *names: "0.6.0" if names == ("fla-core",) else triton)
    monkeypatch.setattr(rules, "capability", lambda: major)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if tilelang else None)
    decision = rules.gated_delta_rule(signature())
    assert (decision.accept, decision.priority) == (accepted, priority)
    assert accepted or f"Triton {triton} computes wrong gradients on Hopper" in decision.reason


def test_installed_distributions_have_a_release() -> None:
    assert rules.installed("no-such-distribution", "pytest") == pytest.__version__
    assert rules.installed("no-such-distribution") is None


@pytest.mark.full
def test_the_stand_in_takes_what_the_library_takes(stand_in: Any) -> None:
    library = pytest.importorskip("fla.ops.gated_delta_rule")
    theirs, ours = (inspect.signature(f).parameters for f in (library.chunk_gated_delta_rule, stand_in))
    assert {name: ours[name].default for name in ours} == {name: theirs[name].default for name in ours}
    assert sys.modules["fla"].__version__.startswith("0.6.")
