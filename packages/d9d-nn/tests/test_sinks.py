"""Learned sinks and soft caps of attention, by the reference and by FlexAttention."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from d9d_core.errors import BuildError
from d9d_core.kernel import OpSignature
from d9d_core.traits import TensorStyle
from d9d_nn.attention.core import AttentionCore
from d9d_nn.attention.grouped_query import GroupedQueryAttention
from d9d_nn.ops.attention import flex, sdpa_sinks
from d9d_nn.ops.attention.reference import attention, visible
from d9d_nn.ops.attention.slot import AttentionSlot
from d9d_nn.rope.rotary_embedding import RotaryEmbedding
from torch import Tensor

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2], [0] * 8])
CPU = torch.device("cpu")


def drawn(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values and sinks."""
    draws = torch.Generator().manual_seed(0)
    shapes = ((2, 8, 4, 16), (2, 8, 2, 16), (2, 8, 2, 16), (4,))
    query, key, value, sinks = (torch.randn(shape, generator=draws, dtype=dtype).requires_grad_() for shape in shapes)
    return query, key, value, sinks


def plain(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, mask: Tensor) -> Tensor:
    """Definition: exponentials of visible scores, divided by their sum and the sink's."""
    key, value = (tensor.repeat_interleave(2, dim=2) for tensor in (key, value))
    powers = (torch.einsum("bsnd,btnd->bnst", query, key) / math.sqrt(query.shape[-1])).exp() * mask
    shares = powers / (powers.sum(-1, keepdim=True) + sinks.exp()[:, None, None])
    return torch.einsum("bnst,btnd->bsnd", shares, value)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_a_sink_takes_a_share_of_the_probability(window: int | None, documents: Tensor | None) -> None:
    query, key, value, sinks = drawn()
    seen = visible(8, documents, CPU, window)
    expected = plain(query, key, value, sinks, seen if documents is None else seen[:, None])
    found = attention(query, key, value, documents, sinks, window=window)
    torch.testing.assert_close(found, expected)
    weights = torch.arange(float(found.numel()), dtype=torch.float64).view_as(found)
    wanted = torch.autograd.grad((expected * weights).sum(), (query, key, value, sinks))
    got = torch.autograd.grad((found * weights).sum(), (query, key, value, sinks))
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b)
    assert got[3].abs().min() > 0


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("documents", [None, DOCUMENTS])
@pytest.mark.parametrize("option", ["sinks", "softcap"])
def test_flex_computes_sinks_and_caps(option: str, window: int | None, documents: Tensor | None) -> None:
    query, key, value, sinks = (tensor.detach() for tensor in drawn(torch.float32))
    given: dict[str, Any] = {"sinks": True} if option == "sinks" else {"softcap": 0.5}
    slot = AttentionSlot(query_heads=4, key_value_heads=2, head_dim=16, window=window, **given)
    more = (sinks,) if option == "sinks" else ()
    expected = slot(query, key, value, documents, *more)
    plain_attention = attention(query, key, value, documents, window=window)
    assert not torch.allclose(expected, plain_attention, atol=1e-2)
    slot.bind("flex", flex.build(OpSignature(slot.op, "cpu", "float32", slot.static)))
    torch.testing.assert_close(slot(query, key, value, slot.prepare(documents, 8, CPU), *more), expected)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_sdpa_computes_sinks_from_all_queries_and_from_some(window: int | None, documents: Tensor | None) -> None:
    given = drawn(torch.float64)
    query, key, value, sinks = given
    slot = AttentionSlot(query_heads=4, key_value_heads=2, head_dim=16, window=window, sinks=True)
    backend = sdpa_sinks.build(OpSignature(slot.op, "cpu", "float64", slot.static))
    expected = slot(query, key, value, documents, sinks)
    assert isinstance(backend, sdpa_sinks.SinkSdpa)
    found = backend(query, key, value, backend.prepare(documents, 8, CPU), sinks)
    torch.testing.assert_close(found, expected)
    for a, b in zip(torch.autograd.grad(found.sum(), given), torch.autograd.grad(expected.sum(), given), strict=True):
        torch.testing.assert_close(a, b)
    runs = [range(2), range(6, 8)]
    own = torch.tensor([0, 1, 6, 7])
    mask = backend.prepare_queries(documents, runs, 8, CPU)
    torch.testing.assert_close(
        backend(query[:, own], key, value, mask, sinks), slot(query, key, value, documents, sinks)[:, own]
    )


def test_sdpa_is_chosen_only_where_the_reference_cannot_attend() -> None:
    facts = {"head_dim": 16, "causal": True, "window": None}
    assert sdpa_sinks.supports(OpSignature("sink_attention", "cpu", "float32", facts)).priority == 0
    assert (
        sdpa_sinks.supports(OpSignature("sink_attention", "cpu", "float32", facts | {"own_queries": True})).priority > 0
    )
    on_gpu = OpSignature("sink_attention", "cuda", "bfloat16", facts | {"own_queries": True})
    assert sdpa_sinks.supports(on_gpu).priority < flex.supports(on_gpu).priority
    assert not sdpa_sinks.supports(OpSignature("sink_attention", "cpu", "int8", facts)).accept


def test_backends_that_compute_no_sinks_cannot_be_chosen_for_them() -> None:
    ops = {
        AttentionSlot(query_heads=2, key_value_heads=2, head_dim=4, window=None, **given).op
        for given in ({}, {"softcap": 1.0}, {"sinks": True})
    }
    assert ops == {"attention", "capped_attention", "sink_attention"}
    with pytest.raises(BuildError, match="sinks and a soft cap"):
        AttentionCore(query_heads=2, key_value_heads=2, head_dim=4, softcap=1.0, sinks=True)


@pytest.mark.parametrize(("op", "reason"), [("capped_attention", "computes soft caps"), ("sink_attention", "sinks")])
def test_flex_is_chosen_on_a_gpu_even_if_it_skips_nothing(op: str, reason: str) -> None:
    facts = {"head_dim": 64, "causal": True, "window": None}
    decision = flex.supports(OpSignature(op, "cuda", "bfloat16", facts, documents=False))
    assert decision.accept
    assert reason in decision.reason
    assert decision.priority > 0


def test_a_core_passes_its_sinks_on() -> None:
    query, key, value, sinks = drawn()
    core = AttentionCore(query_heads=4, key_value_heads=2, head_dim=16, sinks=True)
    torch.testing.assert_close(core(query, key, value, None, sinks), attention(query, key, value, None, sinks))
    core.attend_by(lambda *given: given[-1])
    assert core(query, key, value, None, sinks) is sinks


def test_a_layer_has_a_sink_for_each_query_head_which_tensor_parallelism_splits_like_the_heads() -> None:
    torch.manual_seed(0)
    sizes = {"query_heads": 4, "key_value_heads": 2, "head_dim": 16, "std": 0.5, "output_std": 0.1}
    layer = GroupedQueryAttention(32, sinks=True, **sizes)
    assert layer.sinks is not None
    assert layer.sinks.weight.shape == (4,)
    assert 0.1 < layer.sinks.weight.std() < 1.5
    assert layer.tensor_parallel_plan()["sinks"] is TensorStyle.COLUMN
    assert layer.tensor_parallel_heads()["sinks"] == 4
    rotation, hidden = RotaryEmbedding(16, theta=1e4)(torch.arange(8).unsqueeze(0)), torch.randn(2, 8, 32)
    out = layer(hidden, rotation, None)
    out.sum().backward()
    assert layer.sinks.weight.grad is not None
    assert layer.sinks.weight.grad.all()
    with torch.no_grad():
        layer.sinks.weight.fill_(-torch.inf)  # a sink without a share
    without = GroupedQueryAttention(32, **sizes)
    assert without.sinks is None
    without.load_state_dict({name: tensor for name, tensor in layer.state_dict().items() if "sinks" not in name})
    torch.testing.assert_close(layer(hidden, rotation, None), without(hidden, rotation, None))
    assert not torch.allclose(out, without(hidden, rotation, None))


def test_a_layer_with_an_output_gate_computes_its_sinks_too() -> None:
    torch.manual_seed(0)
    sizes = {"query_heads": 4, "key_value_heads": 2, "head_dim": 16, "std": 0.5, "output_std": 0.1}
    gated = GroupedQueryAttention(32, sinks=True, output_gate=True, **sizes)
    plain = GroupedQueryAttention(32, sinks=True, **sizes)
    rows = gated.q_proj.weight.detach().view(4, 2, 16, 32)  # heads, query and gate, features
    state = {name: tensor for name, tensor in gated.state_dict().items() if name != "q_proj.weight"}
    plain.load_state_dict(state | {"q_proj.weight": rows[:, 0].reshape(64, 32)})
    mixed: list[torch.Tensor] = []
    plain.core.register_forward_hook(lambda _module, _inputs, out: mixed.append(out))
    rotation, hidden = RotaryEmbedding(16, theta=1e4)(torch.arange(8).unsqueeze(0)), torch.randn(2, 8, 32)
    plain(hidden, rotation, None)
    gates = torch.einsum("bsh,ndh->bsnd", hidden, rows[:, 1]).sigmoid()
    out = gated(hidden, rotation, None)
    torch.testing.assert_close(out, plain.o_proj((mixed[0] * gates).flatten(2)))
    out.sum().backward()
    assert gated.sinks is not None
    assert gated.sinks.weight.grad is not None
    assert gated.sinks.weight.grad.all()
