"""Base of the optimizers: groups, state by name, the gate, and the learning rate."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from d9d_core.errors import BuildError
from d9d_core.strategy import Collective
from d9d_core.tensors import local
from torch import Tensor, nn

from d9d_optim.optimizer.config import OptimizerConfig
from d9d_optim.optimizer.groups import ParameterGroup, group_parameters


@dataclass(frozen=True, slots=True)
class Batch:
    """Batch of an optimizer: the tensors of one group's parameters that have a gradient, in lists of equal length.

    One fused call can update the whole batch. For DTensors, the tensors are this rank's shards.

    Attributes:
        names: parameter names.
        layouts: the parameters themselves, as DTensors if sharded.
        params: parameters, updated in place.
        grads: gradients of the parameters.
        slots: state tensors of the parameters by slot name, updated in place.
        lr: the learning rate of the step.
        weight_decay: weight decay; decoupled decay multiplies it by ``lr``.
        gate: 0-d bool on the parameters' device; if false, the update may change no tensor.
        found_inf: the negated gate for torch's fused kernels, which take it in the place of a gradient scaler's flag:
            0-d float32, 1 if the gate is false.
        divisor: 0-d float32 by which gradients must still be divided; ``None`` if they are final.
    """

    names: list[str]
    layouts: list[Tensor]
    params: list[Tensor]
    grads: list[Tensor]
    slots: Mapping[str, list[Tensor]]
    lr: float
    weight_decay: float
    gate: Tensor
    found_inf: Tensor
    divisor: Tensor | None = None

    def part(self, indices: Sequence[int]) -> Batch:
        """Make a batch with a selection of the tensors."""

        def chosen(tensors: list[Any]) -> list[Any]:
            return [tensors[index] for index in indices]

        return replace(
            self,
            names=chosen(self.names),
            layouts=chosen(self.layouts),
            params=chosen(self.params),
            grads=chosen(self.grads),
            slots={slot: chosen(tensors) for slot, tensors in self.slots.items()},
        )


class NamedOptimizer(ABC):
    """Base of the optimizers with state by name, see :class:`d9d_core.optimizer.Optimizer`.

    State is kept by parameter name rather than by position in a list, so that it can be loaded in every layout. A
    subclass defines a parameter's state (:attr:`slots`) and the update of a batch (:meth:`update`); this class handles
    groups, learning rates, wider state, division of gradients for clipping, and sharded parameters. Updates are
    elementwise, on this rank's shards; a subclass with another kind of update overrides :meth:`apply`.

    Attributes:
        takes_divisor: whether :meth:`update` divides float32 gradients of float32 updates by ``batch.divisor`` itself,
            like torch's fused kernels; all other gradients are divided before it, in a separate pass.

    Args:
        config: learning rate, decay and groups.
        parameters: all parameters of the model by name; frozen parameters are ignored.

    Raises:
        BuildError: no parameter is trainable, or a group's pattern applies to no parameter.
    """

    takes_divisor: ClassVar[bool] = False

    def __init__(self, config: OptimizerConfig, parameters: Mapping[str, nn.Parameter]) -> None:
        self._base_lr = config.lr
        self._least_dtype = torch.float32 if config.wide_state else None
        self._factor = 1.0
        self._divisor: Tensor | None = None
        self._groups = group_parameters(config, parameters)
        self._parameters = {name: parameters[name] for group in self._groups for name in group.names}
        self._state: dict[str, dict[str, Tensor]] | None = None

    def init_state(self) -> None:
        """Initialise all state. Call it once, after the parameters have their memory."""
        self._state = {
            name: {slot: make(parameter, self._dtype(parameter)) for slot, make in self.slots_of(name).items()}
            for name, parameter in self._parameters.items()
        }

    @torch.no_grad()
    def step(self, gate: Tensor) -> None:
        """Update every trainable parameter that has a gradient.

        Args:
            gate: 0-d bool. If false, weights, moments and step counts keep their bits. Kernels read the gate on the
                device, without waiting on the host; only for parameters in host memory, the gate is copied to the host.

        Raises:
            BuildError: :meth:`init_state` was not called.
        """
        state = self._materialised()
        found_inf = gate.logical_not().to(torch.float32)
        divisor, self._divisor = self._divisor, None
        for group in self._groups:
            for device, names in self._by_device(group).items():
                flags = gate.to(device), found_inf.to(device), None if divisor is None else divisor.to(device)
                self.apply(self._batch(group, names, state, *flags))

    def divide_gradients(self, divisor: Tensor) -> None:
        """Let the next step divide the gradients by a number, so that clipping needs no separate pass over them.

        Args:
            divisor: 0-d float32.
        """
        self._divisor = divisor

    def set_lr_factor(self, factor: float) -> None:
        """Set the factor by which the base learning rate of every group is multiplied in the next steps."""
        self._factor = factor

    @property
    def lr(self) -> float:
        """Current learning rate of the first group."""
        return self._lr_of(self._groups[0])

    def describe(self) -> Mapping[str, Any]:
        """Base learning rate, weight decay and parameter names of each group."""
        return {
            group.label: {
                "lr": self._base_lr * group.lr_scale,
                "weight_decay": group.weight_decay,
                "parameters": list(group.names),
            }
            for group in self._groups
        }

    def state(self) -> Mapping[str, Tensor]:
        """State dict: the optimizer's own tensors by ``"<parameter name>/<slot>"``; to load a state, copy into them.

        Raises:
            BuildError: :meth:`init_state` was not called, so there is no state to load into.
        """
        return {
            f"{name}/{slot}": value for name, slots in self._materialised().items() for slot, value in slots.items()
        }

    def collectives(self) -> Iterable[Collective] | None:
        """Collectives of a step: none, as updates are elementwise. Override it if :meth:`apply` communicates."""
        return ()

    def slots_of(self, name: str) -> Mapping[str, Callable[[Tensor, torch.dtype], Tensor]]:  # noqa: ARG002
        """Tensors (slots) of one parameter's state; by default :attr:`slots`, the same for all parameters."""
        return self.slots

    def apply(self, batch: Batch) -> None:
        """Update a batch of any dtypes; by default with :meth:`update`, in the dtype of the moments."""
        wide = [self._dtype(param) != param.dtype for param in batch.params]
        if same := [index for index, is_wide in enumerate(wide) if not is_wide]:
            part = self._divided(batch.part(same))
            # Gradients may be accumulated in a wider dtype, but fused kernels need one dtype for all tensors.
            grads = [grad.to(param.dtype) for param, grad in zip(part.params, part.grads, strict=True)]
            self.update(replace(part, grads=grads))
        for index, is_wide in enumerate(wide):  # one by one, to hold one wide copy at a time
            if is_wide:
                self._update_wide(self._divided(batch.part([index])))

    @property
    @abstractmethod
    def slots(self) -> Mapping[str, Callable[[Tensor, torch.dtype], Tensor]]:
        """Tensors (slots) of a parameter's state: their names, and for each a function that makes its initial value.

        The arguments of a function are the parameter and the dtype of its moments. :func:`zeros` and :func:`counter`
        are such functions.
        """

    @abstractmethod
    def update(self, batch: Batch) -> None:
        """Update parameters and state of the batch in place; if ``batch.gate`` is false, all tensors keep their bits.

        If the gate is false, gradients may be NaN or infinite, so use ``torch.where``, not a product with the gate. The
        host may not read the value of a tensor.
        """

    def _lr_of(self, group: ParameterGroup) -> float:
        return self._base_lr * group.lr_scale * self._factor

    def _dtype(self, parameter: Tensor) -> torch.dtype:
        """Dtype of a parameter's moments and of the computation of its update."""
        return parameter.dtype if self._least_dtype is None else torch.promote_types(parameter.dtype, self._least_dtype)

    def _divided(self, batch: Batch) -> Batch:
        """Divide the gradients of a batch, or return the batch if :meth:`update` divides them with the same result.

        A kernel would divide in float32 and not round the quotient to a narrow dtype. This method therefore divides
        gradients narrower than float32, and gradients whose dtype is not the dtype of the update.
        """
        if batch.divisor is None:
            return batch
        exact = all(
            grad.dtype == self._dtype(param) == torch.float32
            for param, grad in zip(batch.params, batch.grads, strict=True)
        )
        if exact and self.takes_divisor:
            return batch
        divide(batch.grads, batch.divisor)
        return replace(batch, divisor=None)

    def _update_wide(self, narrow: Batch) -> None:
        dtype = self._dtype(narrow.params[0])
        params = [p.to(dtype) for p in narrow.params]
        self.update(replace(narrow, params=params, grads=[g.to(dtype) for g in narrow.grads]))
        narrow.params[0].copy_(params[0])

    def _by_device(self, group: ParameterGroup) -> dict[torch.device, list[str]]:
        """Names of a group's parameters that have a gradient, by device; offloaded parameters are in host memory."""
        found: dict[torch.device, list[str]] = {}
        for name in group.names:
            if self._parameters[name].grad is not None:
                found.setdefault(self._parameters[name].device, []).append(name)
        return found

    def _batch(
        self,
        group: ParameterGroup,
        names: list[str],
        state: Mapping[str, Mapping[str, Tensor]],
        gate: Tensor,
        found_inf: Tensor,
        divisor: Tensor | None,
    ) -> Batch:
        layouts: list[Tensor] = [self._parameters[name] for name in names]
        params = [local(parameter) for parameter in layouts]
        grads = [local(parameter.grad) for parameter in layouts if parameter.grad is not None]
        return Batch(
            names=names,
            layouts=layouts,
            params=params,
            grads=[_laid_out(grad, parameter) for grad, parameter in zip(grads, params, strict=True)],
            slots={slot: [local(state[name][slot]) for name in names] for slot in self.slots_of(names[0])},
            lr=self._lr_of(group),
            weight_decay=group.weight_decay,
            gate=gate,
            found_inf=found_inf,
            divisor=divisor,
        )

    def _materialised(self) -> dict[str, dict[str, Tensor]]:
        if self._state is None:
            raise BuildError("the optimizer has no state yet; call init_state() once the parameters are materialised")
        return self._state


def _laid_out(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Gradient with the strides of its parameter, which fused kernels assume."""
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)


def zeros(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Initial state: zeros in the parameter's shape and layout."""
    return torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format, requires_grad=False)


def counter(parameter: Tensor, _dtype: torch.dtype) -> Tensor:
    """Initial step count zero: 0-d float32 on the parameter's device, where the fused kernels count steps."""
    return torch.zeros((), dtype=torch.float32, device=parameter.device)


def divide(gradients: list[Tensor], divisor: Tensor) -> None:
    """Divide gradients in place by a 0-d tensor, each in its own dtype."""
    if gradients:
        torch._foreach_div_(gradients, divisor)


def keep_if(gate: Tensor, tensor: Tensor, new: Tensor) -> None:
    """Set ``tensor`` to ``new`` if the 0-d ``gate`` is true; otherwise no bit changes, even if ``new`` has NaN."""
    tensor.copy_(torch.where(gate, new.to(tensor.dtype), tensor))


@contextmanager
def replaced(parameters: Mapping[str, nn.Parameter], value: Callable[[str, Tensor], Tensor]) -> Iterator[None]:
    """Replace the values of parameters inside the ``with`` block; afterwards their bits are restored.

    Args:
        parameters: parameters by name.
        value: function from a parameter's name and this rank's shard to the values inside the block, in any dtype.
    """
    before = {}
    with torch.no_grad():
        for name, parameter in parameters.items():
            shard = local(parameter)
            before[name] = shard.clone()
            shard.copy_(value(name, shard))
    try:
        yield
    finally:
        with torch.no_grad():
            for name, shard in before.items():
                local(parameters[name]).copy_(shard)
