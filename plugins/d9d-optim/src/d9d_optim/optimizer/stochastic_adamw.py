"""AdamW for bfloat16 parameters with stochastic rounding (Zamirai et al. 2021, Revisiting BFloat16 Training)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from d9d_core.errors import BuildError
from d9d_core.kernel import OpSlot
from torch import Tensor, nn

from d9d_optim.optimizer.base import Batch, NamedOptimizer, counter, divide, keep_if, zeros
from d9d_optim.optimizer.config import StochasticAdamWConfig
from d9d_optim.optimizer.rounding import (
    are_consecutive,
    first_key,
    hashed,
    high_bits,
    low_bits,
    next_key,
    positions,
    rounded,
)

#: Largest number of elements updated at once: on a CPU, as many as its caches hold; on other devices, a limit on the
#: memory of float32 copies.
_PIECE_OF_CPU, _PIECE = 1 << 16, 1 << 24


class StochasticAdamW(NamedOptimizer):
    """Stochastic AdamW: computes in float32 and rounds bfloat16 weights, and bfloat16 moments, stochastically.

    An update below the precision of a weight is applied with a probability proportional to its size, so the expected
    weights follow float32 training without a float32 copy. Float32 parameters are not rounded.

    State per parameter: ``exp_avg`` and ``exp_avg_sq`` in the parameter's shape, ``step`` (0-d float32, number of steps
    taken), ``generator`` (0-d int64). The noise of an element is a function of the generator and of the element's index
    in the full tensor: it is the same after a resume, on ranks with copies of the weights, and in every layout.

    The step is the op ``stochastic_adamw``: a backend is called with a :class:`~d9d_optim.optimizer.base.Batch`, the
    keywords ``betas`` and ``eps``, and ``starts``, the index of each tensor's first element as int32 [1]. Tensors whose
    elements are not consecutive in the full tensor are always updated by the reference.

    Raises:
        BuildError: no trainable parameter is bfloat16, or a parameter has another format narrower than float32.
    """

    def __init__(self, config: StochasticAdamWConfig, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__(config, parameters)
        self._config = config
        self._positions: dict[str, list[Tensor]] = {}
        self._step = OpSlot("stochastic_adamw", self._by_torch, state_dtype=config.state_dtype)
        known = (torch.bfloat16, torch.float32)
        for name, parameter in self._parameters.items():
            if parameter.dtype not in known:
                raise BuildError(f"optimizer 'stochastic_adamw': {name} is {parameter.dtype}; use bfloat16 or float32")
        if all(parameter.dtype == torch.float32 for parameter in self._parameters.values()):
            raise BuildError(
                "optimizer 'stochastic_adamw': every trainable parameter is float32, so there is nothing to round; set "
                "precision.parameters to bfloat16, or use adamw"
            )

    def init_state(self) -> None:
        """Initialise moments with zeros, and each parameter's generator from the seed and the parameter's name."""
        super().init_state()
        for name, slots in self._materialised().items():
            slots["generator"].fill_(first_key(self._config.seed, name))

    @property
    def slots(self) -> Mapping[str, Callable[[Tensor, torch.dtype], Tensor]]:
        """Slots of a parameter's state: the moments, the number of steps taken and the generator's state."""
        return {"exp_avg": zeros, "exp_avg_sq": zeros, "step": counter, "generator": _generator}

    def op_slots(self) -> Mapping[str, OpSlot]:
        return {"step": self._step}

    def apply(self, batch: Batch) -> None:
        """Update the tensors with consecutive local elements in one call, and the others in a second call."""
        follow = [are_consecutive(layout) for layout in batch.layouts]
        config = self._config
        for step, wanted in ((self._step, True), (self._by_torch, False)):
            chosen = [index for index, consecutive in enumerate(follow) if consecutive is wanted]
            if chosen:
                part = batch.part(chosen)
                step(
                    part, betas=config.betas, eps=config.eps, starts=[self._start(part, i) for i in range(len(chosen))]
                )

    def update(self, batch: Batch) -> None:
        """Update each tensor piece by piece, with a few operations; gradients must be divided already."""
        for index in range(len(batch.params)):
            self._update_tensor(batch, index)

    def _by_torch(self, batch: Batch, **_given: object) -> None:
        if batch.divisor is not None:
            divide(batch.grads, batch.divisor)
        self.update(batch)

    def _start(self, batch: Batch, index: int) -> Tensor:
        """Index of the first local element in the full tensor, int32 [1]; [0] if this rank has no element."""
        return self._places(batch, index)[0].flatten()[:1]

    def _places(self, batch: Batch, index: int) -> list[Tensor]:
        name = batch.names[index]
        if name not in self._positions:
            self._positions[name] = positions(batch.layouts[index])
        return self._positions[name]

    def _update_tensor(self, batch: Batch, index: int) -> None:
        key, step = batch.slots["generator"][index], batch.slots["step"][index]
        tensors = [batch.params[index], batch.grads[index], batch.slots["exp_avg"][index]]
        tensors.append(batch.slots["exp_avg_sq"][index])
        taken = step + 1
        first, *others = self._places(batch, index)
        tensors = [tensor.view(1) if tensor.ndim == 0 else tensor for tensor in tensors]
        piece = _PIECE_OF_CPU if tensors[0].device.type == "cpu" else _PIECE
        rows = max(1, piece // max(1, tensors[0][:1].numel()))
        for at in range(0, len(first), rows):
            place = first[at : at + rows]
            for other in others:
                place = place + other
            self._update_piece(batch, [tensor[at : at + rows] for tensor in tensors], taken, place, key)
        keep_if(batch.gate, step, taken)
        keep_if(batch.gate, key, next_key(key))

    def _update_piece(self, batch: Batch, tensors: list[Tensor], taken: Tensor, place: Tensor, key: Tensor) -> None:
        weight, gradient, average, square = tensors
        (beta1, beta2), config = self._config.betas, self._config
        gradient = gradient.float()
        new_average = average.float().lerp(gradient, 1 - beta1)
        new_square = square.float().mul(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (new_square / (1 - beta2**taken)).sqrt_().add_(config.eps)
        update = (new_average / root).mul_(batch.lr / (1 - beta1**taken))
        new_weight = weight.float().mul(1 - batch.lr * batch.weight_decay).sub_(update)
        random = hashed(place, key)
        keep_if(batch.gate, weight, _in_format(new_weight, weight, low_bits(random)))
        if average.dtype == torch.bfloat16:
            new_average = rounded(new_average, high_bits(random))
            # The second moments need their own random bits: a hash of the bits of the first moments.
            new_square = rounded(new_square, low_bits(hashed(random, ~key)))
        keep_if(batch.gate, average, new_average)
        keep_if(batch.gate, square, new_square)


def _in_format(wide: Tensor, like: Tensor, noise: Tensor) -> Tensor:
    return rounded(wide, noise) if like.dtype == torch.bfloat16 else wide


def _generator(parameter: Tensor, _dtype: torch.dtype) -> Tensor:
    return torch.zeros((), dtype=torch.int64, device=parameter.device)
