"""Block masks and compiled functions of the backend ``flex``; no attention is computed on a GPU here."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from d9d_core.kernel import OpSignature
from d9d_nn.ops.attention import flex
from d9d_nn.ops.attention.block_mask import BLOCK, block_mask, visible_blocks
from d9d_nn.ops.attention.reference import attention, visible
from d9d_testing.tolerances import assert_close_values
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

CPU = torch.device("cpu")
pytestmark = [pytest.mark.smoke, pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")]


def packed(samples: int, length: int, count: int, seed: int = 0) -> Tensor:
    """``count`` documents per sample, cut at random places, others in each sample. int64 [B, S]."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.zeros(samples, length, dtype=torch.long)
    for sample in range(samples):
        starts[sample, torch.randperm(length - 1, generator=generator)[: count - 1] + 1] = 1
    return starts.cumsum(1)


def by_definition(documents: Tensor | None, length: int, window: int | None) -> tuple[Tensor, Tensor]:
    """Blocks with a visible score, and blocks of visible scores only, from all scores. Bools [B, Q, Q]."""
    seen = visible(length, documents, CPU, window)
    count = -(-length // BLOCK)
    padded = torch.zeros(*seen.shape[:-2], count * BLOCK, count * BLOCK, dtype=torch.bool)
    padded[..., :length, :length] = seen
    blocks = padded.view(-1, count, BLOCK, count, BLOCK)
    return blocks.any(4).any(2), blocks.all(4).all(2)


lengths = st.integers(1, 5 * BLOCK) | st.sampled_from([BLOCK, 2 * BLOCK, 4 * BLOCK])
windows = st.none() | st.integers(1, 6 * BLOCK) | st.sampled_from([1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK])


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("documents", [None, torch.tensor([[0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 0, 1]])])
def test_scores_of_a_partly_visible_block_are_masked_as_in_the_reference(
    documents: Tensor | None, window: int | None
) -> None:
    mask = block_mask(documents, 6, window, CPU)
    samples, heads = torch.arange(2)[:, None, None], torch.zeros((), dtype=torch.long)
    seen = mask.mask_mod(samples, heads, torch.arange(6)[:, None], torch.arange(6))
    assert torch.equal(seen.expand(2, -1, -1), visible(6, documents, CPU, window).expand(2, -1, -1))


@settings(max_examples=60)
@given(length=lengths, window=windows, count=st.none() | st.integers(1, 40), seed=st.integers(0, 99))
def test_blocks_of_packed_documents_are_those_with_visible_scores(
    length: int, window: int | None, count: int | None, seed: int
) -> None:
    documents = None if count is None else packed(2, length, min(count, length), seed)
    partly, wholly = visible_blocks(documents, length, window, CPU)
    some, whole = by_definition(documents, length, window)
    assert torch.equal(wholly, whole)
    assert torch.equal(partly, some & ~whole)


@settings(max_examples=30)
@given(length=lengths, window=windows, numbers=st.integers(1, 9), seed=st.integers(0, 99))
def test_no_visible_score_is_skipped_whatever_the_numbers_of_documents(
    length: int, window: int | None, numbers: int, seed: int
) -> None:
    documents = torch.randint(-numbers, numbers, (2, length), generator=torch.Generator().manual_seed(seed))
    partly, wholly = visible_blocks(documents, length, window, CPU)
    some, whole = by_definition(documents, length, window)
    assert not (some & ~partly & ~wholly).any()
    assert torch.equal(wholly, whole)
    assert not (partly & wholly).any()


@pytest.mark.thorough
@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize("length", [100, 384, 777])
def test_a_block_mask_is_the_one_that_torch_makes_of_all_scores(length: int, window: int | None) -> None:
    documents = packed(2, length, 5)
    made = block_mask(documents, length, window, CPU)

    def seen(sample: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
        near = (query >= key) & (query - key < (window or length))
        return near & (documents[sample, query] == documents[sample, key])

    expected = create_block_mask(seen, 2, None, length, length, device=CPU)
    assert made.shape == expected.shape
    assert torch.equal(made.to_dense(), expected.to_dense())
    for kind in ("kv", "full_kv", "q", "full_q"):
        counts = getattr(expected, f"{kind}_num_blocks")
        assert torch.equal(getattr(made, f"{kind}_num_blocks"), counts), kind
        places = torch.arange(counts.shape[-1]) < counts[..., None]
        found = getattr(made, f"{kind}_indices")
        assert torch.equal(found[places], getattr(expected, f"{kind}_indices")[places]), kind


def test_the_work_is_that_of_the_documents() -> None:
    length = 64 * BLOCK
    blocks = {
        count: int(torch.stack(visible_blocks(packed(1, length, count), length, None, CPU)).sum())
        for count in (1, 8, 64)
    }
    assert blocks[1] == 64 * 65 // 2
    assert blocks[8] < blocks[1] / 3
    assert blocks[64] < blocks[1] / 8
    near = int(torch.stack(visible_blocks(None, length, 2 * BLOCK, CPU)).sum())
    assert near <= 64 * 3


def cuda(documents: bool | None = None, **static: Any) -> OpSignature:
    return OpSignature("attention", "cuda", "bfloat16", {"head_dim": 64, "window": None} | static, documents=documents)


def test_calls_of_which_nothing_is_skipped_run_as_with_sdpa() -> None:
    documents = packed(1, 300, 3)
    for window, given_documents, skips in (
        (None, None, False),
        (None, documents, True),
        (300, None, False),
        (299, None, True),
        (300, documents, True),
    ):
        made = flex.build(cuda(window=window)).prepare(given_documents, 300, CPU)
        assert (made is not None) == skips, (window, given_documents)
    query = torch.randn(1, 300, 2, 16)
    assert_close_values(flex.build(cuda())(query, query, query, None), attention(query, query, query))
    # Asked for by name where it never skips anything: then it is flex that runs.
    assert flex.build(cuda(documents=False)).prepare(None, 300, CPU) is not None


def test_padding_behind_samples_of_one_document_makes_no_mask_of_samples() -> None:
    padding = (torch.arange(300) >= 280).long()[None].expand(4, -1)
    assert flex.build(cuda(documents=False, window=64)).prepare(padding, 300, CPU).shape[0] == 1
    assert flex.build(cuda(documents=None, window=64)).prepare(padding, 300, CPU).shape[0] == 4


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.GraphModule]:
    """Graphs that Dynamo hands to the compiler, which runs them as they are."""
    found: list[torch.fx.GraphModule] = []
    compile_ = torch.compile

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        found.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda function, **options: compile_(function, backend=backend, **options))
    torch.compiler.reset()
    return found


def draw(samples: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    query, key, value = (torch.randn(samples, length, heads, 16, generator=generator) for heads in (4, 2, 2))
    return query, key, value


@pytest.mark.full
def test_batches_of_any_shape_are_compiled_a_few_times_only(graphs: list[torch.fx.GraphModule]) -> None:
    full, windowed = flex.build(cuda()), flex.build(cuda(window=50))
    shapes = list(itertools.product((1, 2, 3), (64, 200, 256, 300, 512)))
    with torch.no_grad():
        for samples, length in [(2, 512), *shapes, *reversed(shapes)]:
            inputs, documents = draw(samples, length), packed(samples, length, 3, length)
            for function in (full, windowed):
                found = function(*inputs, function.prepare(documents, length, CPU))
                window = 50 if function is windowed else None
                assert_close_values(found, attention(*inputs, documents, window=window))
    assert 2 <= len(graphs) <= 2 * 6  # Dynamo gives up after eight of one function


def test_batches_of_one_shape_are_compiled_once(graphs: list[torch.fx.GraphModule]) -> None:
    function = flex.build(cuda())
    with torch.no_grad():
        for seed, count in enumerate((1, 5, 40, 300)):
            function(*draw(2, 300), function.prepare(packed(2, 300, count, seed), 300, CPU))
    assert len(graphs) == 1


def test_the_time_of_the_first_call_is_logged_once(
    graphs: list[torch.fx.GraphModule], caplog: pytest.LogCaptureFixture
) -> None:
    full, windowed = flex.build(cuda()), flex.build(cuda(window=50))
    inputs, documents = draw(1, 130), packed(1, 130, 3)
    with caplog.at_level(logging.INFO, "d9d"):
        for function in (full, full, windowed):
            function._attend_compiled(  # a call with gradients needs a GPU
                *(tensor.transpose(1, 2) for tensor in inputs),
                block_mask=function.prepare(documents, 130, CPU),
                enable_gqa=True,
            )
        with torch.no_grad():
            full(*inputs, full.prepare(documents, 130, CPU))
    lines = [record.getMessage() for record in caplog.records if record.name == "d9d.attention"]
    assert [line.rpartition(":")[0] for line in lines] == [
        "compiling attention (flex)",
        "compiling attention (flex, window 50)",
        "compiling attention (flex, forward only)",
    ]
    assert graphs


def test_selective_checkpointing_does_not_keep_attention_from_being_compiled(
    graphs: list[torch.fx.GraphModule],
) -> None:
    """Uncompiled, all scores would exist at once. Pins private names of torch."""
    function = flex.build(cuda())
    inputs, documents = draw(2, 300), packed(2, 300, 4)
    mask = function.prepare(documents, 300, CPU)
    contexts = create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.MUST_SAVE)
    for context in contexts:
        graphs.clear()
        torch.compiler.reset()
        with torch.no_grad(), context:
            found = function(*inputs, mask)
        assert len(graphs) == 1
        assert_close_values(found, attention(*inputs, documents))


def test_attention_is_compiled_where_everything_is_forced_to_be_eager(graphs: list[torch.fx.GraphModule]) -> None:
    """As in a forward between two steps: uncompiled, all scores would exist at once."""
    function = flex.build(cuda(window=40))
    inputs = draw(2, 300)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        found = function(*inputs, function.prepare(None, 300, CPU))
        torch.compile(torch.sin)(inputs[0])
    assert len(graphs) == 1
    assert_close_values(found, attention(*inputs, window=40))


def test_shapes_without_gradients_are_no_news_to_what_is_compiled_for_training(
    graphs: list[torch.fx.GraphModule],
) -> None:
    function = flex.build(cuda())

    def call(length: int) -> None:
        heads = (tensor.transpose(1, 2) for tensor in draw(1, length))
        mask = function.prepare(packed(1, length, 3), length, CPU)
        function._attend_compiled(*heads, block_mask=mask, enable_gqa=True)  # with gradients it needs a GPU

    call(130)
    with torch.no_grad():
        call(150)
        call(200)
    before = len(graphs)
    call(130)
    assert len(graphs) == before
