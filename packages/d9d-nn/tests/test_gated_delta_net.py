"""Gated DeltaNet: parity with transformers, documents that do not see each other, initial weights."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from d9d_nn.delta.gated_delta_net import GatedDeltaNet
from d9d_nn.delta.gates import LogSigmoidDecay, MambaDecay
from d9d_nn.delta.short_convolution import ShortConvolution
from torch import Tensor
from torch.nn import functional

HIDDEN, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 12, 2, 4, 3, 5


def module(**options: Any) -> GatedDeltaNet:
    torch.manual_seed(0)
    heads = {"key_heads": KEY_HEADS, "value_heads": VALUE_HEADS, "key_dim": KEY_DIM, "value_dim": VALUE_DIM}
    return GatedDeltaNet(HIDDEN, **heads, std=0.5, output_std=0.5, norm_eps=1e-6, **options)


def of_groups(weight: Tensor, parts: list[int]) -> list[Tensor]:
    """Parts of a projection that transformers keeps per key head, each with the rows of all heads in order."""
    return [part.flatten(0, 1) for part in weight.unflatten(0, (KEY_HEADS, -1)).split(parts, dim=1)]


@pytest.mark.thorough
def test_values_and_gradients_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    config = transformers.Qwen3NextConfig(
        hidden_size=HIDDEN, linear_num_key_heads=KEY_HEADS, linear_num_value_heads=VALUE_HEADS,
        linear_key_head_dim=KEY_DIM, linear_value_head_dim=VALUE_DIM, num_hidden_layers=1, rms_norm_eps=1e-6,
        layer_types=["linear_attention"],
    )  # fmt: skip
    torch.manual_seed(1)
    theirs, ours = Qwen3NextGatedDeltaNet(config, 0), module()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    shared = VALUE_HEADS // KEY_HEADS
    keys, values = KEY_HEADS * KEY_DIM, VALUE_HEADS * VALUE_DIM

    def pieces(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        of_heads = [KEY_DIM, KEY_DIM, shared * VALUE_DIM, shared * VALUE_DIM]
        names = ("q_proj", "k_proj", "v_proj", "gate_proj")
        found = dict(zip(names, of_groups(weights["in_proj_qkvz.weight"], of_heads), strict=True))
        of_gates = of_groups(weights["in_proj_ba.weight"], [shared, shared])
        found |= dict(zip(("beta_proj", "decay_proj"), of_gates, strict=True))
        convolutions = weights["conv1d.weight"].squeeze(1).split([keys, keys, values])
        found |= dict(zip(("q_conv", "k_conv", "v_conv"), convolutions, strict=True))
        found |= {"norm": weights["norm.weight"], "o_proj": weights["out_proj.weight"]}
        found = {f"{name}.weight": weight for name, weight in found.items()}
        return found | {"decay.A_log": weights["A_log"], "decay.dt_bias": weights["dt_bias"]}

    ours.load_state_dict(pieces(dict(theirs.state_dict())))
    hidden = torch.randn(2, 71, HIDDEN)
    mine, other = (hidden.clone().requires_grad_() for _ in range(2))
    found, expected = ours(mine), theirs(other)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    weights = torch.randn_like(found)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(mine.grad, other.grad, rtol=1e-3, atol=2e-4)
    gradients = pieces({name: parameter.grad for name, parameter in theirs.named_parameters()})  # type: ignore[misc]
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-3, atol=1e-3, msg=name)


def test_no_document_sees_another() -> None:
    layer, hidden = module(), torch.randn(1, 30, HIDDEN)
    documents = torch.tensor([[0] * 11 + [1] * 1 + [2] * 18])
    whole = layer(hidden, documents)
    for start, end in ((0, 11), (11, 12), (12, 30)):
        torch.testing.assert_close(whole[:, start:end], layer(hidden[:, start:end]), rtol=1e-5, atol=1e-6)
        changed = hidden.clone()
        changed[:, start:end] += 1
        same = torch.ones(30, dtype=torch.bool)
        same[start:end] = False
        assert torch.equal(layer(changed, documents)[:, same], whole[:, same])
    assert not torch.allclose(layer(hidden)[:, 12:], whole[:, 12:])


def test_no_position_sees_a_later_one() -> None:
    layer, hidden = module(), torch.randn(1, 20, HIDDEN)
    changed = hidden.clone()
    changed[:, 13:] += 1
    assert torch.equal(layer(changed)[:, :13], layer(hidden)[:, :13])


def test_a_convolution_is_torch_s_for_one_document() -> None:
    convolution, x = ShortConvolution(6, 4), torch.randn(2, 9, 6)
    padded = functional.pad(x.mT, (3, 0))
    expected = functional.silu(functional.conv1d(padded, convolution.weight.unsqueeze(1), groups=6)).mT
    torch.testing.assert_close(convolution(x, None), expected)
    assert convolution(x[:, :2], None).shape == (2, 2, 6)  # fewer positions than the width
    assert convolution.weight.abs().max() <= 0.5
    assert convolution.weight.abs().max() > 0.3


def test_a_convolution_reads_no_position_of_another_document_and_none_at_the_end() -> None:
    """Not even times zero, which a value that is not finite would survive."""
    convolution, x = ShortConvolution(6, 4), torch.randn(1, 9, 6)
    x[:, [3, 8]] = torch.inf
    documents = (torch.arange(9) >= 4).long().unsqueeze(0)
    assert convolution(x, None)[:, :3].isfinite().all()
    assert convolution(x, documents)[:, 4:8].isfinite().all()


@pytest.mark.thorough
def test_a_compiled_convolution_keeps_no_float32_copies_of_its_input() -> None:
    convolution, x = ShortConvolution(6, 4).bfloat16(), torch.randn(2, 32, 6, dtype=torch.bfloat16, requires_grad=True)
    torch.compiler.reset()
    # The backend partitions forward and backward as inductor does.
    compiled = torch.compile(convolution, fullgraph=True, backend="aot_eager_decomp_partition")
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    documents = (torch.arange(32) >= 7).long().expand(2, -1)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        compiled(x, documents)
    assert any(tensor.shape == x.shape for tensor in kept)
    assert all(tensor.numel() < x.numel() for tensor in kept if tensor.dtype == torch.float32)


def test_negative_eigenvalues_double_the_strength() -> None:
    plain, wide = module(), module(negative_eigenvalues=True)
    strengths: list[Tensor] = []
    for layer in (plain, wide):

        def rule(_q: Tensor, _k: Tensor, value: Tensor, _g: Tensor, beta: Tensor, _d: Tensor | None) -> Tensor:
            strengths.append(beta)
            return value

        layer.gated_delta_rule.bind("observed", rule)
        layer(torch.ones(1, 3, HIDDEN))
    torch.testing.assert_close(strengths[1], 2 * strengths[0])


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="4 value heads are no multiple of 3 key heads"):
        GatedDeltaNet(8, key_heads=3, value_heads=4, key_dim=2, value_dim=2, std=1, output_std=1, norm_eps=1e-6)


def test_initial_decays_are_in_their_ranges() -> None:
    torch.manual_seed(0)
    gate = MambaDecay(4000, rates=(1, 16), times=(0.001, 0.1))
    rates, times = gate.A_log.exp(), functional.softplus(gate.dt_bias)
    assert rates.min() >= 0.999
    assert rates.max() <= 16.001
    assert abs(rates.mean() - 8.5) < 0.3
    assert times.min() >= 0.00099
    assert times.max() <= 0.101
    assert abs(times.log().mean() - math.log(0.01)) < 0.1
    assert torch.equal(MambaDecay(3).dt_bias, torch.ones(3))


def test_decays_are_float32_also_for_narrow_inputs() -> None:
    x = torch.tensor([-2.0, 0, 3], dtype=torch.bfloat16)
    gate = MambaDecay(3)
    expected = [-a.exp().item() * math.log1p(math.exp(v + 1)) for a, v in zip(gate.A_log, x.tolist(), strict=True)]
    torch.testing.assert_close(gate(x), torch.tensor(expected))
    found = LogSigmoidDecay(normalizer=4)(x)
    torch.testing.assert_close(found, torch.tensor([-math.log1p(math.exp(-v)) / 4 for v in x.tolist()]))
