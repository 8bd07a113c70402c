"""AdamW (Loshchilov and Hutter, Decoupled Weight Decay Regularization, algorithm 2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from d9d_core.errors import BuildError
from d9d_core.kernel import OpSlot
from torch import Tensor, nn

from d9d_optim.optimizer.adam import FusedAdam
from d9d_optim.optimizer.base import Batch
from d9d_optim.optimizer.config import AdamWConfig
from d9d_optim.optimizer.groups import ParameterGroup

#: Name of the state tensor with the bits of a master weight that a bfloat16 parameter lacks.
_LOWER_BITS = "lower_bits"
_HALF = 0x8000
#: Bits of infinity without the sign; larger values are NaN.
_INFINITY = 0x7F800000


class AdamW(FusedAdam):
    """AdamW, bit-identical to ``torch.optim.AdamW(fused=True)``, with gated steps and state by name.

    State per parameter: ``exp_avg`` and ``exp_avg_sq`` in the parameter's shape, with ``amsgrad`` also
    ``max_exp_avg_sq``, and ``step`` (0-d float32, number of steps taken).

    With ``master_weights``, a bfloat16 parameter is its float32 master weight rounded to nearest, and the state
    ``lower_bits`` (int16, in the parameter's shape) is the signed difference of the two in units of float32's last
    place. A parameter that is loaded with zero lower bits is therefore its own master weight, and other changes of a
    parameter need not be copied to a master weight.

    The step is the op ``adamw``: a backend is called with a :class:`~d9d_optim.optimizer.base.Batch` and the keywords
    ``betas`` and ``eps``. Static facts of the op slot, which backends read: ``amsgrad``, ``maximize`` and
    ``master_weights``; with ``master_weights``, a batch of bfloat16 parameters has the state ``lower_bits``, and the
    step must update the master weights.

    Raises:
        BuildError: ``master_weights`` is set, but a parameter has another narrow format than bfloat16, or no parameter
            is bfloat16.
    """

    def __init__(self, config: AdamWConfig, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__(config, parameters, decoupled=True)
        self._step = OpSlot(
            "adamw",
            self._by_torch,
            amsgrad=config.amsgrad,
            maximize=config.maximize,
            master_weights=config.master_weights,
        )
        self._masters = config.master_weights
        if self._masters:
            self._check_dtypes()
            self._groups = tuple(part for group in self._groups for part in self._by_dtype(group))

    def op_slots(self) -> Mapping[str, OpSlot]:
        """Slot of the op ``adamw``, which makes the step."""
        return {"step": self._step}

    def slots_of(self, name: str) -> Mapping[str, Callable[[Tensor, torch.dtype], Tensor]]:
        """Slots of a parameter's state, with ``lower_bits`` for a bfloat16 parameter with a master weight."""
        lacks_bits = self._masters and self._parameters[name].dtype == torch.bfloat16
        return {**self.slots, _LOWER_BITS: _no_bits} if lacks_bits else self.slots

    def apply(self, batch: Batch) -> None:
        """Update the whole batch, of any dtypes, with one call of the op ``adamw``."""
        self._step(batch, betas=self._config.betas, eps=self._config.eps)

    def _by_torch(self, batch: Batch, *, betas: tuple[float, float], eps: float) -> None:  # noqa: ARG002 - update() reads the config
        super().apply(batch)

    def _update_wide(self, narrow: Batch) -> None:
        if _LOWER_BITS not in narrow.slots:
            super()._update_wide(narrow)
            return
        (parameter,), (lower,) = narrow.params, narrow.slots[_LOWER_BITS]
        weight = master_weight(parameter, lower)
        self.update(replace(narrow, params=[weight], grads=[narrow.grads[0].float()]))
        split_weight(weight, parameter, lower)

    def _by_dtype(self, group: ParameterGroup) -> Iterator[ParameterGroup]:
        """Divide a group by the dtype of its parameters, because parameters of equal dtype have equal state tensors."""
        for dtype in sorted({self._parameters[name].dtype for name in group.names}, key=str):
            names = tuple(name for name in group.names if self._parameters[name].dtype == dtype)
            whole = len(names) == len(group.names)
            yield group if whole else replace(group, label=f"{group.label}, {_name(dtype)}", names=names)

    def _check_dtypes(self) -> None:
        dtypes = {name: parameter.dtype for name, parameter in self._parameters.items()}
        for name, dtype in dtypes.items():
            if dtype not in (torch.bfloat16, torch.float32):
                raise BuildError(
                    f"optimizer.master_weights: {name} is {_name(dtype)}; only bfloat16 parameters can have master "
                    "weights (float32 parameters need none)"
                )
        if torch.bfloat16 not in dtypes.values():
            raise BuildError(
                "optimizer.master_weights: every trainable parameter is float32, which needs no master weight; set "
                "precision.parameters to bfloat16, or leave master_weights out"
            )


def master_weight(parameter: Tensor, lower: Tensor) -> Tensor:
    """Master weights float32 from parameters bfloat16 and lower bits int16, all of one shape."""
    upper = parameter.view(torch.int16).to(torch.int32) << 16
    return (upper + lower).view(torch.float32)


def split_weight(weight: Tensor, parameter: Tensor, lower: Tensor) -> None:
    """Write master weights float32 into parameters bfloat16 and lower bits int16; inverse of :func:`master_weight`.

    Every bit is preserved, except that NaN may change to another NaN.
    """
    bits = weight.view(torch.int32)
    upper = (bits + _HALF) >> 16  # halves round up: -32768 fits into int16, 32768 does not
    distance = bits - (upper << 16)
    nan = (bits & 0x7FFFFFFF) > _INFINITY
    upper = torch.where(nan, (bits >> 16) | 0x40, upper)  # stays NaN, whatever bits are cut off
    parameter.copy_(upper.to(torch.int16).view(torch.bfloat16))
    lower.copy_(distance.masked_fill_(nan, 0))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _no_bits(parameter: Tensor, _dtype: torch.dtype) -> Tensor:
    """Initial lower bits: zeros, so parameters are their own master weights."""
    return torch.zeros_like(parameter, dtype=torch.int16, memory_format=torch.preserve_format, requires_grad=False)
