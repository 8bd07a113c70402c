"""SwiGLU feed-forward layer.

Shapes: H features, I features inside, ``...`` any leading dims.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from d9d_core.kernel import OpSlot
from d9d_core.traits import TensorStyle
from torch import Tensor, nn

from d9d_nn.linear import Linear, is_plain, outputs_of
from d9d_nn.ops.silu_mul import silu_mul
from d9d_nn.ops.swiglu import swiglu_slot
from d9d_nn.ops.whole import in_one_op


class SwiGLU(nn.Module):
    """SwiGLU feed-forward layer ``down(silu(gate(x)) * up(x))`` (Shazeer 2020, equation 6).

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
        self.silu_mul = OpSlot("silu_mul", silu_mul, features=intermediate_size)
        self.swiglu = swiglu_slot(hidden_size, intermediate_size)

    def op_slots(self) -> Mapping[str, OpSlot]:
        """Slots of the op ``silu_mul`` and, unless a projection was changed, of the op ``swiglu`` (the whole layer)."""
        whole = {"swiglu": self.swiglu} if all(map(is_plain, self._projections())) else {}
        return {"silu_mul": self.silu_mul, **whole}

    def adjacent_weights(self) -> Sequence[Sequence[str]]:
        """Names of the gate and up weights, to be adjacent in memory, if a kernel may read them as one tensor."""
        return [("gate_proj.weight", "up_proj.weight")] if all(map(is_plain, self._projections())) else []

    def tensor_parallel_plan(self) -> Mapping[str, TensorStyle]:
        """Tensor-parallel styles of the projections, which split the inner features over ranks."""
        return {"gate_proj": TensorStyle.COLUMN, "up_proj": TensorStyle.COLUMN, "down_proj": TensorStyle.ROW}

    @in_one_op("swiglu")
    def forward(self, hidden: Tensor) -> Tensor:
        """Map hidden states [..., H] to the output [..., H] of the layer."""
        gate, up = outputs_of(hidden, self.gate_proj, self.up_proj)  # [..., I] each
        return self.down_proj(self.silu_mul(gate, up))  # type: ignore[no-any-return]  # [..., H]

    def _projections(self) -> tuple[Linear, Linear, Linear]:
        return self.gate_proj, self.up_proj, self.down_proj
