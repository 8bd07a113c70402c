"""Kinds of attention masks: each backend computes a kind exactly, or refuses it.

Shapes: B samples, S positions.
"""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from d9d_core.attention import (
    MASK_KINDS,
    DocumentBlocks,
    MaskKind,
    function_refusal,
    mask_facts,
    mask_kind,
)
from d9d_core.errors import BuildError
from d9d_core.kernel import Decision, OpSignature
from d9d_core.plugin import KernelSpec, Ref
from d9d_nn.attention.core import AttentionCore
from d9d_nn.attention.grouped_query import GroupedQueryAttention
from d9d_nn.attention.latent import MultiHeadLatentAttention
from d9d_nn.attention.masks import prepare_masks, separated_padding
from d9d_nn.ops.attention import flex, sdpa
from d9d_nn.ops.attention.block_mask import BLOCK, block_mask, positions_block_mask, visible_blocks
from d9d_nn.ops.attention.reference import attention, visible
from d9d_nn.ops.attention.sdpa import Sdpa
from d9d_nn.ops.attention.sdpa_sinks import SinkSdpa
from d9d_nn.ops.attention.slot import AttentionSlot
from d9d_nn.rope.rotary_embedding import Rotation
from d9d_testing.suites.kernel import KernelSuite
from d9d_testing.tolerances import assert_close_gradients, assert_close_values
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

HEADS: dict[str, Any] = {"query_heads": 4, "key_value_heads": 2, "head_dim": 8}
CPU = torch.device("cpu")
SAMPLES, LENGTH = 2, 11


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sees(kind: str, window: int | None, documents: list[int], blocks: list[int], query: int, key: int) -> bool:
    """The definition of each kind, in plain words."""
    if documents[query] != documents[key]:
        return False
    if kind == "bidirectional":
        return window is None or abs(query - key) < window
    earlier = key <= query and (window is None or query - key < window)
    return earlier or (kind == "blocks" and blocks[query] == blocks[key] >= 0)


def mask_by_words(kind: str, window: int | None, documents: Tensor, blocks: Tensor) -> Tensor:
    rows = [
        [[sees(kind, window, d, b, q, k) for k in range(len(d))] for q in range(len(d))]
        for d, b in zip(documents.tolist(), blocks.tolist(), strict=True)
    ]
    return torch.tensor(rows)


def softmax_attention(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    """Plain attention [B, S, N, D] with a mask [B, S, S]."""
    key, value = (heads.repeat_interleave(query.shape[2] // key.shape[2], dim=2) for heads in (key, value))
    scores = torch.einsum("bqnd,bknd->bnqk", query, key) / math.sqrt(query.shape[-1])
    return torch.einsum("bnqk,bknd->bqnd", scores.masked_fill(~seen[:, None], -math.inf).softmax(-1), value)


def numbers(most: int, least: int = 0) -> st.SearchStrategy[list[list[int]]]:
    row = st.lists(st.integers(least, most), min_size=LENGTH, max_size=LENGTH)
    return st.lists(row, min_size=SAMPLES, max_size=SAMPLES)


@given(
    kind=st.sampled_from(MASK_KINDS),
    window=st.one_of(st.none(), st.integers(1, LENGTH + 1)),
    documents=numbers(2).map(lambda rows: [sorted(row) for row in rows]),
    blocks=numbers(2, -1),
    queries=st.lists(st.integers(0, LENGTH - 1), min_size=1, unique=True).map(sorted),
)
@settings(max_examples=40)
def test_masks_follow_their_definition(
    kind: MaskKind, window: int | None, documents: list[list[int]], blocks: list[list[int]], queries: list[int]
) -> None:
    of, ids = torch.tensor(documents), torch.tensor(blocks)
    given_documents = DocumentBlocks(of, ids) if kind == "blocks" else of
    expected = mask_by_words(kind, window, of, ids)
    assert torch.equal(visible(LENGTH, given_documents, CPU, window, mask=kind), expected)
    some = visible(LENGTH, given_documents, CPU, window, torch.tensor(queries), mask=kind)
    assert torch.equal(some, expected[:, queries])


@pytest.mark.parametrize("kind", MASK_KINDS)
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_a_core_computes_its_kind_in_values_and_gradients(kind: MaskKind, window: int | None, backend: str) -> None:
    documents = torch.tensor([[0] * 4 + [1] * 7, [0] * 11])
    blocks = torch.tensor([[-1, 0, 0, 0, 0, -1, 2, -1, 2, 2, -1], [0] * 5 + [-1] * 6])
    core = AttentionCore(**HEADS, window=window, mask=kind)
    if backend == "sdpa":
        signature = OpSignature("attention", "cpu", "float64", core.attention.static)
        core.attention.bind("sdpa", sdpa.build(signature))
    shapes = [(SAMPLES, LENGTH, heads, 8) for heads in (4, 2, 2)]
    found = [drawn(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]
    plain = [tensor.detach().clone().requires_grad_() for tensor in found]
    out = core(*found, DocumentBlocks(documents, blocks) if kind == "blocks" else documents)
    expected = softmax_attention(*plain, mask_by_words(kind, window, documents, blocks))
    assert_close_values(out, expected)
    grad = drawn(*out.shape, seed=7)
    out.backward(grad)
    expected.backward(grad)
    names = ("query", "key", "value")
    assert_close_gradients(
        {name: one.grad for name, one in zip(names, found, strict=True)},
        {name: one.grad for name, one in zip(names, plain, strict=True)},
    )


def test_bidirectional_attention_to_whole_samples_needs_no_mask() -> None:
    slot = AttentionSlot(**HEADS, window=None, mask="bidirectional")
    slot.bind("sdpa", sdpa.build(OpSignature("attention", "cpu", "float64", slot.static)))
    assert slot.prepare(None, LENGTH, CPU) is None
    tensors = [drawn(1, LENGTH, heads, 8, seed=heads) for heads in (4, 2, 2)]
    everything = torch.ones(1, LENGTH, LENGTH, dtype=torch.bool)
    assert_close_values(slot(*tensors, None), softmax_attention(*tensors, everything))


def test_attention_of_kind_blocks_is_causal_in_a_microbatch_without_blocks() -> None:
    blocks, causal = (AttentionCore(**HEADS, mask=kind) for kind in ("blocks", "causal"))
    tensors = [drawn(1, LENGTH, heads, 8, seed=heads) for heads in (4, 2, 2)]
    assert torch.equal(blocks(*tensors), causal(*tensors))
    blocks.attention.bind("sdpa", sdpa.build(OpSignature("attention", "cpu", "float64", blocks.attention.static)))
    assert_close_values(blocks(*tensors), causal(*tensors))


@pytest.mark.parametrize("kind", MASK_KINDS)
def test_sinks_have_all_kinds(kind: MaskKind) -> None:
    documents, blocks = torch.tensor([[0] * 4 + [1] * 7]), torch.tensor([[0, 0, 0, -1, -1, -1, 1, 1, 1, -1, -1]])
    mask = DocumentBlocks(documents, blocks) if kind == "blocks" else documents
    tensors, sinks = [drawn(1, LENGTH, heads, 8, seed=heads) for heads in (4, 2, 2)], drawn(4, seed=9)
    function = SinkSdpa(None, mask=kind)
    found = function(*tensors, function.prepare(mask, LENGTH, CPU), sinks)
    assert_close_values(found, attention(*tensors, mask, sinks, mask=kind))


# --- block masks of FlexAttention, whose kernels need a GPU


@pytest.mark.parametrize("kind", MASK_KINDS)
@pytest.mark.parametrize("window", [None, 70, 200])
def test_block_masks_hide_nothing_visible_and_call_nothing_hidden_whole(kind: MaskKind, window: int | None) -> None:
    length = 3 * BLOCK + 37
    documents = (torch.arange(length) >= 150).long()[None]
    blocks = torch.full((1, length), -1)
    blocks[:, 140:300], blocks[:, 380:] = 0, 1
    given_documents = DocumentBlocks(documents, blocks) if kind == "blocks" else documents
    seen = visible(length, given_documents, CPU, window, mask=kind)
    made = block_mask(given_documents, length, window, CPU, mask=kind)
    places = torch.arange(length)
    rule = made.mask_mod(torch.tensor(0), torch.tensor(0), places[:, None], places[None])
    assert torch.equal(rule, seen[0])
    groups = blocks if kind == "blocks" else None
    some, whole = visible_blocks(documents, length, window, CPU, groups=groups, mask=kind)
    runs = [range(BLOCK), range(2 * BLOCK, length)]
    apart = positions_block_mask(given_documents, runs, [range(length)], window, CPU, mask=kind)
    own = torch.cat([torch.arange(run.start, run.stop) for run in runs])
    rows = torch.arange(len(own))
    assert torch.equal(apart.mask_mod(torch.tensor(0), torch.tensor(0), rows[:, None], places[None]), seen[0, own])
    for row in range(4):
        for column in range(4):
            part = seen[0, row * BLOCK : (row + 1) * BLOCK, column * BLOCK : (column + 1) * BLOCK]
            if part.any():
                assert (some | whole)[0, row, column]
            if whole[0, row, column]:
                assert part.all()
                assert part.shape[1] == BLOCK


# --- which backend may compute a kind


@pytest.mark.parametrize("kind", MASK_KINDS)
@pytest.mark.parametrize("with_documents", [True, False], ids=["documents", "one document"])
def test_both_lists_of_a_block_mask_have_all_samples(kind: MaskKind, with_documents: bool) -> None:
    """Compiled kernels index them by one sample, beyond the end of a list that has fewer."""
    length = 3 * BLOCK + 5
    documents = (torch.arange(length) // 100).expand(SAMPLES, length) if with_documents else None
    blocks = torch.arange(SAMPLES * length).view(SAMPLES, length) // 50
    given: Any = DocumentBlocks(documents, blocks) if kind == "blocks" else documents
    positions = [range(100), range(150, length)]
    for made in (
        block_mask(given, length, None, CPU, mask=kind),
        positions_block_mask(given, positions, [range(length)], None, CPU, mask=kind),
    ):
        samples = SAMPLES if given is not None else 1
        partly, wholly = made.kv_indices, made.full_kv_indices
        assert partly.shape == wholly.shape
        assert (len(partly), len(wholly)) == (samples, samples)


@pytest.mark.parametrize("kind", MASK_KINDS)
def test_queries_that_end_at_the_first_key_see_it(kind: MaskKind) -> None:
    made = positions_block_mask(None, [range(6)], [range(5, 9)], None, CPU, mask=kind)
    assert made.to_dense().bool().any()


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux" or shutil.which("g++") is None, reason="compiles C++")
@pytest.mark.parametrize("documents", [True, False], ids=["documents", "one document"])
def test_compiled_attention_reads_the_lists_of_its_mask(documents: bool) -> None:
    """Forward only: on a CPU it has no backward."""
    torch.compiler.reset()  # Dynamo counts what other tests compiled
    length = BLOCK + 22
    query, key, value = (drawn(SAMPLES, heads, length, 16, seed=heads).float() for heads in (4, 2, 2))
    blocks = torch.arange(length).div(9, rounding_mode="floor").expand(SAMPLES, length) - 3
    given = DocumentBlocks((torch.arange(length) // 60).expand(SAMPLES, length) if documents else None, blocks)
    compiled = flex.Flex(None, compiled=True, mask="blocks")
    with torch.no_grad():
        found = compiled(
            *(heads.transpose(1, 2) for heads in (query, key, value)), compiled.prepare(given, length, CPU)
        )
    expected = softmax_attention(
        *(heads.transpose(1, 2) for heads in (query, key, value)), visible(length, given, CPU, mask="blocks")
    )
    assert_close_values(found, expected)


def test_slots_state_their_kind() -> None:
    facts = {kind: AttentionSlot(**HEADS, window=None, mask=kind).static for kind in MASK_KINDS}
    assert {kind: mask_kind(static) for kind, static in facts.items()} == {kind: kind for kind in MASK_KINDS}
    assert [static["causal"] for static in facts.values()] == [True, False, False]
    assert mask_kind({"causal": False}) == "unknown"  # of a plugin that states no kind
    keys = {AttentionSlot(**HEADS, window=None, mask=kind).mask_key for kind in MASK_KINDS}
    assert len(keys) == 3


@pytest.mark.parametrize("kind", ["bidirectional", "blocks"])
def test_a_slot_refuses_functions_that_do_not_name_its_kind(kind: MaskKind) -> None:
    """Whatever their rules say: a backend that does not know of kinds computes causal attention."""
    slot = AttentionSlot(**HEADS, window=None, mask=kind)

    def unaware(query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None) -> Tensor:
        return attention(query, key, value, documents)

    assert slot.refusal(unaware) == f"computes causal attention only, here it is {kind}"
    with pytest.raises(
        BuildError, match=f"kernels.attention: 'fast' computes causal attention only, here it is {kind}"
    ):
        slot.bind("fast", unaware)
    with pytest.raises(BuildError, match="'sdpa' computes causal attention only"):  # built for another slot
        slot.bind("sdpa", Sdpa(None, grouped_with_mask=True))
    with pytest.raises(BuildError, match="context_parallel: this method computes causal attention only.*ulysses"):
        AttentionCore(**HEADS, mask=kind).attend_by(unaware)
    assert function_refusal(mask_facts(kind), Sdpa(None, grouped_with_mask=True, mask=kind)) is None


@pytest.mark.parametrize(
    ("static", "documents", "chosen"),
    [
        ({}, None, flex),
        ({}, False, sdpa),  # only padding is hidden
        ({}, True, flex),
        ({"window": 64}, False, flex),
        ({"own_queries": True}, False, sdpa),
        ({"mask": "blocks"}, False, flex),
    ],
)
def test_on_a_gpu_the_backend_is_chosen_by_the_keys_that_are_hidden(
    static: dict[str, Any], documents: bool | None, chosen: Any
) -> None:
    facts = {**HEADS, "head_dim": 64, "window": None, **mask_facts("bidirectional"), **static}
    signature = OpSignature("attention", "cuda", "bfloat16", facts, documents=documents)
    answers = {module: module.supports(signature) for module in (flex, sdpa)}
    assert all(answer.accept for answer in answers.values())
    assert max(answers, key=lambda module: answers[module].priority) is chosen
    assert not sdpa.of_one(signature)  # documents mark the padding, which causal attention never sees


class Ignores(Sdpa):
    """Says that it computes each kind, and computes causal attention."""

    def __init__(self, signature: OpSignature) -> None:
        super().__init__(signature.static.get("window"), grouped_with_mask=True)
        self.mask_kinds = MASK_KINDS


def accept(signature: OpSignature) -> Decision:
    return Decision(accept=True, reason="accepts everything")


class FaultySuite(KernelSuite):
    target = "attention.ignores"
    dtypes: ClassVar = ("float32",)
    __test__ = False

    def spec(self) -> KernelSpec:
        return KernelSpec(
            op="attention",
            name="ignores",
            summary="",
            supports=Ref(f"{__name__}:accept"),
            build=Ref(f"{__name__}:Ignores"),
        )

    def decision(self, signature: OpSignature) -> Decision:
        return accept(signature)

    def function(self, signature: OpSignature) -> Callable[..., Any]:
        return Ignores(signature)


def test_the_suite_of_kernels_catches_a_backend_that_ignores_the_kind() -> None:
    suite = FaultySuite()
    with pytest.raises(AssertionError, match="bidirectional"):
        suite.test_values_are_those_of_the_reference()
    with pytest.raises(AssertionError):
        suite.test_gradients_are_those_of_the_reference()


# --- layers


def rotation(length: int, features: int) -> Rotation:
    angles = drawn(1, length, features // 2, seed=5)
    return Rotation(angles.cos(), angles.sin())


def layer(which: str, kind: MaskKind) -> torch.nn.Module:
    torch.manual_seed(0)
    made: torch.nn.Module
    if which == "latent":
        sizes = {"query_rank": None, "latent_dim": 6, "nope_dim": 4, "rotary_dim": 4, "value_dim": 6}
        made = MultiHeadLatentAttention(16, heads=4, std=0.5, output_std=0.5, mask=kind, **sizes)
    else:
        made = GroupedQueryAttention(16, **HEADS, std=0.5, output_std=0.5, mask=kind)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return made.double()


@pytest.mark.parametrize("which", ["grouped", "latent"])
@pytest.mark.parametrize("kind", MASK_KINDS)
def test_another_token_changes_only_the_positions_that_see_it(which: str, kind: MaskKind) -> None:
    documents = torch.tensor([[0] * 5 + [1] * 6])
    blocks = torch.tensor([[-1, 0, 0, -1, 0, 0, 1, 1, 1, -1, -1]])
    made, hidden = layer(which, kind), drawn(1, LENGTH, 16, seed=1)
    mask = DocumentBlocks(documents, blocks) if kind == "blocks" else documents
    turning = rotation(LENGTH, 4 if which == "latent" else 8)
    seen = mask_by_words(kind, None, documents, blocks)[0]
    before = made(hidden, turning, mask)
    for place in range(LENGTH):
        changed = hidden.clone()
        changed[:, place] += 1
        differs = (made(changed, turning, mask) != before).any(-1)[0]
        assert differs.tolist() == seen[:, place].tolist()


def test_layers_of_different_kinds_share_no_mask() -> None:
    slots = [AttentionSlot(**HEADS, window=None, mask=kind) for kind in MASK_KINDS]
    for slot in slots:
        slot.bind("sdpa", sdpa.build(OpSignature("attention", "cpu", "float64", slot.static)))
    masks = prepare_masks(slots, torch.zeros(1, LENGTH, dtype=torch.int64), LENGTH, CPU)
    assert masks.prepared["sdpa", None, "bidirectional"].all()
    assert not masks.prepared["sdpa", None, "causal"].all()


def test_padding_is_a_document_of_its_own() -> None:
    lengths = torch.tensor([2, 4])
    assert separated_padding(None, lengths, 4).tolist() == [[0, 0, 1, 1], [0, 0, 0, 0]]
    documents = torch.tensor([[0, 0, 0, 0], [0, 0, 1, 1]])
    assert separated_padding(documents, lengths, 4).tolist() == [[0, 0, 1, 1], [0, 0, 1, 1]]


class ScaledCore(AttentionCore):
    """Core with smaller scores."""

    def forward(self, query: Tensor, *args: Any) -> Tensor:
        return super().forward(query / 2, *args)


def test_a_layer_takes_another_core_with_its_options() -> None:
    sizes = {**HEADS, "std": 0.5, "output_std": 0.5}
    made = GroupedQueryAttention(16, **sizes, core=ScaledCore(**HEADS, mask="bidirectional", window=4))
    assert isinstance(made.core, ScaledCore)
    assert mask_kind(made.core.attention.static) == "bidirectional"
    plain = GroupedQueryAttention(16, **sizes, mask="bidirectional", window=4)
    plain.load_state_dict(made.state_dict())
    plain.q_proj.weight.data /= 2
    hidden, turning = drawn(1, LENGTH, 16, seed=1), rotation(LENGTH, 8)
    assert_close_values(made.double()(hidden, turning, None), plain.double()(hidden, turning, None))


@pytest.mark.parametrize(
    ("core", "options", "text"),
    [
        ({}, {"window": 3}, "together with window, softcap or mask.*give them to the core"),
        ({}, {"mask": "bidirectional"}, "which it would ignore"),
        ({"head_dim": 16}, {}, "heads of 8 features and sinks=False, but its core has 4 and 2 of 16"),
        ({"sinks": True}, {}, "its core has 4 and 2 of 8 and sinks=True"),
    ],
)
def test_a_core_that_does_not_fit_is_refused(core: dict[str, Any], options: dict[str, Any], text: str) -> None:
    with pytest.raises(BuildError, match=text):
        GroupedQueryAttention(16, **HEADS, std=0.5, output_std=0.5, core=AttentionCore(**{**HEADS, **core}), **options)


def test_an_unknown_kind_is_refused_by_backends() -> None:
    signature = OpSignature("attention", "cpu", "float32", {"causal": False})
    assert "causal, bidirectional and blocks attention only, here it is unknown" in sdpa.supports(signature).reason
    stated = replace(signature, static=mask_facts("bidirectional"))
    assert sdpa.supports(stated).accept
