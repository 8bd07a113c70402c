"""Costs of the optimizers per parameter element, from their configs alone. Imports no torch.

An update is either a fused kernel that reads and writes each tensor once, or plain tensor operations, whose passes over
tensors are counted.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from d9d_core.config import PluginConfig
from d9d_core.cost import OptimizerCost

from d9d_optim.optimizer.config import AdamFields, AdamWConfig, EmaConfig, MuonConfig, OptimizerConfig, SGDConfig

_FLOAT32, _BFLOAT16 = 4, 2
#: For an update by plain tensor operations: number of tensors read and written, and largest number of temporary tensors
#: at a time, all in the width of the state.
_LION, _SCHEDULE_FREE, _DAMPENED = (23, 3), (43, 5), (24, 3)
#: For Muon, besides its matrix products: number of tensors read and written in the width of the state, and bytes per
#: element of the bfloat16 tensors read and written.
_AROUND, _AROUND_BFLOAT16 = 21, 14


def _state_width(config: OptimizerConfig, width: int) -> int:
    """Bytes per element of the optimizer state, in whose precision an update is also computed."""
    return _FLOAT32 if config.wide_state else width


def _fused(config: OptimizerConfig, width: int, moments: int) -> OptimizerCost:
    """Cost of an update that reads the gradient, and reads and writes the parameter and all moments."""
    state = moments * _state_width(config, width)
    return OptimizerCost(state, traffic=3 * width + 2 * state)


def _by_torch(config: OptimizerConfig, width: int, cost: OptimizerCost) -> OptimizerCost:
    """Cost of an update by torch's fused kernels, with passes around them: division and copies of narrow tensors."""
    wide = _state_width(config, width)
    divided = 2 * width if width < _FLOAT32 else 0
    copied = 3 * (width + wide) if wide > width else 0
    besides = 2.0 * wide if wide > width else 0.0
    return OptimizerCost(cost.state, cost.traffic + divided + copied, workspace_of_one=besides)


def _plain(config: OptimizerConfig, width: int, moments: int, passes: tuple[int, int]) -> OptimizerCost:
    """Cost of an update of plain tensor operations, after a pass that divides the gradients."""
    wide = _state_width(config, width)
    copied = 3 * (width + wide) if wide > width else 0
    traffic = passes[0] * wide + 2 * width + copied
    return OptimizerCost(moments * wide, traffic, workspace_of_one=float(passes[1] * wide))


def adamw(config: AdamWConfig, width: int) -> OptimizerCost:
    """Cost of an update by ``adamw``, with two moments, three for ``amsgrad``, and lower bits of master weights."""
    cost = _adam(config, width)
    lower = _FLOAT32 - width if config.master_weights else 0
    return OptimizerCost(cost.state + lower, cost.traffic + 2 * lower)


def adam(config: AdamFields, width: int) -> OptimizerCost:
    """Cost of an update by ``adam``, which has the moments of ``adamw`` and uses torch's fused kernel."""
    return _by_torch(config, width, _adam(config, width))


def _adam(config: AdamFields, width: int) -> OptimizerCost:
    return _fused(config, width, 3 if config.amsgrad else 2)


def stochastic_adamw(config: OptimizerConfig, width: int) -> OptimizerCost:
    """Cost of an update by ``stochastic_adamw``, which has two moments."""
    return _fused(config, width, 2)


def schedule_free(config: OptimizerConfig, width: int) -> OptimizerCost:
    """Cost of an update by ``schedule_free``, whose state is the iterate and the second moment."""
    return _plain(config, width, 2, _SCHEDULE_FREE)


def lion(config: OptimizerConfig, width: int) -> OptimizerCost:
    """Cost of an update by ``lion``, which has one moment."""
    return _plain(config, width, 1, _LION)


def sgd(config: SGDConfig, width: int) -> OptimizerCost:
    """Cost of an update by ``sgd``, which has a velocity if there is momentum."""
    if config.dampening:
        return _plain(config, width, 1, _DAMPENED)
    return _by_torch(config, width, _fused(config, width, 1 if config.momentum else 0))


def ema(config: EmaConfig, width: int, inner: Callable[[PluginConfig, int], OptimizerCost]) -> OptimizerCost:
    """Cost of ``ema``: the cost of the averaged optimizer, and a float32 average that each step reads and writes."""
    return _averaged(inner(config.of, width), width)


def _averaged(cost: OptimizerCost, width: int) -> OptimizerCost:
    of_weight = cost.of_weight
    return replace(
        cost,
        state=cost.state + _FLOAT32,
        # Parameters narrower than float32 are first copied to float32, one parameter at a time.
        traffic=cost.traffic + width + 2 * _FLOAT32 + (2 * _FLOAT32 if width < _FLOAT32 else 0),
        workspace_of_one=max(cost.workspace_of_one, _FLOAT32 if width < _FLOAT32 else 0),
        of_weight=None if of_weight is None else lambda name, shape: _averaged(of_weight(name, shape), width),
    )


def muon(config: MuonConfig, width: int) -> OptimizerCost:
    """Cost of ``muon``: for matrices an average and the Newton-Schulz products; otherwise the cost of ``adamw``."""
    rest = _by_torch(config, width, _fused(config, width, 2))
    return OptimizerCost(
        rest.state,
        rest.traffic,
        workspace_of_one=rest.workspace_of_one,
        of_weight=partial(_muon_of, config, width, rest),
    )


def _muon_of(config: MuonConfig, width: int, rest: OptimizerCost, name: str, shape: tuple[int, ...]) -> OptimizerCost:
    """Cost per element of updating the weight with this name and shape; ``rest`` if AdamW updates it."""
    is_excluded = name.endswith("bias") or any(fnmatch.fnmatchcase(name, one) for one in config.adamw.patterns)
    if len(shape) not in (2, 3) or is_excluded:
        return rest
    wide = _state_width(config, width)
    short, long = sorted(shape[-2:])
    # An iteration has three products: X X^T, the square of the result, and its product with X.
    flops = config.ns_steps * (4 * short + 2 * short**2 / long)
    # Reads and writes of the iterations: X twice, the result, and the small square matrices.
    iterations = config.ns_steps * _BFLOAT16 * (3 + 4 * short / long)
    traffic = 2 * width + _AROUND * wide + _AROUND_BFLOAT16 + iterations
    # All averages are rounded to bfloat16 before the first iteration, and all results are kept until the last
    # iteration.
    return OptimizerCost(wide, traffic, 2 * _BFLOAT16, 3.0 * wide, flops, _BFLOAT16)
