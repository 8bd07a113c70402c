"""Facts about the heads of language models, of stand-ins with the interface of transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_core.errors import BuildError
from d9d_transformers.head import Head
from torch import Tensor, nn


class Base(nn.Module):
    """Model without its head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)

    def forward(self, input_ids: Tensor) -> Any:
        return (self.embed(input_ids),)


class Native(nn.Module):
    """Language model with 4 features and 7 words."""

    base_model_prefix = "model"

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.model = Base()
        self.lm_head: nn.Module = nn.Linear(4, 7, bias=given.get("bias", False))
        self.before, self.after = given.get("before", 1.0), given.get("after", 1.0)
        cap = given.get("cap")
        text = SimpleNamespace(final_logit_softcapping=cap)
        self.config = SimpleNamespace(initializer_range=given.get("std"), get_text_config=lambda: text)
        self.cap = given.get("own_cap", cap)
        self.all_tied_weights_keys = given.get("tied", {})

    @property
    def base_model(self) -> nn.Module:
        return self.model

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, input_ids: Tensor, use_cache: bool) -> Any:
        assert not use_cache
        logits = self.lm_head(self.before * self.model(input_ids=input_ids)[0]) * self.after
        return SimpleNamespace(logits=logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap)


def test_a_head_has_the_sizes_names_and_factors_of_its_model() -> None:
    found = Head.of(Native(std=0.5, before=0.25, after=3.0))
    assert found == Head("lm_head", "model.embed", 4, 7, 0.5, tied=False, scale=pytest.approx(0.75), softcap=None)
    assert (Head.of(Native()).scale, Head.of(Native()).std) == (1.0, 0.02)
    assert Head.of(Native(tied={"lm_head.weight": "model.embed.weight"})).tied
    capped = Head.of(Native(cap=20.0, before=0.5))
    assert (capped.scale, capped.softcap) == (pytest.approx(0.5), 20.0)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"bias": True}, "the head of Native is Linear, but d9d supports only a linear layer without bias"),
        ({"tied": {"model.other": "model.embed.weight"}}, "Native ties model.other = model.embed.weight; d9d can tie"),
        ({"tied": {"lm_head.weight": "model.other"}}, "Native ties lm_head.weight = model.other; d9d can tie only"),
        ({"cap": 20.0, "after": 2.0}, "Native changes logits after its head by more than a factor or a soft cap"),
        ({"own_cap": 20.0}, "Native changes logits after its head by more than a factor or a soft cap"),
        ({"before": torch.arange(4.0)}, "Native changes hidden states before its head by more than a factor"),
        ({"before": torch.ones(2, 1, 1)}, "Native changes hidden states before its head by more than a factor"),
    ],
)
def test_a_head_that_computes_otherwise_is_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(BuildError, match=text):
        Head.of(Native(**given))


@pytest.mark.parametrize("kind", [nn.Identity, nn.Sequential])
def test_a_head_that_is_no_linear_layer_of_the_model_itself_is_refused(kind: Any) -> None:
    native = Native()
    native.lm_head = kind(nn.Linear(4, 7, bias=False)) if kind is nn.Sequential else kind()
    inner = native.lm_head[0] if isinstance(native.lm_head, nn.Sequential) else native.lm_head
    native.get_output_embeddings = lambda: inner  # type: ignore[method-assign]
    with pytest.raises(BuildError, match=f"the head of Native is {type(inner).__name__}, but d9d supports only"):
        Head.of(native)


def test_a_head_that_cannot_be_examined_is_refused_with_the_reason() -> None:
    native = Native()

    def fail(**_: Any) -> None:
        raise KeyError("mask")

    native.forward = fail  # type: ignore[method-assign,assignment]
    with pytest.raises(BuildError, match="the head of Native cannot be examined: 'mask'"):
        Head.of(native)
