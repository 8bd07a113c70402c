"""Every backend of attention on CUDA against the reference, forward and backward.

The reference computes in float64 from the same rounded inputs. What a kernel gives may be as far from it as the
reference in the kernel's own dtype, times a factor: kernels round at other places than the reference does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from d9d_core.extend import Decision, JobError, OpSignature
from d9d_nn.attention.core import AttentionCore
from d9d_nn.attention.masks import prepare_masks
from d9d_nn.ops.attention import flex, sdpa
from d9d_nn.ops.attention.reference import attention
from d9d_nn.ops.attention.sdpa_pinned import CUDNN, EFFICIENT, FLASH
from d9d_nn.ops.attention.slot import AttentionSlot
from torch import Tensor

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
#: How much further from float64 than the reference in the same dtype; and a floor for what is almost zero there.
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


def distance(found: Tensor, exact: Tensor) -> float:
    """Root mean square of the difference, relative to that of ``exact``."""
    return float((found.double() - exact).norm() / exact.norm().clamp_min(1e-30))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_computes_what_the_reference_does(backend: str, dtype: str, case: str) -> None:
    samples, length, heads, shared, features, window, count = CASES[case]
    supports, build = BACKENDS[backend]
    slot = AttentionSlot(query_heads=heads, key_value_heads=shared, head_dim=features, window=window)
    signature = OpSignature("attention", "cuda", dtype, slot.static)
    decision = supports(signature)
    if not decision.accept:
        pytest.skip(f"{backend} refuses, and says: {decision.reason}")
    slot.bind(backend, build(signature))
    documents = documents_of(samples, length, count)
    tensors = inputs_of(samples, length, heads, shared, features, DTYPES[dtype])
    if backend == "sdpa_flash" and documents is not None:
        with pytest.raises(JobError, match="flash attention reads no mask"):
            slot.prepare(documents, length, tensors[0].device)
        return

    mask = slot.prepare(documents, length, tensors[0].device)
    found = forward_and_backward(lambda *heads: slot(*heads, mask), tensors)

    def reference(*heads: Tensor) -> Tensor:
        return attention(*heads, documents, window=window)

    exact = forward_and_backward(reference, [tensor.double() for tensor in tensors])
    rounded = forward_and_backward(reference, tensors)
    for name, tensor in found.items():
        assert tensor.dtype == DTYPES[dtype], f"{name} is {tensor.dtype}"
        if exact[name].norm() < 1e-9:  # a window of one: the softmax of one score has no gradient
            assert tensor.double().norm() < FLOOR[dtype] * exact["value"].norm(), f"{name} should be zero"
            continue
        allowed = max(FACTOR * distance(rounded[name], exact[name]), FLOOR[dtype])
        off = distance(tensor, exact[name])
        assert off <= allowed, (
            f"{backend} {dtype} {case}: {name} is off by {off:.1e} of its norm, allowed {allowed:.1e}"
        )


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


def test_flex_makes_no_mask_of_length_by_length() -> None:
    length = 8192
    core = AttentionCore(query_heads=2, key_value_heads=2, head_dim=64, window=128)
    slot = core.attention
    slot.bind("flex", flex.build(OpSignature("attention", "cuda", "bfloat16", slot.static)))
    documents = documents_of(1, length, 9)
    assert documents is not None
    prepare_masks([core.attention], documents, length, documents.device)  # compiles
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
