"""Example calls of ops for given sizes, as first-party models make them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an op.

    Attributes:
        name: name for messages.
        inputs: name -> tensor; floating-point inputs are differentiated.
        static: static facts of the slot.
        options: further arguments.
        constants: names of floating-point inputs that models do not differentiate.
        documents: whether samples of the data hold several documents; ``None`` if unknown.
    """

    name: str
    inputs: Mapping[str, Tensor]
    static: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    constants: Collection[str] = ()
    documents: bool | None = None


def draw(*shape: int, seed: int) -> Tensor:
    """Tensor of normal random numbers that are equal in each call of this function."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def attention(
    samples: int,
    length: int,
    query_heads: int,
    heads: int,
    features: int,
    window: int | None,
    packed: bool,
    mask: str = "causal",
) -> Call:
    """Call of ``attention`` or ``attention_block`` with a kind of mask; with ``packed``, samples hold two documents."""
    inputs = {
        "query": draw(samples, length, query_heads, features, seed=0),
        "key": draw(samples, length, heads, features, seed=1),
        "value": draw(samples, length, heads, features, seed=2),
    }
    if packed:
        inputs["documents"] = (torch.arange(length) >= length // 3).long() + torch.zeros(samples, length).long()
    if mask == "blocks":  # every third run of positions is outside of blocks (-1)
        inputs["blocks"] = (draw(samples, length, seed=6) > 0.8).long().cumsum(1) % 3 - 1
    static = {"query_heads": query_heads, "key_value_heads": heads, "head_dim": features, "window": window}
    kind = {"causal": True} if mask == "causal" else {"causal": False, "mask": mask}
    name = f"query {list(inputs['query'].shape)}, key {list(inputs['key'].shape)}, window {window}"
    name += ", several documents" if packed else ", one document"
    name += "" if mask == "causal" else f", {mask}"
    return Call(name, inputs, {**kind, **static}, documents=packed or None)


def gated_delta_rule(samples: int, length: int, heads: int, shared: int, features: int, packed: bool) -> Call:
    """Call of ``gated_delta_rule`` with ``heads`` key heads, each for ``shared`` value heads of twice the features."""
    of_values = (samples, length, heads * shared)
    inputs = {
        "query": draw(samples, length, heads, features, seed=0),
        "key": draw(samples, length, heads, features, seed=1),
        "value": draw(*of_values, 2 * features, seed=2),
        "decay": -draw(*of_values, seed=3).square(),
        "beta": draw(*of_values, seed=4).sigmoid(),
    }
    if packed:
        inputs["documents"] = (draw(samples, length, seed=5) > 1).long().cumsum(1)
    static = {"key_dim": features, "value_dim": 2 * features, "key_heads": heads, "value_heads": heads * shared}
    name = f"value {[*of_values, 2 * features]}, {heads} key heads" + (", several documents" if packed else "")
    return Call(name, inputs, static, documents=packed or None)


def gated_delta_rule_from(samples: int, length: int, heads: int, shared: int, features: int, packed: bool) -> Call:
    """Call of ``gated_delta_rule_from``: the tensors of :func:`gated_delta_rule`, after a state."""
    call = gated_delta_rule(samples, length, heads, shared, features, packed)
    state = draw(samples, heads * shared, features, 2 * features, seed=6)
    return replace(call, inputs={"state": state, **call.inputs})


def state_space_rule(samples: int, length: int, groups: int, shared: int, features: int, packed: bool) -> Call:
    """Call of ``state_space_rule`` with ``groups`` groups of ``shared`` heads, whose states have twice the features."""
    of_heads, of_groups = (samples, length, groups * shared), (samples, length, groups, 2 * features)
    inputs = {
        "x": draw(*of_heads, features, seed=0),
        "dt": draw(*of_heads, seed=1).square(),
        "A": -draw(groups * shared, seed=2).square(),
        "B": draw(*of_groups, seed=3),
        "C": draw(*of_groups, seed=4),
    }
    if packed:
        inputs["documents"] = (draw(samples, length, seed=5) > 1).long().cumsum(1)
    static = {"heads": groups * shared, "groups": groups, "head_dim": features, "state_dim": 2 * features}
    name = f"x {[*of_heads, features]}, {groups} groups" + (", several documents" if packed else "")
    return Call(name, inputs, static, documents=packed or None)


def rms_norm(*shape: int) -> Call:
    """Call of ``rms_norm``."""
    inputs = {"x": draw(*shape, seed=0), "weight": draw(shape[-1], seed=1)}
    return Call(f"x {list(shape)}", inputs, {"features": shape[-1]}, {"eps": 1e-6})


def add_rms_norm(*shape: int, adds: bool) -> Call:
    """Call of ``add_rms_norm``, with or without an addend."""
    inputs = {"x": draw(*shape, seed=0), "weight": draw(shape[-1], seed=1)}
    inputs |= {"added": draw(*shape, seed=2)} if adds else {}
    name = f"x {list(shape)}, {'as much' if adds else 'nothing'} added"
    return Call(name, inputs, {"features": shape[-1]}, {"eps": 1e-6})


def silu_mul(*shape: int) -> Call:
    """Call of ``silu_mul``."""
    return Call(f"gate {list(shape)}", {"gate": draw(*shape, seed=0), "up": draw(*shape, seed=1)})


def low_rank_linear(shape: Sequence[int], inputs: int, rank: int, features: Sequence[int], *, biased: bool) -> Call:
    """Call of ``low_rank_linear`` with x [*shape, inputs] and one layer for each number of ``features``.

    The last layer has a bias if ``biased``; ranks increase by one from layer to layer.
    """
    tensors = {"x": draw(*shape, inputs, seed=0)}
    for place, count in enumerate(features):
        tensors |= {
            f"weight_{place}": draw(count, inputs, seed=4 * place + 1) / inputs**0.5,
            f"down_{place}": draw(rank + place, inputs, seed=4 * place + 2) / inputs**0.5,
            f"up_{place}": draw(count, rank + place, seed=4 * place + 3) / rank**0.5,
        }
    if biased:
        tensors[f"bias_{len(features) - 1}"] = draw(features[-1], seed=4 * len(features) + 1)
    static = {"inputs": inputs, "features": features[0], "rank": rank}
    name = f"x {[*shape, inputs]}, rank {rank}, features {list(features)}" + (", bias" if biased else "")
    return Call(name, tensors, static)


def swiglu(shape: Sequence[int], hidden: int, features: int) -> Call:
    """Call of ``swiglu`` with x [*shape, hidden], and weights that preserve the scale of activations."""
    inputs = {
        "x": draw(*shape, hidden, seed=0),
        "gate_weight": draw(features, hidden, seed=1) / hidden**0.5,
        "up_weight": draw(features, hidden, seed=2) / hidden**0.5,
        "down_weight": draw(hidden, features, seed=3) / features**0.5,
    }
    return Call(f"x {[*shape, hidden]}, {features} inside", inputs, {"hidden": hidden, "features": features})


def rope(samples: int, length: int, query_heads: int, heads: int, features: int, shared: bool) -> Call:
    """Call of ``rope``; ``shared`` uses the same angles for all samples."""
    angles = 3 * draw(1 if shared else samples, length, features // 2, seed=2)
    inputs = {
        "query": draw(samples, length, query_heads, features, seed=0),
        "key": draw(samples, length, heads, features, seed=1),
        "cos": angles.cos(),
        "sin": angles.sin(),
    }
    name = f"query {list(inputs['query'].shape)}, key {list(inputs['key'].shape)}, cos {list(angles.shape)}"
    return Call(name, inputs, {"head_dim": features}, constants=("cos", "sin"))


def normed_rope(samples: int, length: int, query_heads: int, heads: int, features: int, shared: bool) -> Call:
    """Call of ``normed_rope``; ``shared`` uses the same angles for all samples."""
    call = rope(samples, length, query_heads, heads, features, shared)
    inputs = {"query": call.inputs["query"], "key": call.inputs["key"]}
    inputs |= {"query_weight": draw(features, seed=3), "key_weight": draw(features, seed=4)}
    inputs |= {"cos": call.inputs["cos"], "sin": call.inputs["sin"]}
    static = {**call.static, "query_heads": query_heads, "key_heads": heads}
    return Call(call.name, inputs, static, {"eps": 1e-6}, constants=call.constants)


def attention_inputs(samples: int, length: int, query_heads: int, heads: int, features: int, shared: bool) -> Call:
    """Call of ``attention_inputs`` with 24 input features; ``shared`` uses the same angles for all samples."""
    call = normed_rope(samples, length, query_heads, heads, features, shared)
    hidden, given = 24, call.inputs
    inputs = {
        "x": draw(samples, length, hidden, seed=5),
        "query_weight": draw(query_heads * features, hidden, seed=6),
        "key_weight": draw(heads * features, hidden, seed=7),
        "value_weight": draw(heads * features, hidden, seed=8),
        "query_norm": given["query_weight"],
        "key_norm": given["key_weight"],
        "cos": given["cos"],
        "sin": given["sin"],
    }
    return Call(call.name, inputs, {**call.static, "hidden": hidden}, call.options, constants=call.constants)


def grouped_linear(
    counts: Sequence[int], spare: int, spare_rows: bool, features_in: int = 16, features_out: int = 24
) -> Call:
    """Call of ``grouped_linear`` with ``counts`` rows per expert and ``spare`` padding rows."""
    inputs = {
        "x": draw(sum(counts) + spare, features_in, seed=0),
        "bank": draw(len(counts), features_in, features_out, seed=1),
        "counts": torch.tensor(counts),
    }
    static = {"in_features": features_in, "out_features": features_out, "experts": len(counts)}
    name = f"rows {list(counts)} and {spare} padding, spare_rows={spare_rows}"
    return Call(name, inputs, static, {"spare_rows": spare_rows})


def linear_cross_entropy(shape: Sequence[int], features: int, words: int, spread: float = 1.0) -> Call:
    """Call of ``linear_cross_entropy``; every fourth target is ignored.

    A small ``spread`` of hidden states keeps the predicted probabilities away from 0 and 1, where gradients would be
    only rounding errors.
    """
    targets = torch.randint(words, tuple(shape), generator=torch.Generator().manual_seed(2))
    targets.view(-1)[1::4] = -100
    inputs = {
        "hidden": spread * draw(*shape, features, seed=0),
        "weight": draw(words, features, seed=1),
        "targets": targets,
    }
    name = f"hidden {[*shape, features]}, weight {[words, features]}"
    return Call(name, inputs, {"features": features, "vocabulary": words})


def permutation(tokens: int, choices: int, rows: int, features: int, *, back: bool, weighted: bool = True) -> Call:
    """Call of ``permute``, or with ``back`` of ``unpermute``; choices beyond the first ``rows`` are dropped."""
    slots = torch.randperm(tokens * choices, generator=torch.Generator().manual_seed(5))
    places = torch.empty_like(slots).scatter_(0, slots, torch.arange(len(slots)))
    numbers = {"slots": slots[:rows], "places": places.view(tokens, choices)}
    if back:
        inputs = {"rows": draw(rows, features, seed=0), **numbers}
        inputs |= {"weights": draw(tokens, choices, seed=1)} if weighted else {}
    else:
        inputs = {"tokens": draw(tokens, features, seed=0), **numbers}
    name = f"{tokens} tokens of {features} features, {choices} choices, {rows} rows"
    name += "" if weighted or not back else ", no weights"
    return Call(name, inputs, options={"absent": rows < tokens * choices})


def adamw(*shapes: Sequence[int]) -> Call:
    """Call of ``adamw``: parameters of some shapes, and their gradients."""
    inputs = {f"parameter {number}": draw(*shape, seed=2 * number) for number, shape in enumerate(shapes)}
    inputs |= {f"gradient {number}": draw(*shape, seed=2 * number + 1) for number, shape in enumerate(shapes)}
    static = {"amsgrad": False, "maximize": False, "master_weights": False}
    return Call(f"parameters {[list(shape) for shape in shapes]}", inputs, static, constants=tuple(inputs))
