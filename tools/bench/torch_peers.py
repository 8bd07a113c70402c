"""Training steps of a model that is spread by torch's own means: ``parallelize_module`` and ``context_parallel``.

Shapes: B samples, S positions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

# Models and optimizer of the comparison with other libraries.
sys.path.append(str(Path(__file__).parent / "compare"))

import torch
from plain_qwen3 import PlainQwen3, cross_entropy
from random_tokens import drawn
from settings import BETAS, CLIP, DECAY, LR, MODELS
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

_KERNELS = {
    "cudnn": [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION],
    "flash": [SDPBackend.FLASH_ATTENTION],
}


@dataclass(frozen=True, slots=True)
class Peer:
    """Contender on two ranks that uses torch's own parallelism.

    Attributes:
        axis: ``tp`` by ``parallelize_module``, or ``cp`` by ``context_parallel`` and FSDP2.
        model: name in :data:`settings.MODELS`; a dense one.
        samples: samples of a step, of both ranks.
        length: positions of a sample.
        rotate: method by which ``cp`` moves keys and values: ``allgather`` or ``alltoall``.
        attention: kernel of attention that is preferred: ``cudnn`` or ``flash``.
        backend: compiler of blocks and loss; nothing is compiled, if absent.
        dtype: dtype of the parameters.
    """

    axis: Literal["tp", "cp"]
    model: str
    samples: int
    length: int
    rotate: Literal["allgather", "alltoall"] | None = None
    attention: Literal["cudnn", "flash"] = "flash"
    backend: str | None = "inductor"
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        """Name in tables: ``torch context_parallel dense-2b 2x16384 allgather flash``."""
        parts = ["torch", "parallelize_module" if self.axis == "tp" else "context_parallel"]
        parts += [self.model, f"{self.samples}x{self.length}"]
        return " ".join([*parts, *([self.rotate] if self.rotate else []), self.attention])

    @property
    def tokens(self) -> int:
        """Tokens of a step, of both ranks."""
        return self.samples * self.length


@dataclass(frozen=True, slots=True)
class Spread:
    """Parallelised model of a peer on this rank.

    Attributes:
        model: model whose parameters are DTensors.
        backward: function that adds the gradients of a step to the parameters' gradients, and returns the mean loss
            over all ranks, float32 []; collective over all ranks.
    """

    model: nn.Module
    backward: Callable[[], Tensor]


def step_of(peer: Peer, device: torch.device) -> Callable[[], Tensor]:
    """Training step of a peer: forward, backward, clipping and AdamW; collective."""
    spread = spread_of(peer, device)
    parameters = list(spread.model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=LR, betas=BETAS, weight_decay=DECAY, fused=True)

    def step() -> Tensor:
        loss = spread.backward()
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], foreach=True)
        nn.utils.clip_grads_with_norm_(parameters, CLIP, _whole(norm), foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


def spread_of(peer: Peer, device: torch.device) -> Spread:
    """Parallelised model of a peer, with equal initial weights on all ranks; collective."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=(peer.axis,))
    model = model_of(peer, device)
    # The same data as in d9d's row.
    microbatch = drawn(peer.samples, peer.length, MODELS[peer.model]["vocab_size"], torch.Generator().manual_seed(0))
    tokens, targets = (tensor.to(device) for tensor in microbatch)
    positions = torch.arange(peer.length, device=device)[None]
    _compile(model, peer)
    loss_of = torch.compile(cross_entropy, backend=peer.backend) if peer.backend else cross_entropy
    if peer.axis == "tp":
        split_tensors(model, mesh)
    else:
        shard_parameters(model, mesh)

    def backward_of_tensors() -> Tensor:
        with _kernels(peer, device), loss_parallel():
            loss = loss_of(model(tokens, positions), targets)
            loss.backward()  # type: ignore[no-untyped-call]
        return _whole(loss.detach())

    def backward_of_context() -> Tensor:
        # context_parallel shards them in place.
        own = [tokens.clone(), targets.clone(), positions.clone()]
        set_rotate_method(peer.rotate or "allgather")
        context = context_parallel(mesh, buffers=own, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(own))
        with _kernels(peer, device), context:
            loss = loss_of(model(own[0], own[2]), own[1])
            loss.backward()  # type: ignore[no-untyped-call]  # in the context: it replaces attention's backward too
        mean = loss.detach().clone()
        dist.all_reduce(mean, dist.ReduceOp.SUM)
        return mean / mesh.size()

    return Spread(model, backward_of_tensors if peer.axis == "tp" else backward_of_context)


def model_of(peer: Peer, device: torch.device) -> PlainQwen3:
    """Whole model, with initial weights from a seed."""
    torch.manual_seed(0)
    with device:
        return PlainQwen3(MODELS[peer.model]).to(getattr(torch, peer.dtype))


def split_tensors(model: PlainQwen3, mesh: DeviceMesh) -> None:
    """Shard weights over the ranks, and activations between products along the sequence, as in torch's tutorial.

    The head's logits stay split over the vocabulary, as ``loss_parallel`` takes them.
    """
    attention = {
        "input_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(
            input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        # Norms of heads take DTensors, so that gradients of their weights are summed over the ranks.
        "self_attn.q_proj": ColwiseParallel(use_local_output=False),
        "self_attn.k_proj": ColwiseParallel(use_local_output=False),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.q_norm": SequenceParallel(sequence_dim=2, use_local_output=True),
        "self_attn.k_norm": SequenceParallel(sequence_dim=2, use_local_output=True),
        "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
    }
    feed_forward = {
        "post_attention_layernorm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
    }
    for block in model.model.layers:
        parallelize_module(block, mesh, {**attention, **feed_forward})
    outside = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, outside)
    # In compiled blocks of torch 2.15, an output that is still being communicated lacks its placement.
    model.model.embed_tokens.register_forward_hook(lambda module, inputs, hidden: hidden.clone())  # noqa: ARG005


def shard_parameters(model: PlainQwen3, mesh: DeviceMesh) -> None:
    """Shard parameters over the ranks by FSDP2, block by block; it averages gradients over them."""
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _whole(tensor: Tensor) -> Tensor:
    """Full tensor of a DTensor; collective over its ranks if it is not replicated."""
    whole: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole


def _compile(model: PlainQwen3, peer: Peer) -> None:
    if peer.backend:
        for block in model.model.layers:
            block.compile(backend=peer.backend, fullgraph=True)


@contextmanager
def _kernels(peer: Peer, device: torch.device) -> Iterator[None]:
    """Context with the allowed attention kernels on a GPU; a CPU has only one."""
    if device.type != "cuda":
        yield
        return
    with sdpa_kernel(_KERNELS[peer.attention], set_priority=True):
        yield
