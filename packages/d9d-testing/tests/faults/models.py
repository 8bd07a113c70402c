"""Models with one fault each: Qwen3 (taken from d9d-qwen3), without a reference implementation to compare with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from d9d_core.plugin import ModelSpec, Ref
from d9d_core.traits import HasOps, modules_with
from d9d_testing.suites.model import ModelSuite
from torch import Tensor, nn
from torch.nn import functional

Change = Callable[[nn.Module], None]


class Changed(Ref):
    """Builds the model and changes it."""

    change: Change

    def load(self) -> Callable[..., nn.Module]:
        build = Ref(self.target).load()

        def changed(*args: Any) -> nn.Module:
            model: nn.Module = build(*args)
            type(self).change(model)
            return model

        return changed


def _blocks(model: nn.Module) -> list[Any]:
    return list(model.get_submodule("layers").children())


class InOut(nn.Linear):
    """A linear layer whose weight is [in, out]."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=getattr(self, "std", 1.0))


def holds_a_square_in_out(model: nn.Module) -> None:
    for block in _blocks(model):
        old = block.attention.o_proj
        block.attention.o_proj = InOut(old.in_features, old.out_features, bias=False)
        block.attention.o_proj.std = old.std


def starts_attention_too_large(model: nn.Module) -> None:
    for block in _blocks(model):
        block.attention.o_proj.std = 0.02


def starts_feed_forward_too_large(model: nn.Module) -> None:
    for block in _blocks(model):
        block.ffn.down_proj.std = 0.02


def leaves_a_norm(model: nn.Module) -> None:
    for block in _blocks(model):
        block.ffn_norm.reset_parameters = lambda: None


def _attend(model: nn.Module, function: Callable[..., Tensor]) -> None:
    for module in modules_with(model, HasOps).values():
        for slot in module.op_slots().values():
            if slot.op == "attention":
                slot.bind("faulty", function)


def sees_later_tokens(model: nn.Module) -> None:
    def attend(query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None) -> Tensor:
        parts = (tensor.transpose(1, 2) for tensor in (query, key, value))
        mask = None if documents is None else (documents[:, None, :, None] == documents[:, None, None, :])
        return functional.scaled_dot_product_attention(*parts, attn_mask=mask, enable_gqa=True).transpose(1, 2)

    _attend(model, attend)


def sees_other_documents(model: nn.Module) -> None:
    def attend(query: Tensor, key: Tensor, value: Tensor, _documents: Tensor | None) -> Tensor:
        parts = (tensor.transpose(1, 2) for tensor in (query, key, value))
        return functional.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True).transpose(1, 2)

    _attend(model, attend)


def skips_a_norm(model: nn.Module) -> None:
    for block in _blocks(model):
        block.ffn_norm.forward = lambda x: x


def mixes_samples(model: nn.Module) -> None:
    for block in _blocks(model):
        block.register_forward_hook(lambda _m, _i, out: out + 0.1 * out.mean(0, keepdim=True))


def reads_a_value(model: nn.Module) -> None:
    def read(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        float(inputs[0].sum())

    for block in _blocks(model):
        block.register_forward_pre_hook(read)


def keeps_documents(model: nn.Module) -> None:
    """A cache with the shape as its key: later microbatches get the documents of the first one."""
    first: dict[Any, Tensor] = {}

    def remember(_module: nn.Module, inputs: Any, named: dict[str, Any]) -> Any:
        documents = named.get("documents")
        if documents is None:
            return None
        key = (documents.shape, documents.device)
        return inputs, {**named, "documents": first.setdefault(key, documents)}

    model.register_forward_pre_hook(remember, with_kwargs=True)


def drops_out_in_evaluation(model: nn.Module) -> None:
    for block in _blocks(model):
        block.register_forward_hook(lambda _m, _i, out: functional.dropout(out, 0.05))


def norms_are_narrow(model: nn.Module) -> None:
    """Norms compute in the dtype of their input."""

    def narrow(x: Tensor, norm: Any) -> Tensor:
        mean = (x * x).cumsum(-1)[..., -1:] / x.shape[-1]  # each partial sum is rounded
        out: Tensor = x * torch.rsqrt(mean + norm.eps) * norm.weight
        return out

    def summed(x: Tensor, added: Tensor | None, norm: Any) -> tuple[Tensor, Tensor]:
        total = x if added is None else x + added
        return narrow(total, norm), total

    for module in model.modules():
        if type(module).__name__ == "RMSNorm":
            module.forward = lambda x, norm=module: narrow(x, norm)
            module.branch = lambda x, added=None, norm=module: summed(x, added, norm)


class _Format:
    """The format of Qwen3 with one fault."""

    def __init__(self) -> None:
        self._inner = Ref("d9d_qwen3.hugging_face.dense:Qwen3HuggingFace").load()()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class ForgetsAField(_Format):
    def config_json(self, config: Any, dtype: str) -> dict[str, Any]:
        return {k: v for k, v in self._inner.config_json(config, dtype).items() if k != "rope_theta"} | {
            "rms_norm_eps": 0.5
        }


class Plain(Ref):
    """A reference to a module of this file."""

    value: Any

    def load(self) -> Any:
        return type(self).value


def plain_qwen3(config: Any, weights: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
    """Qwen3 as a plain function. Shapes: B samples, S positions, N heads of D features."""

    def norm(x: Tensor, name: str) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + config.rms_norm_eps)
        return (wide * scale).to(x.dtype) * weights[f"{name}.weight"]

    def heads(x: Tensor, name: str) -> Tensor:
        return (x @ weights[f"{name}.weight"].T).unflatten(-1, (-1, config.head_dim))

    def rotated(x: Tensor) -> Tensor:
        powers = torch.arange(0, config.head_dim, 2) / config.head_dim
        angles = torch.arange(tokens.shape[1])[:, None, None] * config.rope_theta**-powers
        one, two = x.float().chunk(2, -1)
        turned = (one * angles.cos() - two * angles.sin(), two * angles.cos() + one * angles.sin())
        return torch.cat(turned, -1).to(x.dtype)

    x = weights["embedding.weight"][tokens]
    for layer in range(config.num_layers):
        at = f"layers.{layer}"
        inner = norm(x, f"{at}.attention_norm")
        query, key = (
            rotated(norm(heads(inner, f"{at}.attention.{part}_proj"), f"{at}.attention.{part}_norm")) for part in "qk"
        )
        parts = (part.transpose(1, 2) for part in (query, key, heads(inner, f"{at}.attention.v_proj")))
        mixed = functional.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True).transpose(1, 2)
        x = x + mixed.flatten(2) @ weights[f"{at}.attention.o_proj.weight"].T
        inner = norm(x, f"{at}.ffn_norm")
        gate, up = (inner @ weights[f"{at}.ffn.{part}_proj.weight"].T for part in ("gate", "up"))
        x = x + (functional.silu(gate) * up) @ weights[f"{at}.ffn.down_proj.weight"].T
    return norm(x, "norm") @ weights["heads.causal_lm.weight"].T


class Sound(ModelSuite):
    plugin = "d9d_qwen3.plugin"
    target = "qwen3"
    changes: Mapping[str, Any] = {}
    claims: str | None = None
    test_every_data_parallel_layout_computes_the_same = None  # of the plugin itself, whatever is changed here

    def reference_logits(self, config: Any, weights: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
        return plain_qwen3(config, weights, tokens)

    @pytest.fixture
    def spec(self) -> ModelSpec:
        pytest.importorskip("d9d_qwen3")
        specs = Ref("d9d_qwen3.plugin:d9d_models").load()()
        (found,) = [spec for spec in specs if spec.name == self.target]
        provides = found.provides | ({self.claims} if self.claims else set())
        return replace(found, provides=provides, **self.changes)


def _model(change: Change, text: str) -> tuple[dict[str, Any], str]:
    kind = type("Changed", (Changed,), {"change": staticmethod(change)})
    return {"changes": {"build": kind("d9d_qwen3.model:Qwen3")}}, text


def _part(text: str, **parts: Any) -> tuple[dict[str, Any], str]:
    made = {name: type("Plain", (Plain,), {"value": staticmethod(value)})("of:this") for name, value in parts.items()}
    return {"changes": made}, text


FAULTS = {
    "a square matrix is exported untransposed": _model(holds_a_square_in_out, "transpose it in the exporter"),
    "attention writes too much at the start": _model(starts_attention_too_large, "residual stream of 18 blocks"),
    "feed-forward writes too much at the start": _model(starts_feed_forward_too_large, "residual stream of 18 blocks"),
    "a norm is not initialised": _model(leaves_a_norm, "not filled by any reset_parameters()"),
    "sees later tokens": _model(sees_later_tokens, ""),
    "sees other documents": _model(sees_other_documents, ""),
    "a norm is idle": _model(skips_a_norm, "allowed)"),
    "mixes samples": _model(mixes_samples, ""),
    "keeps the documents of its first microbatch": _model(keeps_documents, ""),
    "drops out in evaluation": _model(drops_out_in_evaluation, ""),
    "norms are narrow": _model(norms_are_narrow, "from the result in float32, and the reference"),
    "reads a value on the host": _model(reads_a_value, ""),
    "config.json lacks some fields": _part("", hugging_face=ForgetsAField),
    "counts ten times the FLOPs": _part("", flops=lambda config, length: 10.0 * 6 * 40_000),
    "claims a trait that it lacks": (
        {"claims": "model:experts"},
        "no module implements it: ['model:experts']",
    ),
}
