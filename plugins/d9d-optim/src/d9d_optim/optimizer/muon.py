"""Muon for the matrices of hidden layers (Jordan et al. 2024; Liu et al. 2025), AdamW for all other parameters."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial

import torch
from d9d_core.config import closest
from d9d_core.errors import BuildError
from d9d_core.strategy import Collective
from torch import Tensor, nn

from d9d_optim.optimizer.adam import update_adam
from d9d_optim.optimizer.base import Batch, NamedOptimizer, counter, divide, keep_if, zeros
from d9d_optim.optimizer.config import MuonConfig
from d9d_optim.optimizer.groups import is_matrix
from d9d_optim.optimizer.newton_schulz import orthogonalize, rate_factor
from d9d_optim.optimizer.whole_matrices import map_matrices, matrix_collectives


class Muon(NamedOptimizer):
    """Muon, bit-identical to ``torch.optim.Muon``, also for sharded matrices, and AdamW for the other parameters.

    A matrix is a parameter of two dimensions, or of three (stacked matrices of experts), that is no bias and does not
    match ``adamw.match``. Its average of gradients is orthogonalised, so that the update is equally large in all
    directions.

    State per matrix: ``momentum_buffer`` in the parameter's shape. State of other parameters as in ``adamw``:
    ``exp_avg``, ``exp_avg_sq`` and ``step``.

    A step gathers each matrix that is sharded within its rows or columns once, in bfloat16, on the one rank that
    computes its update, and scatters the result; see :func:`d9d_optim.optimizer.whole_matrices.map_matrices`.

    Raises:
        BuildError: no parameter is left for Muon, or a pattern of ``adamw.match`` matches nothing.
    """

    takes_divisor = True  # for the parameters that AdamW updates

    def __init__(self, config: MuonConfig, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__(config, parameters)
        self._config = config
        self._matrices = frozenset(name for name, p in self._parameters.items() if self._is_matrix(name, p))
        self._check()
        kinds = {True: ("muon", 1.0), False: ("adamw", config.adamw.lr / config.lr)}
        groups = []
        for group in self._groups:
            for for_muon, (kind, ratio) in kinds.items():
                names = tuple(name for name in group.names if (name in self._matrices) == for_muon)
                if names:
                    label = f"{kind}, {group.label}"
                    groups.append(replace(group, label=label, lr_scale=group.lr_scale * ratio, names=names))
        self._groups = tuple(sorted(groups, key=lambda group: group.names[0] not in self._matrices))

    def slots_of(self, name: str) -> Mapping[str, Callable[[Tensor, torch.dtype], Tensor]]:
        """Slots of the state: the average of gradients for a matrix; moments and step count for other parameters."""
        return self.slots if name in self._matrices else {"exp_avg": zeros, "exp_avg_sq": zeros, "step": counter}

    @property
    def slots(self) -> Mapping[str, Callable[[Tensor, torch.dtype], Tensor]]:
        """Slot of the state of a matrix: the average of its gradients."""
        return {"momentum_buffer": zeros}

    def apply(self, batch: Batch) -> None:
        """Update a group: matrices in one call, to divide them among ranks. Collective over the matrices' meshes."""
        if batch.names[0] not in self._matrices:
            super().apply(batch)
            return
        if batch.divisor is not None:
            divide(batch.grads, batch.divisor)
        config = self._config
        updates = []
        for gradient, average in zip(batch.grads, batch.slots["momentum_buffer"], strict=True):
            final = gradient.to(average.dtype)
            moved = average.lerp(final, 1 - config.momentum)
            # The iterations are in bfloat16, so matrices are sent in bfloat16.
            updates.append((final.lerp(moved, config.momentum) if config.nesterov else moved).bfloat16())
            keep_if(batch.gate, average, moved)
        function = partial(orthogonalize, coefficients=config.ns_coefficients, steps=config.ns_steps, eps=config.eps)
        for index, update in enumerate(map_matrices(updates, batch.layouts, function)):
            weight, average = batch.params[index], batch.slots["momentum_buffer"][index]
            rate = batch.lr * rate_factor(config.adjust_lr, batch.layouts[index].shape)
            moved = weight.to(average.dtype) * (1 - batch.lr * batch.weight_decay)
            keep_if(batch.gate, weight, moved.add_(update, alpha=-rate))

    def collectives(self) -> Iterable[Collective]:
        """Collectives of a step: the matrices of each group are sent to the ranks that compute them, and back."""
        for group in self._groups:
            if group.names[0] in self._matrices:
                layouts = [self._parameters[name] for name in group.names]
                yield from matrix_collectives(layouts, torch.bfloat16.itemsize)

    def update(self, batch: Batch) -> None:
        """Update the parameters other than matrices with one fused call of AdamW."""
        update_adam(batch, self._config.adamw.betas, self._config.adamw.eps, decoupled=True)

    def _is_matrix(self, name: str, parameter: Tensor) -> bool:
        patterns = self._config.adamw.patterns
        is_excluded = any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
        return is_matrix(name, parameter) and parameter.ndim <= 3 and not is_excluded

    def _check(self) -> None:
        if not self._matrices:
            raise BuildError(
                "optimizer 'muon': no trainable parameter is a matrix, or optimizer.adamw.match matches all; narrow "
                "the patterns, or use adamw"
            )
        # Default patterns may match nothing, because not every model has trainable embeddings and heads.
        for index, pattern in enumerate(self._config.adamw.match or ()):
            if not any(fnmatch.fnmatchcase(name, pattern) for name in self._parameters):
                near = closest(pattern, list(self._parameters))
                raise BuildError(
                    f"optimizer.adamw.match[{index}]: the pattern {pattern!r} matches no trainable parameter"
                    + (f"; a similar name is {near}" if near else "")
                )
