"""Mamba-2: parity with transformers, documents that do not see each other, overflow of gates, initial weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from d9d_nn.delta.gated_delta_net import GatedRMSNorm
from d9d_nn.ops.state_space_rule import chunked, state_space_rule
from d9d_nn.state_space.mamba2 import Mamba2, StateSpace
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

HIDDEN, HEADS, HEAD_DIM, GROUPS, STATE = 8, 4, 4, 2, 3
SIZES = {"heads": HEADS, "head_dim": HEAD_DIM, "groups": GROUPS, "state_dim": STATE}
DEVIATIONS = {"std": 0.5, "output_std": 0.5, "norm_eps": 1e-5}


def module(**options: Any) -> Mamba2:
    torch.manual_seed(0)
    return Mamba2(HIDDEN, **SIZES, **DEVIATIONS, **options)


def pieces(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of transformers' mixer by our names."""
    shared, inner = GROUPS * STATE, HEADS * HEAD_DIM
    found = {f"ssm.{name}": weights[name] for name in ("A_log", "dt_bias", "D")}
    found |= {name: weights[name] for name in weights if name.startswith(("norm.", "out_proj."))}
    for kind in ("weight", "bias"):
        if f"in_proj.{kind}" in weights:
            parts = weights[f"in_proj.{kind}"].split([inner, inner, shared, shared, HEADS])
            names = ("z_proj", "x_proj", "B_proj", "C_proj", "dt_proj")
            found |= {f"{name}.{kind}": part for name, part in zip(names, parts, strict=True)}
        if f"conv1d.{kind}" in weights:
            convolution = weights[f"conv1d.{kind}"]
            convolution = convolution.squeeze(1) if kind == "weight" else convolution
            parts = convolution.split([inner, shared, shared])
            found |= {f"{name}_conv.{kind}": part for name, part in zip("xBC", parts, strict=True)}
    return found


def assert_equal_within(found: Tensor | None, expected: Tensor | None, share: float, name: str = "") -> None:
    """Assert that no element differs by more than a share of the largest one."""
    assert found is not None
    assert expected is not None
    assert (found - expected).abs().max() <= share * expected.abs().max(), name


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {}, "biases, limits": {"bias": True, "time_step_limit": (0.3, 1.5)}, "no biases": {"conv_bias": False}
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("rule", [state_space_rule, chunked])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_values_and_gradients_are_those_of_transformers(options: dict[str, Any], rule: Callable[..., Tensor]) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    config = transformers.Mamba2Config(
        hidden_size=HIDDEN, num_heads=HEADS, head_dim=HEAD_DIM, n_groups=GROUPS, state_size=STATE, num_hidden_layers=1,
        expand=2, chunk_size=16, use_bias=options.get("bias", False), use_conv_bias=options.get("conv_bias", True),
        time_step_limit=options.get("time_step_limit", (0.0, math.inf)), layer_norm_epsilon=1e-5,
    )  # fmt: skip
    torch.manual_seed(1)
    theirs, ours = Mamba2Mixer(config, 0), module(**options)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    ours.load_state_dict(pieces(dict(theirs.state_dict())))
    ours.state_space_rule.bind("chosen", rule)
    hidden = torch.randn(2, 71, HIDDEN)
    mine, other = (hidden.clone().requires_grad_() for _ in range(2))
    found, expected = ours(mine), theirs(other)
    assert_equal_within(found, expected, 1e-5)
    weights = torch.randn_like(found)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    assert_equal_within(mine.grad, other.grad, 1e-5)
    gradients = pieces({name: parameter.grad for name, parameter in theirs.named_parameters()})  # type: ignore[misc]
    assert gradients.keys() == dict(ours.named_parameters()).keys()
    for name, parameter in ours.named_parameters():
        assert_equal_within(parameter.grad, gradients[name], 1e-5, name)


@pytest.mark.parametrize("norm_before_gate", [False, True])
def test_a_gated_norm_keeps_the_dtype_of_its_input(norm_before_gate: bool) -> None:
    norm, x = GatedRMSNorm(12, eps=1e-5, norm_before_gate=norm_before_gate), torch.randn(2, 12).bfloat16()
    assert norm.weight.dtype == torch.float32
    assert norm(x, x).dtype == torch.bfloat16


@pytest.mark.thorough
@pytest.mark.parametrize("norm_before_gate", [False, True])
def test_a_norm_of_groups_is_that_of_transformers_in_either_order(norm_before_gate: bool) -> None:
    pytest.importorskip("transformers")
    from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated

    theirs = FalconH1RMSNormGated(12, eps=1e-5, n_groups=3, norm_before_gate=norm_before_gate)
    ours = GatedRMSNorm(12, eps=1e-5, group_size=4, norm_before_gate=norm_before_gate)
    with torch.no_grad():
        theirs.weight.copy_(ours.weight.copy_(torch.randn(12)))
    x, gate = torch.randn(2, 5, 12), torch.randn(2, 5, 12)
    torch.testing.assert_close(ours(x, gate), theirs(x, gate), rtol=1e-5, atol=1e-6)
    assert module(norm_before_gate=norm_before_gate).norm.norm_before_gate == norm_before_gate
    assert module().norm.norm_before_gate is False


def test_no_document_sees_another() -> None:
    layer, hidden = module(), torch.randn(1, 150, HIDDEN)
    layer.state_space_rule.bind("chunked", chunked)
    parts = ((0, 41), (41, 42), (42, 100), (100, 150))
    documents = torch.cat([torch.full((1, end - start), start) for start, end in parts], dim=1)
    whole = layer(hidden, documents)
    for start, end in parts:
        torch.testing.assert_close(whole[:, start:end], layer(hidden[:, start:end]), rtol=1e-5, atol=1e-5)
        changed = hidden.clone()
        changed[:, start:end] += 1
        same = torch.ones(150, dtype=torch.bool)
        same[start:end] = False
        assert torch.equal(layer(changed, documents)[:, same], whole[:, same])
    assert not torch.allclose(layer(hidden)[:, 100:], whole[:, 100:])


def test_no_document_of_some_other_has_a_gradient() -> None:
    layer, hidden = module(), torch.randn(1, 90, HIDDEN, requires_grad=True)
    layer.state_space_rule.bind("chunked", chunked)
    documents = (torch.arange(90) // 31)[None]
    (gradient,) = torch.autograd.grad(layer(hidden, documents)[:, 31:62].square().sum(), hidden)
    assert gradient[:, 31:62].abs().sum(-1).all()
    assert not gradient[:, :31].any()
    assert not gradient[:, 62:].any()


def test_padding_after_a_sample_changes_nothing() -> None:
    layer, hidden = module(), torch.randn(1, 70, HIDDEN)
    layer.state_space_rule.bind("chunked", chunked)
    padded = torch.cat([hidden, 100 * torch.ones(1, 30, HIDDEN)], dim=1)
    torch.testing.assert_close(layer(padded)[:, :70], layer(hidden), rtol=1e-5, atol=1e-5)
    after = torch.tensor([[0] * 30 + [1] * 70])  # padding before a sample is a document of its own
    turned = torch.cat([100 * torch.ones(1, 30, HIDDEN), hidden], dim=1)
    torch.testing.assert_close(layer(turned, after)[:, 30:], layer(hidden), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rule", [state_space_rule, chunked])
@pytest.mark.parametrize(("rate", "bias"), [(200.0, 5.0), (200.0, -200.0), (5.0, 1e30), (-200.0, -200.0)])
def test_gates_that_overflow_give_finite_values_and_gradients(
    rule: Callable[..., Tensor], rate: float, bias: float
) -> None:
    layer, hidden = module(), torch.randn(1, 70, HIDDEN, requires_grad=True)
    layer.state_space_rule.bind("chosen", rule)
    with torch.no_grad():
        layer.ssm.A_log.fill_(rate)
        layer.ssm.dt_bias.fill_(bias)
    out = layer(hidden)
    gradients = torch.autograd.grad(out.sum(), [hidden, *layer.parameters()])
    assert all(found.isfinite().all() for found in (out, *gradients))


def test_steps_are_limited() -> None:
    ssm, found = StateSpace(2, time_step_limit=(0.25, 0.5)), []

    def rule(x: Tensor, dt: Tensor, *rest: Tensor | None) -> Tensor:
        found.append(dt)
        return torch.zeros_like(x)

    x = torch.ones(1, 3, 2, 4)
    out = ssm(x, x, x, torch.tensor([[[-9.0, 9.0], [0.0, 0.0], [9.0, -9.0]]]), None, rule)
    assert torch.equal(out, x)  # D is one
    steps = found[0][0]
    assert torch.equal(steps[0], torch.tensor([0.25, 0.5]))
    assert torch.equal(steps[2], torch.tensor([0.5, 0.25]))
    assert ((steps >= 0.25) & (steps <= 0.5)).all()


def test_wrong_sizes_are_refused() -> None:
    sizes: dict[str, Any] = {**SIZES, **DEVIATIONS}
    with pytest.raises(ValueError, match="4 heads are no multiple of 3 groups; give each group the same number"):
        Mamba2(HIDDEN, **sizes | {"groups": 3})
    for limit in ((-1.0, 1.0), (2.0, 1.0)):
        with pytest.raises(ValueError, match="give the smallest step, at least 0, and the largest one"):
            Mamba2(HIDDEN, **sizes, time_step_limit=limit)


def test_initial_weights_are_those_of_the_paper() -> None:
    torch.manual_seed(0)
    ssm = StateSpace(4000, time_step_limit=(0.0, math.inf))
    rates, times = ssm.A_log.exp(), functional.softplus(ssm.dt_bias)
    assert rates.min() >= 0.999
    assert rates.max() <= 16.001
    assert abs(rates.mean() - 8.5) < 0.3
    assert times.min() >= 0.00099
    assert times.max() <= 0.101
    assert abs(times.log().mean() - math.log(0.01)) < 0.1
    with torch.no_grad():
        ssm.D.zero_()
    ssm.reset_parameters()
    assert (ssm.D == 1).all()
    layer = module(width=5, bias=True)
    for convolution in (layer.x_conv, layer.B_conv, layer.C_conv):
        assert convolution.weight.shape[1] == 5
        for parameter in convolution.parameters():
            assert 0.2 < parameter.abs().max() <= 5**-0.5
    assert layer.out_proj.bias is not None


def test_states_and_steps_are_float32_also_for_narrow_weights() -> None:
    layer, hidden = module(), torch.randn(1, 80, HIDDEN).bfloat16()
    seen = []

    def rule(*arguments: Tensor | None) -> Tensor:
        seen.append([tensor.dtype for tensor in arguments if tensor is not None])
        return chunked(*arguments)  # type: ignore[arg-type]

    layer.bfloat16().state_space_rule.bind("noting", rule)
    assert layer(hidden).dtype == torch.bfloat16
    narrow, wide = torch.bfloat16, torch.float32
    assert seen == [[narrow, wide, wide, narrow, narrow]]


@pytest.mark.thorough
def test_a_compiler_sees_one_graph_and_checkpointed_gradients_are_equal() -> None:
    layer, hidden = module(), torch.randn(1, 130, HIDDEN, requires_grad=True)
    layer.state_space_rule.bind("chunked", chunked)
    documents = (torch.arange(130) // 50)[None]
    expected = layer(hidden, documents)
    wanted = torch.autograd.grad(expected.square().sum(), [hidden, *layer.parameters()])
    for computed in (
        torch.compile(layer, backend="aot_eager", fullgraph=True)(hidden, documents),
        checkpoint(layer, hidden, documents, use_reentrant=False),
    ):
        torch.testing.assert_close(computed, expected, rtol=1e-5, atol=1e-6)
        found = torch.autograd.grad(computed.square().sum(), [hidden, *layer.parameters()])
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
