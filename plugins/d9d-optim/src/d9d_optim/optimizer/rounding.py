"""Stochastic rounding from float32 to bfloat16: up or down at random, so that the expected value is exact."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from d9d_core.tensors import is_dtensor
from torch import Tensor

_EXPONENT = 0x7F800000
_KEPT_BITS = -0x10000  # sign, exponent and the seven bits of bfloat16's fraction


@torch.no_grad()
def copy_fp32_to_bf16_stochastic_(target: Tensor, source: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Round float32 numbers stochastically to bfloat16: each to one of its two neighbours, more often to the nearer.

    The expected value is the number itself. NaN, infinities and numbers that bfloat16 can represent are kept; finite
    numbers above the largest bfloat16 number become the largest. The host does not wait for the device.

    Args:
        target: bfloat16, changed in place; for a DTensor, pass its local shard.
        source: float32, with the same shape and device.
        generator: generator on that device; by default torch's. Ranks with copies of the same numbers need generators
            in the same state.

    Returns:
        The target.

    Raises:
        TypeError: the target is not bfloat16, or the source is not float32.
        ValueError: the shapes differ.
    """
    if target.dtype != torch.bfloat16 or source.dtype != torch.float32:
        raise TypeError(f"the function rounds float32 to bfloat16, but got {source.dtype} to {target.dtype}")
    if target.shape != source.shape:
        raise ValueError(f"the target has shape {tuple(target.shape)}, but the source {tuple(source.shape)}")
    noise = torch.randint(0, 1 << 16, source.shape, dtype=torch.int32, device=source.device, generator=generator)
    return target.copy_(rounded(source, noise))


def rounded(source: Tensor, noise: Tensor) -> Tensor:
    """Round to bfloat16 by adding noise to the bits that will be cut off.

    Args:
        source: float32.
        noise: int32 of the same shape, uniform in [0, 2**16).
    """
    bits = source.contiguous().view(torch.int32)
    up = (bits + noise).bitwise_and_(_KEPT_BITS)
    # A carry into an exponent of all ones would make a finite number infinite.
    overflows = up.bitwise_and(_EXPONENT) == _EXPONENT
    chosen = torch.where(overflows, bits.bitwise_and(_KEPT_BITS), up).view(torch.float32)
    # All fraction bits of a NaN may be cut off; torch's conversion keeps it NaN.
    return torch.where(source.isfinite(), chosen, source).to(torch.bfloat16)


def first_key(seed: int, name: str) -> int:
    """Initial state of a parameter's random generator, a signed 64-bit number."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little", signed=True)


def next_key(key: Tensor) -> Tensor:
    """State of the generator after a step: a linear congruential generator of period 2**64 (Knuth's MMIX).

    Args:
        key: 0-d int64.
    """
    return key * 6364136223846793005 + 1442695040888963407


def positions(parameter: Tensor) -> list[Tensor]:
    """Index of each local element in the full tensor, as one int32 tensor per dimension; their sum is the index.

    The noise of an element depends on its index, so it is the same in every layout and for copies on several ranks.
    Indices wrap around beyond 2**32. No collectives.

    Returns:
        For each dimension d, a tensor with as many dimensions as the parameter, of size 1 except in d.
    """
    device = parameter.device
    shape: Sequence[int] = parameter.shape or (1,)
    stride, found = 1, []
    for dim in reversed(range(len(shape))):
        form = [-1 if other == dim else 1 for other in range(len(shape))]
        whole = (torch.arange(shape[dim], dtype=torch.int64, device=device) * stride).to(torch.int32).view(form)
        found.append(_own_part(whole, parameter, dim))
        stride *= shape[dim]
    return found[::-1]


def are_consecutive(parameter: Tensor) -> bool:
    """Whether this rank's elements are consecutive in the full tensor."""
    if not is_dtensor(parameter):
        return True
    from torch.distributed.tensor import Replicate, Shard

    # Exactly these classes, because subclasses of Shard order rows differently.
    return all(
        type(placement) is Replicate or (type(placement) is Shard and placement.dim == 0)
        for placement in parameter.placements
    )


def _own_part(whole: Tensor, parameter: Tensor, dim: int) -> Tensor:
    """This rank's shard of a tensor that has a size above 1 only in one dimension, sharded like the parameter."""
    if not is_dtensor(parameter):
        return whole
    from torch.distributed.tensor import Replicate, distribute_tensor

    placements = [
        placement if getattr(placement, "dim", None) == dim else Replicate() for placement in parameter.placements
    ]
    return distribute_tensor(whole, parameter.device_mesh, placements, src_data_rank=None).to_local()


def hashed(position: Tensor, key: Tensor) -> Tensor:
    """Hash an index and a key to 32 random bits: a bijective mixer of the index XOR the mixed key.

    Mixer: Ellis' ``lowbias32`` (https://nullprogram.com/blog/2018/07/31). Integer arithmetic gives the same bits on
    every device.

    Args:
        position: int32.
        key: 0-d int64.

    Returns:
        int32 of the same shape.
    """
    folded = _mix(_mix(key.to(torch.int32)).add_((key >> 32).to(torch.int32)))
    return _mix(position ^ folded)


def _mix(x: Tensor) -> Tensor:
    # Right shifts of int32 copy the sign, which the masks remove; products wrap around.
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(-0x7B935975)  # 0x846CA68B as int32
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def low_bits(random: Tensor) -> Tensor:
    """Lower 16 of 32 random bits."""
    return random.bitwise_and(0xFFFF)


def high_bits(random: Tensor) -> Tensor:
    """Upper 16 of 32 random bits."""
    return (random >> 16).bitwise_and_(0xFFFF)
