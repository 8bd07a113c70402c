"""Auxiliary losses of a model's modules, and tallies (counts of a forward) to which modules adapt."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from d9d_core.errors import BuildError
from d9d_core.task import StageInputs, Task
from d9d_core.traits import Adapts, AddsLosses, HasTallies, InputTargets, LossTerm, modules_with
from d9d_core.types import Microbatch
from torch import Tensor, nn
from torch import distributed as dist

#: Value of targets that do not count, see :mod:`d9d_core.data`.
_IGNORE = -100


class AuxiliaryLosses:
    """Loss terms of a model's modules, such as load-balancing losses.

    Args:
        stages: index -> stage of this rank, materialised.
        model: full model, on any device; all ranks must have the same terms.
        task: task with its own loss terms; makes the model's inputs, which determine the weights of the terms.
        context_ranks: number of ranks of ``cp``; each has a part of every sample's positions, but computes losses over
            all positions.

    Raises:
        BuildError: two modules define one term differently, or a module and the task have a term of the same name.
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
                        "give one of them another name, or make the definitions equal"
                    )
                if term in task.coefficients:
                    raise BuildError(
                        f"module '{name}' adds a loss term '{term}', but the task has this term, too; rename one"
                    )

    @property
    def coefficients(self) -> dict[str, float]:
        """Term -> its coefficient in the total loss."""
        return {name: term.coefficient for name, term in self.terms.items()}

    def weights(self, microbatch: Microbatch) -> dict[str, int | Tensor]:
        """Term -> its weight in a microbatch: number of samples, of positions, or of its own targets.

        Weights are numbers from the shape [B, S, ...] of the first input or, if the input ``lengths`` is given, 0-d
        tensors computed from it. Own targets are counted in their input.

        Raises:
            BuildError: the task does not give the input with a term's targets.
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
            # Lengths of full samples, also on ranks that have a part of the positions.
            counts = {"sample": (lengths > 0).sum(), "position": lengths.sum()}
        return {
            name: _targets(name, term.per, inputs) if isinstance(term.per, InputTargets) else counts[term.per]
            for name, term in self.terms.items()
        }

    def begin(self, scale: Mapping[str, Tensor]) -> None:
        """Fill the modules' factor buffers: the derivative of the step's loss with respect to each loss sum.

        Args:
            scale: term -> 1 / (global weight).
        """
        factors = {name: scale[name] * term.coefficient for name, term in self.terms.items()}
        modules = [module for of_stage in self._modules.values() for module in of_stage]
        pairs = [(buffer, factors[term]) for module in modules for term, buffer in module.loss_factors().items()]
        if pairs:
            torch._foreach_copy_([buffer for buffer, _ in pairs], [value for _, value in pairs])

    def take(self, stage: int) -> dict[str, Tensor]:
        """Term -> its sum in the last forward of a stage, over all modules of the stage; 0-d float32."""
        parts: dict[str, list[Tensor]] = {}
        for module in self._modules[stage]:
            for term, buffer in module.loss_sums().items():
                parts.setdefault(term, []).append(buffer)
        return {name: torch.stack(buffers).sum() for name, buffers in parts.items()}


class Tallies:
    """Tallies of modules, for metrics and for modules that adapt to their tallies once per step.

    Tallies are sums that a module counts in its forward, such as the number of tokens of each expert.

    Args:
        stages: index -> stage of this rank, materialised.
        group: process group of the ranks with other samples, or other positions of the same samples; ``None`` for a
            single rank.
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
        """Tallies of a stage's last forward, ``"<module>/<name>"`` -> tensor; overwritten by the next forward.

        Adds the tallies to which modules adapt to the sums of this step.
        """
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

    def sums(self) -> list[Tensor]:
        """Tallies of this step to which modules adapt, not copied; zeros for a stage that ran no microbatch."""
        for stage, adaptive in self._adaptive.items():
            if stage not in self._sums and adaptive:
                self._sums[stage] = {
                    f"{name}/{key}": torch.zeros_like(module.tallies()[key])
                    for name, module in adaptive.items()
                    for key in module.adapts_to()
                }
        return [tensor for of_stage in self._sums.values() for tensor in of_stage.values()]

    def forget(self) -> None:
        """Forget the tallies of an attempt at a step that is undone."""
        self._sums = {}

    def adapted_bytes(self) -> list[int]:
        """Bytes of each all-reduce of :meth:`adapt`: one for each dtype of the reduced tallies."""
        found: dict[torch.dtype, int] = {}
        for module in (module for of_stage in self._adaptive.values() for module in of_stage.values()):
            tallies = module.tallies()
            for tensor in (tallies[key] for key in module.adapts_to()):
                found[tensor.dtype] = found.get(tensor.dtype, 0) + tensor.nbytes
        return list(found.values())

    def adapt(self, finite: Tensor) -> None:
        """Let modules adapt to their summed tallies of this step. Collective over the group, if such modules exist.

        Args:
            finite: 0-d bool; false if the step is skipped.
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


def _targets(term: str, per: InputTargets, inputs: StageInputs) -> Tensor:
    """Number of a term's own targets in a microbatch, 0-d."""
    if per.input not in inputs.shared:
        raise BuildError(
            f"the model adds the loss term '{term}' over its input '{per.input}', which the task does not give; use a "
            "task that gives it, such as causal_lm after its check(), or switch the term off in the model"
        )
    return (inputs.shared[per.input][..., per.index] != _IGNORE).sum()


def _reduce(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    """All-reduce tensors in place, with one message per dtype."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        mine = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.flatten() for tensor in mine])
        dist.all_reduce(flat, group=group)
        parts = torch.split(flat, [tensor.numel() for tensor in mine])
        torch._foreach_copy_(mine, [part.view_as(t) for part, t in zip(parts, mine, strict=True)])
