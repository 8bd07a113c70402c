from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from d9d_core.errors import JobError
from d9d_core.kernel import Decision, OpSignature
from d9d_nn.ops.attention import flex, sdpa
from d9d_nn.ops.attention.reference import attention, visible
from d9d_nn.ops.attention.sdpa_pinned import CUDNN, EFFICIENT, FLASH, PinnedKernel
from d9d_nn.ops.attention.slot import AttentionSlot
from d9d_testing.tolerances import assert_close_gradients, assert_close_values
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode

CPU = OpSignature("attention", "cpu", "float32", {"causal": True})
BUILDS = {
    "sdpa": lambda window: sdpa.build(OpSignature("attention", "cpu", "float32", {"window": window})),
    "sdpa_as_on_cuda": lambda window: sdpa.build(OpSignature("attention", "cuda", "bfloat16", {"window": window})),
    "flex": lambda window: flex.build(OpSignature("attention", "cpu", "float32", {"window": window})),
}
BACKENDS = ("reference", *BUILDS)
WINDOWS = (None, 1, 3, 100)
# Not compiled, it says so; here that is the point.
pytestmark = [pytest.mark.smoke, pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")]


def attend(
    backend: str, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None = None, window: int | None = None
) -> Tensor:
    """As a model calls it: through a slot that prepares the mask."""
    features = query.shape[3]
    slot = AttentionSlot(query_heads=query.shape[2], key_value_heads=key.shape[2], head_dim=features, window=window)
    if backend != "reference":
        slot.bind(backend, BUILDS[backend](window))
    out: Tensor = slot(query, key, value, slot.prepare(documents, query.shape[1], query.device))
    return out


def heads(samples: int, length: int, count: int, features: int = 8, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, length, count, features, generator=generator).requires_grad_()


def one_token_at_a_time(query: Tensor, key: Tensor, value: Tensor, documents: Tensor, window: int | None) -> Tensor:
    """The definition, in loops."""
    out = torch.zeros_like(query)
    samples, length, count, features = query.shape
    for b in range(samples):
        for s in range(length):
            seen = [t for t in range(s + 1) if documents[b, t] == documents[b, s] and s - t < (window or length)]
            for n in range(count):
                k = n * key.shape[2] // count
                scores = torch.stack([query[b, s, n] @ key[b, t, k] for t in seen]) / math.sqrt(features)
                out[b, s, n] = scores.softmax(0) @ torch.stack([value[b, t, k] for t in seen])
    return out


@pytest.mark.thorough
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_follows_the_definition(backend: str, window: int | None) -> None:
    query, key, value = (heads(2, 5, count, seed=seed).detach() for seed, count in enumerate((4, 2, 2)))
    documents = torch.tensor([[0, 0, 0, 1, 1], [3, 4, 4, 4, 5]])
    with torch.no_grad():
        out = attend(backend, query, key, value, documents, window)
        assert_close_values(out, one_token_at_a_time(query, key, value, documents, window))
        out = attend(backend, query, key, value, None, window)
        assert_close_values(out, one_token_at_a_time(query, key, value, torch.zeros_like(documents), window))


@settings(max_examples=20)
@given(
    samples=st.integers(1, 3),
    length=st.integers(1, 17),
    key_value_heads=st.integers(1, 3),
    groups=st.integers(1, 3),
    cuts=st.lists(st.integers(0, 16), max_size=3) | st.none(),
    window=st.integers(1, 20) | st.none(),
)
def test_sdpa_agrees_with_the_reference(
    samples: int, length: int, key_value_heads: int, groups: int, cuts: list[int] | None, window: int | None
) -> None:
    documents = None
    if cuts is not None:
        documents = sum((torch.arange(length) >= cut).long() for cut in cuts) + torch.zeros(
            samples, length, dtype=torch.long
        )
    results = {}
    for name in ("reference", "sdpa"):
        inputs = (
            heads(samples, length, key_value_heads * groups),
            heads(samples, length, key_value_heads, seed=1),
            heads(samples, length, key_value_heads, seed=2),
        )
        out = attend(name, *inputs, documents, window)
        out.square().sum().backward()
        results[name] = out, {n: t.grad for n, t in zip(("query", "key", "value"), inputs, strict=True)}
    assert_close_values(results["sdpa"][0], results["reference"][0])
    # A token that sees only itself gives its query and key no gradient but rounding.
    if visible(length, documents, torch.device("cpu"), window).sum() > (samples if cuts is not None else 1) * length:
        assert_close_gradients(results["sdpa"][1], results["reference"][1])


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_documents_equal_documents_alone(backend: str, window: int | None) -> None:
    lengths = (3, 1, 5)
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)).unsqueeze(0)
    query, key, value = (heads(1, 9, count, seed=seed).detach() for seed, count in enumerate((4, 2, 2)))
    packed = attend(backend, query, key, value, documents, window)
    parts = zip(query.split(lengths, 1), key.split(lengths, 1), value.split(lengths, 1), strict=True)
    alone = torch.cat([attend(backend, *part, None, window) for part in parts], dim=1)
    torch.testing.assert_close(packed, alone, rtol=1e-6, atol=1e-6)


def test_a_window_sees_as_many_keys_as_it_is_wide() -> None:
    seen = visible(5, None, torch.device("cpu"), window=2)
    assert seen.int().tolist() == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]
    assert torch.equal(visible(5, None, torch.device("cpu"), window=5), visible(5, None, torch.device("cpu")))


def test_sdpa_reads_no_mask_where_none_is_needed() -> None:
    cpu = torch.device("cpu")
    assert sdpa.build(CPU).prepare(None, 8, cpu) is None
    assert BUILDS["sdpa"](8).prepare(None, 8, cpu) is None
    assert BUILDS["sdpa"](7).prepare(None, 8, cpu).shape == (8, 8)
    assert sdpa.build(CPU).prepare(torch.zeros(2, 8, dtype=torch.long), 8, cpu).shape == (2, 1, 8, 8)


def test_document_numbers_need_not_be_ordered() -> None:
    mask = visible(4, torch.tensor([[7, 7, -1, 7]]), torch.device("cpu"))
    assert mask.tolist() == [
        [
            [True, False, False, False],
            [True, True, False, False],
            [False, False, True, False],
            [True, True, False, True],
        ]
    ]


def test_reference_softmax_is_wider_than_bfloat16() -> None:
    query, key, value = (heads(1, 64, 1, seed=s).detach() for s in range(3))
    exact = attention(query.double(), key.double(), value.double())
    narrow = attention(query.bfloat16(), key.bfloat16(), value.bfloat16())
    assert narrow.dtype == torch.bfloat16
    assert_close_values(narrow, exact.to(torch.bfloat16))


def test_sdpa_explains_its_answer() -> None:
    assert sdpa.supports(CPU).accept
    assert sdpa.supports(CPU).priority > 0
    assert "the model is int8" in sdpa.supports(OpSignature("attention", "cpu", "int8")).reason
    refused = sdpa.supports(OpSignature("attention", "cpu", "float32", {"causal": False}))
    assert not refused.accept
    assert "causal" in refused.reason


def cuda(dtype: str = "bfloat16", documents: bool | None = None, **static: Any) -> OpSignature:
    facts = {"causal": True, "head_dim": 64, "window": None} | static
    return OpSignature("attention", "cuda", dtype, facts, documents=documents)


@pytest.mark.parametrize("documents", [None, False])
def test_the_pinned_kernels_are_never_chosen_by_themselves(documents: bool | None) -> None:
    for supports in (FLASH.supports, CUDNN.supports, EFFICIENT.supports):
        decision = supports(cuda(documents=documents))
        assert decision.accept
        assert decision.priority == 0
        assert "used only if the job names it" in decision.reason


@pytest.mark.parametrize(
    ("signature", "chosen", "reason"),
    [
        (cuda(documents=True), flex, "the data packs documents: skips keys of other documents, without a mask"),
        (cuda(documents=None), flex, "if microbatches pack them, which the data does not state"),
        (cuda(documents=False), sdpa, "samples are one document each, so it needs no mask"),
        (cuda(documents=False, window=8), flex, "skips keys outside of windows of 8"),
        (cuda(documents=True, window=8), flex, "the data packs documents"),
        (cuda("float32", documents=True), flex, "without a mask of S x S; compiled in the first step"),
        (cuda("float64", documents=True), sdpa, "documents need a mask of S x S"),
        (cuda(documents=True, head_dim=8), sdpa, "documents need a mask of S x S"),
        (cuda(documents=True, head_dim=512), sdpa, "documents need a mask of S x S"),
        (replace(CPU, documents=True), sdpa, "documents need a mask of S x S"),
        (replace(CPU, documents=False), sdpa, "documents need a mask of S x S"),
    ],
    ids=str,
)
def test_flex_is_chosen_where_it_skips_something(signature: OpSignature, chosen: Any, reason: str) -> None:
    answers = {module: module.supports(signature) for module in (sdpa, flex)}
    best = max((module for module in answers if answers[module].accept), key=lambda module: answers[module].priority)
    assert best is chosen
    assert reason in answers[best].reason


def test_samples_of_one_document_need_no_mask_for_their_padding() -> None:
    padding = (torch.arange(8) >= 5).long()[None]
    cpu = torch.device("cpu")
    for build in (sdpa.build, FLASH.build, CUDNN.build):
        assert build(cuda(documents=False)).prepare(padding, 8, cpu) is None
    assert sdpa.build(cuda(documents=False, window=3)).prepare(padding, 8, cpu).shape == (8, 8)
    assert sdpa.build(cuda()).prepare(padding, 8, cpu).shape == (1, 1, 8, 8)
    query, key, value = (heads(1, 8, count, seed=seed).detach() for seed, count in enumerate((4, 2, 2)))
    found, masked = (attention(query, key, value, documents) for documents in (None, padding))
    assert torch.equal(found[:, :5], masked[:, :5])


@pytest.mark.parametrize(
    ("supports", "signature", "text"),
    [
        (FLASH.supports, CPU, "flash attention is a CUDA kernel, the device is cpu"),
        (CUDNN.supports, CPU, "cuDNN attention is a CUDA kernel, the device is cpu"),
        (EFFICIENT.supports, CPU, "memory-efficient attention is a CUDA kernel, the device is cpu"),
        (flex.supports, CPU, "no backward on the CPU"),
        (flex.supports, OpSignature("attention", "mps", "float32"), "compiles for CUDA only, the device is mps"),
        (FLASH.supports, cuda("float32"), "needs one of bfloat16, float16, the model is float32"),
        (CUDNN.supports, cuda("float32"), "the model is float32"),
        (EFFICIENT.supports, cuda("float64"), "the model is float64"),
        (flex.supports, cuda("float64"), "the model is float64"),
        (
            FLASH.supports,
            cuda(documents=True),
            "the data packs documents, which flash attention cannot mask",
        ),
        (FLASH.supports, cuda(window=8), "a window needs a mask, which flash attention does not have"),
        (FLASH.supports, cuda(head_dim=512), "head_dim up to 256, a multiple of 8; here it is 512"),
        (CUDNN.supports, cuda(head_dim=136), "head_dim up to 128"),
        (EFFICIENT.supports, cuda(head_dim=60), "a multiple of 8; here it is 60"),
        (flex.supports, cuda(head_dim=8), "head_dim of 16 or more, here it is 8"),
        (EFFICIENT.supports, cuda(causal=False), "causal attention only"),
        (flex.supports, cuda(causal=False), "causal, bidirectional and blocks attention only, here it is unknown"),
    ],
)
def test_backends_say_why_they_refuse(
    supports: Callable[[OpSignature], Decision], signature: OpSignature, text: str
) -> None:
    decision = supports(signature)
    assert not decision.accept
    assert text in decision.reason


def test_windows_are_no_reason_to_refuse_for_kernels_that_read_masks() -> None:
    for supports in (CUDNN.supports, EFFICIENT.supports, flex.supports, sdpa.supports):
        assert supports(cuda(window=8)).accept
    assert "a window needs a mask" in sdpa.supports(cuda(window=8)).reason


def test_flash_says_what_to_do_with_documents() -> None:
    function = FLASH.build(cuda())
    assert function.prepare(None, 8, torch.device("cpu")) is None
    with pytest.raises(
        JobError, match="^kernels.attention: flash attention has no mask.* choose sdpa, sdpa_efficient or flex"
    ):
        function.prepare(torch.zeros(1, 8, dtype=torch.long), 8, torch.device("cpu"))


@pytest.mark.parametrize(("dtype", "repeated"), [("bfloat16", False), ("float32", True)])
def test_on_cuda_heads_are_repeated_where_no_fused_kernel_reads_groups(dtype: str, repeated: bool) -> None:
    grouped: list[bool] = []

    class Sees(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.nn.functional.scaled_dot_product_attention:
                grouped.append(kwargs["enable_gqa"])
                assert args[1].shape[1] == (4 if repeated else 2)
            return function(*args, **(kwargs or {}))

    function = sdpa.build(OpSignature("attention", "cuda", dtype, {"window": None}))
    with Sees():
        function(heads(1, 4, 4), heads(1, 4, 2), heads(1, 4, 2), None)
    assert grouped == [not repeated]


@pytest.mark.parametrize("kernel", [FLASH, CUDNN, EFFICIENT], ids=lambda kernel: kernel.name)
def test_a_pinned_kernel_runs_with_no_other_allowed(kernel: PinnedKernel) -> None:
    allowed: list[bool] = []

    class Asks(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.nn.functional.scaled_dot_product_attention:
                on = torch.backends.cuda
                allowed[:] = [on.flash_sdp_enabled(), on.cudnn_sdp_enabled(), on.mem_efficient_sdp_enabled()]
                assert not on.math_sdp_enabled()
                return args[0]
            return function(*args, **(kwargs or {}))

    query = heads(1, 4, 2)
    with Asks():
        kernel.build(cuda())(query, query, query, None)
    assert allowed == [kernel is FLASH, kernel is CUDNN, kernel is EFFICIENT]


@pytest.mark.parametrize(
    "spread",
    [lambda x: torch.stack((x, x), -1)[..., 0], lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2)],
    ids=["every other number", "after the heads"],
)
def test_a_pinned_kernel_takes_features_that_lie_apart(spread: Callable[[Tensor], Tensor]) -> None:
    parts = [heads(2, 5, 4, seed=seed) for seed in range(3)]
    query, key, value = map(spread, parts)
    assert 1 not in (query.stride(-1), key.stride(-1), value.stride(-1))
    assert_close_values(FLASH.build(cuda())(query, key, value, None), attention(*parts))


@pytest.mark.full
def test_a_pinned_kernel_compiles_into_one_graph() -> None:
    query, key, value = heads(2, 5, 4), heads(2, 5, 2, seed=1), heads(2, 5, 2, seed=2)
    function = FLASH.build(cuda())  # torch has a flash kernel for the CPU too
    compiled = torch.compile(function.__call__, backend="aot_eager", fullgraph=True)
    expected = attention(query, key, value)
    for call in (function, compiled):
        assert_close_values(call(query, key, value, None), expected)
