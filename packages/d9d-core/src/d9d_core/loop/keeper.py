"""What a run must remember to continue as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor, nn

from d9d_core.config.job import JobConfig
from d9d_core.errors import CheckpointError
from d9d_core.loop.statistics import Statistics
from d9d_core.plugin.manifest import Manifest
from d9d_core.protocols import DataStream, Optimizer, State
from d9d_core.state.checkpoint import Checkpoint, CheckpointStore
from d9d_core.state.files import write_json, write_text
from d9d_core.state.model import model_tensors
from d9d_core.trackers.hub import TrackerHub

_MODEL, _OPTIMIZER, _METRICS = "model/", "optimizer/", "metrics/"
#: Fields of the job that a resumed run may not change: the weights' meaning and the order of the data depend on them.
_FIXED = ("model.", "seed", "precision.parameters")


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
        statistics: Statistics,
        stream: DataStream,
        trackers: TrackerHub,
        job: JobConfig,
        manifest: Manifest,
        note: Callable[[str], None],
    ) -> None:
        self.store = store
        self._stage = stage
        self._optimizer = optimizer
        self._statistics = statistics
        self._stream = stream
        self._trackers = trackers
        self._job = job
        self._manifest = manifest
        self._note = note

    def record(self) -> None:
        """Write ``job.yaml``, all defaults filled in, and ``plugins.json`` to the run's directory."""
        directory = self._job.run.directory
        directory.mkdir(parents=True, exist_ok=True)
        resolved = self._job.resolved()
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
        facts = {"job": self._job.resolved(), "plugins": self._manifest.to_json()}
        return self.store.save(progress.step, self.tensors(), values, facts)

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
        self._load(checkpoint)
        values = checkpoint.values()
        self._stream.load_state(values["data"])
        for path in self.store.set_aside(newer_than=checkpoint.step):
            self._note(f"warning: a damaged checkpoint was set aside as {path}")
        return Progress(checkpoint.step, values["tokens"], values["skipped"]), values["trackers"]

    def tensors(self) -> dict[str, Tensor]:
        """Everything on the device that a checkpoint holds, under the names it has there."""
        parts = {
            _MODEL: model_tensors(self._stage),
            _OPTIMIZER: self._optimizer.state(),
            _METRICS: self._statistics.tensors(),
        }
        return {scope + name: tensor for scope, tensors in parts.items() for name, tensor in tensors.items()}

    def _load(self, checkpoint: Checkpoint) -> None:
        tensors = self.tensors()
        for scope in (_MODEL, _OPTIMIZER):
            part = {name: tensor for name, tensor in tensors.items() if name.startswith(scope)}
            checkpoint.load_into(part, scope)

        def known(metric: str, state: Mapping[str, Tensor]) -> bool:
            scope = f"{_METRICS}{metric}/"
            try:
                checkpoint.load_into({scope + key: tensor for key, tensor in state.items()}, scope)
            except CheckpointError:
                return False
            return True

        for name in self._statistics.load(known):
            self._note(f"warning: metric '{name}' is not in {checkpoint.path.name} and starts anew")

    def _compare(self, checkpoint: Checkpoint) -> None:
        here, there = (_flat(job) for job in (self._job.resolved(), checkpoint.manifest["job"]))
        changed = {f: (there.get(f), here.get(f)) for f in sorted({*here, *there}) if there.get(f) != here.get(f)}
        refused = [f"{f}: {a!r} there, {b!r} here" for f, (a, b) in changed.items() if f.startswith(_FIXED)]
        if refused:
            what = "another model" if any(line.startswith("model.") for line in refused) else "another run"
            raise CheckpointError(
                f"{checkpoint.path} is of {what}: {'; '.join(refused)}; restore the job, or use another run.name"
            )
        for field, (before, now) in changed.items():
            self._note(f"changed since {checkpoint.path.name}: {field}: {before!r} -> {now!r}")
        saved = Manifest(checkpoint.manifest["plugins"])
        for line in saved.differences(self._manifest, "checkpoint", "now"):
            self._note(f"warning: plugins changed since {checkpoint.path.name}: {line}")


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted fields; lists stay whole."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
