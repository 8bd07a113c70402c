from __future__ import annotations

import math

import pytest
import torch
from d9d_core.ops import OpSignature
from d9d_nn.ops import sdpa
from d9d_nn.ops.attention import attention, visible
from d9d_testing.tolerances import assert_close_gradients, assert_close_values
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytestmark = pytest.mark.smoke

CPU = OpSignature("attention", "cpu", "float32", {"causal": True})
BACKENDS = {
    "reference": attention,
    "sdpa": sdpa.build(CPU),
    "sdpa_as_on_cuda": sdpa.build(OpSignature("attention", "cuda", "bfloat16")),
}


def heads(samples: int, length: int, count: int, features: int = 8, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, length, count, features, generator=generator).requires_grad_()


def one_token_at_a_time(query: Tensor, key: Tensor, value: Tensor, documents: Tensor) -> Tensor:
    """The definition, in loops."""
    out = torch.zeros_like(query)
    samples, length, count, features = query.shape
    for b in range(samples):
        for s in range(length):
            seen = [t for t in range(s + 1) if documents[b, t] == documents[b, s]]
            for n in range(count):
                k = n * key.shape[2] // count
                scores = torch.stack([query[b, s, n] @ key[b, t, k] for t in seen]) / math.sqrt(features)
                out[b, s, n] = scores.softmax(0) @ torch.stack([value[b, t, k] for t in seen])
    return out


@pytest.mark.parametrize("backend", BACKENDS)
def test_follows_the_definition(backend: str) -> None:
    query, key, value = heads(2, 5, 4), heads(2, 5, 2, seed=1), heads(2, 5, 2, seed=2)
    documents = torch.tensor([[0, 0, 0, 1, 1], [3, 4, 4, 4, 5]])
    with torch.no_grad():
        assert_close_values(
            BACKENDS[backend](query, key, value, documents), one_token_at_a_time(query, key, value, documents)
        )


@settings(max_examples=20, deadline=None)
@given(
    samples=st.integers(1, 3),
    length=st.integers(1, 17),
    key_value_heads=st.integers(1, 3),
    groups=st.integers(1, 3),
    cuts=st.lists(st.integers(0, 16), max_size=3) | st.none(),
)
def test_sdpa_agrees_with_the_reference(
    samples: int, length: int, key_value_heads: int, groups: int, cuts: list[int] | None
) -> None:
    documents = None
    if cuts is not None:
        documents = sum((torch.arange(length) >= cut).long() for cut in cuts) + torch.zeros(
            samples, length, dtype=torch.long
        )
    results = {}
    for name in ("reference", "sdpa"):
        inputs = (
            heads(samples, length, key_value_heads * groups),
            heads(samples, length, key_value_heads, seed=1),
            heads(samples, length, key_value_heads, seed=2),
        )
        out = BACKENDS[name](*inputs, documents)
        out.square().sum().backward()
        results[name] = out, {n: t.grad for n, t in zip(("query", "key", "value"), inputs, strict=True)}
    assert_close_values(results["sdpa"][0], results["reference"][0])
    # A token that sees only itself gives its query and key no gradient but rounding.
    if visible(length, documents, torch.device("cpu")).sum() > (samples if cuts is not None else 1) * length:
        assert_close_gradients(results["sdpa"][1], results["reference"][1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_documents_equal_documents_alone(backend: str) -> None:
    lengths = (3, 1, 5)
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)).unsqueeze(0)
    query, key, value = heads(1, 9, 4), heads(1, 9, 2, seed=1), heads(1, 9, 2, seed=2)
    packed = BACKENDS[backend](query, key, value, documents)
    parts = zip(query.split(lengths, 1), key.split(lengths, 1), value.split(lengths, 1), strict=True)
    alone = torch.cat([BACKENDS[backend](*part, None) for part in parts], dim=1)
    assert_close_values(packed, alone)


def test_document_numbers_need_not_be_ordered() -> None:
    mask = visible(4, torch.tensor([[7, 7, -1, 7]]), torch.device("cpu"))
    assert mask.tolist() == [
        [
            [True, False, False, False],
            [True, True, False, False],
            [False, False, True, False],
            [True, True, False, True],
        ]
    ]


def test_reference_softmax_is_wider_than_bfloat16() -> None:
    query, key, value = (heads(1, 64, 1, seed=s).detach() for s in range(3))
    exact = attention(query.double(), key.double(), value.double())
    narrow = attention(query.bfloat16(), key.bfloat16(), value.bfloat16())
    assert narrow.dtype == torch.bfloat16
    assert_close_values(narrow, exact.to(torch.bfloat16))


def test_sdpa_explains_its_answer() -> None:
    assert sdpa.supports(CPU).accept
    assert sdpa.supports(CPU).priority > 0
    assert "the model is int8" in sdpa.supports(OpSignature("attention", "cpu", "int8")).reason
    refused = sdpa.supports(OpSignature("attention", "cpu", "float32", {"causal": False}))
    assert not refused.accept
    assert "causal" in refused.reason
