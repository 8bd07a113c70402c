"""Checkpointer of a run: saves and restores all state that the run needs to continue exactly."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from d9d_core.config import ModelConfig
from d9d_core.errors import CheckpointError, TrainingError
from d9d_core.events import SaveReport
from d9d_core.job_file.job import JobConfig
from d9d_core.optimizer import AveragesWeights, Optimizer
from d9d_core.registry.manifest import Manifest
from d9d_core.schedule import Program
from d9d_core.subscriber import StatefulSubscriber
from d9d_core.tensors import local
from d9d_core.types import State
from d9d_weights.checkpoint.manifest import are_losses
from d9d_weights.checkpoint.manifest_model import average_of
from d9d_weights.checkpoint.names import folder
from d9d_weights.progress import ByteBar, waiting
from d9d_weights.sharding.agreement import on_main
from d9d_weights.sharding.collectives import all_gather_objects
from d9d_weights.sharding.model_tensors import model_tensors
from d9d_weights.sharding.shards import ReplicaSlice
from torch import Tensor, nn

from d9d_engine.checkpoint.retention import BestOf, Retention
from d9d_engine.checkpoint.saved import Checkpoint
from d9d_engine.checkpoint.store import CheckpointStore
from d9d_engine.distributed.mesh import Topology
from d9d_engine.run.directory import read_ending, write_ending, write_start
from d9d_engine.run.logbook import Skips, is_state
from d9d_engine.run.prefetch import DevicePrefetcher
from d9d_engine.step.metrics import Statistics
from d9d_engine.step.ownership import Ownership
from d9d_engine.step.replicas import Replicas
from d9d_engine.step.tied import Ties
from d9d_engine.trackers.hub import TrackerHub

_MODEL, _OPTIMIZER, _METRICS = "model/", "optimizer/", "metrics/"
T = TypeVar("T")
#: Prefixes of tensor names in a checkpoint: tensors of replicas that take their own steps, with one row per replica;
#: and tensors of the strategy that makes such replicas equal.
_REPLICAS, _STRATEGY = "replicas/", "strategy/"
#: Fields of the job that a resumed run may not change: weights and data order depend on them.
_FIXED = ("model.", "seed", "precision.parameters")
#: Fields of the model that may change: the checkpoint has the weights. ModelConfig.free_on_resume adds further ones.
_FREE = frozenset({"pretrained"})


@dataclass
class Progress:
    """Counters of a run and its last logged values, as saved in checkpoints.

    Attributes:
        step: number of optimizer steps done.
        tokens: number of tokens (or samples) consumed.
        skips: counts of the steps that were skipped because of non-finite values.
        logged: last value of each logged series; in a resumed run, initially :meth:`losses` of its checkpoint.
        trained_by: job of the checkpoint, if it differs from the run's job and no step was trained since.
        chosen: reason why a checkpoint was chosen for the export; ``None`` for the last step.
    """

    step: int = 0
    tokens: int = 0
    skips: Skips = field(default_factory=Skips)
    logged: dict[str, float] = field(default_factory=dict)
    trained_by: Mapping[str, Any] | None = None
    chosen: str | None = None

    def losses(self) -> dict[str, float]:
        """Last losses and evaluation values, which, unlike other logged values, are equal in repeated runs."""
        return {
            name: value
            for name, value in self.logged.items()
            if (name == "loss" or name.startswith(("loss/", "eval/"))) and math.isfinite(value)
        }


def processes_of(job: Mapping[str, Any]) -> int | None:
    """Number of processes of a saved job, from its mesh; ``None`` if it cannot be known."""
    mesh = job.get("mesh")
    if not isinstance(mesh, Mapping):
        return None
    sizes = [size for axis, size in mesh.items() if axis != "ep" and type(size) is int]
    return math.prod(sizes) if len(sizes) == len({*mesh} - {"ep"}) else None


def open_store(
    job: JobConfig,
    topology: Topology,
    note: Callable[[str], None] = lambda _text: None,
    write: bool = True,
    owning: bool = False,
) -> CheckpointStore:
    """Open the checkpoint store of a job's run. Collective over all ranks.

    Args:
        job: validated job.
        topology: rank, device, meshes and process groups of this process.
        note: prints a line about repeated saves.
        write: whether to check that checkpoints can be written.
        owning: whether to take ownership of the directory now.

    Raises:
        CheckpointError: the directory cannot be written or is not shared, or another process owns it.
    """
    wanted = job.checkpoint.best
    best = BestOf(wanted.series, wanted.mode, wanted.keep) if wanted else None
    retention = Retention(job.checkpoint.keep, job.checkpoint.keep_every, best)
    location = job.checkpoint.location(job.run.directory)
    timeout = timedelta(seconds=job.timeouts.checkpoint)
    tolerate = job.checkpoint.tolerate_failures
    store = CheckpointStore(location, retention, topology, job.checkpoint.asynchronous, timeout, tolerate, note)
    if write:
        store.prepare()
    if owning:
        store.own()
    return store


class Checkpointer:
    """Saves and restores weights, optimizer state, metrics, data position, tracker runs and counters.

    Learning rate and random seeds are pure functions of the step, which is saved.
    """

    def __init__(
        self,
        store: CheckpointStore,
        stage: nn.Module,
        ties: Ties,
        optimizer: Optimizer,
        statistics: Statistics,
        stream: DevicePrefetcher,
        trackers: TrackerHub,
        job: JobConfig,
        manifest: Manifest,
        note: Callable[[str], None],
        stateful: Mapping[str, StatefulSubscriber] | None = None,
        resynchronise: Sequence[Callable[[], None]] = (),
        replicas: Replicas | None = None,
        programs: Sequence[Program] = (),
        save_assets: Callable[[Path], None] = lambda _directory: None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        self.store = store
        self._stage = stage
        self._ties = ties
        self._optimizer = optimizer
        self._statistics = statistics
        self._stream = stream
        self._trackers = trackers
        self._job = job
        self._manifest = manifest
        self._programs = programs
        self._save_assets = save_assets
        self._facts = facts or {}
        self._note = note
        self._stateful = dict(stateful or {})
        self._said_unscored = False
        self._resynchronise = resynchronise
        self._replicas = replicas or Replicas({}, Ownership({}), store.topology)

    def record(self, step: int, trains: bool) -> None:
        """Write the job and its plugins to the run's directory; see :func:`~d9d_engine.run.directory.write_start`.

        Collective over all ranks.

        Raises:
            CheckpointError: a file cannot be written.
        """
        written = (self._job, self._manifest, self._programs, self._save_assets, step, trains, self._facts)
        on_main(lambda: write_start(*written), self.store.group)

    @property
    def has_ended(self) -> bool:
        """Whether the run's directory says that the run is finished. Collective over all ranks."""
        return bool(on_main(lambda: read_ending(self._job.run.directory) is not None, self.store.group))

    def record_end(self, step: int, total: int, reason: str | None) -> None:
        """Write to the run's directory that the run is finished; see :func:`~d9d_engine.run.directory.write_ending`.

        No effect if the directory already says that the run is finished, because then this start has trained no step.
        Collective over all ranks.

        Raises:
            CheckpointError: the file cannot be written.
        """
        if not self.has_ended:
            on_main(lambda: write_ending(self._job.run.directory, step, max(step, total), reason), self.store.group)

    def make_replicas_equal(self) -> None:
        """Before a save or evaluation, make replicas equal that a strategy lets diverge. Collective over all ranks."""
        for resynchronise in self._resynchronise:
            resynchronise()

    def save(
        self,
        progress: Progress,
        wait: bool = False,
        tell: Callable[[int, int], None] = lambda _done, _total: None,
    ) -> bool:
        """Save the current state. Collective over all ranks.

        :meth:`poll` reports the completed checkpoint. Parameters and optimizer state must not change until
        :meth:`before_mutation` is called.

        Args:
            progress: counters and logged values.
            wait: return after the checkpoint is written.
            tell: called in the writing thread with the bytes that this rank has written, and with the size of its file.

        Returns:
            Whether the checkpoint is written or being written. False: the storage failed, and ``tolerate_failures`` of
            the job allows a further attempt, so save again later.

        Raises:
            CheckpointError: all allowed attempts have failed, for this save (unless it continues in the background) or
                for the previous save.
        """
        self.make_replicas_equal()
        trackers = self._trackers.request_state()
        values = {"data": self._stream.state(), **self.values(progress)}
        facts = {
            "job": self._job.resolved(),
            "plugins": self._manifest.to_json(),
            "left_out": self._left_out_anywhere(),
            **average_of(self._optimizer),
        }
        tensors = self.tensors()
        return self.store.save(
            progress.step,
            tensors,
            values,
            facts,
            # A forward may change buffers and metrics; parameters and moments change in the optimizer's step only.
            volatile=tensors.keys() - self._changed_by_optimizer(),
            # While steps are skipped, the last value was measured for an earlier checkpoint, so this one gets no value.
            score=None if progress.skips.in_a_row else self._score(progress.logged),
            kept_before=progress.skips.kept_before,
            wait=wait,
            late_values=lambda: {"trackers": trackers()},
            tell=tell,
        )

    def values(self, progress: Progress) -> dict[str, Any]:
        """JSON values of a checkpoint, without the position in the data and the state of trackers."""
        return {
            "tokens": progress.tokens,
            "skipped": progress.skips.total,
            "skips": progress.skips.state(),
            "losses": progress.losses(),
            "subscribers": {name: subscriber.state() for name, subscriber in self._stateful.items()},
        }

    def job_values(self) -> dict[str, Any]:
        """Resolved job without the section ``run``, which differs between elastic replicas."""
        return {name: value for name, value in self._job.resolved().items() if name != "run"}

    def live_tensors(self) -> dict[str, Tensor]:
        """Local tensors of this rank for another replica; see :meth:`d9d_core.elastic.LiveState.tensors`."""
        constant = self._changed_by_optimizer()
        weights = {name: local(tensor).detach() for name, tensor in self._weights().items()}
        kept = {name: tensor if name in constant else tensor.clone() for name, tensor in weights.items()}
        return kept | _prefixed(_METRICS, self._statistics.own())

    def take_live(self, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Progress:
        """Continue from the state of another replica; see :meth:`d9d_core.elastic.LiveState.take`.

        Raises:
            TrainingError: the other replica trains another job.
        """
        here, there = _flat(self.job_values()), _flat(values["job"])
        if changed := [f for f in sorted({*here, *there}) if here.get(f) != there.get(f)]:
            listed = "; ".join(f"{f}: {there.get(f)!r} there, {here.get(f)!r} here" for f in changed)
            raise TrainingError(f"another replica trains another job: {listed}; start all replicas with the same job")
        self.before_mutation()
        for name, tensor in self._weights().items():
            local(tensor).detach().copy_(tensors[name])
        self._ties.copy_values()
        self._statistics.take_own({name.removeprefix(_METRICS): tensor for name, tensor in tensors.items()})
        self._stream.load_state(values["data"])
        for name, subscriber in self._stateful.items():
            subscriber.load_state(values["subscribers"][name])
        return Progress(values["step"], values["tokens"], Skips.of(values["skips"]), dict(values["losses"]))

    def before_mutation(self) -> None:
        """Make the device wait for a save's copies; call it before parameters or optimizer state change."""
        self.store.before_mutation()

    def poll(self) -> list[SaveReport]:
        """Reports of the saves that succeeded since the last call. Does not wait."""
        reports = self.store.poll()
        for report in reports:
            if report.warning:
                self._note(f"warning: {report.warning}")
        return reports

    def wait(self) -> None:
        """Wait for a running save. Collective over all ranks.

        Raises:
            CheckpointError: the save failed.
        """
        self.store.wait()

    def restore(self) -> tuple[Progress, Mapping[str, State]]:
        """Restore the newest usable checkpoint, if there is one and the job allows it. Collective over all ranks.

        Returns:
            Counters of the run, and the saved states from which its trackers are opened.

        Raises:
            CheckpointError: all checkpoints are damaged, the newest usable one does not fit the job, one exists
                although ``checkpoint.resume`` is ``never``, or none exists although it is ``must``.
        """
        resume = self._job.checkpoint.resume
        if resume == "never" and self.store.steps():
            raise CheckpointError(
                f"{self.store.directory} holds checkpoints, but checkpoint.resume is 'never'; "
                "choose another run.name, remove them, or set checkpoint.resume to 'auto'"
            )
        with waiting("verifying the checkpoint", shown=self.store.topology.is_main):
            checkpoint = self.store.newest(self._note)
        if checkpoint is None and resume == "must":
            raise CheckpointError(
                f"{self.store.directory} holds no checkpoint, but checkpoint.resume is 'must'; correct run.name and "
                "run.dir, or set checkpoint.resume to 'auto'"
            )
        progress, trackers = (Progress(), {}) if checkpoint is None else self._continue(checkpoint)
        if self._job.checkpoint.every is not None and self._job.checkpoint.asynchronous:
            large = self._changed_by_optimizer() - self._left_out()
            self.store.reserve({name: tensor for name, tensor in self._saved_weights().items() if name in large})
        return progress, trackers

    @contextmanager
    def best_weights(self, progress: Progress) -> Iterator[Progress]:
        """Load the best checkpoint's weights into the model inside the block, and the last step's weights after it.

        Collective over all ranks. After a failure inside the block, the model keeps the best checkpoint's weights.

        Args:
            progress: counters of the last step, which is saved.

        Yields:
            The counters of the best checkpoint, or ``progress`` if no checkpoint has a value to compare.

        Raises:
            CheckpointError: a checkpoint could not be read.
        """
        best, found = self._job.checkpoint.best, self.store.best()
        if best is None or found is None:
            series = "no series" if best is None else f"'{best.series}'"
            self._note(
                f"warning: export: no checkpoint has a value of {series}; the weights of the last step are exported"
            )
            yield progress
            return
        step, value = found
        chosen = f"step {step:,} of {progress.step:,}, with the best {best.series} ({value:.4g})"
        self._note(f"export: {chosen}")
        if step == progress.step:
            yield replace(progress, chosen=chosen)
            return
        checkpoint = self.store.open(folder(step))
        values = checked_values(checkpoint.values(), checkpoint.location)
        self._load_evaluated(checkpoint)
        yield Progress(step, values["tokens"], Skips(), values.get("losses", {}), progress.trained_by, chosen)
        last = self.store.open(folder(progress.step))
        self._load_evaluated(last)
        self._load_own_parameters(last)

    def tensors(self) -> dict[str, Tensor | ReplicaSlice]:
        """Tensors that a checkpoint holds, by their names in the checkpoint. Collective over all ranks."""
        left_out = self._left_out()
        return {name: tensor for name, tensor in self._everything().items() if name not in left_out}

    def _everything(self) -> dict[str, Tensor | ReplicaSlice]:
        return {**self._saved_weights(), **_prefixed(_METRICS, self._statistics.tensors())}

    def _saved_weights(self) -> dict[str, Tensor | ReplicaSlice]:
        """Weights and optimizer state for a checkpoint: of each replica, if replicas take their own steps.

        Such a checkpoint also has the means of the replicas' weights, under the names that readers without replicas
        use. Collective over the replicas.
        """
        replicas = self._replicas
        if not replicas.kept:
            return {**self._weights()}
        return {
            **_prefixed(_MODEL, {**model_tensors(self._stage), **replicas.means()}),
            **_prefixed(_REPLICAS + _MODEL, replicas.slices(replicas.parameters())),
            **_prefixed(_REPLICAS + _OPTIMIZER, replicas.slices(self._optimizer_state())),
            **_prefixed(_STRATEGY, replicas.state()),
        }

    def _weights(self) -> dict[str, Tensor]:
        return {**_prefixed(_MODEL, model_tensors(self._stage)), **_prefixed(_OPTIMIZER, self._optimizer_state())}

    def _optimizer_state(self) -> dict[str, Tensor]:
        """Optimizer state of this rank, without states of other ranks' parameters, which are on the meta device."""
        return {key: tensor for key, tensor in self._optimizer.state().items() if tensor.device.type != "meta"}

    def _left_out(self) -> set[str]:
        if not self._job.checkpoint.trainable_only:
            return set()
        return {_MODEL + name for name, p in self._stage.named_parameters() if not p.requires_grad}

    def _left_out_anywhere(self) -> list[str]:
        """Names of the tensors left out by any pipeline rank. Collective if ``checkpoint.trainable_only`` is set."""
        own = sorted(self._left_out())
        if not self._job.checkpoint.trainable_only or self.store.group is None:
            return own
        return sorted({name for names in all_gather_objects(own, self.store.group) for name in names})

    def _changed_by_optimizer(self) -> set[str]:
        parameters = {_MODEL + name for name, _ in self._stage.named_parameters()}
        own = _REPLICAS if self._replicas.kept else ""
        state = {own + _OPTIMIZER + key for key in self._optimizer_state()}
        of_replicas = {_REPLICAS + _MODEL + name for name in self._replicas.parameters()}
        return parameters | state | of_replicas | {_STRATEGY + name for name in self._replicas.state()}

    def _score(self, logged: Mapping[str, float]) -> float | None:
        best = self._job.checkpoint.best
        if best is None:
            return None
        if best.series not in logged and not self._said_unscored:
            self._said_unscored = True
            self._note(
                f"warning: checkpoint.best.series: '{best.series}' was not logged yet, so this checkpoint cannot be "
                f"the best one; logged are: {', '.join(sorted(logged)) or 'none'}"
            )
        score = logged.get(best.series)
        return score if score is not None and math.isfinite(score) else None

    def _continue(self, checkpoint: Checkpoint) -> tuple[Progress, Mapping[str, State]]:
        if missing := [name for name in ("job", "plugins") if checkpoint.manifest.get(name) is None]:
            raise CheckpointError(
                f"{checkpoint.location}: the manifest has no entry {' and '.join(map(repr, missing))}, so d9d train "
                "did not "
                "write this checkpoint; use another run.name"
            )
        self._compare(checkpoint)
        values = checked_values(checkpoint.values(), checkpoint.location)
        self._load(checkpoint)
        try:
            self._stream.load_state(values["data"])
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            raise CheckpointError(
                f"{checkpoint.location} has a position in the data that the dataset cannot read "
                f"({type(error).__name__}: {error}); continue with the dataset of the saved run"
            ) from error
        if self._replicas.kept and not _replicas_in(checkpoint):
            self._note(f"{checkpoint.name} has one state for all replicas, and each of them starts from it")
        for location in self.store.set_aside(newer_than=checkpoint.step):
            self._note(f"warning: a damaged checkpoint was set aside as {location}")
        skips = Skips.of(values["skips"]) if "skips" in values else Skips(total=values["skipped"])
        if warning := self.store.prune(checkpoint.step, skips.kept_before):
            self._note(f"warning: {warning}")
        for name, subscriber in self._stateful.items():
            if name in values.get("subscribers", {}):
                subscriber.load_state(values["subscribers"][name])
        job = checkpoint.manifest["job"]
        trained_by = None if job == self._job.resolved() else job
        progress = Progress(checkpoint.step, values["tokens"], skips, values.get("losses", {}), trained_by)
        return progress, values["trackers"]

    def _load_evaluated(self, checkpoint: Checkpoint) -> None:
        """Load the weights, and the optimizer's state if evaluation weights are computed from it."""
        self.before_mutation()
        self._replicas.differ = False  # all replicas load one model
        self._load_weights(
            checkpoint, (_MODEL, _OPTIMIZER) if isinstance(self._optimizer, AveragesWeights) else (_MODEL,)
        )

    def _load_weights(self, checkpoint: Checkpoint, scopes: Sequence[str]) -> None:
        tensors = self._weights()
        may_lack = self._left_out() & set(checkpoint.manifest.get("left_out", ()))
        size = sum(local(one).nbytes for name, one in tensors.items() if name.startswith(tuple(scopes)))
        with ByteBar("loading checkpoint", size, shown=self.store.topology.is_main) as bar:
            for scope in scopes:
                part = {name: tensor for name, tensor in tensors.items() if name.startswith(scope)}
                checkpoint.load_into(part, scope, may_lack, on_bytes=bar.add)
        self._ties.copy_values()

    def _load_replicas(self, checkpoint: Checkpoint) -> None:
        """Load the state of this rank's replica, and the tensors of the strategy. Collective over all ranks."""
        replicas, there = self._replicas, _replicas_in(checkpoint)
        here = replicas.count if replicas.kept else 1
        if there not in (0, here):
            raise CheckpointError(
                f"{checkpoint.location} keeps the optimizer states of {there} replicas that took their own steps, but "
                f"this job has {here}; set mesh.dp_replicate to {there}, with the strategy of that run, or start "
                "another run whose model.pretrained is this checkpoint"
            )
        if there:
            self._load_weights(checkpoint, (_MODEL,))
            replicas.start()
            scope = _REPLICAS + _OPTIMIZER
            checkpoint.load_into(_prefixed(scope, replicas.slices(self._optimizer_state())), scope)
            state = replicas.state()
            if state and any(name.startswith(_STRATEGY) for name in checkpoint.manifest["tensors"]):
                checkpoint.load_into(_prefixed(_STRATEGY, state), _STRATEGY)
            self._load_own_parameters(checkpoint)
        else:
            self._load_weights(checkpoint, (_MODEL, _OPTIMIZER))
            replicas.start()

    def _load_own_parameters(self, checkpoint: Checkpoint) -> None:
        """Load the parameters of this rank's replica, if the replicas differed when the checkpoint was saved."""
        scope = _REPLICAS + _MODEL
        self._replicas.differ = any(name.startswith(scope) for name in checkpoint.manifest["tensors"])
        if self._replicas.differ:
            checkpoint.load_into(_prefixed(scope, self._replicas.slices(self._replicas.parameters())), scope)
            self._ties.copy_values()

    def _load(self, checkpoint: Checkpoint) -> None:
        self._load_replicas(checkpoint)

        def known(metric: str, state: Mapping[str, Tensor]) -> bool:
            scope = f"{_METRICS}{metric}/"
            try:
                checkpoint.load_into({scope + key: tensor for key, tensor in state.items()}, scope)
            except CheckpointError:
                return False
            return True

        for name in self._statistics.load(known):
            self._note(f"warning: metric '{name}' has no fitting state in {checkpoint.name} and starts anew")

    def _compare(self, checkpoint: Checkpoint) -> None:
        here, there = (_flat(job) for job in (self._job.resolved(), checkpoint.manifest["job"]))
        changed = {f: (there.get(f), here.get(f)) for f in sorted({*here, *there}) if there.get(f) != here.get(f)}
        model = self._job.model
        free = _FREE | model.free_on_resume if isinstance(model, ModelConfig) else _FREE
        fixed = {f: values for f, values in changed.items() if f.startswith(_FIXED) and not _is_of_model(f, free)}
        refused = [f"{f}: {a!r} there, {b!r} here" for f, (a, b) in fixed.items()]
        if refused:
            what = "another model" if any(line.startswith("model.") for line in refused) else "another run"
            raise CheckpointError(
                f"{checkpoint.location} is of {what}: {'; '.join(refused)}; restore the job, or use another run.name"
            )
        if isinstance(model, ModelConfig):
            try:
                model.check_resume(checkpoint.manifest["job"]["model"])
            except ValueError as error:
                raise CheckpointError(f"{checkpoint.location} is of another model: model.{error}") from None
        for name, (before, now) in changed.items():
            self._note(f"changed since {checkpoint.name}: {name}: {before!r} -> {now!r}")
        saved = Manifest(checkpoint.manifest["plugins"])
        for line in saved.differences(self._manifest, "checkpoint", "now"):
            self._note(f"warning: plugins changed since {checkpoint.name}: {line}")


def checked_values(values: Mapping[str, Any], location: str) -> Mapping[str, Any]:
    """Check the types of a checkpoint's values, and return the values.

    Raises:
        CheckpointError: a value is missing or has a wrong type.
    """
    kinds = {"data": dict, "tokens": int, "skipped": int, "trackers": dict}
    wrong = [name for name, kind in kinds.items() if type(values.get(name)) is not kind]
    wrong += [name for name in ("tokens", "skipped") if name not in wrong and values[name] < 0]
    wrong += ["trackers"] if "trackers" not in wrong and not all(map(_is_table, values["trackers"].values())) else []
    subscribers = values.get("subscribers", {})  # checkpoints of older versions have none
    sound = isinstance(subscribers, dict) and all(map(_is_table, subscribers.values()))
    wrong += [] if sound else ["subscribers"]
    wrong += ["skips"] if not is_state(values.get("skips", Skips().state())) else []  # older versions wrote none
    wrong += ["losses"] if not are_losses(values.get("losses", {})) else []  # older versions wrote none
    if wrong:
        raise CheckpointError(f"{location}: state.json has no usable {', '.join(wrong)}; copy the checkpoint again")
    return values


def _is_table(value: object) -> bool:
    return isinstance(value, dict)


def _replicas_in(checkpoint: Checkpoint) -> int:
    """Number of replicas whose states a checkpoint keeps; 0 if it keeps one state for all ranks."""
    shapes = (entry["shape"] for name, entry in checkpoint.manifest["tensors"].items() if name.startswith(_REPLICAS))
    return next((int(shape[0]) for shape in shapes), 0)


def _prefixed(scope: str, tensors: Mapping[str, T]) -> dict[str, T]:
    return {scope + name: tensor for name, tensor in tensors.items()}


def _is_of_model(field: str, names: Collection[str]) -> bool:
    section, _, rest = field.partition(".")
    return section == "model" and rest.partition(".")[0] in names


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings to dotted fields; lists are kept."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
