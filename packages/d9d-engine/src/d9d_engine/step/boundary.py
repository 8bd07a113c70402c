"""Boundary tensors between pipeline stages, inferred without running the stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from d9d_core.errors import BuildError
from d9d_core.traits import PipelineStage
from d9d_core.types import Microbatch, TensorSpec
from torch import Tensor, nn

Specs = Mapping[str, TensorSpec]
_Shapes = tuple[tuple[str, torch.Size, torch.dtype], ...]


class Boundaries:
    """Boundary tensors between pipeline stages, for microbatches of any shape.

    Args:
        stages: all stages but the last, on any device, equal on all ranks; with the trait ``PipelineStage``.
        compute_dtype: dtype to which strategies convert parameters, if they do; it replaces the parameters' dtype in
            the declared boundary tensors.
    """

    def __init__(self, stages: Sequence[nn.Module], compute_dtype: torch.dtype | None = None) -> None:
        self._stages = tuple(stages)
        self._stored = {parameter.dtype for stage in stages for parameter in stage.parameters()}
        self._compute = compute_dtype
        self._known: dict[tuple[int, _Shapes], Specs] = {}

    def after(self, stage: int, microbatch: Microbatch) -> Specs:
        """Specifications of the tensors that a stage passes to the next one for this microbatch, in order."""
        shapes = tuple((name, tensor.shape, tensor.dtype) for name, tensor in microbatch.items())
        if (stage, shapes) not in self._known:
            given = {name: TensorSpec(tuple(shape), dtype) for name, shape, dtype in shapes}
            self._known[stage, shapes] = self.announced(stage, given)
        return self._known[stage, shapes]

    def announced(self, stage: int, microbatch: Specs) -> Specs:
        """Specifications of a stage's boundary tensors, from the specifications of a microbatch."""
        module = self._stages[stage]
        assert isinstance(module, PipelineStage)  # checked when the stages were built
        return {name: self._converted(spec) for name, spec in module.boundary(microbatch).items()}

    def conform(self, stage: int, outputs: Mapping[str, Tensor], microbatch: Microbatch) -> dict[str, Tensor]:
        """Bring outputs into the declared order and dtypes.

        Raises:
            BuildError: the stage returned other tensors than it declares.
        """
        announced = self.after(stage, microbatch)
        returned = {name: tuple(tensor.shape) for name, tensor in outputs.items()}
        if returned != {name: spec.shape for name, spec in announced.items()}:
            shapes = {name: spec.shape for name, spec in announced.items()}
            raise BuildError(
                f"boundary() of stage {stage} declares {shapes}, but forward returned {returned}; correct one of them"
            )
        return {name: outputs[name].to(spec.dtype) for name, spec in announced.items()}

    def _converted(self, spec: TensorSpec) -> TensorSpec:
        if self._compute is not None and spec.dtype in self._stored:
            return TensorSpec(spec.shape, self._compute)
        return spec
