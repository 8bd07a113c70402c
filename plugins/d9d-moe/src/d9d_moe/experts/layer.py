"""Mixture-of-experts layer, which replaces a feed-forward layer.

Shapes: B samples, S positions, H features, T = B * S tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

from d9d_core.errors import BuildError
from d9d_core.kernel import OpSlot
from d9d_core.traits import Dispatcher, HasOps, Routing, TensorStyle
from d9d_nn.linear import Linear
from torch import Tensor, nn

from d9d_moe.experts.grouped_swiglu import GroupedSwiGLU
from d9d_moe.router.top_k import TopKRouter


class MoELayer(nn.Module):
    """MoE layer: weighted sum of the outputs of each token's experts, plus an optional shared expert for all tokens.

    Qwen3-MoE has no shared expert, DeepSeek-V3 has a shared expert ("DeepSeek-V3", equation 12), and Qwen2-MoE
    multiplies the output of its shared expert by a sigmoid gate.

    Args:
        router: router that chooses experts for each token.
        experts: experts of the layer.
        dispatcher: dispatcher that sends tokens to experts and combines their outputs.
        shared_expert: module [B, S, H] -> [B, S, H], for example :class:`d9d_nn.swiglu.SwiGLU`.
        shared_gate: linear layer with H inputs and 1 output; its sigmoid scales the shared expert's output per token.

    Raises:
        BuildError: router and experts have different numbers of experts, or there is a gate but no shared expert.
    """

    def __init__(
        self,
        router: TopKRouter,
        experts: GroupedSwiGLU,
        dispatcher: Dispatcher,
        *,
        shared_expert: nn.Module | None = None,
        shared_gate: Linear | None = None,
    ) -> None:
        super().__init__()
        if router.experts != len(experts.gate_proj):
            raise BuildError(
                f"MoELayer: the router chooses among {router.experts} experts, but there are {len(experts.gate_proj)}; "
                "build both with the same number"
            )
        if shared_gate is not None and shared_expert is None:
            raise BuildError("MoELayer: shared_gate without shared_expert has no effect; pass both or neither")
        self.router = router
        self.experts = experts
        self.dispatcher = dispatcher
        self.shared_expert = shared_expert
        self.shared_gate = shared_gate

    def expert_banks(self) -> Mapping[str, nn.Module]:
        """Module with the weights of the experts; a strategy that shards it over ranks replaces ``dispatcher`` too."""
        return {"experts": self.experts}

    def tensor_parallel_plan(self) -> Mapping[str, TensorStyle]:
        """Tensor-parallel styles of router and experts: replicated; each rank computes its own positions.

        A shared expert has its own plan.
        """
        gate = {} if self.shared_gate is None else {"shared_gate": TensorStyle.SEQUENCE}
        return {"router": TensorStyle.SEQUENCE, "experts": TensorStyle.SEQUENCE, **gate}

    def op_slots(self) -> Mapping[str, OpSlot]:
        """Op slots of the dispatcher, if it has any; the experts declare their own op slots."""
        slots = self.dispatcher.op_slots() if isinstance(self.dispatcher, HasOps) else {}
        return {f"dispatcher.{name}": slot for name, slot in slots.items()}

    def forward(self, hidden: Tensor, padding: Tensor | None = None) -> Tensor:
        """Map [B, S, H] to [B, S, H]. Collective over the ranks that share the experts, if the dispatcher is.

        Args:
            hidden: [B, S, H].
            padding: bool [B, S], padded positions, which no expert computes and no tally counts; ``None`` if there is
                no padding. Covers all positions, even if ranks of ``tp`` split ``hidden``.
        """
        tokens = hidden.flatten(0, 1)
        routing = self.router(tokens, samples=len(hidden), padding=None if padding is None else padding.flatten())
        outside = getattr(self.dispatcher, "outside_graph", None)
        mixed: Tensor = (
            self._mixed(hidden, tokens, routing) if outside is None else outside(self._mixed, hidden, tokens, routing)
        )
        return mixed

    def _mixed(self, hidden: Tensor, tokens: Tensor, routing: Routing) -> Tensor:
        sending = self.dispatcher.dispatch(tokens, routing)
        shared = self._shared(hidden)  # computed here to overlap the exchange, also in the backward
        sent = sending.wait()
        outputs = self.experts(sent.tokens, sent.counts, spare_rows=sent.spare_rows)
        mixed = self.dispatcher.combine(outputs, sent.handle).wait().view_as(hidden)
        return mixed if shared is None else mixed + shared

    def _shared(self, hidden: Tensor) -> Tensor | None:
        if self.shared_expert is None:
            return None
        shared: Tensor = self.shared_expert(hidden)
        return shared if self.shared_gate is None else shared * self.shared_gate(hidden).sigmoid()
