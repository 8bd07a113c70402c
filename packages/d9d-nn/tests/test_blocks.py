from __future__ import annotations

import math

import pytest
import torch
from d9d_core.traits import ContextParallelizable, HasOps, LateInit, TensorParallelizable, TensorStyle, modules_with
from d9d_nn.attention.grouped_query import GroupedQueryAttention
from d9d_nn.decoder.config import PROJECTIONS
from d9d_nn.embedding import TokenEmbedding
from d9d_nn.heads.causal_lm import CausalLMHead
from d9d_nn.initialization import Initialization
from d9d_nn.linear import Linear
from d9d_nn.rms_norm import RMSNorm
from d9d_nn.rope.rotary_embedding import RotaryEmbedding
from d9d_nn.swiglu import SwiGLU
from d9d_testing.tolerances import assert_close_values
from torch import nn


def attention_layer(head_norm_eps: float | None = 1e-6) -> GroupedQueryAttention:
    torch.manual_seed(0)
    return GroupedQueryAttention(
        32, query_heads=4, key_value_heads=2, head_dim=6, std=0.2, output_std=0.2, head_norm_eps=head_norm_eps
    )


def test_attention_has_heads_of_any_size_and_optional_head_norms() -> None:
    with_norms, without = attention_layer(), attention_layer(None)
    assert with_norms.q_proj.weight.shape == (24, 32)
    assert {n for n, _ in with_norms.named_parameters()} - {n for n, _ in without.named_parameters()} == {
        "q_norm.weight",
        "k_norm.weight",
    }
    hidden, rotation = torch.randn(2, 5, 32), RotaryEmbedding(6, theta=1e4)(torch.arange(5).unsqueeze(0))
    assert with_norms(hidden, rotation, None).shape == (2, 5, 32)
    assert without(hidden, rotation, None).shape == (2, 5, 32)


@pytest.mark.thorough
def test_head_norms_make_attention_blind_to_the_scale_of_queries() -> None:
    layer = attention_layer()
    hidden, rotation = torch.randn(1, 5, 32), RotaryEmbedding(6, theta=1e4)(torch.arange(5).unsqueeze(0))
    before = layer(hidden, rotation, None)
    with torch.no_grad():
        layer.q_proj.weight.mul_(16)
    torch.testing.assert_close(layer(hidden, rotation, None), before, rtol=1e-4, atol=1e-5)


def test_biases_are_optional_and_start_at_zero() -> None:
    torch.manual_seed(0)
    layer = GroupedQueryAttention(
        32,
        query_heads=4,
        key_value_heads=2,
        head_dim=6,
        std=0.2,
        output_std=0.2,
        head_norm_eps=1e-6,
        biases=PROJECTIONS,
    )
    biases = {name: p for name, p in layer.named_parameters() if name.endswith("bias")}
    assert {name: tuple(p.shape) for name, p in biases.items()} == {
        "q_proj.bias": (24,),
        "k_proj.bias": (12,),
        "v_proj.bias": (12,),
        "o_proj.bias": (32,),
    }
    hidden, rotation = torch.randn(1, 5, 32), RotaryEmbedding(6, theta=1e4)(torch.arange(5).unsqueeze(0))
    assert torch.equal(layer(hidden, rotation, None), attention_layer()(hidden, rotation, None))
    with torch.no_grad():
        for bias in biases.values():
            bias.fill_(1.0)
    assert not torch.allclose(layer(hidden, rotation, None), attention_layer()(hidden, rotation, None))
    for module in modules_with(layer, LateInit).values():
        module.reset_parameters()
    assert not any(bias.any() for bias in biases.values())


def test_a_window_hides_what_is_further_back() -> None:
    layer = GroupedQueryAttention(
        32, query_heads=4, key_value_heads=2, head_dim=6, std=0.2, output_std=0.2, head_norm_eps=1e-6, window=3
    )
    assert layer.core.attention.static["window"] == 3
    hidden, rotation = torch.randn(1, 6, 32), RotaryEmbedding(6, theta=1e4)(torch.arange(6).unsqueeze(0))
    changed = hidden.clone()
    changed[:, 1] += 1.0
    before, after = layer(hidden, rotation, None), layer(changed, rotation, None)
    differs = (before != after).any(dim=-1)[0].tolist()
    assert differs == [False, True, True, True, False, False]


def test_a_tensor_parallel_rank_may_hold_some_heads() -> None:
    layer, half = attention_layer(), attention_layer()
    hidden, rotation = torch.randn(1, 5, 32), RotaryEmbedding(6, theta=1e4)(torch.arange(5).unsqueeze(0))
    parts = []
    for rank in range(2):
        for name, style in layer.tensor_parallel_plan().items():
            whole = layer.get_submodule(name).weight
            dim = {TensorStyle.COLUMN: 0, TensorStyle.ROW: 1}.get(style)
            part = whole if dim is None else whole.chunk(2, dim=dim)[rank]
            half.get_submodule(name).weight = nn.Parameter(part.detach().clone())
        parts.append(half(hidden, rotation, None))
    assert_close_values(parts[0] + parts[1], layer(hidden, rotation, None))


def test_swiglu_is_split_over_its_inner_features() -> None:
    torch.manual_seed(0)
    layer = SwiGLU(8, 12, std=0.5, output_std=0.5)
    hidden, half = torch.randn(3, 8), SwiGLU(8, 12, std=0.5, output_std=0.5)
    parts = []
    for rank in range(2):
        for name, style in layer.tensor_parallel_plan().items():
            part = layer.get_submodule(name).weight.chunk(2, dim=0 if style is TensorStyle.COLUMN else 1)[rank]
            half.get_submodule(name).weight = nn.Parameter(part.detach().clone())
        parts.append(half(hidden))
    assert_close_values(parts[0] + parts[1], layer(hidden))


@pytest.mark.thorough
@pytest.mark.parametrize("compiled", [False, True])
def test_swiglu_calls_projections_that_have_hooks_whatever_kernel_it_is_bound_to(compiled: bool) -> None:
    kinds = ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"]
    for kind in kinds[:2] if compiled else kinds:
        layer = SwiGLU(4, 8, std=0.5, output_std=0.5)
        layer.swiglu.bind("other", lambda *_: pytest.fail("calls no projection"))
        calls: list[str] = []
        hook = getattr(layer.down_proj, f"register_{kind}")(lambda *_: calls.append(kind))  # noqa: B023
        call = torch.compile(layer, backend="eager", fullgraph=True) if compiled else layer
        call(torch.randn(3, 4)).sum().backward()
        assert calls == [kind]
        hook.remove()
        layer.swiglu.bind("other", lambda x, *_: x + 1)
        assert call(torch.ones(3, 4)).tolist() == [[2.0] * 4] * 3


def test_attention_calls_projections_that_have_hooks_whatever_kernel_its_inputs_are_bound_to() -> None:
    layer, rotation = attention_layer(), RotaryEmbedding(6, theta=1e4)(torch.arange(5).unsqueeze(0))
    calls: list[str] = []
    hook = layer.v_proj.register_forward_hook(lambda *_: calls.append("hook"))
    layer.attention_inputs.bind("other", lambda *_: pytest.fail("calls no projection"))
    layer(torch.randn(2, 5, 32), rotation, None)
    assert calls == ["hook"]
    hook.remove()
    layer.attention_inputs.bind(
        "other", lambda x, *_: tuple(torch.zeros(*x.shape[:2], heads, 6) for heads in (4, 2, 2))
    )
    assert not layer(torch.randn(2, 5, 32), rotation, None).any()


def test_modules_implement_the_traits_they_should() -> None:
    layer = attention_layer()
    assert isinstance(layer, ContextParallelizable)
    assert isinstance(layer, TensorParallelizable)
    assert isinstance(layer.core, HasOps)
    assert not isinstance(layer.core, LateInit)
    assert all(isinstance(m, LateInit) for m in (RMSNorm(4, eps=1e-6), Linear(4, 4, std=1), CausalLMHead(4, 4, std=1)))
    assert not list(RotaryEmbedding(4, theta=1e4).buffers())


def test_weights_start_with_the_standard_deviation_asked_for() -> None:
    torch.manual_seed(0)
    for module in (Linear(200, 300, std=0.02), TokenEmbedding(300, 200, std=0.02), CausalLMHead(200, 300, std=0.02)):
        assert module.weight.std().item() == pytest.approx(0.02, rel=0.02)


def test_depth_scaling_is_optional() -> None:
    assert Initialization().output_std(8) == pytest.approx(0.02 / math.sqrt(16))
    assert Initialization(std=0.1, depth_scaled=False).output_std(8) == 0.1
