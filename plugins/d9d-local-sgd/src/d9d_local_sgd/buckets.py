"""All-reduce of many tensors over replicas in a few flat buckets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch import distributed as dist

#: Largest size of a bucket in bytes, unless a single tensor is larger.
LIMIT = 64 * 2**20


def wide(tensor: Tensor) -> torch.dtype:
    """Dtype in which a tensor is summed over replicas: float32, or the tensor's own dtype if that is wider."""
    return torch.promote_types(tensor.dtype, torch.float32)


def buckets(tensors: Mapping[str, Tensor], limit: int = LIMIT) -> Iterator[list[str]]:
    """Distribute names of local tensors, in order, to buckets of one device and one dtype of sums.

    A bucket has at most ``limit`` bytes, unless it is a single tensor.
    """
    held: list[str] = []
    size, kind = 0, None
    for name, tensor in tensors.items():
        own, key = tensor.numel() * wide(tensor).itemsize, (tensor.device, wide(tensor))
        if held and (key != kind or size + own > limit):
            yield held
            held, size = [], 0
        held.append(name)
        size, kind = size + own, key
    if held:
        yield held


def bucket_bytes(tensors: Mapping[str, Tensor], names: Sequence[str]) -> int:
    """Bytes that the all-reduce of a bucket sums on each rank."""
    return sum(tensors[name].numel() * wide(tensors[name]).itemsize for name in names)


def means(
    tensors: Mapping[str, Tensor], of: Callable[[str], Tensor], group: dist.ProcessGroup | None, replicas: int
) -> Iterator[tuple[str, Tensor]]:
    """Average tensors over the replicas, bucket by bucket. Collective over ``group``.

    Args:
        tensors: name -> local tensor; dtypes and sizes determine the buckets.
        of: returns the tensor to average for a name, of the local tensor's shape, in the dtype :func:`wide`.
        group: process group of the replicas.
        replicas: number of replicas.

    Yields:
        Name and mean, in the dtype :func:`wide`; the mean is valid until the next bucket.
    """
    for names in buckets(tensors):
        flat = torch.cat([of(name).reshape(-1) for name in names])
        if not flat.numel():  # the shards of this rank are empty, on all replicas alike
            continue
        dist.all_reduce(flat, group=group)
        flat /= replicas
        for name, mean in zip(names, torch.split(flat, [tensors[name].numel() for name in names]), strict=True):
            yield name, mean.view(tensors[name].shape)
