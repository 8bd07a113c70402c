"""Mixture-of-experts layer, in place of a feed-forward layer.

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
    """MoE layer of experts: weighted sum of each token's experts, plus a shared expert for all tokens if there is one.

    Qwen3-MoE has no shared expert, DeepSeek-V3 has one ("DeepSeek-V3", equation 12), Qwen2-MoE has one times a
    sigmoid gate.

    Args:
        router: picks experts for each token.
        experts: the experts.
        dispatcher: brings tokens to experts and back.
        shared_expert: maps [B, S, H] to [B, S, H], for example :class:`d9d_nn.swiglu.SwiGLU`.
        shared_gate: H features -> 1; its sigmoid is a token's factor for the shared expert.

    Raises:
        BuildError: router and experts disagree about their number, or there is a gate and nothing to gate.
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
            raise BuildError("MoELayer: shared_gate without shared_expert has nothing to gate; pass both or neither")
        self.router = router
        self.experts = experts
        self.dispatcher = dispatcher
        self.shared_expert = shared_expert
        self.shared_gate = shared_gate

    def expert_banks(self) -> Mapping[str, nn.Module]:
        """Experts of the layer; a strategy that shards them over ranks replaces ``dispatcher`` too."""
        return {"experts": self.experts}

    def tensor_parallel_plan(self) -> Mapping[str, TensorStyle]:
        """Styles of router and experts, which stay whole and see a rank's own tokens; a shared expert has a plan."""
        gate = {} if self.shared_gate is None else {"shared_gate": TensorStyle.SEQUENCE}
        return {"router": TensorStyle.SEQUENCE, "experts": TensorStyle.SEQUENCE, **gate}

    def op_slots(self) -> Mapping[str, OpSlot]:
        """Slots of the dispatcher, if it has any; those of the experts belong to the experts."""
        slots = self.dispatcher.op_slots() if isinstance(self.dispatcher, HasOps) else {}
        return {f"dispatcher.{name}": slot for name, slot in slots.items()}

    def forward(self, hidden: Tensor, padding: Tensor | None = None) -> Tensor:
        """Map [B, S, H] to [B, S, H]. Collective over the ranks that share the experts, if the dispatcher is.

        Args:
            hidden: [B, S, H].
            padding: bool [B, S], positions that no expert computes and that count nowhere; ``None`` if there are none.
                All positions, also where ranks of ``tp`` split ``hidden``.
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
        shared = self._shared(hidden)  # while tokens travel; autograd's order gives the same in the backward
        sent = sending.wait()
        outputs = self.experts(sent.tokens, sent.counts, spare_rows=sent.spare_rows)
        mixed = self.dispatcher.combine(outputs, sent.handle).wait().view_as(hidden)
        return mixed if shared is None else mixed + shared

    def _shared(self, hidden: Tensor) -> Tensor | None:
        if self.shared_expert is None:
            return None
        shared: Tensor = self.shared_expert(hidden)
        return shared if self.shared_gate is None else shared * self.shared_gate(hidden).sigmoid()
