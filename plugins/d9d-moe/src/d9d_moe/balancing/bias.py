"""Balance without a loss: a bias that only the selection sees.

Shapes: E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor


@dataclass(frozen=True)
class SignUpdate:
    """``b_i += rate * sign(mean load - load_i)``: experts with less than the mean become likelier by a fixed step.

    Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", algorithm 1.
    """

    rate: float
    layout_invariant: ClassVar[bool] = True

    def moved(self, bias: Tensor, counts: Tensor) -> Tensor:
        """The new bias. Loads are compared as integers: an expert at exactly the mean stays where it is."""
        return bias + self.rate * (counts.sum() - counts * len(counts)).sign()
