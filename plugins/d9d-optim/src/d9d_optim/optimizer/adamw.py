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

#: Slot of the bits of master weights that bfloat16 parameters lack.
_LOWER_BITS = "lower_bits"
_HALF = 0x8000
#: Without the sign, the bits of infinity; greater ones are no numbers.
_INFINITY = 0x7F800000


class AdamW(FusedAdam):
    """AdamW with the same bits as ``torch.optim.AdamW(fused=True)``, gated steps and state by name.

    State per parameter: ``exp_avg`` and ``exp_avg_sq`` of its shape, with ``amsgrad`` ``max_exp_avg_sq``, and ``step``
    (0-d float32, taken steps).

    With ``master_weights``, a bfloat16 parameter has the upper 16 bits of a float32 master weight, and the state
    ``lower_bits`` (int16, of its shape) the lower ones: the signed distance from the parameter, which is the nearest
    bfloat16, in units of float32's last place. So a parameter that is loaded with zeros for lower bits is its own
    master weight, and no copy has to follow what else changes a parameter.

    Its step is the op ``adamw``: a backend is called with a :class:`~d9d_optim.optimizer.base.Batch` and the keywords
    ``betas`` and ``eps``. Facts of the slot: ``amsgrad``, ``maximize`` and ``master_weights``; with these, a batch of
    bfloat16 parameters has the slot ``lower_bits``, and the master weights are what the step updates.

    Raises:
        BuildError: master weights are asked for, of parameters of another narrow format, or of none.
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
        """The step."""
        return {"step": self._step}

    def slots_of(self, name: str) -> Mapping[str, Callable[[Tensor, torch.dtype], Tensor]]:
        """Slots of a parameter: with lower bits, if its master weights have some."""
        lacks_bits = self._masters and self._parameters[name].dtype == torch.bfloat16
        return {**self.slots, _LOWER_BITS: _no_bits} if lacks_bits else self.slots

    def apply(self, batch: Batch) -> None:
        """One call for the whole batch, of any dtypes."""
        self._step(batch, betas=self._config.betas, eps=self._config.eps)

    def _by_torch(self, batch: Batch, *, betas: tuple[float, float], eps: float) -> None:  # noqa: ARG002 - the config's
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
        """Parts of a group whose parameters have the same slots."""
        for dtype in sorted({self._parameters[name].dtype for name in group.names}, key=str):
            names = tuple(name for name in group.names if self._parameters[name].dtype == dtype)
            whole = len(names) == len(group.names)
            yield group if whole else replace(group, label=f"{group.label}, {_name(dtype)}", names=names)

    def _check_dtypes(self) -> None:
        dtypes = {name: parameter.dtype for name, parameter in self._parameters.items()}
        for name, dtype in dtypes.items():
            if dtype not in (torch.bfloat16, torch.float32):
                raise BuildError(
                    f"optimizer.master_weights: {name} is {_name(dtype)}; master weights are those of bfloat16 "
                    "parameters, and float32 ones are their own"
                )
        if torch.bfloat16 not in dtypes.values():
            raise BuildError(
                "optimizer.master_weights: every trainable parameter is float32 and its own master weight; set "
                "precision.parameters to bfloat16, or leave master_weights out"
            )


def master_weight(parameter: Tensor, lower: Tensor) -> Tensor:
    """Master weights float32 of parameters bfloat16 and lower bits int16, all of one shape."""
    upper = parameter.view(torch.int16).to(torch.int32) << 16
    return (upper + lower).view(torch.float32)


def split_weight(weight: Tensor, parameter: Tensor, lower: Tensor) -> None:
    """Write master weights float32 into parameters bfloat16 and lower bits int16, for :func:`master_weight`.

    Every bit is kept, but of what is not a number, which stays so.
    """
    bits = weight.view(torch.int32)
    upper = (bits + _HALF) >> 16  # a half goes away from zero: its distance of -32768 fits into 16 bits, 32768 does not
    distance = bits - (upper << 16)
    nan = (bits & 0x7FFFFFFF) > _INFINITY
    upper = torch.where(nan, (bits >> 16) | 0x40, upper)  # not infinity, whatever bits are cut off
    parameter.copy_(upper.to(torch.int16).view(torch.bfloat16))
    lower.copy_(distance.masked_fill_(nan, 0))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _no_bits(parameter: Tensor, _dtype: torch.dtype) -> Tensor:
    """Initial lower bits: parameters are their own master weights."""
    return torch.zeros_like(parameter, dtype=torch.int16, memory_format=torch.preserve_format, requires_grad=False)
