"""Routers of transformers' models, found in a small model, not by a list of models.

A router of transformers passes only the chosen experts of each token and their weights. Losses that balance the load
also need the scores of all experts, which are a function of the hidden states and one matrix. This module finds the
matrix and the function in a small model: they fit if each token's weights are a multiple of its experts' scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

#: Number that is added to an expert's selection bias; larger than any score.
_LARGE = 100.0


@dataclass(frozen=True)
class RouterFacts:
    """Facts about the router of a layer with experts.

    Attributes:
        module: name of the module with the matrix ``weight`` [experts, features], inside the containing module.
        scoring: function from logits to scores.
        bias: name of the tensor that is added to the scores only for the selection; ``None`` without such a tensor.
    """

    module: str
    scoring: Literal["softmax", "sigmoid"]
    bias: str | None


@dataclass(frozen=True)
class ExpertsCall:
    """Arguments of a call of an expert module: hidden states [T, H], experts int64 [T, k] and weights [T, k]."""

    hidden: Tensor
    index: Tensor
    weights: Tensor


def find_routers(base: nn.Module, run: Callable[[], object]) -> Mapping[str, RouterFacts]:
    """Find facts about routers, by the class of the module that contains the experts; unknown routers are left out.

    Args:
        base: small model without its head, in float32.
        run: function that runs the model on some tokens, without gradients.
    """
    calls = _calls(base, run)
    found: dict[str, RouterFacts] = {}
    for path, call in calls.items():
        parent = base.get_submodule(path.rpartition(".")[0])
        kind = type(parent).__name__
        if kind in found:
            continue
        matches = list(_matches(parent, base.get_submodule(path), call))
        if len(matches) == 1:
            (module, scoring) = matches[0]
            found[kind] = RouterFacts(module, scoring, _bias(base, path, call, module, run))
    return found


def scores_of(logits: Tensor, scoring: str) -> Tensor:
    """Scores [T, E] from logits [T, E]."""
    return logits.softmax(dim=-1) if scoring == "softmax" else logits.sigmoid()


def _calls(base: nn.Module, run: Callable[[], object]) -> dict[str, ExpertsCall]:
    """Last call of each expert module in a run."""
    calls: dict[str, ExpertsCall] = {}

    def note(path: str, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        given = [value for value in (*args, *keywords.values()) if isinstance(value, Tensor)]
        if len(given) == 3 and given[1].shape == given[2].shape and not given[1].is_floating_point():
            calls[path] = ExpertsCall(*given)

    hooks = [
        module.register_forward_pre_hook(
            lambda _, args, keywords, path=path: note(path, args, keywords), with_kwargs=True
        )
        for path, module in base.named_modules()
        if path.rpartition(".")[2] == "experts"
    ]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _matches(
    parent: nn.Module, experts: nn.Module, call: ExpertsCall
) -> Iterator[tuple[str, Literal["softmax", "sigmoid"]]]:
    """Yield pairs of matrix and function that fit a call: its weights are a multiple of the pair's scores."""
    inside = set(experts.modules())
    for name, module in parent.named_modules():
        weight = getattr(module, "weight", None)
        if module in inside or not isinstance(weight, Tensor) or weight.ndim != 2:
            continue
        if weight.shape[1] != call.hidden.shape[-1] or weight.shape[0] <= int(call.index.max()):
            continue
        bias = getattr(module, "bias", None)
        logits = functional.linear(call.hidden, weight, bias if isinstance(bias, Tensor) else None)
        for scoring in ("softmax", "sigmoid"):
            ratio = call.weights / scores_of(logits, scoring).gather(1, call.index)
            if torch.allclose(ratio, ratio[:, :1].expand_as(ratio), rtol=1e-4, atol=0):
                yield name, scoring


def _bias(base: nn.Module, path: str, call: ExpertsCall, router: str, run: Callable[[], object]) -> str | None:
    """Find the name of the selection bias: if one of its entries is large, every token chooses that entry's expert."""
    experts, parent = base.get_submodule(path), base.get_submodule(path.rpartition(".")[0])
    inside = {id(tensor) for tensor in (*experts.parameters(), *experts.buffers())}
    count = int(getattr(experts, "num_experts", call.index.max() + 1))
    for name, tensor in (*parent.named_parameters(), *parent.named_buffers()):
        if tensor.numel() != count or id(tensor) in inside or not tensor.is_floating_point():
            continue
        if name == f"{router}.bias":  # added to the logits, not only for the selection
            continue
        kept = tensor.detach().clone()
        for expert in range(count):
            tensor.data.view(-1)[expert] += _LARGE
            chosen = _calls(base, run)[path].index
            tensor.data.copy_(kept)
            if not (chosen == expert).any(dim=1).all():
                break
        else:
            return name
    return None
