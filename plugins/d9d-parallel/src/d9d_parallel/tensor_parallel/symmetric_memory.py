"""Matrix products fused with collectives, over memory that the GPUs of a node read from each other.

The GPUs' copy engines make the copies, so all multiprocessors are free for the products. All code for symmetric memory
that depends on the version of torch is in this module; tests check the names and signatures in use. Multicast is not
used: the operators use it only for all-gathers that do not return the rows.

Shapes: B samples, S positions, R ranks, I features in, O features out.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from d9d_parallel.ranks import Ranks


def is_usable(ranks: Ranks, device: torch.device) -> bool:
    """Whether all ranks are on GPUs of one node that can access each other's memory. Collective over the ranks.

    The result is the same on all ranks, and false in a simulated world.
    """
    if device.type != "cuda" or ranks.size == 1 or is_simulated(ranks):
        return False
    # A rendezvous with a rank on another node would wait until the timeout, so compare the nodes first.
    if not _same_on_all(_node(), ranks, device):
        return False
    memory = _memory(ranks, device)
    # The rendezvous below would also wait until the timeout if a rank could not allocate such memory.
    if _smallest(memory is not None, ranks, device) == 0:
        return False
    return _smallest(memory is not None and _met(memory, ranks), ranks, device) == 1


def is_simulated(ranks: Ranks) -> bool:
    """Whether the ranks belong to a simulated world, in which no other process exists."""
    return str(dist.get_backend(ranks.group)) == "fake"


def is_expected(numbers: Sequence[int], device: torch.device, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether :func:`is_usable` is expected to be true, for a simulated world, whose GPUs cannot be asked.

    The GPUs of a node are expected to access each other's memory. If the size of a node is unknown, all ranks are
    expected to be on one node.

    Args:
        numbers: numbers of the ranks in the world; ranks of a node have consecutive numbers.
        device: device of this rank.
        environ: environment variables with the launcher's ``LOCAL_WORLD_SIZE``, the number of ranks of a node.
    """
    if device.type != "cuda" or len(numbers) == 1:
        return False
    given, here = environ.get("LOCAL_WORLD_SIZE", ""), torch.cuda.device_count()
    # A job is often checked on a machine with one GPU or none, which says nothing about the nodes that will run it.
    per_node = int(given) if given.isdigit() and int(given) else here if here > 1 else None
    return per_node is None or len({number // per_node for number in numbers}) == 1


def gather_multiply(rows: Tensor, weights: Sequence[Tensor], ranks: Ranks) -> tuple[Tensor, list[Tensor]]:
    """Fused version of :func:`d9d_parallel.tensor_parallel.micro_pipeline.gather_multiply`. Collective.

    Args:
        rows: [B, S / R, I].
        weights: [O, I] each, in the dtype of the rows.
        ranks: ranks in the order of the rows.
    """
    transposed = [weight.t() for weight in weights]
    whole, outs = torch.ops.symm_mem.fused_all_gather_matmul(rows.contiguous(), transposed, 1, ranks.name)
    # With several samples, the operator returns tensors with positions before samples in memory.
    return _one(whole), [_one(out) for out in outs]


def _one(tensor: Tensor) -> Tensor:
    """Contiguous tensor as a view, because Dynamo of torch 2.11 loses the gradient of a tensor that may be an alias."""
    whole = tensor.contiguous()
    return whole.view_as(whole)


def multiply_scatter(rows: Sequence[Tensor], weights: Sequence[Tensor], ranks: Ranks) -> Tensor:
    """Multiply and reduce-scatter the sum of the products [B, S / R, O]. Collective over the ranks.

    Args:
        rows: [B, S, I] each; I may differ.
        weights: [O, I] each, in the dtype of the rows.
        ranks: ranks in the order of the parts.
    """
    # One product of all features needs one exchange, and sums without rounding in between.
    joined = rows[0] if len(rows) == 1 else torch.cat(list(rows), dim=-1)
    weight = weights[0] if len(weights) == 1 else torch.cat(list(weights), dim=1)
    out: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(joined.contiguous(), weight.t(), "sum", 1, ranks.name)
    return _one(out)


def _memory(ranks: Ranks, device: torch.device) -> Tensor | None:
    """Tensor in memory that other ranks can read; ``None`` if this rank lacks such memory or the operators."""
    try:
        # torch documents this module under its private name only; importing it registers the operators.
        import torch.distributed._symmetric_memory as symmetric

        operators: Any = torch.ops.symm_mem
        module: Any = symmetric  # its type stubs do not fit torch 2.11
        _ = operators.fused_all_gather_matmul, operators.fused_matmul_reduce_scatter
        if not module.is_symm_mem_enabled_for_group(ranks.name):
            module.enable_symm_mem_for_group(ranks.name)  # needed by torch 2.11 only
        tensor: Tensor = module.empty(ranks.size, dtype=torch.int32, device=device)
    except (ImportError, AttributeError, RuntimeError):  # for example with an older driver
        return None
    return tensor


def _met(memory: Tensor, ranks: Ranks) -> bool:
    """Whether this rank can access the memory of all other ranks. Collective over the ranks."""
    from torch.distributed import _symmetric_memory as symmetric

    module: Any = symmetric
    try:
        module.rendezvous(memory, ranks.name)
    except RuntimeError:  # GPUs without peer access
        return False
    return True


def _node() -> int:
    """Number that identifies this machine, from host name and boot id, because host names of containers may repeat."""
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
