"""Rotary frequencies under each scaling.

Shapes: B samples, S positions, D features of a head.
"""

from __future__ import annotations

import math

import torch
from d9d_core.tensors import wide_dtype
from torch import Tensor

from d9d_nn.rope.scaling import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    NtkScaling,
    RopeScaling,
    YarnScaling,
    stretched_theta,
    yarn_magnitude,
)


def rotary_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None, length: int | Tensor, device: torch.device
) -> tuple[Tensor, float]:
    """Frequencies of scaled RoPE: angle per position of each pair of features, and the factor of cosine and sine.

    The host never waits for the device, because only the indices of the pairs are on the device.

    Args:
        head_dim: D.
        theta: base of the frequencies.
        scaling: ``None`` for the frequencies of Su et al. 2021.
        length: length of the whole samples, as a number or int64 [B]; only ``dynamic`` reads it.
        device: device of the frequencies.

    Returns:
        float32 [D/2], or [B, 1, D/2] for ``dynamic`` with a length for each sample; and a factor for cosine and sine.
    """
    if isinstance(scaling, DynamicScaling):
        return 1.0 / _stretched(theta, scaling, length, head_dim) ** _exponents(head_dim, device), 1.0
    if isinstance(scaling, NtkScaling):
        theta = stretched_theta(theta, scaling.factor, head_dim)
    plain = 1.0 / theta ** _exponents(head_dim, device)
    if isinstance(scaling, LinearScaling):
        return plain / scaling.factor, 1.0
    if isinstance(scaling, YarnScaling):
        return _yarn(plain, scaling, head_dim, theta), _attention_factor(scaling)
    if isinstance(scaling, Llama3Scaling):
        return _llama3(plain, scaling), 1.0
    return plain, 1.0


def _exponents(head_dim: int, device: torch.device) -> Tensor:
    return torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim


def _stretched(theta: float, scaling: DynamicScaling, length: int | Tensor, head_dim: int) -> float | Tensor:
    """Theta of dynamic NTK scaling for samples of this length; float32 [B, 1, 1] for lengths [B]."""
    if isinstance(length, Tensor):
        beyond: float | Tensor = length.to(wide_dtype(length.device)).clamp(min=scaling.original_max_positions)
    else:
        beyond = max(length, scaling.original_max_positions)
    stretch = scaling.factor * beyond / scaling.original_max_positions - (scaling.factor - 1)
    stretched: float | Tensor = theta * stretch ** (head_dim / (head_dim - 2))
    return stretched.float().view(-1, 1, 1) if isinstance(stretched, Tensor) else stretched


def _yarn(plain: Tensor, scaling: YarnScaling, head_dim: int, theta: float) -> Tensor:
    def pair_that_turns(times: float) -> float:
        """Index (a real number) of the pair that makes ``times`` full rotations within the original maximum length."""
        return head_dim * math.log(scaling.original_max_positions / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    # transformers limits the index of a pair to D - 1, not D/2 - 1; published models were trained with this limit.
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    pairs = torch.arange(head_dim // 2, dtype=torch.float32, device=plain.device)
    interpolated = ((pairs - low) / width).clamp(0, 1)
    return plain / scaling.factor * interpolated + plain * (1 - interpolated)


def _attention_factor(scaling: YarnScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale is not None and scaling.mscale_all_dim is not None:
        return yarn_magnitude(scaling.factor, scaling.mscale) / yarn_magnitude(scaling.factor, scaling.mscale_all_dim)
    return yarn_magnitude(scaling.factor)


def _llama3(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    wavelengths = 2 * math.pi / plain
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    # Share of the unscaled frequency: 0 above the upper bound of wavelengths, 1 below the lower bound.
    kept = ((scaling.original_max_positions / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * plain / scaling.factor + kept * plain
