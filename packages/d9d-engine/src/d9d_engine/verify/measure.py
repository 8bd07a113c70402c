"""Measurement of what a layout computes: the first steps of a job, full gradients included."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from d9d_core import events as ev
from d9d_weights.sharding.model_tensors import gathered
from d9d_weights.sharding.stage_holders import StageHolders
from safetensors.torch import load_file, save_file
from torch import Tensor

from d9d_engine.distributed.mesh import Topology
from d9d_engine.job import Job
from d9d_engine.run.trainer import Trainer


@dataclass
class Measurement:
    """Measurement of the first steps of a job.

    Attributes:
        losses: of each step.
        grad_norms: of each step, as the step itself measured them.
        weights: the initial parameters, by name.
        gradients: of each step, as full tensors, after all reductions.
        trained: the parameters after the last step, by name.
    """

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    trained: dict[str, Tensor] = field(default_factory=dict)

    def write(self, directory: Path) -> None:
        """Save to ``measurement.json`` and ``measurement.safetensors``."""
        tensors = {f"weights/{name}": tensor for name, tensor in self.weights.items()}
        tensors |= {f"trained/{name}": tensor for name, tensor in self.trained.items()}
        for step, gradients in enumerate(self.gradients):
            tensors |= {f"{step}/{name}": tensor for name, tensor in gradients.items()}
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, directory / "measurement.safetensors")
        # NaN is no JSON, but it is what a broken layout may compute.
        numbers = {"losses": list(map(repr, self.losses)), "grad_norms": list(map(repr, self.grad_norms))}
        (directory / "measurement.json").write_text(json.dumps(numbers))

    @classmethod
    def read(cls, directory: Path) -> Measurement:
        """Read what :meth:`write` has saved."""
        numbers = json.loads((directory / "measurement.json").read_text())
        found = cls(list(map(float, numbers["losses"])), list(map(float, numbers["grad_norms"])))
        found.gradients = [{} for _ in found.losses]
        for key, tensor in load_file(directory / "measurement.safetensors").items():
            where, _, name = key.partition("/")
            named = {"weights": found.weights, "trained": found.trained}
            (named[where] if where in named else found.gradients[int(where)])[name] = tensor
        return found


class Witness:
    """Measuring subscriber: records weights and gradients during a run. Collective, as gathering them is.

    Args:
        topology: this process among others; only the main one keeps anything.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._parameters: Mapping[str, Any] = {}
        self._stage_holders: StageHolders | None = None
        self.measurement = Measurement()

    def subscriptions(self) -> Iterable[tuple[type[Any], Callable[[Any], None]]]:
        """Subscriptions to the ready model, and in each step to the final gradients and the end."""
        return [
            (ev.ModelReady, self._model_ready),
            (ev.OptimizerStepStarts, self._gradients_final),
            (ev.StepEnds, self._step_ends),
        ]

    def finish(self) -> Measurement:
        """Return all that was recorded, and the parameters as they are now."""
        self.measurement.trained = self._whole(self._parameters)
        return self.measurement

    def _model_ready(self, event: ev.ModelReady) -> None:
        self._parameters = dict(event.stage.named_parameters())
        self._stage_holders = event.stage_holders
        self.measurement.weights = self._whole(self._parameters)

    def _gradients_final(self, _event: ev.OptimizerStepStarts) -> None:
        gradients = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        self.measurement.gradients.append(self._whole(gradients))

    def _step_ends(self, event: ev.StepEnds) -> None:
        self.measurement.losses.append(event.result.loss.item())
        self.measurement.grad_norms.append(event.result.grad_norm.item())

    def _whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # Cloned: on a CPU, a full tensor may be the very one that the next step overwrites.
        return {n: t.clone() for n, t in gathered(tensors, self._topology.is_main, self._stage_holders).items()}


def measure(job: Job, topology: Topology, steps: int) -> Measurement:
    """Measure the first steps of a job, without checkpoints, logs or export; only the main rank's result has tensors.

    Collective over all ranks.

    Args:
        job: with clipping switched off, else a gradient of the wrong length would look right.
        topology: this process among others.
        steps: how many.

    Raises:
        D9dError: the job cannot run.
    """
    witness = Witness(topology)
    trainer: Trainer = job.build(lambda _text: None, topology, observers=[witness])
    with trainer.prefetcher as prefetcher:
        for step in range(steps):
            trainer.step(step, prefetcher.next())
    return witness.finish()
