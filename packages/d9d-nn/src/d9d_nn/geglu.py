"""GeGLU feed-forward layer.

Shapes: H features, I features inside, ``...`` any leading dims.
"""

from __future__ import annotations

from collections.abc import Mapping

from d9d_core.kernel import OpSlot
from d9d_core.traits import TensorStyle
from torch import Tensor, nn

from d9d_nn.linear import Linear, outputs_of
from d9d_nn.ops.gelu_mul import gelu_mul


class GeGLU(nn.Module):
    """GeGLU feed-forward layer ``down(gelu(gate(x)) * up(x))`` (Shazeer 2020, equation 6), gelu approximated by tanh.

    Args:
        hidden_size: H.
        intermediate_size: I.
        std: initial standard deviation of the gate and up projections.
        output_std: initial standard deviation of the down projection.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, *, std: float, output_std: float) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size, std=std)
        self.up_proj = Linear(hidden_size, intermediate_size, std=std)
        self.down_proj = Linear(intermediate_size, hidden_size, std=output_std)
        self.gelu_mul = OpSlot("gelu_mul", gelu_mul, features=intermediate_size)

    def op_slots(self) -> Mapping[str, OpSlot]:
        """Slot of the op ``gelu_mul``, which computes ``gelu(gate) * up``."""
        return {"gelu_mul": self.gelu_mul}

    def tensor_parallel_plan(self) -> Mapping[str, TensorStyle]:
        """Tensor-parallel styles of the projections, which split the inner features over ranks."""
        return {"gate_proj": TensorStyle.COLUMN, "up_proj": TensorStyle.COLUMN, "down_proj": TensorStyle.ROW}

    def forward(self, hidden: Tensor) -> Tensor:
        """Map hidden states [..., H] to the output [..., H] of the layer."""
        gate, up = outputs_of(hidden, self.gate_proj, self.up_proj)  # [..., I] each
        return self.down_proj(self.gelu_mul(gate, up))  # type: ignore[no-any-return]  # [..., H]
