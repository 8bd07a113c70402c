"""Backends of ``attention_block``: attention of some queries to some keys, whose parts make the attention to all.

The ranks of a ring are taken one after another here, without any communication.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from d9d_core.errors import JobError
from d9d_core.kernel import OpSignature
from d9d_nn.ops.attention import block_flex, block_sdpa, partial, sdpa
from d9d_nn.ops.attention.block_flex import FlexBlocks
from d9d_nn.ops.attention.block_sdpa import SdpaBlocks
from d9d_nn.ops.attention.partial import rectangles
from d9d_nn.ops.attention.reference import attention, visible
from d9d_testing.tolerances import assert_close_gradients, assert_close_values
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

CPU = torch.device("cpu")
smoke = pytest.mark.smoke


def chunks(ranks: int, rank: int, length: int) -> list[range]:
    """Positions of a rank in zigzag order."""
    size = length // (2 * ranks)
    return [range(number * size, (number + 1) * size) for number in (rank, 2 * ranks - 1 - rank)]


def places(runs: list[range]) -> Tensor:
    return torch.cat([torch.arange(run.start, run.stop) for run in runs])


def dense(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask) -> tuple[Tensor, Tensor]:
    """FlexAttention by its definition, with heads before positions: it has no backward on a CPU."""
    rows, columns = torch.arange(query.shape[2])[:, None], torch.arange(key.shape[2])[None]
    samples = torch.arange(query.shape[0])[:, None, None]
    seen = mask.mask_mod(samples, torch.zeros((), dtype=torch.long), rows, columns)
    seen = seen.expand(query.shape[0], -1, -1)[:, None]
    # What lies in no listed block is not computed.
    blocks = mask.to_dense().bool().repeat_interleave(128, 2).repeat_interleave(128, 3)
    seen = seen & blocks[..., : query.shape[2], : key.shape[2]]
    key, value = (tensor.repeat_interleave(query.shape[1] // tensor.shape[1], dim=1) for tensor in (key, value))
    scores = (query @ key.mT / math.sqrt(query.shape[3])).masked_fill(~seen, -math.inf)
    total = scores.logsumexp(-1)
    probabilities = (scores - total.masked_fill(total == -math.inf, 0).unsqueeze(-1)).exp()
    return probabilities @ value, total


def drawn(
    query_heads: int, shared: int, length: int, features: int, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """Queries, keys, values and a gradient of the output, of two samples."""
    generator = torch.Generator().manual_seed(0)
    heads = (query_heads, shared, shared, query_heads)
    return [
        torch.randn(2, length, count, features, generator=generator, dtype=torch.float64).to(dtype) for count in heads
    ]


def packed(length: int, count: int, seed: int = 0) -> Tensor:
    """``count`` documents in each of two samples, cut at random places. int64 [2, S]."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.zeros(2, length, dtype=torch.long)
    for sample in range(2):
        starts[sample, torch.randperm(length - 1, generator=generator)[: count - 1] + 1] = 1
    return starts.cumsum(1)


def of_a_rank(
    blocks: Any, tensors: list[Tensor], ranks: int, rank: int, documents: Tensor | None, window: int | None
) -> list[Tensor]:
    """Output of a rank's queries, their gradients, and all gradients of keys and values from them: float32 or wider."""
    query, key, value, grad = tensors
    length, device, wide = query.shape[1], query.device, torch.promote_types(query.dtype, torch.float32)
    own = places(chunks(ranks, rank, length)).to(device)
    query, grad = query[:, own], grad[:, own]
    out, total = torch.zeros_like(query, dtype=wide), torch.full(query.shape[:3], -math.inf, dtype=wide, device=device)
    turns = []
    for source in range(ranks):
        theirs = chunks(ranks, source, length)
        there = places(theirs).to(device)
        turns += [
            (rows, there[columns], mask)
            for rows, columns, mask in blocks.prepare(chunks(ranks, rank, length), theirs, documents, window, device)
        ]
    for rows, there, mask in turns:
        part, of_part = blocks(query[:, rows], key[:, there], value[:, there], mask)
        both = torch.logaddexp(total[:, rows], of_part)
        weights = [(of - both.masked_fill(both == -math.inf, 0)).exp()[..., None] for of in (total[:, rows], of_part)]
        out[:, rows] = out[:, rows] * weights[0] + part * weights[1]
        total[:, rows] = both
    result = out.to(query.dtype)
    grads = [torch.zeros_like(tensor, dtype=wide) for tensor in (query, key, value)]
    for rows, there, mask in turns:
        inputs = query[:, rows], key[:, there], value[:, there], result[:, rows], total[:, rows]
        added = blocks.backward(grad[:, rows], *inputs, mask)
        grads[0][:, rows] += added[0]
        grads[1][:, there] += added[1]
        grads[2][:, there] += added[2]
    return [result, *grads]


def assert_all_ranks_make_the_whole(
    blocks: Any, tensors: list[Tensor], ranks: int, documents: Tensor | None, window: int | None
) -> None:
    """Compare with the attention of all positions, computed in float64."""
    query, key, value = (tensor.double().requires_grad_() for tensor in tensors[:3])
    expected = attention(query, key, value, documents, window=window)
    whole = torch.autograd.grad(expected, (query, key, value), tensors[3].double())
    found = [of_a_rank(blocks, tensors, ranks, rank, documents, window) for rank in range(ranks)]
    order = torch.cat([places(chunks(ranks, rank, expected.shape[1])) for rank in range(ranks)]).to(expected.device)
    together = torch.cat([one[0] for one in found], dim=1)
    assert_close_values(together, expected.detach()[:, order].to(together.dtype), what="output")
    gradients = {
        "query": torch.cat([one[1] for one in found], dim=1),
        "key": torch.stack([one[2] for one in found]).sum(0),
        "value": torch.stack([one[3] for one in found]).sum(0),
    }
    wanted = {"query": whole[0][:, order], "key": whole[1], "value": whole[2]}
    dtype = tensors[0].dtype  # whose tolerance holds
    assert_close_gradients(
        {name: tensor.to(dtype) for name, tensor in gradients.items()},
        {name: tensor.to(dtype) for name, tensor in wanted.items()},
    )


# --- rectangles


@pytest.mark.thorough
@smoke
@given(ranks=st.integers(1, 6), chunk=st.integers(1, 4), everything=st.booleans(), data=st.data())
def test_rectangles_are_what_a_causal_mask_lets_through(
    ranks: int, chunk: int, everything: bool, data: st.DataObject
) -> None:
    length = 2 * ranks * chunk
    mine = chunks(ranks, data.draw(st.integers(0, ranks - 1)), length)
    theirs = [range(length)] if everything else chunks(ranks, data.draw(st.integers(0, ranks - 1)), length)
    seen = torch.zeros(2 * chunk, len(places(theirs)), dtype=torch.int64)
    for one in rectangles(mine, theirs):
        part = seen[one.queries, one.keys]
        assert part.numel() > 0
        assert not one.causal or part.shape[0] == part.shape[1]
        part += torch.ones_like(part).tril() if one.causal else torch.ones_like(part)
    assert torch.equal(seen, (places(mine)[:, None] >= places(theirs)).long())


@smoke
def test_each_turn_of_a_ring_is_one_rectangle_and_as_much_work_for_each_rank() -> None:
    for ranks in (2, 3, 8):
        work = set()
        for rank in range(ranks):
            scores = 0.0
            for source in range(ranks):
                (one,) = rectangles(chunks(ranks, rank, 96), chunks(ranks, source, 96))
                shape = (one.queries.stop - one.queries.start, one.keys.stop - one.keys.start)
                scores += shape[0] * shape[1] / (2 if one.causal else 1)
            work.add(scores)
        assert work == {96 * 96 / 2 / ranks}


@smoke
def test_queries_that_lie_in_keys_in_part_are_refused() -> None:
    with pytest.raises(ValueError, match="only partly"):
        rectangles([range(4, 8)], [range(6)])


# --- sdpa


@smoke
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_rectangles_by_sdpa_make_the_whole(ranks: int, heads: tuple[int, int]) -> None:
    assert_all_ranks_make_the_whole(SdpaBlocks(of_one=False), drawn(*heads, 48, 8), ranks, None, None)


@smoke
def test_rectangles_by_sdpa_in_bfloat16_are_merged_in_float32() -> None:
    tensors = drawn(4, 2, 64, 16, torch.bfloat16)
    assert_all_ranks_make_the_whole(SdpaBlocks(of_one=False), tensors, 2, None, None)


@smoke
def test_documents_and_windows_are_no_affair_of_sdpa() -> None:
    documents, runs = torch.zeros(2, 8, dtype=torch.long), [range(8)]
    for of_one, numbers, window in ((False, documents, None), (True, None, 3)):
        with pytest.raises(JobError, match=r"kernels\.attention_block: sdpa has no mask"):
            SdpaBlocks(of_one=of_one).prepare(runs, runs, numbers, window, CPU)
    assert SdpaBlocks(of_one=True).prepare(runs, runs, documents, None, CPU) == [(slice(0, 8), slice(0, 8), True)]


@smoke
@pytest.mark.parametrize("cudnn", [True, False], ids=["cudnn", "flash"])
def test_kernels_of_cuda_are_called_as_torch_declares_them(monkeypatch: pytest.MonkeyPatch, cudnn: bool) -> None:
    """With tensors without numbers, as there may be no GPU. They are private, and arguments may move."""
    monkeypatch.setattr(partial, "_prefers_cudnn", lambda *_, **__: cudnn)
    query, out = (torch.empty(2, 6, 4, 16, device="meta", dtype=torch.bfloat16) for _ in range(2))
    key = torch.empty(2, 3, 2, 16, device="meta", dtype=torch.bfloat16)
    found, total = partial.attend(query, key, key, causal=False)
    assert found.shape == query.shape
    assert (total.shape, total.dtype) == ((2, 6, 4), torch.float32)
    grads = partial.attend_backward(out, query, key, key, found, total, causal=False)
    assert [tuple(grad.shape) for grad in grads] == [(2, 6, 4, 16), (2, 3, 2, 16), (2, 3, 2, 16)]


class Backwards(TorchDispatchMode):
    """Addresses of the tensors that backwards of attention get."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[set[int]] = []

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
            self.found.append({one.data_ptr() for one in args if isinstance(one, Tensor)})
        return function(*args, **(kwargs or {}))


@pytest.mark.thorough
@smoke
def test_slices_of_output_and_gradient_are_copied_only_to_be_of_one_layout() -> None:
    rows = slice(4, 8)
    query, out, grad = (torch.randn(2, 8, 4, 16) for _ in range(3))
    other = grad.transpose(1, 2).contiguous().transpose(1, 2)
    inputs = query[:, rows], query[:, rows], query[:, rows], out[:, rows], torch.zeros(2, 4, 4)
    mode = Backwards()
    with mode:
        alike = partial.attend_backward(grad[:, rows], *inputs, causal=True)
        copied = partial.attend_backward(other[:, rows], *inputs, causal=True)
    assert {grad[:, rows].data_ptr(), out[:, rows].data_ptr()} <= mode.found[0]
    assert not {other[:, rows].data_ptr(), out[:, rows].data_ptr()} & mode.found[1]
    for one, same in zip(alike, copied, strict=True):
        assert torch.equal(one, same)


@smoke
def test_torch_tells_which_kernel_it_would_take() -> None:
    heads = torch.empty(1, 2, 8, 16)
    assert torch._fused_sdp_choice(heads, heads, heads, is_causal=True, enable_gqa=False) == 1  # flash, on a CPU


# --- flex


WINDOWS = (None, 1, 40, 100, 300)


@pytest.mark.thorough
@smoke
@pytest.mark.parametrize(("window", "ranks"), [*itertools.product(WINDOWS, (2,)), (40, 3), (None, 1)])
@pytest.mark.parametrize("count", [0, 1, 6])
def test_blocks_by_flex_make_the_whole(window: int | None, ranks: int, count: int) -> None:
    documents = packed(300, count) if count else None
    assert_all_ranks_make_the_whole(FlexBlocks(dense, of_one=False), drawn(4, 2, 300, 8), ranks, documents, window)


@smoke
def test_documents_in_any_order_are_told_apart_by_flex() -> None:
    documents = torch.randint(0, 3, (2, 300), generator=torch.Generator().manual_seed(1))
    assert_all_ranks_make_the_whole(FlexBlocks(dense, of_one=False), drawn(2, 2, 300, 8), 2, documents, 70)


@pytest.mark.thorough
@smoke
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_itself_gives_the_output_and_the_sums() -> None:
    """Its forward runs on a CPU, uncompiled."""

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask) -> tuple[Tensor, Tensor]:
        query, key, value = query.detach(), key.detach(), value.detach()
        out, more = flex_attention(query, key, value, block_mask=mask, enable_gqa=True, return_aux=AuxRequest(lse=True))
        assert more.lse is not None
        return out, more.lse

    query, key, value, _ = drawn(4, 2, 512, 16, torch.float32)
    documents = packed(512, 5)
    for source in (0, 1):
        mine, theirs = chunks(2, 0, 512), chunks(2, source, 512)
        for given_documents, window in ((documents, None), (documents, 60), (None, 60)):
            found, expected = (
                FlexBlocks(one, of_one=False).prepare(mine, theirs, given_documents, window, CPU)
                for one in (attend, dense)
            )
            assert len(found) == len(expected)
            for (rows, columns, mask), _ in zip(found, expected, strict=True):
                there = places(theirs)[columns]
                inputs = query[:, places(mine)[rows]], key[:, there], value[:, there]
                one, other = (FlexBlocks(attend_, of_one=False)(*inputs, mask) for attend_ in (attend, dense))
                assert_close_values(one[0], other[0], what="output")
                assert torch.equal(one[1] == -math.inf, other[1] == -math.inf)
                assert_close_values(one[1].exp(), other[1].exp(), what="sums")


@pytest.mark.thorough
@smoke
def test_all_turns_of_all_microbatches_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the compiler; the given function runs as it is, and without gradients, which need a GPU."""
    graphs: list[torch.fx.GraphModule] = []
    compile_ = torch.compile

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda function, **options: compile_(function, backend=backend, **options))
    monkeypatch.setattr(block_flex, "_leaves", lambda *heads: tuple(one.transpose(1, 2) for one in heads))
    monkeypatch.setattr(torch, "enable_grad", torch.no_grad)
    torch.compiler.reset()
    blocks = block_flex.build(signature(True))
    query, key, value, _ = drawn(4, 2, 512, 16, torch.float32)
    for seed, rank, source in itertools.product(range(2), range(2), range(2)):
        mine, theirs = chunks(2, rank, 512), chunks(2, source, 512)
        for rows, columns, mask in blocks.prepare(mine, theirs, packed(512, 5, seed), None, CPU):
            there = places(theirs)[columns]
            inputs = query[:, places(mine)[rows]], key[:, there], value[:, there]
            with torch.no_grad():
                found, expected = blocks(*inputs, mask), FlexBlocks(dense, of_one=False)(*inputs, mask)
            assert_close_values(found[0], expected[0], what="output")
    assert len(graphs) == 1


@smoke
def test_flex_lists_what_documents_windows_and_positions_leave_to_see() -> None:
    """The blocks of all turns of all ranks together are a few more than those with a visible score."""
    length, ranks = 4096, 2
    documents = packed(length, 12)[:1]
    for numbers, window in ((documents, None), (documents, 200), (None, 200)):
        blocks = FlexBlocks(dense, of_one=False)
        listed = 0
        for rank, source in itertools.product(range(ranks), repeat=2):
            runs = chunks(ranks, rank, length), chunks(ranks, source, length)
            for *_, mask in blocks.prepare(*runs, numbers, window, CPU):
                assert isinstance(mask, BlockMask)
                listed += int(mask.to_dense().sum())
        seen = visible(length, numbers, CPU, window).view(-1, length // 128, 128, length // 128, 128)
        assert listed == int(seen.any(4).any(2).sum())


@smoke
def test_turns_that_a_window_hides_are_left_out() -> None:
    blocks = FlexBlocks(dense, of_one=False)
    assert blocks.prepare([range(8)], [range(8, 16)], None, 4, CPU) == []
    assert blocks.prepare([range(16, 24)], [range(8)], None, 4, CPU) == []
    assert len(blocks.prepare([range(8, 16)], [range(8)], None, 4, CPU)) == 1


@smoke
def test_what_positions_hide_alone_is_left_to_sdpa() -> None:
    plain = FlexBlocks(dense, of_one=False, plain=SdpaBlocks(of_one=True))
    assert_all_ranks_make_the_whole(plain, drawn(4, 2, 96, 8), 2, None, 96)
    runs = [range(96)]
    assert plain.prepare(runs, runs, None, 96, CPU) == [(slice(0, 96), slice(0, 96), True)]
    assert isinstance(plain.prepare(runs, runs, None, 95, CPU)[0][2], BlockMask)
    padding = (torch.arange(96) >= 90).long()[None]
    of_one = FlexBlocks(dense, of_one=True, plain=SdpaBlocks(of_one=True))
    assert of_one.prepare(runs, runs, padding, None, CPU)[0][2] is True


# --- choice


def signature(documents: bool | None, device: str = "cuda", dtype: str = "bfloat16", **static: Any) -> OpSignature:
    facts = {"head_dim": 128, "causal": True, "window": None} | static
    return OpSignature("attention_block", device, dtype, facts, documents=documents)


@smoke
@pytest.mark.parametrize(
    ("asked", "fused", "flex"),
    [
        (signature(False), 20, 15),
        (signature(True), None, 15),
        (signature(None), 0, 15),
        (signature(False, window=64), None, 15),
        (signature(False, dtype="float32"), None, 15),
        (signature(False, dtype="float64"), None, None),
        (signature(False, head_dim=12), None, None),
        (signature(False, device="cpu", dtype="float32"), 0, None),
        (signature(True, device="cpu"), None, None),
        (signature(False, device="mps"), None, None),
        (signature(False, causal=False), None, None),
    ],
)
def test_a_backend_is_chosen_by_what_hides_keys(asked: OpSignature, fused: int | None, flex: int | None) -> None:
    for module, priority in ((block_sdpa, fused), (block_flex, flex)):
        decision = module.supports(asked)
        assert (decision.priority if decision.accept else None) == priority, decision
        assert decision.reason


@smoke
def test_flex_hands_to_sdpa_only_what_sdpa_computes() -> None:
    runs = [range(256)]
    for asked, handed in ((signature(None), True), (signature(None, dtype="float32"), False)):
        mask = block_flex.build(asked).prepare(runs, runs, None, None, CPU)[0][2]
        assert isinstance(mask, bool) == handed
    assert isinstance(block_flex.build(signature(False)).prepare(runs, runs, None, None, CPU)[0][2], BlockMask)


# --- on a GPU

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
BUILDS: dict[str, Callable[[OpSignature], Any]] = {"sdpa": block_sdpa.build, "flex": block_flex.build}
CASES = [
    ("sdpa", "bfloat16", None, 0),
    ("sdpa", "float16", None, 0),
    ("flex", "bfloat16", None, 7),
    ("flex", "bfloat16", 200, 0),
    ("flex", "bfloat16", 200, 7),
    ("flex", "float32", 200, 7),
    ("flex", "float32", None, 0),
]


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # torch's own: deprecations inside Inductor, low matmul precision
@on_gpu
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("backend", "dtype", "window", "count"), CASES)
def test_on_a_gpu_blocks_make_the_whole(backend: str, dtype: str, window: int | None, count: int, ranks: int) -> None:
    blocks = BUILDS[backend](signature(bool(count), dtype=dtype, window=window, head_dim=64))
    for length in (1024, 1000):
        documents = packed(length, count).cuda() if count else None
        tensors = [tensor.cuda() for tensor in drawn(8, 2, length, 64, getattr(torch, dtype))]
        assert_all_ranks_make_the_whole(blocks, tensors, ranks, documents, window)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@on_gpu
@pytest.mark.parametrize("kernel", ["FLASH_ATTENTION", "CUDNN_ATTENTION"])
def test_on_a_gpu_either_kernel_of_sdpa_makes_the_whole(kernel: str) -> None:
    tensors = [tensor.cuda() for tensor in drawn(8, 2, 768, 128, torch.bfloat16)]
    with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, kernel)):
        assert_all_ranks_make_the_whole(SdpaBlocks(of_one=False), tensors, 3, None, None)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@on_gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["alone", "in a block"])
def test_on_a_gpu_queries_of_some_positions_attend_in_rectangles(compiled: bool) -> None:
    asked = OpSignature("attention", "cuda", "bfloat16", {"head_dim": 64, "own_queries": True}, documents=False)
    attend: Any = sdpa.build(asked)
    runs = [range(256, 512), range(700, 956)]
    mask = attend.prepare_queries(None, runs, 1000, torch.device("cuda"))
    call = torch.compile(attend) if compiled else attend
    tensors, own = [tensor.cuda() for tensor in drawn(8, 2, 1000, 64, torch.bfloat16)], places(runs).cuda()
    inputs = [tensor.requires_grad_() for tensor in (tensors[0][:, own].clone(), *tensors[1:3])]
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors[:3]]
    out, expected = call(*inputs, mask), attention(*exact)[:, own]
    found = torch.autograd.grad(out, inputs, tensors[3][:, own])
    wanted = torch.autograd.grad(expected, exact, tensors[3][:, own].double())
    assert_close_values(out.detach(), expected.detach().to(out.dtype), what="output")
    names, wanted = ("query", "key", "value"), (wanted[0][:, own], *wanted[1:])
    assert_close_gradients(
        dict(zip(names, found, strict=True)), {n: one.to(out.dtype) for n, one in zip(names, wanted, strict=True)}
    )


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@on_gpu
@pytest.mark.parametrize("backend", BUILDS)
def test_on_a_gpu_blocks_never_wait_and_make_no_mask_of_all_scores(backend: str) -> None:
    length, ranks = 16384, 2
    documents = packed(length, 9).cuda() if backend == "flex" else None
    blocks = BUILDS[backend](signature(documents is not None, head_dim=64))
    # Little compared with a mask: with a head of 64 features, a tensor of both samples has 2 MiB.
    tensors = [tensor.cuda() for tensor in drawn(1, 1, length, 64, torch.bfloat16)]
    for _ in range(2):  # compiling and choosing kernels may wait
        of_a_rank(blocks, tensors, ranks, 1, documents, None)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    mine, theirs = (chunks(ranks, rank, length) for rank in (1, 0))
    query, key = tensors[0][:, : length // 2], tensors[1][:, : length // 2]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for rows, columns, mask in blocks.prepare(mine, theirs, documents, None, query.device):
            inputs = query[:, rows], key[:, columns], key[:, columns]
            out, total = blocks(*inputs, mask)
            blocks.backward(out, *inputs, out, total, mask)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.max_memory_allocated() - before < (length / 2) ** 2  # bytes of a mask of bools


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("shared", [4, 2])
def test_a_block_by_flex_attention_returns_the_sums_of_its_scores(monkeypatch: pytest.MonkeyPatch, shared: int) -> None:
    monkeypatch.setattr(block_flex, "compiled_alone", lambda function: function)
    query, key, value, _ = drawn(4, shared, 24, 16, torch.float32)
    documents = packed(24, 3)
    runs = [range(24)]
    ((rows, columns, mask),) = FlexBlocks(dense, of_one=False).prepare(runs, runs, documents, 7, CPU)
    assert (rows, columns) == (slice(0, 24), slice(0, 24))
    heads = [tensor.transpose(1, 2) for tensor in (query, key, value)]
    attend = block_flex._compiled_attention()
    for _ in range(2):
        found, expected = attend(*heads, mask), dense(*heads, mask)  # type: ignore[arg-type]
        torch.testing.assert_close(found[0], expected[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found[1], expected[1], atol=1e-5, rtol=1e-5)
