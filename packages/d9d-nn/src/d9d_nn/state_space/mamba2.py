"""Mamba-2 as a module (Dao and Gu 2024, "Transformers are SSMs", arXiv:2405.21060, section 7).

Shapes: B samples, S positions, H features, N heads, G groups, D features of a head, D_s of the state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import torch
from d9d_core.kernel import OpSlot
from d9d_core.model import ContextShare
from d9d_core.strategy import ContextCall, StepShape
from d9d_core.traits import TensorStyle
from torch import Tensor, nn

from d9d_nn.delta.chain import ContextChain, head_ranks, joined, stacked
from d9d_nn.delta.gated_delta_net import GatedRMSNorm
from d9d_nn.delta.gates import MambaRates
from d9d_nn.delta.short_convolution import ShortConvolution
from d9d_nn.linear import Linear
from d9d_nn.ops.gated_delta_rule import counted
from d9d_nn.ops.state_space_rule import state_space_rule

__all__ = ["Mamba2", "StateSpace"]


class Mamba2(nn.Module):
    """Mamba-2: short convolutions, a decaying state per head, a gated norm of each group, and an output projection.

    Tensor parallelism splits the groups, each with its heads; the number of ranks must divide the number of groups,
    because the heads of a group share a norm. Under context parallelism, ranks exchange the last positions and the
    states of their chunks, see :mod:`d9d_nn.delta.chain`; the rule then runs in PyTorch.

    Args:
        hidden_size: H.
        heads: N, a multiple of G.
        head_dim: D.
        groups: G; the heads of a group share B and C, and a norm.
        state_dim: D_s.
        std: initial standard deviation of the input projections.
        output_std: initial standard deviation of the output projection.
        norm_eps: epsilon of the norm of the outputs.
        width: positions that a short convolution reads.
        bias: whether the projections have biases.
        conv_bias: whether the convolutions have biases.
        norm_before_gate: whether the norm comes before the gate, as in Falcon-H1, instead of after it, as in Mamba-2.
        time_step_limit: smallest and largest step size ``softplus(dt + dt_bias)``.

    Raises:
        ValueError: the number of heads is no multiple of the number of groups, or the limits of the steps are no range.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        heads: int,
        head_dim: int,
        groups: int,
        state_dim: int,
        std: float,
        output_std: float,
        norm_eps: float,
        width: int = 4,
        bias: bool = False,
        conv_bias: bool = True,
        norm_before_gate: bool = False,
        time_step_limit: tuple[float, float] = (0.0, math.inf),
    ) -> None:
        super().__init__()
        if heads % groups:
            raise ValueError(
                f"Mamba2: {heads} heads are no multiple of {groups} groups; give each group the same number of heads"
            )
        if not 0 <= time_step_limit[0] <= time_step_limit[1]:
            raise ValueError(
                f"Mamba2: time_step_limit is {time_step_limit}; give the smallest step, at least 0, and the largest one"
            )
        self.head_dim, self.state_dim = head_dim, state_dim
        self._heads, self._groups = heads, groups
        self._chain: ContextChain | None = None
        features, shared = heads * head_dim, groups * state_dim
        self.z_proj = Linear(hidden_size, features, std=std, bias=bias)
        self.x_proj = Linear(hidden_size, features, std=std, bias=bias)
        self.B_proj = Linear(hidden_size, shared, std=std, bias=bias)
        self.C_proj = Linear(hidden_size, shared, std=std, bias=bias)
        self.dt_proj = Linear(hidden_size, heads, std=std, bias=bias)
        self.x_conv = ShortConvolution(features, width, bias=conv_bias)
        self.B_conv = ShortConvolution(shared, width, bias=conv_bias)
        self.C_conv = ShortConvolution(shared, width, bias=conv_bias)
        self.ssm = StateSpace(heads, time_step_limit=time_step_limit)
        self.norm = GatedRMSNorm(
            features, eps=norm_eps, group_size=features // groups, norm_before_gate=norm_before_gate
        )
        self.out_proj = Linear(features, hidden_size, std=output_std, bias=bias)
        self.state_space_rule = OpSlot(
            "state_space_rule", state_space_rule, heads=heads, groups=groups, head_dim=head_dim, state_dim=state_dim
        )

    def op_slots(self) -> Mapping[str, OpSlot]:
        """Slot of the op ``state_space_rule``; none under context parallelism, which has its own rule."""
        return {"state_space_rule": self.state_space_rule} if self._chain is None else {}

    def divisibility(self) -> Mapping[str, Mapping[str, int]]:
        """Number of groups, which must be divisible by the number of ranks of ``tp``."""
        return {"tp": {"groups": self._groups}}

    def tensor_parallel_plan(self) -> Mapping[str, TensorStyle]:
        """Styles of the children, all of which are split over groups."""
        columns = dict.fromkeys(("z_proj", "x_proj", "B_proj", "C_proj", "dt_proj"), TensorStyle.COLUMN)
        split = dict.fromkeys(("x_conv", "B_conv", "C_conv", "ssm", "norm"), TensorStyle.HEADS)
        return {**columns, **split, "out_proj": TensorStyle.ROW}

    def tensor_parallel_heads(self) -> Mapping[str, int]:
        """Number of groups for each split child, by name: ranks have whole groups."""
        return dict.fromkeys(self.tensor_parallel_plan().keys() - {"out_proj"}, self._groups)

    def see_context(self, share: ContextShare) -> None:
        """Expect this rank's positions in inputs and outputs from now on; ``documents`` still cover all positions."""
        self._chain = ContextChain(share)

    def context_collectives(self, step: StepShape) -> Iterator[ContextCall]:
        """Collectives of a step, see :meth:`~d9d_nn.delta.chain.ContextChain.collectives`."""
        assert self._chain is not None  # see_context() comes first
        ranks, width = head_ranks(self.dt_proj.weight), self.x_conv.weight.shape[1]
        heads, groups = self._heads // ranks, self._groups // ranks
        features = heads * self.head_dim + 2 * groups * self.state_dim
        numbers = heads * (self.state_dim * self.head_dim + 1)
        return self._chain.collectives(step, width=width, features=features, numbers=numbers)

    def forward(self, hidden: Tensor, documents: Tensor | None = None) -> Tensor:
        """Mix tokens of the same document by the states of the heads.

        Collective over ``cp`` after :meth:`see_context`.

        Args:
            hidden: [B, S, H], or this rank's own positions [B, S / cp, H].
            documents: int64 [B, S], number of the document of each token; ``None`` if a sample is one document.

        Returns:
            The shape of ``hidden``.
        """
        documents = None if documents is None else counted(documents)
        inputs, steps = (self.x_proj(hidden), self.B_proj(hidden), self.C_proj(hidden)), self.dt_proj(hidden)
        layers, chain = (self.x_conv, self.B_conv, self.C_conv), self._chain
        if chain is None:
            parts = [layer(x, documents) for layer, x in zip(layers, inputs, strict=True)]
            mixed = self.ssm(*self._split(*parts), steps, documents, self.state_space_rule)  # [B, S, N, D]
        else:
            parts = chain.convolve(layers, inputs, documents)
            mixed = joined(self.ssm(*self._split(*parts), stacked(steps), documents, chain.state_space_rule))
        return self.out_proj(self.norm(mixed.flatten(2), self.z_proj(hidden)))  # type: ignore[no-any-return]

    def _split(self, x: Tensor, *shared: Tensor) -> Iterator[Tensor]:
        """Split features into the heads [B, S, N, D] of x, and the groups [B, S, G, D_s] of B and of C."""
        yield torch.unflatten(x, -1, (-1, self.head_dim))
        yield from (torch.unflatten(part, -1, (-1, self.state_dim)) for part in shared)


class StateSpace(MambaRates):
    """State-space model of each head, with steps that depend on the token, and a skip connection scaled by ``D``.

    Args:
        heads: N.
        time_step_limit: smallest and largest step.
    """

    def __init__(self, heads: int, *, time_step_limit: tuple[float, float]) -> None:
        super().__init__(heads, rates=(1.0, 16.0), times=(0.001, 0.1))
        self.D = nn.Parameter(torch.ones(heads))
        self._limits = time_step_limit

    def reset_parameters(self) -> None:
        """Draw the initial rates and steps; set ``D`` to one."""
        super().reset_parameters()
        nn.init.ones_(self.D)

    def forward(
        self, x: Tensor, B: Tensor, C: Tensor, dt: Tensor, documents: Tensor | None, rule: Callable[..., Tensor]
    ) -> Tensor:
        """Apply ``rule`` with the steps ``softplus(dt + dt_bias)`` of dt [B, S, N], and add ``D x``.

        Steps are clamped to ``time_step_limit``. The result has the shape and dtype of ``x``; see
        :func:`~d9d_nn.ops.state_space_rule.state_space_rule` for the other arguments.
        """
        rate = self.rate(dt)
        out = rule(x, self.step(dt).clamp(*self._limits), rate, B, C, documents)
        return (out + self.D.to(rate.dtype)[:, None] * x).to(x.dtype)
