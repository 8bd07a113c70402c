"""Rings whose attention a kernel computes: masks that all layers share, and numbers of one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from d9d_core.job_file.job import Mesh
from d9d_core.kernel import OpSignature
from d9d_core.model import ContextShare
from d9d_core.plugin import ViewSpec
from d9d_core.registry.registry import Registry
from d9d_engine.distributed.mesh import Topology
from d9d_nn.attention.core import AttentionCore
from d9d_nn.attention.masks import prepare_masks
from d9d_nn.ops.attention import block_sdpa
from d9d_nn.ops.attention.reference import attention
from d9d_parallel.context_parallel.config import ContextParallelConfig
from d9d_parallel.context_parallel.ring import RingAttention, Turns
from d9d_parallel.context_parallel.strategy import ContextParallel
from d9d_testing.world import World
from torch import Tensor, nn
from torch import distributed as dist

VIEWS = {e.spec.key: e.spec for e in Registry.of().entries("view") if isinstance(e.spec, ViewSpec)}
LENGTH, FACTS = 32, {"query_heads": 8, "key_value_heads": 4, "head_dim": 8}
PACKED = [[0] * 5 + [1] * 14 + [2] * 13, [0] * 20 + [1] * 12]


class Layers(nn.Module):
    """Stage of attention cores."""

    def __init__(self, *windows: int | None) -> None:
        super().__init__()
        self.cores = nn.ModuleList([AttentionCore(**FACTS, window=window) for window in windows])
        self.share: ContextShare | None = None

    def attention_cores(self) -> Mapping[str, nn.Module]:
        return {f"cores.{number}": core for number, core in enumerate(self.cores)}

    def split_context(self, share: ContextShare) -> None:
        self.share = share


def split(settings: dict[str, Any], *windows: int | None) -> tuple[Layers, tuple[str, ...]]:
    """Stage on a rank, and notes of the strategy."""
    stage, world = Layers(*windows), dist.get_world_size()
    topology = Topology(sizes=Mesh(cp=world).sizes(), rank=dist.get_rank(), world_size=world, views=VIEWS)
    applied = ContextParallel(ContextParallelConfig(**settings)).apply(stage, topology)
    return stage, tuple(applied.notes)


def drawn(dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys, values and a gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, LENGTH, heads, 8, generator=generator, dtype=torch.float64).to(dtype) for heads in (8, 4, 4, 8)
    ]


def differences(settings: dict[str, Any], backend: str, autocast: bool) -> list[float]:
    """Distance of output and gradients from one process, relative to the largest number."""
    stage, _ = split(settings, None)
    core = stage.cores[0]
    assert isinstance(core, AttentionCore)
    slot = core.op_slots()["attention_block"]
    if backend == "sdpa":
        facts = OpSignature("attention_block", "cpu", "float64", slot.static, documents=False)
        slot.bind("sdpa", block_sdpa.build(facts))
    *inputs, grad = drawn(torch.float32 if autocast else torch.float64)
    whole = [tensor.requires_grad_() for tensor in inputs]
    expected = attention(*whole)
    expected.backward(grad)
    assert stage.share is not None
    own = stage.share.own
    mine = [own(tensor.detach()).requires_grad_() for tensor in whole]
    masks = prepare_masks([core.attention], None, LENGTH, mine[0].device)
    assert isinstance(masks.prepared[core.attention.mask_key], Turns)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = core(*mine, masks)
    assert out.dtype == (torch.bfloat16 if autocast and backend == "sdpa" else grad.dtype)
    out.backward(own(grad).to(out.dtype))
    pairs = [(out.detach(), own(expected.detach()))]
    for one, other in zip(mine, whole, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        pairs.append((one.grad, own(other.grad)))
    return [((one.to(other.dtype) - other).abs().max() / other.abs().max()).item() for one, other in pairs]


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize(("ranks", "settings"), [(2, {"method": "ring"}), (4, {"method": "hybrid", "head_ranks": 2})])
def test_a_ring_with_shared_masks_computes_what_one_process_does(
    ranks: int, settings: dict[str, Any], backend: str
) -> None:
    for found in World(ranks).run(differences, settings, backend, False):
        assert max(found) < 1e-12, found


def test_a_kernel_of_a_ring_computes_in_what_autocast_says() -> None:
    for found in World(2).run(differences, {"method": "ring"}, "sdpa", True):
        assert 1e-6 < max(found) < 2e-2, found


def on_gpus() -> list[float]:
    """Distances of output and gradients on this GPU from one process in float64, relative to their norms."""
    device = torch.device("cuda", dist.get_rank())
    torch.cuda.set_device(device)
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 4096, heads, 64) for heads in (8, 4, 4, 8)]
    tensors = [torch.randn(shape, generator=generator).to(torch.bfloat16).to(device) for shape in shapes]
    stage, _ = split({"method": "ring"}, None)
    core = stage.cores[0]
    assert isinstance(core, AttentionCore)
    slot = core.op_slots()["attention_block"]
    slot.bind(
        "sdpa", block_sdpa.build(OpSignature("attention_block", "cuda", "bfloat16", slot.static, documents=False))
    )
    assert stage.share is not None
    own = stage.share.own
    *mine, grad = (own(tensor).contiguous() for tensor in tensors)
    leaves = [tensor.requires_grad_() for tensor in mine]
    masks = prepare_masks([core.attention], None, 4096, device)
    for waits in (True, False):
        if not waits:  # what connects ranks and chooses kernels may wait, once
            torch.cuda.set_sync_debug_mode("error")
        try:
            out = core(*leaves, masks)
            grads = torch.autograd.grad(out, leaves, grad)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    whole = [tensor.double().requires_grad_() for tensor in tensors[:3]]
    expected = attention(*whole)
    exact = torch.autograd.grad(expected, whole, tensors[3].double())
    pairs = zip((out.detach(), *grads), (own(one.detach()) for one in (expected, *exact)), strict=True)
    return [((one.double() - other).norm() / other.norm()).item() for one, other in pairs]


@pytest.mark.gpus(2)
def test_on_gpus_a_ring_does_not_wait_for_them_and_computes_what_one_process_does() -> None:
    for found in World(2, timeout=180.0, backend="cpu:gloo,cuda:nccl").run(on_gpus):
        assert max(found) < 1e-2, found


def masks_of_layers() -> None:
    stage, notes = split({"method": "ring"}, None, 6, None)
    cores = [core for core in stage.cores if isinstance(core, AttentionCore)]
    documents = torch.tensor(PACKED)
    masks = prepare_masks([core.attention for core in cores], documents, LENGTH, documents.device)
    assert len(masks.prepared) == 2  # of the two windows
    query, key, value, _ = drawn(torch.float64)
    assert stage.share is not None
    own = stage.share.own
    for core in cores:
        window = core.attention.static["window"]
        expected = own(attention(query, key, value, documents, window=window))
        for given in (masks, documents):
            torch.testing.assert_close(core(own(query), own(key), own(value), given), expected)
        slots = core.op_slots()
        assert list(slots) == ["attention_block"]
        assert slots["attention_block"].static == core.attention.static | {"window": window}
    assert notes == ()


def test_layers_of_one_window_share_what_a_ring_prepares() -> None:
    World(2).run(masks_of_layers)


class Unlisted(AttentionCore):
    """Core that says nothing of what attends in its place."""

    def op_slots(self) -> Mapping[str, Any]:
        return {}


def unlisted() -> tuple[str, ...]:
    stage = Layers()
    stage.cores.append(Unlisted(**FACTS))
    world = dist.get_world_size()
    topology = Topology(sizes=Mesh(cp=world).sizes(), rank=dist.get_rank(), world_size=world, views=VIEWS)
    return tuple(ContextParallel(ContextParallelConfig(method="ring")).apply(stage, topology).notes)


def test_a_core_without_a_slot_for_kernels_is_noted() -> None:
    said = "cores.0: declares no slot of attention_block, so it is computed in plain PyTorch"
    assert World(2).run(unlisted) == [(said,), (said,)]


def copied() -> bool:
    """Whether a copy of a core, as of a teacher, attends by a ring and a slot of its own."""
    import copy

    stage, _ = split({"method": "ring"}, None)
    other = copy.deepcopy(stage)
    first, second = (one.cores[0]._function for one in (stage, other))
    assert isinstance(first, RingAttention)
    assert isinstance(second, RingAttention)
    return first.ranks is second.ranks and first.slot is not second.slot


def test_copies_of_a_core_talk_to_the_same_ranks() -> None:
    assert all(World(2).run(copied))
