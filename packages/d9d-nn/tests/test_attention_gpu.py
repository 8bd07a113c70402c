"""Every backend of attention on CUDA against the reference, forward and backward.

The reference computes in float64 from the same rounded inputs. A kernel's result may deviate from it as much as
the reference in the kernel's own dtype, times a factor: kernels round at other places than the reference does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from d9d_core.errors import JobError
from d9d_core.kernel import Decision, OpSignature
from d9d_nn.attention.core import AttentionCore
from d9d_nn.attention.masks import prepare_masks
from d9d_nn.ops.attention import flex, sdpa
from d9d_nn.ops.attention.queries import QueryRectangles
from d9d_nn.ops.attention.reference import attention
from d9d_nn.ops.attention.sdpa_pinned import CUDNN, EFFICIENT, FLASH
from d9d_nn.ops.attention.slot import AttentionSlot
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),  # torch's own: deprecations inside Inductor, low matmul precision
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BACKENDS: dict[str, tuple[Callable[[OpSignature], Decision], Callable[[OpSignature], Callable[..., Tensor]]]] = {
    "sdpa": (sdpa.supports, sdpa.build),
    "sdpa_flash": (FLASH.supports, FLASH.build),
    "sdpa_cudnn": (CUDNN.supports, CUDNN.build),
    "sdpa_efficient": (EFFICIENT.supports, EFFICIENT.build),
    "flex": (flex.supports, flex.build),
}
#: name -> (B, S, N, K, D, window, documents in a sample); S with and without whole blocks of 128.
CASES: dict[str, tuple[int, int, int, int, int, int | None, int]] = {
    "causal": (2, 256, 4, 4, 64, None, 0),
    "grouped": (2, 200, 8, 2, 128, None, 0),
    "documents": (2, 384, 8, 2, 64, None, 5),
    "documents_uneven": (3, 333, 4, 1, 64, None, 7),
    "window": (2, 384, 4, 2, 64, 50, 0),
    "window_of_one": (1, 130, 4, 2, 64, 1, 0),
    "window_and_documents": (2, 300, 4, 2, 128, 40, 4),
}
#: How much further from float64 than the reference in the same dtype, and a floor for values near zero.
FACTOR, FLOOR = 4.0, {"float32": 1e-4, "bfloat16": 1e-2}


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> None:
    """Each test brings other shapes; Dynamo gives up compiling a function after eight of them."""
    torch.compiler.reset()


def documents_of(samples: int, length: int, count: int) -> Tensor | None:
    """``count`` documents per sample, cut at random places, others in each sample. int64 [B, S]."""
    if not count:
        return None
    generator = torch.Generator().manual_seed(3)
    starts = torch.zeros(samples, length, dtype=torch.long)
    for sample in range(samples):
        starts[sample, torch.randperm(length - 1, generator=generator)[: count - 1] + 1] = 1
    return starts.cumsum(1).cuda()


def inputs_of(samples: int, length: int, heads: int, shared: int, features: int, dtype: torch.dtype) -> list[Tensor]:
    """Query, key, value and the gradient of the result."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(samples, length, count, features) for count in (heads, shared, shared, heads)]
    return [torch.randn(shape, generator=generator).to(dtype).cuda() for shape in shapes]


def forward_and_backward(call: Callable[..., Tensor], tensors: list[Tensor]) -> dict[str, Tensor]:
    query, key, value = (tensor.detach().clone().requires_grad_() for tensor in tensors[:3])
    out = call(query, key, value)
    gradients = torch.autograd.grad(out, (query, key, value), tensors[3])
    return dict(zip(("output", "query", "key", "value"), (out.detach(), *gradients), strict=True))


def assert_near(found: dict[str, Tensor], rounded: dict[str, Tensor], exact: dict[str, Tensor], dtype: str) -> None:
    """Compare with float64, by the norm of the difference.

    Gradients of queries and keys come from differences of two rounded numbers as large as gradients of values are, of
    which little is left where a token sees few others.
    """
    of_values = exact["value"].norm()
    for name, tensor in found.items():
        scale = exact[name].norm()
        if scale < 1e-9:  # a window of one: the softmax of one score has no gradient
            allowed = FLOOR[dtype] * of_values
        else:
            allowed = max(FACTOR * (rounded[name].double() - exact[name]).norm(), FLOOR[dtype] * scale)
            if name in ("query", "key"):
                allowed = max(allowed, torch.finfo(DTYPES[dtype]).eps / 2 * of_values)
        off = (tensor.double() - exact[name]).norm()
        assert off <= allowed, f"{name} is off by {off:.1e}, allowed {allowed:.1e}; its norm is {scale:.1e}"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_computes_what_the_reference_does(backend: str, dtype: str, case: str) -> None:
    samples, length, heads, shared, features, window, count = CASES[case]
    supports, build = BACKENDS[backend]
    slot = AttentionSlot(query_heads=heads, key_value_heads=shared, head_dim=features, window=window)
    signature = OpSignature("attention", "cuda", dtype, slot.static)  # data that does not say whether it packs
    decision = supports(signature)
    if not decision.accept:
        pytest.skip(f"{backend} refuses, and says: {decision.reason}")
    slot.bind(backend, build(signature))
    documents = documents_of(samples, length, count)
    tensors = inputs_of(samples, length, heads, shared, features, DTYPES[dtype])
    if backend == "sdpa_flash" and documents is not None:
        with pytest.raises(JobError, match="flash attention has no mask, but samples hold several documents"):
            slot.prepare(documents, length, tensors[0].device)
        return

    mask = slot.prepare(documents, length, tensors[0].device)
    found = forward_and_backward(lambda *heads: slot(*heads, mask), tensors)

    def reference(*heads: Tensor) -> Tensor:
        return attention(*heads, documents, window=window)

    exact = forward_and_backward(reference, [tensor.double() for tensor in tensors])
    rounded = forward_and_backward(reference, tensors)
    assert {tensor.dtype for tensor in found.values()} == {DTYPES[dtype]}
    assert_near(found, rounded, exact, dtype)


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_queries_of_a_rank_in_rectangles_compute_what_the_reference_does(compiled: bool, rank: int) -> None:
    length, chunk = 768, 128
    chunks = [range(number * chunk, (number + 1) * chunk) for number in (rank, 5 - rank)]
    rectangles = QueryRectangles([range(256, 512)] if rank == 2 else chunks, length)
    places = torch.cat([torch.arange(run.start, run.stop) for run in chunks]).cuda()
    tensors = inputs_of(2, length, 8, 2, 128, torch.bfloat16)
    tensors[0], tensors[3] = tensors[0][:, places], tensors[3][:, places]
    attend = torch.compile(rectangles.attend, fullgraph=True) if compiled else rectangles.attend

    def gathered(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend(query, *torch.cat([key, value], dim=2).chunk(2, dim=2))  # keys and values lie side by side

    def reference(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        whole = query.new_zeros(2, length, *query.shape[2:]).index_copy(1, places, query)
        return attention(whole, key, value)[:, places]

    found = forward_and_backward(gathered, tensors)
    exact = forward_and_backward(reference, [tensor.double() for tensor in tensors])
    rounded = forward_and_backward(reference, tensors)
    assert_near(found, rounded, exact, "bfloat16")


@pytest.mark.parametrize("backend", ["sdpa", "sdpa_efficient", "flex"])
def test_packed_documents_are_as_if_alone(backend: str) -> None:
    lengths, window = (37, 128, 90), 30
    slot = AttentionSlot(query_heads=4, key_value_heads=2, head_dim=64, window=window)
    slot.bind(backend, BACKENDS[backend][1](OpSignature("attention", "cuda", "bfloat16", slot.static)))
    query, key, value, _ = inputs_of(1, sum(lengths), 4, 2, 64, torch.bfloat16)
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)).unsqueeze(0).cuda()
    with torch.no_grad():
        packed = slot(query, key, value, slot.prepare(documents, sum(lengths), query.device))
        start = 0
        for length in lengths:
            part = [tensor[:, start : start + length] for tensor in (query, key, value)]
            alone = slot(*part, slot.prepare(None, length, query.device))
            torch.testing.assert_close(packed[:, start : start + length], alone, rtol=2e-2, atol=2e-2)
            start += length


@pytest.mark.parametrize("compiled", [False, True], ids=["alone", "in a block"])
@pytest.mark.parametrize("seed", range(6))
def test_flex_computes_what_the_reference_does_over_random_packings(seed: int, compiled: bool) -> None:
    """Of any lengths, windows and groups of heads, one after another, as batches come in training."""
    draw = torch.Generator().manual_seed(seed)

    def pick(*options: Any) -> Any:
        return options[int(torch.randint(len(options), (1,), generator=draw))]

    heads, groups, features = pick(4, 6, 8), pick(1, 2), pick(16, 64, 128)
    window = pick(None, None, 1, 70, 128, 300)
    slot = AttentionSlot(query_heads=heads, key_value_heads=heads // groups, head_dim=features, window=window)
    slot.bind("flex", flex.build(OpSignature("attention", "cuda", "bfloat16", slot.static)))
    attend = torch.compile(slot.__call__) if compiled else slot.__call__
    for _ in range(4):
        samples, length, count = pick(1, 2, 3), pick(64, 128, 200, 384, 777, 1024), pick(1, 2, 9, 60)
        documents = documents_of(samples, length, count)
        tensors = inputs_of(samples, length, heads, heads // groups, features, torch.bfloat16)
        mask = slot.prepare(documents, length, tensors[0].device)
        found = forward_and_backward(lambda *inputs, mask=mask: attend(*inputs, mask), tensors)

        def reference(*inputs: Tensor, documents: Tensor | None = documents) -> Tensor:
            return attention(*inputs, documents, window=window)

        exact = forward_and_backward(reference, [tensor.double() for tensor in tensors])
        assert_near(found, forward_and_backward(reference, tensors), exact, "bfloat16")


@pytest.mark.parametrize("window", [None, 100])
def test_with_flex_another_document_changes_no_bit(window: int | None) -> None:
    """Neither of outputs nor of gradients."""
    slot = AttentionSlot(query_heads=8, key_value_heads=2, head_dim=128, window=window)
    slot.bind("flex", flex.build(OpSignature("attention", "cuda", "bfloat16", slot.static)))
    documents = documents_of(2, 900, 6)
    assert documents is not None
    tensors = inputs_of(2, 900, 8, 2, 128, torch.bfloat16)
    mask = slot.prepare(documents, 900, tensors[0].device)
    changed = documents == 3
    assert changed.any()
    others = [torch.where(changed[:, :, None, None], tensor + 1, tensor) for tensor in tensors]
    before, after = (forward_and_backward(lambda *inputs: slot(*inputs, mask), one) for one in (tensors, others))
    for name in before:
        assert torch.equal(before[name][~changed], after[name][~changed]), name
        if name != "value":  # the gradient of values does not depend on them
            assert not torch.equal(before[name][changed], after[name][changed]), name


def test_flex_computes_the_same_bits_each_time() -> None:
    slot = AttentionSlot(query_heads=8, key_value_heads=2, head_dim=128, window=None)
    slot.bind("flex", flex.build(OpSignature("attention", "cuda", "bfloat16", slot.static)))
    tensors = inputs_of(2, 2048, 8, 2, 128, torch.bfloat16)
    mask = slot.prepare(documents_of(2, 2048, 6), 2048, tensors[0].device)
    first, again = (forward_and_backward(lambda *inputs: slot(*inputs, mask), tensors) for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("save", [False, True], ids=["recomputed", "chosen outputs kept"])
def test_checkpointed_attention_with_flex_holds_no_scores(save: bool) -> None:
    length, heads = 8192, 8
    slot = AttentionSlot(query_heads=heads, key_value_heads=heads, head_dim=64, window=None)
    slot.bind("flex", flex.build(OpSignature("attention", "cuda", "bfloat16", slot.static)))
    tensors = inputs_of(1, length, heads, heads, 64, torch.bfloat16)
    mask = slot.prepare(documents_of(1, length, 9), length, tensors[0].device)
    options: dict[str, Any] = {}
    if save:
        contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
        options = {"context_fn": contexts}

    def block(*inputs: Tensor) -> Tensor:
        out: Tensor = slot(*inputs, mask)
        return out * 2

    def step(checkpointed: bool) -> dict[str, Tensor]:
        if not checkpointed:
            return forward_and_backward(block, tensors)
        return forward_and_backward(lambda *inputs: checkpoint(block, *inputs, use_reentrant=False, **options), tensors)

    expected, found = step(False), step(True)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(True)
    assert torch.cuda.max_memory_allocated() - before < heads * length * length / 2  # of bytes; scores have 4 each


def test_batches_of_other_shapes_are_compiled_a_few_times_only(caplog: pytest.LogCaptureFixture) -> None:
    slot = AttentionSlot(query_heads=4, key_value_heads=2, head_dim=64, window=None)
    slot.bind("flex", flex.build(OpSignature("attention", "cuda", "bfloat16", slot.static)))
    torch._dynamo.utils.counters.clear()

    def step(samples: int, length: int) -> None:
        tensors = inputs_of(samples, length, 4, 2, 64, torch.bfloat16)
        mask = slot.prepare(documents_of(samples, length, 5), length, tensors[0].device)
        forward_and_backward(lambda *inputs: slot(*inputs, mask), tensors)

    with caplog.at_level(logging.INFO, "d9d"):
        for samples, length in ((2, 512), (2, 640), (3, 384), (1, 896), (2, 300), (1, 300)):
            step(samples, length)
        known = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        for samples, length in ((4, 700), (3, 1100), (5, 513), (2, 1024), (1, 333)):
            step(samples, length)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == known <= 6
    lines = [record.getMessage() for record in caplog.records if record.name == "d9d.attention"]
    assert len(lines) == 1
    assert lines[0].startswith("compiling attention (flex): ")


def test_flex_makes_no_mask_of_length_by_length() -> None:
    length = 8192
    core = AttentionCore(query_heads=2, key_value_heads=2, head_dim=64, window=128)
    slot = core.attention
    slot.bind("flex", flex.build(OpSignature("attention", "cuda", "bfloat16", slot.static)))
    documents = documents_of(1, length, 9)
    assert documents is not None
    prepare_masks([core.attention], documents, length, documents.device)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    masks = prepare_masks([core.attention], documents, length, documents.device)
    assert torch.cuda.max_memory_allocated() - before < length * length / 2  # a mask of bools has twice that
    blocks = masks.prepared[slot.mask_key]
    assert blocks.sparsity() > 90.0  # percent of blocks that are skipped


@pytest.mark.parametrize("backend", ["sdpa", "sdpa_efficient", "sdpa_cudnn", "flex"])
def test_making_a_mask_and_using_it_never_waits_for_the_gpu(backend: str) -> None:
    slot: Any = AttentionSlot(query_heads=4, key_value_heads=2, head_dim=64, window=40)
    slot.bind(backend, BACKENDS[backend][1](OpSignature("attention", "cuda", "bfloat16", slot.static)))
    documents, tensors = documents_of(2, 256, 3), inputs_of(2, 256, 4, 2, 64, torch.bfloat16)

    def step() -> None:
        mask = slot.prepare(documents, 256, tensors[0].device)
        forward_and_backward(lambda *heads: slot(*heads, mask), tensors)

    for _ in range(2):  # compiling and choosing kernels may wait
        step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("documents", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("option", ["sinks", "softcap"])
def test_flex_computes_sinks_and_soft_caps_with_their_gradients(
    option: str, window: int | None, documents: bool
) -> None:
    given: dict[str, Any] = {"sinks": True} if option == "sinks" else {"softcap": 2.0}
    slot, plain = (
        AttentionSlot(query_heads=8, key_value_heads=2, head_dim=64, window=window, **given) for _ in range(2)
    )
    slot.bind("flex", flex.build(OpSignature(slot.op, "cuda", "bfloat16", slot.static, documents=documents)))
    packed = documents_of(2, 500, 5) if documents else None
    query, key, value, grad = inputs_of(2, 500, 8, 2, 64, torch.bfloat16)
    sinks = [torch.randn(8, device="cuda")] if option == "sinks" else []
    mask = slot.prepare(packed, 500, query.device)

    def computed(attend: AttentionSlot, mask: Any, dtype: torch.dtype) -> dict[str, Tensor]:
        leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in (query, key, value, *sinks)]
        out = attend(*leaves[:3], mask, *leaves[3:])
        gradients = torch.autograd.grad(out, leaves, grad.to(dtype))
        return dict(zip(("output", "query", "key", "value", "sinks"), (out.detach(), *gradients), strict=False))

    found, expected, exact = (
        computed(slot, mask, torch.bfloat16),
        computed(plain, packed, torch.bfloat16),
        computed(plain, packed, torch.float64),
    )
    assert_near(found, expected, exact, "bfloat16")
