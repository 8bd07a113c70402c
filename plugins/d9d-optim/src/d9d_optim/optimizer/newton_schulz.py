"""Orthogonalisation of matrices by Newton-Schulz iterations (Jordan et al. 2024, Muon)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, assert_never

import torch
from torch import Tensor


def orthogonalize(matrices: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Orthogonalise matrices by Newton-Schulz iterations, which move their singular values towards 1, in bfloat16.

    Args:
        matrices: [rows, columns] or [batch, rows, columns].
        coefficients: a, b, c of ``a X + b (X X^T) X + c (X X^T)^2 X``.
        steps: number of iterations.
        eps: lower bound of the norm by which a matrix is divided, so that a zero matrix stays zero.

    Returns:
        bfloat16, of the same shape.
    """
    a, b, c = coefficients
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.to(torch.bfloat16, copy=True)
    x = x.mT if tall else x  # so that X X^T has the smaller of both sizes
    # The Frobenius norm bounds the spectral norm, which must be at most 1.
    x.div_(torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=eps))
    multiply_add = torch.addmm if x.ndim == 2 else torch.baddbmm
    for _ in range(steps):
        gram = x @ x.mT
        x = multiply_add(x, multiply_add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def rate_factor(kind: Literal["original", "match_rms_adamw", "spectral_unclamped"], shape: Sequence[int]) -> float:
    """Factor on the learning rate of a matrix, whose rows and columns are the last two dimensions of ``shape``."""
    rows, columns = shape[-2:]
    if kind == "original":
        return math.sqrt(max(1, rows / columns))
    if kind == "match_rms_adamw":  # Liu et al. 2025, Muon is Scalable for LLM Training, section 2.2
        return 0.2 * math.sqrt(max(rows, columns))
    if kind == "spectral_unclamped":  # Bernstein 2025, Deriving Muon
        return math.sqrt(rows / columns)
    assert_never(kind)
