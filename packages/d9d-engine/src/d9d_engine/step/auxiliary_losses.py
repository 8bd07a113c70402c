"""Auxiliary loss terms of a model's own modules, and the tallies that they adapt to."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from d9d_core.errors import BuildError
from d9d_core.task import Task
from d9d_core.traits import Adapts, AddsLosses, HasTallies, LossTerm, modules_with
from d9d_core.types import Microbatch
from torch import Tensor, nn
from torch import distributed as dist


class AuxiliaryLosses:
    """Auxiliary losses: the loss terms of a model's modules.

    Args:
        stages: those of this rank, materialised, by index.
        model: the full model, on any device: all ranks have to agree about the terms.
        task: makes the model's inputs, from which the weights of these terms follow, and has terms of its own.
        context_ranks: ranks of ``cp``, each of which has a part of each sample's positions and the losses of all.

    Raises:
        BuildError: two modules mean different things by one term, or a module and the task share a name.
    """

    def __init__(self, stages: Mapping[int, nn.Module], model: nn.Module, task: Task, context_ranks: int = 1) -> None:
        self._task = task
        self._context_ranks = context_ranks
        self._modules: dict[int, list[AddsLosses]] = {
            index: list(modules_with(stage, AddsLosses).values()) for index, stage in stages.items()
        }
        self.terms: dict[str, LossTerm] = {}
        for name, module in model.named_modules():
            if not isinstance(module, AddsLosses):
                continue
            for term, meant in module.loss_terms().items():
                if self.terms.setdefault(term, meant) != meant:
                    raise BuildError(
                        f"module '{name}' adds the loss term '{term}' as {meant}, another as {self.terms[term]}; "
                        "give one of them another name, or the same coefficient"
                    )
                if term in task.coefficients:
                    raise BuildError(f"module '{name}' adds a loss term '{term}', but the task has one; rename it")

    @property
    def coefficients(self) -> dict[str, float]:
        """Coefficients of the terms in the total."""
        return {name: term.coefficient for name, term in self.terms.items()}

    def weights(self, microbatch: Microbatch) -> dict[str, int | Tensor]:
        """Weights of the terms in a microbatch: samples or positions.

        They follow from the shape [B, S, ...] of the first input; or, where the inputs have ``lengths``, from those, as
        0-d tensors.
        """
        if not self.terms:
            return {}
        inputs = self._task.inputs(microbatch)
        lengths = inputs.shared.get("lengths", inputs.first.get("lengths"))
        counts: dict[str, int | Tensor]
        if lengths is None:
            first = next(iter(inputs.first.values()))
            counts = {"sample": len(first), "position": first.shape[:2].numel() * self._context_ranks}
        else:
            # Those of whole samples, also on ranks that share their positions.
            counts = {"sample": (lengths > 0).sum(), "position": lengths.sum()}
        return {name: counts[term.per] for name, term in self.terms.items()}

    def begin(self, scale: Mapping[str, Tensor]) -> None:
        """Fill the modules' factor buffers: the gradients of their sums in this step.

        Args:
            scale: term -> 1 / (global weight).
        """
        factors = {name: scale[name] * term.coefficient for name, term in self.terms.items()}
        modules = [module for of_stage in self._modules.values() for module in of_stage]
        pairs = [(buffer, factors[term]) for module in modules for term, buffer in module.loss_factors().items()]
        if pairs:
            torch._foreach_copy_([buffer for buffer, _ in pairs], [value for _, value in pairs])

    def take(self, stage: int) -> dict[str, Tensor]:
        """Sums of the terms in the last forward of a stage, over the modules that have them; 0-d float32."""
        parts: dict[str, list[Tensor]] = {}
        for module in self._modules[stage]:
            for term, buffer in module.loss_sums().items():
                parts.setdefault(term, []).append(buffer)
        return {name: torch.stack(buffers).sum() for name, buffers in parts.items()}


class Tallies:
    """Tallies of modules, beside their auxiliary losses: for metrics, and for modules that adapt to them once per step.

    Args:
        stages: those of this rank, materialised, by index.
        group: the ranks that see other samples, or other parts of them; ``None`` if there are none.
    """

    def __init__(self, stages: Mapping[int, nn.Module], group: dist.ProcessGroup | None = None) -> None:
        self._modules: dict[int, dict[str, HasTallies]] = {i: modules_with(s, HasTallies) for i, s in stages.items()}
        self._adaptive: dict[int, dict[str, Adapts]] = {
            index: {name: module for name, module in modules_with(stage, Adapts).items() if module.adapts_to()}
            for index, stage in stages.items()
        }
        self._group = group
        self._sums: dict[int, dict[str, Tensor]] = {}

    def take(self, stage: int) -> dict[str, Tensor]:
        """Tallies of a stage's last forward, ``"<module>/<name>"`` -> tensor. The next one overwrites them."""
        modules, adaptive = self._modules[stage], self._adaptive[stage]
        counted = {f"{name}/{key}": t for name, module in modules.items() for key, t in module.tallies().items()}
        needed = {
            f"{name}/{key}": counted[f"{name}/{key}"] for name, module in adaptive.items() for key in module.adapts_to()
        }
        if needed and stage in self._sums:
            torch._foreach_add_(list(self._sums[stage].values()), list(needed.values()))
        elif needed:
            self._sums[stage] = {key: tensor.clone() for key, tensor in needed.items()}
        return counted

    def adapted_bytes(self) -> list[int]:
        """Bytes of each all-reduce of :meth:`adapt`: one for each dtype of the tallies that modules adapt to."""
        found: dict[torch.dtype, int] = {}
        for module in (module for of_stage in self._adaptive.values() for module in of_stage.values()):
            tallies = module.tallies()
            for tensor in (tallies[key] for key in module.adapts_to()):
                found[tensor.dtype] = found.get(tensor.dtype, 0) + tensor.nbytes
        return list(found.values())

    def adapt(self, finite: Tensor) -> None:
        """Let modules adapt to the step's sums. Collective over the group, if there are such modules.

        Args:
            finite: 0-d bool, whether the step counts.
        """
        sums = {key: tensor for of_stage in self._sums.values() for key, tensor in of_stage.items()}
        if not sums:
            return
        if self._group is not None:
            _reduce(list(sums.values()), self._group)
        for adaptive in self._adaptive.values():
            for name, module in adaptive.items():
                module.adapt({key: sums[f"{name}/{key}"] for key in module.adapts_to()}, finite)
        self._sums = {}


def _reduce(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    """All-reduce tensors in place, with one message per dtype."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        mine = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.flatten() for tensor in mine])
        dist.all_reduce(flat, group=group)
        parts = torch.split(flat, [tensor.numel() for tensor in mine])
        torch._foreach_copy_(mine, [part.view_as(t) for part, t in zip(parts, mine, strict=True)])
