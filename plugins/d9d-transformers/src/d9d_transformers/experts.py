"""Experts of transformers' models, computed by d9d's grouped products and dispatchers.

transformers keeps the experts of a layer in two tensors: gate and up projections [E, 2 I, H], and down projections
[E, H, I]. d9d keeps three parameters of stacked matrices [E, in, out], so that expert parallelism, LoRA and kernels
work as in d9d's own models.

Shapes: T tokens, k experts of a token, E experts, H features, I features inside.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from d9d_core.kernel import OpSlot
from d9d_core.traits import Dispatcher, HasOps
from d9d_moe.dispatch.local import LocalDispatcher
from d9d_moe.experts.grouped_swiglu import GroupedSwiGLU
from d9d_moe.router.routing import TopKRouting
from torch import Tensor, nn

from d9d_transformers.balance import Balance

#: Names of transformers' parameters.
GATE_UP, DOWN = "gate_up_proj", "down_proj"
#: Name of the child module that holds d9d's stacked expert weights in a replaced module.
BANK = "bank"


class RoutedExperts(nn.Module):
    """Experts of a layer, called with the arguments of transformers' module; a router of transformers chooses experts.

    Args:
        hidden_size: H.
        intermediate_size: I.
        experts: E.
        std: initial standard deviation of all projections.

    Attributes:
        dispatcher: dispatcher that sends tokens to experts; expert parallelism replaces it.
        chosen: k; set by a call on the meta device.
        balance: balance of the experts; ``None`` without balancing.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, experts: int, *, std: float) -> None:
        super().__init__()
        self.bank = GroupedSwiGLU(hidden_size, intermediate_size, experts, std=std, output_std=std)
        self.dispatcher: Dispatcher = LocalDispatcher()
        self.num_experts = experts
        self.chosen = 1
        self.balance: Balance | None = None

    def expert_banks(self) -> Mapping[str, nn.Module]:
        """Module with the weights of all experts, by name."""
        return {BANK: self.bank}

    def unused_numbers(self) -> int:
        """Number of parameter elements of the experts that a token does not use."""
        return sum(bank[0].numel() for bank in self.bank.parameters()) * (self.num_experts - self.chosen)

    def op_slots(self) -> Mapping[str, OpSlot]:
        """Op slots of the dispatcher, if it has any; the bank declares its own op slots."""
        slots = self.dispatcher.op_slots() if isinstance(self.dispatcher, HasOps) else {}
        return {f"dispatcher.{name}": slot for name, slot in slots.items()}

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Map tokens [T, H] to [T, H]. Collective over the ranks that share the experts, if the dispatcher is.

        Args:
            hidden_states: [T, H].
            top_k_index: int64 [T, k], experts of each token.
            top_k_weights: [T, k], factors of the experts' outputs.
        """
        if hidden_states.is_meta and not torch.is_grad_enabled():  # while a model is examined: counts have no values
            self.chosen = top_k_index.shape[1]
            return torch.empty_like(hidden_states)
        if self.balance is not None:
            top_k_weights = self.balance(hidden_states, top_k_index, top_k_weights)
        wide = torch.promote_types(top_k_weights.dtype, torch.float32)
        routing = TopKRouting.of(top_k_index, top_k_weights.to(wide), self.num_experts)
        outside = getattr(self.dispatcher, "outside_graph", None)
        mixed: Tensor = (
            self._mixed(hidden_states, routing) if outside is None else outside(self._mixed, hidden_states, routing)
        )
        return mixed

    def _mixed(self, tokens: Tensor, routing: TopKRouting) -> Tensor:
        sent = self.dispatcher.dispatch(tokens, routing).wait()
        outputs = self.bank(sent.tokens, sent.counts, spare_rows=sent.spare_rows)
        return self.dispatcher.combine(outputs, sent.handle).wait()


def replace_experts(base: nn.Module, std: float) -> list[str]:
    """Replace expert modules that compute SwiGLU, in place. Returns the names of the replaced modules.

    Args:
        base: model without its head, on the meta device.
        std: initial standard deviation.
    """
    verdicts: dict[type, bool] = {}
    replaced = []
    for path, module in list(base.named_modules()):
        kind = type(module)
        shapes = {name: parameter.shape for name, parameter in module.named_parameters(recurse=False)}
        if shapes.keys() != {GATE_UP, DOWN} or len(shapes[DOWN]) != 3:
            continue
        experts, hidden, inside = shapes[DOWN]
        if shapes[GATE_UP] != (experts, 2 * inside, hidden):
            continue
        if kind not in verdicts:
            verdicts[kind] = computes_swiglu(module)
        if verdicts[kind]:
            base.set_submodule(path, RoutedExperts(hidden, inside, experts, std=std))
            replaced.append(path)
    return replaced


def computes_swiglu(module: nn.Module) -> bool:
    """Whether an expert module of transformers computes SwiGLU; runs it with small random weights on the CPU."""
    tokens, hidden, inside, experts, chosen = 6, 5, 4, 3, 2
    with torch.device("cpu"), torch.no_grad():
        draws = torch.Generator().manual_seed(0)
        wide: dict[str, Any] = {"generator": draws, "dtype": torch.float32}  # whatever the default dtype is
        ours = RoutedExperts(hidden, inside, experts, std=1.0).float()
        gate_up = torch.randn(experts, 2 * inside, hidden, **wide)
        down = torch.randn(experts, hidden, inside, **wide)
        for bank, drawn in zip(ours.bank.banks().values(), (*gate_up.chunk(2, dim=1), down), strict=True):
            bank.copy_(drawn.mT)
        index = torch.stack([torch.randperm(experts, generator=draws)[:chosen] for _ in range(tokens)])
        given = torch.randn(tokens, hidden, **wide), index, torch.rand(tokens, chosen, **wide)
        small: Any = copy.copy(module)
        # nn.Module keeps its parameters here; assigning one would replace the model's own.
        small._parameters = {GATE_UP: nn.Parameter(gate_up), DOWN: nn.Parameter(down)}  # noqa: SLF001
        small.num_experts, small.config = experts, SimpleNamespace(_experts_implementation="eager")
        try:
            return torch.allclose(small(*given), ours(*given), rtol=1e-4, atol=1e-5)
        except Exception:  # a module that needs other attributes is not replaced
            return False
