"""Mapper from weights quantised to MXFP4 to floating-point weights.

Open Compute Project 2023, "OCP Microscaling Formats (MX) Specification", sections 5.3.3 and 5.4: 32 numbers of 4 bits
(sign, two bits of exponent, one bit of mantissa) share a scale of 8 bits, a power of two.

Shapes: ``...`` one or more leading dims, C columns of the weight, G = C / 32 groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from d9d_core.types import TensorSpec
from torch import Tensor

from d9d_weights.graph.base import Effect, Mapper, Scope
from d9d_weights.graph.expressions import TensorSource, Value
from d9d_weights.graph.mappers import Identity

__all__ = ["DequantiseMXFP4"]

#: Number of weights that share a scale.
GROUP = 32
#: Bytes of a group; each holds two numbers, the first one in its lower bits.
BYTES = GROUP // 2
#: Value of each code of 4 bits.
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
#: A stored exponent is the exponent plus this.
BIAS = 127
#: Largest number of weights that are dequantised at a time, in float32.
_PART = 2**24


def dequantise(blocks: Tensor, scales: Tensor) -> Tensor:
    """Convert weights from MXFP4 to float32; every result is exact in bfloat16, too.

    Args:
        blocks: uint8 [..., G, 16], two numbers in each byte.
        scales: uint8 [..., G]: a group's weights are multiplied by ``2 ** (scale - 127)``.

    Returns:
        float32 [..., 32 * G].
    """
    pairs = torch.tensor([(VALUES[byte & 15], VALUES[byte >> 4]) for byte in range(256)])
    numbers = pairs.index_select(0, blocks.flatten().int()).view(*scales.shape, GROUP)
    factors = torch.ldexp(torch.ones(scales.shape), scales.int() - BIAS)
    return numbers.mul_(factors.unsqueeze(-1)).flatten(-2)


@dataclass(frozen=True, slots=True)
class Dequantised(Value):
    """Weight [..., C] in bfloat16, from blocks [..., G, 16] and scales [..., G]; a window reads only its own groups."""

    blocks: Value
    scales: Value
    spec: TensorSpec = field(init=False)

    def __post_init__(self) -> None:
        *leading, groups = self.scales.spec.shape
        object.__setattr__(self, "spec", TensorSpec((*leading, groups * GROUP), torch.bfloat16))

    @property
    def parts(self) -> tuple[Value, ...]:
        return self.blocks, self.scales

    @property
    def keeps_rows(self) -> bool:
        return False

    def tensor(self, find: Callable[[str], Tensor]) -> Tensor:
        return dequantise(self.blocks.tensor(find), self.scales.tensor(find)).bfloat16()

    def read(self, source: TensorSource, offset: Sequence[int], into: Tensor) -> None:
        first, columns = offset[-1], into.shape[-1]
        start, stop = first // GROUP, -(-(first + columns) // GROUP)
        rows = max(1, _PART // max(1, into[:1].numel()))
        for row, part in enumerate(torch.split(into, rows)):
            leading = [offset[0] + row * rows, *offset[1:-1]]
            scales = torch.empty((*part.shape[:-1], stop - start), dtype=torch.uint8)
            blocks = torch.empty((*scales.shape, BYTES), dtype=torch.uint8)
            self.scales.read(source, [*leading, start], scales)
            self.blocks.read(source, [*leading, start, 0], blocks)
            part.copy_(dequantise(blocks, scales).narrow(-1, first - start * GROUP, columns))

    def text(self) -> str:
        return f"dequantise({self.blocks.text()}, {self.scales.text()})"


@dataclass(frozen=True)
class DequantiseMXFP4(Mapper):
    """Mapper from ``<name>_blocks`` and ``<name>_scales`` to a bfloat16 weight ``<name>`` [..., C].

    Blocks are uint8 [..., G, 16], scales uint8 [..., G]; see :func:`dequantise`.
    d9d writes no quantised weights: the inverse keeps the weight as it is.

    Attributes:
        name: name of the weight.
    """

    name: str

    def apply(self, scope: Scope) -> Effect:
        label, names = f"DequantiseMXFP4('{self.name}')", [f"{self.name}_blocks", f"{self.name}_scales"]
        effect = Effect(dict.fromkeys(names, label))
        found = scope.find(names, label)
        if found is None:
            return effect
        blocks, scales = (value.spec for value in found)
        fits = blocks.shape == (*scales.shape, BYTES) and len(scales.shape) > 1
        if not fits or {blocks.dtype, scales.dtype} != {torch.uint8}:
            scope.complain(
                f"{label}: blocks are {blocks.dtype} {list(blocks.shape)} and scales {scales.dtype} "
                f"{list(scales.shape)}; MXFP4 has uint8 [..., groups, {BYTES}] and uint8 [..., groups]"
            )
        else:
            effect.made[self.name] = Dequantised(*found)
        return effect

    def inverse(self) -> Mapper:
        return Identity((self.name,))
