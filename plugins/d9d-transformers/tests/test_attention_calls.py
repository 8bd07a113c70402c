"""Calls of attention by stand-in modules: recorded facts, the core that computes them, and the arguments it gets."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from d9d_core.errors import BuildError
from d9d_nn.attention.core import AttentionCore
from d9d_transformers.attention import AttentionCall, attend, mask_on_meta, record, register, window_of
from d9d_transformers.library import library
from torch import Tensor, nn

FACTS = {
    "query_heads": 4, "key_value_heads": 2, "head_dim": 16, "value_dim": 8, "scaling": 0.25, "window": None,
    "softcap": None, "sinks": False, "others": (),
}  # fmt: skip


def heads(value_dim: int = 8, device: str = "meta") -> tuple[Tensor, Tensor, Tensor]:
    shapes = (3, 4, 5, 16), (3, 2, 5, 16), (3, 2, 5, value_dim)
    query, key, value = (torch.empty(shape, device=device) for shape in shapes)
    return query, key, value


def mask_of(function: Callable[..., Any]) -> Tensor:
    return mask_on_meta(mask_function=function, q_length=3, kv_length=4, other="ignored")


def windowed(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return (key <= query) & (key > query - 9)


def bidirectional(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return key > query - 9


def marked(is_causal: bool) -> nn.Module:
    module = nn.Identity()
    module.is_causal = is_causal  # type: ignore[assignment]
    return module


@pytest.mark.parametrize(
    ("module", "mask", "scaling", "keywords", "changed"),
    [
        (nn.Identity(), None, None, {}, {}),
        (marked(True), None, 3, {"position_ids": 1, "use_cache": True, "cache_position": 2}, {"scaling": 3.0}),
        (marked(False), None, None, {"zeta": 1, "alpha": 0}, {"others": ("alpha", "is_causal=False", "zeta")}),
        (nn.Identity(), None, None, {"zeta": None, "output_attentions": True, "output_router_logits": 1}, {}),
        (nn.Identity(), None, None, {"sliding_window": 7, "softcap": 2.0}, {"window": 7, "softcap": 2.0}),
        (nn.Identity(), None, None, {"s_aux": torch.ones(4), "d9d_documents": {}}, {"sinks": True}),
        (nn.Identity(), None, None, {"s_aux": None}, {}),
        (nn.Identity(), mask_of(windowed), None, {"sliding_window": 7}, {"window": 9}),
        (nn.Identity(), mask_of(lambda _b, _h, q, k: k <= q), None, {"sliding_window": 7}, {"window": None}),
        (
            nn.Identity(),
            mask_of(bidirectional),
            None,
            {"sliding_window": 7},
            {"others": ("a mask of another kind (which is not causal)",)},
        ),
        (
            nn.Identity(),
            torch.zeros(1, 1, 3, 4),
            None,
            {"sliding_window": 7},
            {"others": ("a mask of another kind (changed)",)},
        ),
    ],
)
def test_the_facts_of_a_call_are_its_shapes_and_keywords(
    module: nn.Module, mask: Tensor | None, scaling: Any, keywords: dict[str, Any], changed: dict[str, Any]
) -> None:
    assert AttentionCall.of(module, *heads(), mask, scaling, keywords) == AttentionCall(**FACTS | changed)
    calls: dict[nn.Module, AttentionCall] = {}
    out, weights = record(module, *heads(), mask, scaling, **{**keywords, "d9d_documents": calls})
    assert calls == {module: AttentionCall(**FACTS | changed)}
    assert (out.shape, out.is_meta, weights) == ((3, 5, 4, 8), True, None)


def test_a_mask_on_the_meta_device_has_the_size_and_the_window_of_its_function() -> None:
    mask = mask_of(windowed)
    assert (mask.shape, mask.is_meta) == ((1, 1, 3, 4), True)


def test_a_core_has_heads_of_one_size_for_all() -> None:
    for dims in ((16, 8), (8, 16)):
        given = {"head_dim": dims[0], "value_dim": dims[1], "window": 5}
        for others in ({"softcap": 2.0, "sinks": False}, {"softcap": None, "sinks": True}):
            slot = AttentionCall(**FACTS | given | others).core("layers.0.self_attn").attention
            same = AttentionCore(query_heads=4, key_value_heads=2, head_dim=16, window=5, **others).attention
            assert (slot.op, slot.static) == (same.op, same.static)
            assert same.static["head_dim"] == 16
    call = AttentionCall(**FACTS | {"others": ("alpha", "zeta")})
    with pytest.raises(
        BuildError, match=r"^model\.config: layers\.0 gives its attention alpha, zeta, which d9d does not"
    ):
        call.core("layers.0")


class Recorder(nn.Module):
    """Core that returns its queries, and records its arguments."""

    def forward(self, *given: Any) -> Tensor:
        self.given = given
        result: Tensor = given[0] + given[2].repeat_interleave(2, dim=2)
        return result


@pytest.mark.parametrize(
    ("value_dim", "scaling", "factor"),
    [
        (16, None, 1.0),
        (16, 0.25, 1.0),
        (16, 0.5, 2.0),
        (8, None, 1.0),
        (8, 1.0, 4.0),
        (20, None, math.sqrt(20 / 16)),
        (20, 1 / math.sqrt(20), 1.0),
    ],
)
def test_a_core_gets_padded_heads_and_scaled_queries(value_dim: int, scaling: float | None, factor: float) -> None:
    torch.manual_seed(0)
    module = nn.Module()
    module.d9d_core = Recorder()
    query, key, value = (torch.randn(tensor.shape) for tensor in heads(value_dim))
    out, weights = attend(module, query, key, value, scaling=scaling, sliding_window=3)
    given: Any = module.d9d_core.given
    width = max(16, value_dim)
    padded = [torch.nn.functional.pad(one, (0, width - one.shape[-1])).transpose(1, 2) for one in (query, key, value)]
    torch.testing.assert_close(given[0], padded[0] * factor)
    assert torch.equal(given[1], padded[1])
    assert torch.equal(given[2], padded[2])
    assert given[3:] == (None,)
    assert weights is None
    assert torch.equal(out, (given[0] + padded[2].repeat_interleave(2, dim=2))[..., :value_dim])
    if factor == 1:
        assert torch.equal(given[0], padded[0])  # not even rounded


def test_a_core_gets_documents_and_sinks() -> None:
    module = nn.Module()
    module.d9d_core = Recorder()
    documents, sinks = object(), torch.ones(4)
    given = [torch.zeros(tensor.shape) for tensor in heads(16)]
    attend(module, *given, d9d_documents=documents, s_aux=sinks)
    recorded: Any = module.d9d_core.given
    assert recorded[3:] == (documents, sinks)
    assert isinstance(AttentionCall(**FACTS).core("here"), AttentionCore)


def test_masks_and_dropout_that_would_be_ignored_are_refused() -> None:
    hint = "; set attention_dropout of model.config to 0"
    module, given = nn.Identity(), heads()
    with pytest.raises(ValueError, match=r"^Identity gives its attention a mask, which d9d does not support$"):
        attend(module, *given, attention_mask=torch.ones(1), dropout=0.5)
    with pytest.raises(ValueError, match=f"attention dropout of 0.5, which d9d does not support{hint}$"):
        attend(module, *given, dropout=0.5)
    with pytest.raises(ValueError, match=f"attention dropout of 0.5, which d9d's attention does not have{hint}$"):
        record(module, *given, dropout=0.5, d9d_documents={})
    with pytest.raises(ValueError, match="^Identity passes no keywords to its attention"):
        record(module, *given)


@pytest.mark.parametrize(
    ("function", "window"),
    [
        (lambda _b, _h, query, key: (key <= query) & (key >= query), 1),
        (lambda _b, _h, query, key: (key <= query) & (key > query - 2), 2),
        (lambda _b, _h, query, key: key <= query + 1, "which is not causal"),
        (lambda _b, _h, query, key: key <= query + 7, "which is not causal"),
        (lambda _b, _h, query, key: (key <= query) | (key > query + 6), "which is not causal"),
        (lambda _b, _h, query, key: key < query, "which leaves out some earlier keys"),
        (lambda _b, _h, query, key: key < 0 * query, "which leaves out some earlier keys"),
        (lambda _b, _h, query, key: (key <= query) & (key > 0), "which depends on the position"),
        (lambda _b, _h, query, key: (key <= query) & (key != query - 1), "which leaves out some earlier keys"),
        (lambda _b, _h, query, key: (key <= query) & (key > query - 2**19 - 1), 2**19 + 1),
        (lambda _b, _h, query, key: (key <= query) & (key > query - 2**19 - 2), "which depends on the position"),
        (lambda _b, _h, query, key: (key <= query) & (key != 0), "which depends on the position"),
        (lambda *_: True, "which is not causal"),
        (lambda *_: False, "which leaves out some earlier keys"),
        (lambda batch, head, query, key: (key <= query) & (batch == 0) & (head == 0), None),
    ],
)
def test_a_window_is_found_at_its_boundaries(function: Callable[..., Any], window: int | str | None) -> None:
    assert window_of(function) == window


def test_attention_functions_and_the_mask_have_their_names_in_transformers() -> None:
    register()
    found = library().AttentionInterface()
    assert (found["d9d"], found["d9d_examined"], found["d9d_masked"]) == (attend, record, record)
    assert library().AttentionMaskInterface()["d9d_masked"] is mask_on_meta
