"""Ops of first-party models: example calls as models make them, with odd or random shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any

import torch
from d9d_core.attention import DocumentBlocks
from d9d_core.kernel import OpSlot
from d9d_core.plugin import Ref
from torch import Tensor, nn

from d9d_testing.suites.support import calls
from d9d_testing.suites.support.attention_blocks import attend_in_turns, block_slot
from d9d_testing.suites.support.calls import Call

#: Sizes of dimensions: powers of two and their neighbours, so that kernels have full tiles, masked tiles, and several
#: rows per tile.
_SIZES = (1, 2, 3, 7, 8, 16, 17, 31, 64, 65, 100, 129)


#: Samples, positions, query heads, key/value heads, features, window, and whether samples hold several documents.
AttentionSizes = tuple[int, int, int, int, int, int | None, bool]
#: Sizes of the calls of attention that is not causal.
_MASKED: Sequence[AttentionSizes] = (
    (2, 7, 4, 2, 8, None, False),
    (2, 9, 4, 2, 16, 3, False),
    (2, 150, 2, 1, 32, None, True),
    (2, 140, 2, 2, 32, 70, True),
)
_MASKED_BLOCKS: Sequence[AttentionSizes] = (
    (2, 20, 3, 1, 16, None, False),
    (2, 28, 4, 4, 16, None, True),
    (3, 20, 6, 3, 24, 4, True),
)


@dataclass(frozen=True, slots=True)
class Op:
    """Description of an op for tests.

    Attributes:
        slot: function from the static facts of a call to a slot bound to the op's reference.
        calls: function that returns float32 calls with odd shapes.
        invoke: function that calls a slot like models do.
        package: module of the package with the reference.
        at_random: function that returns a call with random shapes.
    """

    slot: Callable[[Mapping[str, Any]], OpSlot]
    calls: Callable[[], Sequence[Call]]
    invoke: Callable[[OpSlot, Call], Tensor]
    package: str = "d9d_nn"
    at_random: Callable[[Random], Call] | None = None


def _plain_slot(op: str, reference: str, static: Mapping[str, Any]) -> OpSlot:
    return OpSlot(op, Ref(reference).load(), **static)


def invoke_plainly(slot: OpSlot, call: Call) -> Tensor:
    """Call an op slot with all inputs of a call, in order."""
    out: Tensor = slot(*call.inputs.values(), **call.options)
    return out


def _attention_slot(static: Mapping[str, Any]) -> OpSlot:
    make = Ref("d9d_nn.ops.attention.slot:AttentionSlot").load()
    slot: OpSlot = make(**{name: value for name, value in static.items() if name != "causal"})
    return slot


def _attentions() -> Sequence[Call]:
    return [
        calls.attention(2, 7, 4, 2, 8, None, False),
        calls.attention(2, 7, 4, 2, 8, None, True),
        calls.attention(1, 1, 2, 2, 8, None, False),
        calls.attention(1, 17, 3, 1, 16, 5, False),
        calls.attention(3, 9, 6, 3, 8, 4, True),
        # Calls with several blocks of a kernel, and with heads as large as in models.
        calls.attention(1, 150, 2, 1, 64, None, False),
        calls.attention(2, 140, 4, 2, 32, None, True),
        calls.attention(1, 130, 2, 2, 32, 70, True),
        *(calls.attention(*sizes, kind) for kind in ("bidirectional", "blocks") for sizes in _MASKED),
    ]


def _attention_blocks() -> Sequence[Call]:
    """Calls of ``attention_block`` with sequence lengths that a ring of two ranks can split."""
    return [
        calls.attention(2, 8, 4, 2, 16, None, False),
        calls.attention(1, 20, 3, 1, 16, None, False),
        calls.attention(2, 28, 4, 4, 16, None, True),
        calls.attention(1, 20, 3, 1, 16, 7, False),
        calls.attention(3, 12, 6, 3, 24, 4, True),
        *(calls.attention(*sizes, kind) for kind in ("bidirectional", "blocks") for sizes in _MASKED_BLOCKS),
    ]


def _attention_at_random(random: Random, multiple: int = 1) -> Call:
    samples, length, heads = random.randint(1, 3), multiple * random.randint(2, 40 // multiple), random.randint(1, 3)
    window = random.choice([None, random.randint(1, length)])
    features = 8 * random.randint(1, 5)
    return calls.attention(
        samples,
        length,
        heads * random.randint(1, 3),
        heads,
        features,
        window,
        random.random() < 0.5,
        random.choice(["causal", "bidirectional", "blocks"]),
    )


def _invoke_attention(slot: Any, call: Call) -> Tensor:
    query = call.inputs["query"]
    mask = slot.prepare(_documents(call), query.shape[1], query.device)
    out: Tensor = slot(query, call.inputs["key"], call.inputs["value"], mask)
    return out


def _invoke_attention_blocks(slot: OpSlot, call: Call) -> Tensor:
    query, key, value = (call.inputs[name] for name in ("query", "key", "value"))
    return attend_in_turns(slot, query, key, value, _documents(call))


def _documents(call: Call) -> Any:
    """Documents of a call of attention; if its mask is of kind ``blocks``, together with its blocks."""
    documents, blocks = call.inputs.get("documents"), call.inputs.get("blocks")
    if blocks is None:
        return documents
    return DocumentBlocks(documents, blocks)


def _rms_norms() -> Sequence[Call]:
    made = [calls.rms_norm(*shape) for shape in ((3, 5, 16), (1, 2), (7, 33), (2, 3, 1, 8), (0, 8))]
    # 3000 rows of the same sign: a weight gradient that a kernel sums in bfloat16 would stop growing.
    many = calls.rms_norm(3000, 8)
    positive = {"x": many.inputs["x"] + 2, "weight": many.inputs["weight"]}
    return [*made, replace(many, name=f"{many.name} around 2", inputs=positive)]


def _leading(random: Random) -> list[int]:
    return [random.randint(1, 6) for _ in range(random.randint(0, 3))]


def _rms_norm_at_random(random: Random) -> Call:
    # At least two features: a single feature is normalised to its sign, so its gradient is only rounding error.
    return calls.rms_norm(*_leading(random), random.choice(_SIZES[1:]))


def _add_rms_norms() -> Sequence[Call]:
    shapes = (3, 5, 16), (1, 2), (7, 33), (0, 8)
    return [calls.add_rms_norm(*shape, adds=adds) for shape in shapes for adds in (True, False)]


def _add_rms_norm_at_random(random: Random) -> Call:
    return calls.add_rms_norm(*_leading(random), random.choice(_SIZES[1:]), adds=random.random() < 0.7)


def _invoke_add_rms_norm(slot: OpSlot, call: Call) -> Tensor:
    x, added, weight = (call.inputs.get(name) for name in ("x", "added", "weight"))
    return torch.cat(slot(x, added, weight, **call.options), dim=-1)


def _silu_muls() -> Sequence[Call]:
    return [calls.silu_mul(*shape) for shape in ((3, 5, 16), (1,), (7, 33), (0, 8))]


def _silu_mul_at_random(random: Random) -> Call:
    return calls.silu_mul(*_leading(random), random.choice(_SIZES))


def _low_rank_linears() -> Sequence[Call]:
    return [
        calls.low_rank_linear((2, 7), 16, 2, (24,), biased=False),
        calls.low_rank_linear((130,), 24, 16, (32, 8, 8), biased=True),
        calls.low_rank_linear((3,), 8, 1, (17, 300), biased=False),
        calls.low_rank_linear((70,), 100, 70, (72,), biased=True),
        calls.low_rank_linear((2, 0), 16, 2, (24, 8), biased=True),
        calls.low_rank_linear((9,), 140, 130, (132,), biased=True),
    ]


def _low_rank_linear_at_random(random: Random) -> Call:
    inputs, features = random.choice(_SIZES), [random.choice(_SIZES) for _ in range(random.randint(1, 3))]
    rank, biased = random.randint(1, 20), random.random() < 0.5
    return calls.low_rank_linear(_leading(random), inputs, rank, features, biased=biased)


def _invoke_low_rank_linear(slot: OpSlot, call: Call) -> Tensor:
    """Call the slot with the layers of a call; returns all outputs, concatenated."""
    inputs, count = call.inputs, sum(name.startswith("weight_") for name in call.inputs)
    names = ("weight", "bias", "down", "up")
    layers = [[inputs.get(f"{name}_{place}") for place in range(count)] for name in names]
    return torch.cat(slot(inputs["x"], *layers, [2.0 / (place + 1) for place in range(count)]), dim=-1)


def _swiglus() -> Sequence[Call]:
    return [calls.swiglu(shape, 16, 24) for shape in ((3, 5), (), (7,), (2, 0))]


def _swiglu_at_random(random: Random) -> Call:
    return calls.swiglu(_leading(random), 8 * random.randint(1, 6), 8 * random.randint(1, 6))


_RULES = ((2, 7, 2, 2, 4, False), (1, 1, 1, 1, 2, True), (1, 70, 2, 1, 8, True), (2, 130, 1, 3, 4, True))


def _invoke_rule_from(slot: OpSlot, call: Call) -> Tensor:
    """Call ``gated_delta_rule_from`` with a state of float32 or wider; return its outputs and last state in a row."""
    state, *inputs = call.inputs.values()
    out, last = slot(state.to(torch.promote_types(state.dtype, torch.float32)), *inputs)
    return torch.cat([out.flatten(), last.flatten()])


def _rule_at_random(random: Random, make: Callable[..., Call]) -> Call:
    sizes = random.randint(1, 2), random.randint(1, 150), random.randint(1, 3), random.randint(1, 3)
    return make(*sizes, random.randint(1, 9), random.random() < 0.7)


_ROPES = (
    (2, 3, 4, 2, 8, False),
    (2, 3, 4, 2, 8, True),
    (1, 1, 1, 1, 2, False),
    (1, 5, 5, 3, 20, True),
    (2, 1, 1, 4, 16, False),
    (0, 5, 4, 2, 8, True),
    (2, 0, 4, 2, 8, False),
)


#: Least features per head; with fewer, the gradient through the head's norm is dominated by rounding errors.
_LEAST_HEAD = 8


def _rope_at_random(random: Random, make: Callable[..., Call]) -> Call:
    samples, length, query_heads, heads = (random.randint(1, most) for most in (2, 5, 5, 3))
    return make(samples, length, query_heads, heads, 2 * random.choice(_SIZES[1:]), random.random() < 0.5)


def _invoke_rope(slot: OpSlot, call: Call) -> Tensor:
    return torch.cat(slot(*call.inputs.values(), **call.options), dim=2)


def _attention_inputs() -> Sequence[Call]:
    return [calls.attention_inputs(*size) for size in _ROPES if size[4] >= _LEAST_HEAD]


def _attention_inputs_at_random(random: Random) -> Call:
    call = None
    while call is None or call.static["head_dim"] < _LEAST_HEAD:
        call = _rope_at_random(random, calls.attention_inputs)
    return call


_COUNTS = (
    ([3, 0, 5, 2], 0),
    ([3, 0, 5, 2], 3),
    ([0, 0, 7], 0),
    ([7, 0, 0], 1),
    ([4], 0),
    ([0, 1, 0], 0),
    ([0, 0], 0),
)


def _grouped_linears() -> Sequence[Call]:
    return [
        calls.grouped_linear(counts, spare, spare_rows)
        for counts, spare in _COUNTS
        for spare_rows in ((True,) if spare else (True, False))
    ]


def _grouped_linear_at_random(random: Random) -> Call:
    counts = [random.choice((0, random.randint(1, 40))) for _ in range(random.randint(1, 9))]
    spare = random.choice((0, random.randint(1, 9)))
    spare_rows = spare > 0 or random.random() < 0.5
    return calls.grouped_linear(counts, spare, spare_rows, 8 * random.randint(1, 6), 8 * random.randint(1, 6))


def _linear_cross_entropies() -> Sequence[Call]:
    sizes = (((2, 7), 16, 33), ((5,), 8, 64), ((1, 1), 24, 1), ((3,), 16, 130), ((0,), 8, 16))
    return [calls.linear_cross_entropy(*size) for size in sizes]


def _linear_cross_entropy_at_random(random: Random) -> Call:
    shape = [random.randint(0, 9) for _ in range(random.randint(1, 2))]
    # not 1: with one token id, every loss is zero
    features, words = 8 * random.randint(1, 6), random.choice((*_SIZES[1:], 1025))
    return calls.linear_cross_entropy(shape, features, words, spread=features**-0.5)


def _permutations(*, back: bool) -> Sequence[Call]:
    sizes = ((5, 2, 10, 16), (3, 3, 7, 33), (1, 1, 1, 8), (2, 5, 10, 2), (2, 2, 0, 8), (0, 2, 0, 8))
    plain = [calls.permutation(*size, back=True, weighted=False) for size in sizes] if back else []
    return [calls.permutation(*size, back=back) for size in sizes] + plain


def _permutation_at_random(random: Random, *, back: bool) -> Call:
    tokens, choices = random.randint(1, 20), random.randint(1, 8)
    rows = random.choice((tokens * choices, random.randint(1, tokens * choices)))
    size = tokens, choices, rows, random.choice(_SIZES)
    return calls.permutation(*size, back=back, weighted=not back or random.random() < 0.7)


def _permutation_op(op: str) -> Op:
    slot = partial(_plain_slot, op, f"d9d_moe.dispatch.permutation:{op}")
    drawn = partial(_permutation_at_random, back=op == "unpermute")
    return Op(slot, partial(_permutations, back=op == "unpermute"), invoke_plainly, "d9d_moe", drawn)


def _adamw(parameters: Mapping[str, nn.Parameter]) -> Any:
    config = Ref("d9d_optim.optimizer.config:AdamWConfig").load()
    # The eps is large, because squares of small gradients underflow in float16.
    return Ref("d9d_optim.optimizer.adamw:AdamW").load()(config(lr=0.1, weight_decay=0.1, eps=0.1), parameters)


def _adamw_slot(_static: Mapping[str, Any]) -> OpSlot:
    (slot,) = _adamw({"none": nn.Parameter(torch.zeros(0))}).op_slots().values()
    found: OpSlot = slot
    return found


def _invoke_adamw(slot: OpSlot, call: Call) -> Tensor:
    """Run two AdamW steps, the second with halved gradients; return the parameters."""
    names = [name for name in call.inputs if name.startswith("parameter")]
    parameters = {name: nn.Parameter(call.inputs[name].clone()) for name in names}
    optimizer = _adamw(parameters)
    (own,) = optimizer.op_slots().values()
    own.bind("asked", slot.function)
    optimizer.init_state()
    for share in (1.0, 0.5):
        for name, parameter in parameters.items():
            parameter.grad = share * call.inputs[name.replace("parameter", "gradient")]
        optimizer.step(torch.ones((), dtype=torch.bool, device=parameters[names[0]].device))
    return torch.cat([parameter.detach().flatten() for parameter in parameters.values()])


def _adamws() -> Sequence[Call]:
    return [calls.adamw((3, 5), (7,), (), (0, 4)), calls.adamw((33, 17))]


def _adamw_at_random(random: Random) -> Call:
    return calls.adamw(*([random.choice(_SIZES), *_leading(random)] for _ in range(random.randint(1, 5))))


#: Name -> op, of d9d-nn, d9d-moe, d9d-optim and d9d-parallel.
KNOWN_OPS: Mapping[str, Op] = {
    "attention": Op(_attention_slot, _attentions, _invoke_attention, at_random=_attention_at_random),
    "attention_block": Op(
        block_slot,
        _attention_blocks,
        _invoke_attention_blocks,
        "d9d_parallel",
        partial(_attention_at_random, multiple=4),
    ),
    "rms_norm": Op(
        partial(_plain_slot, "rms_norm", "d9d_nn.ops.rms_norm:rms_norm"),
        _rms_norms,
        invoke_plainly,
        at_random=_rms_norm_at_random,
    ),
    "add_rms_norm": Op(
        partial(_plain_slot, "add_rms_norm", "d9d_nn.ops.add_rms_norm:add_rms_norm"),
        _add_rms_norms,
        _invoke_add_rms_norm,
        at_random=_add_rms_norm_at_random,
    ),
    "silu_mul": Op(
        partial(_plain_slot, "silu_mul", "d9d_nn.ops.silu_mul:silu_mul"),
        _silu_muls,
        invoke_plainly,
        at_random=_silu_mul_at_random,
    ),
    "gelu_mul": Op(
        partial(_plain_slot, "gelu_mul", "d9d_nn.ops.gelu_mul:gelu_mul"),
        _silu_muls,
        invoke_plainly,
        at_random=_silu_mul_at_random,
    ),
    "gated_delta_rule": Op(
        partial(_plain_slot, "gated_delta_rule", "d9d_nn.ops.gated_delta_rule:gated_delta_rule"),
        lambda: [calls.gated_delta_rule(*size) for size in _RULES],
        invoke_plainly,
        at_random=partial(_rule_at_random, make=calls.gated_delta_rule),
    ),
    "gated_delta_rule_from": Op(
        partial(_plain_slot, "gated_delta_rule_from", "d9d_nn.ops.gated_delta_rule:chunked_from"),
        lambda: [calls.gated_delta_rule_from(*size) for size in _RULES],
        _invoke_rule_from,
        at_random=partial(_rule_at_random, make=calls.gated_delta_rule_from),
    ),
    "state_space_rule": Op(
        partial(_plain_slot, "state_space_rule", "d9d_nn.ops.state_space_rule:state_space_rule"),
        lambda: [calls.state_space_rule(*size) for size in _RULES],
        invoke_plainly,
        at_random=partial(_rule_at_random, make=calls.state_space_rule),
    ),
    "low_rank_linear": Op(
        partial(_plain_slot, "low_rank_linear", "d9d_nn.ops.low_rank_linear:low_rank_linear"),
        _low_rank_linears,
        _invoke_low_rank_linear,
        at_random=_low_rank_linear_at_random,
    ),
    "swiglu": Op(
        partial(_plain_slot, "swiglu", "d9d_nn.ops.swiglu:swiglu"),
        _swiglus,
        invoke_plainly,
        at_random=_swiglu_at_random,
    ),
    "rope": Op(
        partial(_plain_slot, "rope", "d9d_nn.ops.rope:rope"),
        lambda: [calls.rope(*size) for size in _ROPES],
        _invoke_rope,
        at_random=partial(_rope_at_random, make=calls.rope),
    ),
    "normed_rope": Op(
        partial(_plain_slot, "normed_rope", "d9d_nn.ops.normed_rope:normed_rope"),
        lambda: [calls.normed_rope(*size) for size in _ROPES],
        _invoke_rope,
        at_random=partial(_rope_at_random, make=calls.normed_rope),
    ),
    "attention_inputs": Op(
        partial(_plain_slot, "attention_inputs", "d9d_nn.ops.attention_inputs:attention_inputs"),
        _attention_inputs,
        _invoke_rope,
        at_random=_attention_inputs_at_random,
    ),
    "grouped_linear": Op(
        partial(_plain_slot, "grouped_linear", "d9d_nn.ops.grouped_linear:grouped_linear"),
        _grouped_linears,
        invoke_plainly,
        at_random=_grouped_linear_at_random,
    ),
    "linear_cross_entropy": Op(
        partial(_plain_slot, "linear_cross_entropy", "d9d_nn.ops.linear_cross_entropy:linear_cross_entropy"),
        _linear_cross_entropies,
        invoke_plainly,
        at_random=_linear_cross_entropy_at_random,
    ),
    "permute": _permutation_op("permute"),
    "unpermute": _permutation_op("unpermute"),
    "adamw": Op(_adamw_slot, _adamws, _invoke_adamw, "d9d_optim", _adamw_at_random),
}
