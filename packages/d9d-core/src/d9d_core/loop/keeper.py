"""What a run must remember to continue as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml
from torch import Tensor, nn

from d9d_core.config.job import JobConfig
from d9d_core.errors import CheckpointError
from d9d_core.plugin.manifest import Manifest
from d9d_core.protocols import DataStream, Metric, Optimizer, State
from d9d_core.state.checkpoint import Checkpoint, CheckpointStore
from d9d_core.state.files import write_json, write_text
from d9d_core.state.model import model_tensors
from d9d_core.trackers.hub import TrackerHub


@dataclass
class Progress:
    """Counters of the run.

    Attributes:
        step: optimizer steps done.
        tokens: tokens (or samples) consumed.
        skipped: steps without an update, because something was not finite.
    """

    step: int = 0
    tokens: int = 0
    skipped: int = 0


class Keeper:
    """Saves and restores weights, optimizer, metrics, data position, tracker runs and counters.

    Learning rate and randomness are pure functions of the step, so the step is all they need.
    """

    def __init__(
        self,
        store: CheckpointStore,
        stage: nn.Module,
        optimizer: Optimizer,
        metrics: Mapping[str, Metric],
        stream: DataStream,
        trackers: TrackerHub,
        job: JobConfig,
        manifest: Manifest,
        note: Callable[[str], None],
    ) -> None:
        self.store = store
        self._stage = stage
        self._optimizer = optimizer
        self._metrics = metrics
        self._stream = stream
        self._trackers = trackers
        self._job = job
        self._manifest = manifest
        self._note = note

    def record(self) -> None:
        """Write ``job.yaml``, all defaults filled in, and ``plugins.json`` to the run's directory."""
        directory = self._job.run.directory
        directory.mkdir(parents=True, exist_ok=True)
        resolved = self._job.model_dump(mode="json")
        write_text(directory / "job.yaml", yaml.safe_dump(resolved, sort_keys=False))
        write_json(directory / "plugins.json", {"digest": self._manifest.digest, "plugins": self._manifest.to_json()})

    def save(self, progress: Progress) -> Path:
        """Write a checkpoint of the present state.

        Raises:
            CheckpointError: it could not be written.
        """
        self._trackers.flush()
        values = {
            "data": self._stream.state(),
            "trackers": self._trackers.state(),
            "tokens": progress.tokens,
            "skipped": progress.skipped,
        }
        facts = {"job": self._job.model_dump(mode="json"), "plugins": self._manifest.to_json()}
        return self.store.save(progress.step, self._tensors(), values, facts)

    def restore(self) -> tuple[Progress, Mapping[str, State]]:
        """Continue from the newest usable checkpoint, if there is one and the job wants it.

        Returns:
            The counters, and the states of the trackers to open.

        Raises:
            CheckpointError: no checkpoint fits, or there is one although the job says ``never``.
        """
        resume = self._job.checkpoint.resume
        if resume == "never" and self.store.paths():
            raise CheckpointError(
                f"{self.store.directory} holds checkpoints, but checkpoint.resume is 'never'; "
                "choose another run.name, remove them, or set checkpoint.resume to 'auto'"
            )
        checkpoint = self.store.newest(self._note)
        if checkpoint is None:
            if resume == "must":
                raise CheckpointError(f"{self.store.directory} holds no checkpoint, but checkpoint.resume is 'must'")
            return Progress(), {}
        self._compare(checkpoint)
        tensors = self._tensors()
        checkpoint.load_into(tensors)
        for name, metric in self._metrics.items():
            metric.load_state({key: tensors[f"metrics/{name}/{key}"] for key in metric.state()})
        values = checkpoint.values()
        self._stream.load_state(values["data"])
        return Progress(checkpoint.step, values["tokens"], values["skipped"]), values["trackers"]

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {f"model/{name}": tensor for name, tensor in model_tensors(self._stage).items()}
        tensors |= {f"optimizer/{name}": tensor for name, tensor in self._optimizer.state().items()}
        for name, metric in self._metrics.items():
            tensors |= {f"metrics/{name}/{key}": tensor for key, tensor in metric.state().items()}
        return tensors

    def _compare(self, checkpoint: Checkpoint) -> None:
        here = self._job.model.model_dump(mode="json")
        there = checkpoint.manifest["job"]["model"]
        fields = sorted({*here, *there})
        different = [
            f"model.{f}: {there.get(f)!r} there, {here.get(f)!r} here" for f in fields if here.get(f) != there.get(f)
        ]
        if different:
            raise CheckpointError(
                f"{checkpoint.path} is of another model: {'; '.join(different)}; "
                "restore the model section, or use another run.name"
            )
        saved = Manifest(checkpoint.manifest["plugins"])
        for line in saved.differences(self._manifest, "checkpoint", "now"):
            self._note(f"warning: plugins changed since {checkpoint.path.name}: {line}")
