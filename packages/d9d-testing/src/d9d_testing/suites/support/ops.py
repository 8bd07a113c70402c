"""Calls of the ops that first-party models make: shapes that are odd on purpose, and how a slot is called.

Shapes: B samples, S positions, N query heads, K key/value heads, D features of a head; R rows, E experts, I features
in, O features out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from d9d_core.extend import OpSlot
from d9d_core.plugin import Ref
from torch import Tensor

from d9d_testing.suites.support.attention_blocks import attend_in_turns, block_slot


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an op.

    Attributes:
        name: for messages.
        inputs: tensors by name; the floating-point ones are differentiated.
        static: the facts that a slot states about its calls.
        options: further arguments.
        constants: names of floating-point inputs that no model differentiates.
        documents: whether samples of the data that the call is made with hold several documents, if that is known.
    """

    name: str
    inputs: Mapping[str, Tensor]
    static: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    constants: Collection[str] = ()
    documents: bool | None = None


@dataclass(frozen=True, slots=True)
class Op:
    """What is known about an op.

    Attributes:
        slot: the static facts of a call -> a slot that holds the op's reference.
        calls: its calls, with float32 inputs.
        invoke: calls a slot, as models do.
        package: module of the package that has the reference.
    """

    slot: Callable[[Mapping[str, Any]], OpSlot]
    calls: Callable[[], Iterator[Call]]
    invoke: Callable[[OpSlot, Call], Tensor]
    package: str = "d9d_nn"


def _plain_slot(op: str, reference: str, static: Mapping[str, Any]) -> OpSlot:
    return OpSlot(op, Ref(reference).load(), **static)


def invoke_plainly(slot: OpSlot, call: Call) -> Tensor:
    """The slot with all inputs in order."""
    out: Tensor = slot(*call.inputs.values(), **call.options)
    return out


def draw(*shape: int, seed: int) -> Tensor:
    """Normal numbers, the same in each call."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _attention_slot(static: Mapping[str, Any]) -> OpSlot:
    make = Ref("d9d_nn.ops.attention.slot:AttentionSlot").load()
    slot: OpSlot = make(**{name: value for name, value in static.items() if name != "causal"})
    return slot


_ATTENTIONS = (
    (2, 7, 4, 2, 8, None, False),
    (2, 7, 4, 2, 8, None, True),
    (1, 1, 2, 2, 8, None, False),
    (1, 17, 3, 1, 16, 5, False),
    (3, 9, 6, 3, 8, 4, True),
)
#: Of lengths that a ring of two ranks can share.
_BLOCKS = (
    (2, 8, 4, 2, 16, None, False),
    (1, 20, 3, 1, 16, None, False),
    (2, 28, 4, 4, 16, None, True),
    (1, 20, 3, 1, 16, 7, False),
    (3, 12, 6, 3, 24, 4, True),
)


def _attention_calls(cases: Collection[tuple[int, int, int, int, int, int | None, bool]]) -> Iterator[Call]:
    for samples, length, query_heads, heads, features, window, packed in cases:
        inputs = {
            "query": draw(samples, length, query_heads, features, seed=0),
            "key": draw(samples, length, heads, features, seed=1),
            "value": draw(samples, length, heads, features, seed=2),
        }
        if packed:
            inputs["documents"] = (torch.arange(length) >= length // 3).long() + torch.zeros(samples, length).long()
        static = {"query_heads": query_heads, "key_value_heads": heads, "head_dim": features, "window": window}
        name = f"query {list(inputs['query'].shape)}, key {list(inputs['key'].shape)}, window {window}"
        name += ", several documents" if packed else ", one document"
        yield Call(name, inputs, {"causal": True, **static}, documents=packed or None)


def _invoke_attention(slot: Any, call: Call) -> Tensor:
    query = call.inputs["query"]
    mask = slot.prepare(call.inputs.get("documents"), query.shape[1], query.device)
    out: Tensor = slot(query, call.inputs["key"], call.inputs["value"], mask)
    return out


def _invoke_attention_blocks(slot: OpSlot, call: Call) -> Tensor:
    query, key, value = (call.inputs[name] for name in ("query", "key", "value"))
    return attend_in_turns(slot, query, key, value, call.inputs.get("documents"))


def _rms_norm_calls() -> Iterator[Call]:
    for shape in ((3, 5, 16), (1, 2), (7, 33), (2, 3, 1, 8), (0, 8)):
        inputs = {"x": draw(*shape, seed=0), "weight": draw(shape[-1], seed=1)}
        yield Call(f"x {list(shape)}", inputs, {"features": shape[-1]}, {"eps": 1e-6})


def _silu_mul_calls() -> Iterator[Call]:
    for shape in ((3, 5, 16), (1,), (7, 33), (0, 8)):
        yield Call(f"gate {list(shape)}", {"gate": draw(*shape, seed=0), "up": draw(*shape, seed=1)})


def _swiglu_calls() -> Iterator[Call]:
    hidden, features = 16, 24
    weights = {"gate_weight": draw(features, hidden, seed=1), "up_weight": draw(features, hidden, seed=2)}
    weights["down_weight"] = draw(hidden, features, seed=3)
    for shape in ((3, 5, hidden), (hidden,), (7, hidden), (2, 0, hidden)):
        inputs = {"x": draw(*shape, seed=0), **weights}
        yield Call(f"x {list(shape)}", inputs, {"hidden": hidden, "features": features})


def _rope_calls() -> Iterator[Call]:
    for samples, length, query_heads, heads, features, shared in (
        (2, 3, 4, 2, 8, False),
        (2, 3, 4, 2, 8, True),
        (1, 1, 1, 1, 2, False),
        (1, 5, 5, 3, 20, True),
        (2, 1, 1, 4, 16, False),
        (0, 5, 4, 2, 8, True),
        (2, 0, 4, 2, 8, False),
    ):
        angles = 3 * draw(1 if shared else samples, length, features // 2, seed=2)
        inputs = {
            "query": draw(samples, length, query_heads, features, seed=0),
            "key": draw(samples, length, heads, features, seed=1),
            "cos": angles.cos(),
            "sin": angles.sin(),
        }
        name = f"query {list(inputs['query'].shape)}, key {list(inputs['key'].shape)}, cos {list(angles.shape)}"
        yield Call(name, inputs, {"head_dim": features}, constants=("cos", "sin"))


def _invoke_rope(slot: OpSlot, call: Call) -> Tensor:
    return torch.cat(slot(*call.inputs.values()), dim=2)


def _normed_rope_calls() -> Iterator[Call]:
    for call in _rope_calls():
        features = call.static["head_dim"]
        inputs = {"query": call.inputs["query"], "key": call.inputs["key"]}
        inputs |= {"query_weight": draw(features, seed=3), "key_weight": draw(features, seed=4)}
        inputs |= {"cos": call.inputs["cos"], "sin": call.inputs["sin"]}
        heads = {"query_heads": inputs["query"].shape[2], "key_heads": inputs["key"].shape[2]}
        yield Call(call.name, inputs, {**call.static, **heads}, {"eps": 1e-6}, constants=call.constants)


def _invoke_normed_rope(slot: OpSlot, call: Call) -> Tensor:
    return torch.cat(slot(*call.inputs.values(), **call.options), dim=2)


def _grouped_linear_calls() -> Iterator[Call]:
    features_in, features_out = 16, 24
    for counts, spare in (
        ([3, 0, 5, 2], 0),
        ([3, 0, 5, 2], 3),
        ([0, 0, 7], 0),
        ([7, 0, 0], 1),
        ([4], 0),
        ([0, 1, 0], 0),
        ([0, 0], 0),
    ):
        inputs = {
            "x": draw(sum(counts) + spare, features_in, seed=0),
            "bank": draw(len(counts), features_in, features_out, seed=1),
            "counts": torch.tensor(counts),
        }
        static = {"in_features": features_in, "out_features": features_out, "experts": len(counts)}
        for spare_rows in (True, False) if not spare else (True,):
            name = f"rows {counts} and {spare} of nobody, spare_rows={spare_rows}"
            yield Call(name, inputs, static, {"spare_rows": spare_rows})


def _linear_cross_entropy_calls() -> Iterator[Call]:
    for shape, features, words in (((2, 7), 16, 33), ((5,), 8, 64), ((1, 1), 24, 1), ((3,), 16, 130), ((0,), 8, 16)):
        targets = torch.randint(words, shape, generator=torch.Generator().manual_seed(2))
        targets.view(-1)[1::4] = -100  # not predicted
        inputs = {
            "hidden": draw(*shape, features, seed=0),
            "weight": draw(words, features, seed=1),
            "targets": targets,
        }
        name = f"hidden {[*shape, features]}, weight {[words, features]}"
        yield Call(name, inputs, {"features": features, "vocabulary": words})


def _permutation(tokens: int, choices: int, rows: int) -> dict[str, Tensor]:
    """Slots int64 [R] and places int64 [T, k], where choices beyond the rows have none."""
    slots = torch.randperm(tokens * choices, generator=torch.Generator().manual_seed(5))
    places = torch.empty_like(slots).scatter_(0, slots, torch.arange(len(slots)))
    return {"slots": slots[:rows], "places": places.view(tokens, choices)}


def _permutation_calls(*, back: bool) -> Iterator[Call]:
    for tokens, choices, rows, features in (
        (5, 2, 10, 16),
        (3, 3, 7, 33),
        (1, 1, 1, 8),
        (2, 5, 10, 2),
        (2, 2, 0, 8),
        (0, 2, 0, 8),
    ):
        inputs = _permutation(tokens, choices, rows)
        if back:
            inputs = {"rows": draw(rows, features, seed=0), **inputs, "weights": draw(tokens, choices, seed=1)}
        else:
            inputs = {"tokens": draw(tokens, features, seed=0), **inputs}
        name = f"{tokens} tokens of {features} features, {choices} choices, {rows} rows"
        yield Call(name, inputs, options={"absent": rows < tokens * choices})


def _permutation_op(op: str) -> Op:
    slot = partial(_plain_slot, op, f"d9d_moe.dispatch.permutation:{op}")
    return Op(slot, partial(_permutation_calls, back=op == "unpermute"), invoke_plainly, package="d9d_moe")


#: The ops that d9d-nn declares backends for, its small ones, and those of d9d-moe and d9d-parallel.
KNOWN_OPS: Mapping[str, Op] = {
    "attention": Op(_attention_slot, partial(_attention_calls, _ATTENTIONS), _invoke_attention),
    "attention_block": Op(
        block_slot, partial(_attention_calls, _BLOCKS), _invoke_attention_blocks, package="d9d_parallel"
    ),
    "rms_norm": Op(
        partial(_plain_slot, "rms_norm", "d9d_nn.ops.rms_norm:rms_norm"), _rms_norm_calls, invoke_plainly
    ),
    "silu_mul": Op(
        partial(_plain_slot, "silu_mul", "d9d_nn.ops.silu_mul:silu_mul"), _silu_mul_calls, invoke_plainly
    ),
    "swiglu": Op(partial(_plain_slot, "swiglu", "d9d_nn.ops.swiglu:swiglu"), _swiglu_calls, invoke_plainly),
    "rope": Op(partial(_plain_slot, "rope", "d9d_nn.ops.rope:rope"), _rope_calls, _invoke_rope),
    "normed_rope": Op(
        partial(_plain_slot, "normed_rope", "d9d_nn.ops.normed_rope:normed_rope"),
        _normed_rope_calls,
        _invoke_normed_rope,
    ),
    "grouped_linear": Op(
        partial(_plain_slot, "grouped_linear", "d9d_nn.ops.grouped_linear:grouped_linear"),
        _grouped_linear_calls,
        invoke_plainly,
    ),
    "linear_cross_entropy": Op(
        partial(_plain_slot, "linear_cross_entropy", "d9d_nn.ops.linear_cross_entropy:linear_cross_entropy"),
        _linear_cross_entropy_calls,
        invoke_plainly,
    ),
    "permute": _permutation_op("permute"),
    "unpermute": _permutation_op("unpermute"),
}  # fmt: skip
