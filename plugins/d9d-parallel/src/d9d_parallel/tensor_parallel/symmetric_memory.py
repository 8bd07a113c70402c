"""Products with collectives in one operator, over memory that the GPUs of a node read of each other.

Copies between GPUs are made by their copy engines, which leave the multiprocessors to the products. Everything that
depends on the version of torch is here; tests pin the names and signatures that are used. No multicast: the operators
use it only for all-gathers whose rows nobody asks back.

Shapes: B samples, S positions, R ranks, I features in, O features out.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from d9d_parallel.ranks import Ranks


def is_usable(ranks: Ranks, device: torch.device) -> bool:
    """Whether all ranks are on GPUs of one node that reach each other's memory. Collective over the ranks.

    The answer is the same on all of them. A simulated world has no such memory.
    """
    if device.type != "cuda" or ranks.size == 1 or dist.get_backend(ranks.group) == "fake":
        return False
    # No rank may look for the memory of one on another node, which would wait until its time is over.
    if not _same_on_all(_node(), ranks, device):
        return False
    memory = _memory(ranks, device)
    # Nor may one wait for a rank that has none.
    if _smallest(memory is not None, ranks, device) == 0:
        return False
    return _smallest(memory is not None and _met(memory, ranks), ranks, device) == 1


def gather_multiply(rows: Tensor, weights: Sequence[Tensor], ranks: Ranks) -> tuple[Tensor, list[Tensor]]:
    """All-gather and products as of :func:`d9d_parallel.tensor_parallel.micro_pipeline.gather_multiply`. Collective.

    Args:
        rows: [B, S / R, I].
        weights: [O, I] each, of the dtype of the rows.
        ranks: in whose order the rows follow each other.
    """
    transposed = [weight.t() for weight in weights]
    whole, outs = torch.ops.symm_mem.fused_all_gather_matmul(rows.contiguous(), transposed, 1, ranks.name)
    # Of several samples, the operator returns positions before samples in memory.
    return _one(whole), [_one(out) for out in outs]


def _one(tensor: Tensor) -> Tensor:
    """A contiguous tensor that is no other one to Dynamo of torch 2.11, which loses the gradient of what may be two."""
    whole = tensor.contiguous()
    return whole.view_as(whole)


def multiply_scatter(rows: Sequence[Tensor], weights: Sequence[Tensor], ranks: Ranks) -> Tensor:
    """Products and reduce-scatter of their sum [B, S / R, O]. Collective over the ranks.

    Args:
        rows: [B, S, I] each; the features may differ.
        weights: [O, I] each, of the dtype of the rows.
        ranks: which get the parts, in their order.
    """
    # One product of all features is one exchange, and adds up what would be rounded in between.
    joined = rows[0] if len(rows) == 1 else torch.cat(list(rows), dim=-1)
    weight = weights[0] if len(weights) == 1 else torch.cat(list(weights), dim=1)
    out: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(joined.contiguous(), weight.t(), "sum", 1, ranks.name)
    return _one(out)


def _memory(ranks: Ranks, device: torch.device) -> Tensor | None:
    """A tensor that other ranks may read, and the operators; ``None`` if this rank has none of it."""
    try:
        # torch documents this module under its private name, and has no other; importing it registers the operators.
        import torch.distributed._symmetric_memory as symmetric

        operators: Any = torch.ops.symm_mem
        module: Any = symmetric  # its types are not those of torch 2.11
        _ = operators.fused_all_gather_matmul, operators.fused_matmul_reduce_scatter
        if not module.is_symm_mem_enabled_for_group(ranks.name):
            module.enable_symm_mem_for_group(ranks.name)  # torch 2.11 asks for it, later ones do not
        tensor: Tensor = module.empty(ranks.size, dtype=torch.int32, device=device)
    except (ImportError, AttributeError, RuntimeError):  # an older driver
        return None
    return tensor


def _met(memory: Tensor, ranks: Ranks) -> bool:
    """Whether this rank reaches the memory of the others."""
    from torch.distributed import _symmetric_memory as symmetric

    module: Any = symmetric
    try:
        module.rendezvous(memory, ranks.name)
    except RuntimeError:  # GPUs without a way to each other
        return False
    return True


def _node() -> int:
    """Number that stands for this machine, as it started: names of containers may repeat."""
    try:
        started = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:
        started = ""
    return int.from_bytes(hashlib.sha256(f"{socket.gethostname()} {started}".encode()).digest()[:7])


def _same_on_all(number: int, ranks: Ranks, device: torch.device) -> bool:
    least, most = _smallest(number, ranks, device), -_smallest(-number, ranks, device)
    return least == most


def _smallest(number: int, ranks: Ranks, device: torch.device) -> int:
    found = torch.tensor(number, dtype=torch.int64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MIN, group=ranks.group)
    return int(found)
