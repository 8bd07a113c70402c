"""Sections of a job file. Every field with a sensible default has a default."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    Field,
    JsonValue,
    NonNegativeInt,
    PositiveInt,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from d9d_core.config import PathOrAddress, PluginConfig, Section, is_address, speakable
from d9d_core.job_file.evaluation import Evaluation
from d9d_core.job_file.open_union import Named
from d9d_core.job_file.sections.garbage_collection import GarbageCollection
from d9d_core.job_file.sections.kernels import KernelRequest
from d9d_core.job_file.sections.logging import Logging
from d9d_core.job_file.sections.plugins import Plugins
from d9d_core.job_file.sections.profiling import Profiling

__all__ = ["Batch", "Checkpoint", "GradientClipping", "Gradients", "Loading", "Mesh", "Precision", "Run", "Timeouts"]

# float16 would need a loss scaler, which the training loop does not have.
Dtype = Literal["float32", "bfloat16"]
# About three years: timers of some libraries overflow at some hundreds of years.
Seconds = Annotated[float, Field(gt=0, le=1e8, allow_inf_nan=False)]


#: Mesh axes whose size may be ``auto``: the number of processes divided by the sizes of the other axes.
DATA_AXES = frozenset({"dp_replicate", "dp_shard"})
#: Largest number of processes of a mesh; it is limited because every process stores a list of all processes.
MAX_RANKS = 1 << 17
#: Largest number of forward passes in a step on one rank; limited because each is an action of the step's program.
MAX_MICROBATCHES = 1 << 14


class Run(Section):
    """Name, description and directory of a run."""

    name: Annotated[str, Field(pattern=r"^\w[\w.-]*$")] = "run"
    """Name of the run, and of its directory: letters, digits, ``_``, ``-``, and ``.`` except at the beginning."""
    dir: Path = Path("runs")
    """Parent of the run's directory, relative to the working directory."""
    description: str = ""
    """Free text for the trackers."""
    hparams: dict[str, JsonValue] = {}
    """Hyperparameters for the trackers, for example the values that a sweep varies: any names, values may be nested."""
    tags: list[Annotated[str, Field(min_length=1)]] = []
    """Labels for the trackers, by which runs can be found."""

    @field_validator("tags")
    @classmethod
    def _refuse_duplicate_tags(cls, tags: list[str]) -> list[str]:
        if twice := next((tag for tag in tags if tags.count(tag) > 1), None):
            raise ValueError(f"duplicate tag '{twice}'; remove one")
        return tags

    @property
    def directory(self) -> Path:
        """Directory of all files that the run writes."""
        return self.dir / self.name

    @property
    def cache(self) -> Path:
        """Directory of prepared data, shared by all runs with the same parent directory."""
        return self.dir / ".cache"


#: Size of a data-parallel axis. A job file may write ``auto``, which is replaced by a number before validation.
DataSize = Annotated[
    PositiveInt,
    WithJsonSchema({"anyOf": [{"type": "integer", "exclusiveMinimum": 0}, {"const": "auto"}]}),
]


class Mesh(Section):
    """Sizes of the mesh axes. Their product, without ``ep``, is the number of processes."""

    pp: Annotated[PositiveInt, Field(le=4096)] = 1
    """Ranks of the pipeline; each has one or more pipeline stages."""
    dp_replicate: DataSize = 1
    """Replicas of the (sharded) model; this or ``dp_shard`` can be ``auto``."""
    dp_shard: DataSize = 1
    """Ranks that shard the parameters; ``auto`` is the number of processes divided by the sizes of the other axes."""
    cp: PositiveInt = 1
    """Ranks that split each sequence (context parallelism)."""
    tp: PositiveInt = 1
    """Ranks that split each matrix (tensor parallelism)."""
    ep: PositiveInt = 1
    """Ranks that split the experts; they are the ranks of the innermost other axes, so ``ep`` adds no processes."""

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_unresolved_auto(cls, value: Any, info: ValidationInfo) -> Any:
        if value != "auto":
            return value
        if info.context is None:
            raise ValueError("'auto' is resolved only when a job file is read (Job.load); give the number here")
        axes = " or ".join(sorted(DATA_AXES, reverse=True))
        if info.field_name in DATA_AXES:
            raise ValueError(f"auto on two axes: only one of {axes} can be derived from the number of processes")
        raise ValueError(f"auto is possible for {axes} only; give the number")

    @model_validator(mode="after")
    def _check_world_size(self) -> Mesh:
        if self.world_size > MAX_RANKS:
            raise ValueError(f"the mesh has {self.world_size:,} processes; at most {MAX_RANKS:,} are possible")
        return self

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.pp * self.data_parallel_size * self.cp * self.tp

    @property
    def data_parallel_size(self) -> int:
        """Number of processes that see different samples."""
        return self.dp_replicate * self.dp_shard

    def sizes(self) -> dict[str, int]:
        """Sizes of the axes by name."""
        return {name: getattr(self, name) for name in type(self).model_fields}

    def __str__(self) -> str:
        axes = [f"{name}={size}" for name, size in self.sizes().items() if size > 1 and name != "ep"]
        return " x ".join(axes) or "one process"


class Batch(Section):
    """Numbers of samples per optimizer step and per forward pass."""

    size: PositiveInt = 16
    """Samples per optimizer step, over all processes."""
    microbatch: PositiveInt | None = None
    """Samples per forward pass on one process; all of a process's share by default."""
    prefetch: NonNegativeInt = 2
    """Batches that are read and copied to the device ahead of their step; 0 reads each batch when its step begins, for
    data that depends on the previous step."""


class GradientClipping(Section):
    """Clipping of gradients by their global norm."""

    max_norm: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = 1.0
    """Largest gradient norm; larger gradients are scaled down to it. Null disables clipping; the norm is still
    measured."""
    p: Annotated[float, Field(gt=0, allow_inf_nan=True)] = 2.0
    """Order p of the p-norm; ``inf`` is allowed."""


class Gradients(Section):
    """Accumulation of gradients over microbatches, and their all-reduce over ranks."""

    accumulate: Literal["float32"] | None = None
    """Number format in which gradients are accumulated; null uses the parameters' format."""
    bucket_mib: PositiveInt = 32
    """Size in MiB of the buckets in which gradients without FSDP are all-reduced."""


class Best(Section):
    """Retention of the checkpoints at which a logged value, such as the evaluation loss, was best."""

    series: str = "eval/loss"
    """Name of the series, such as ``eval/loss``. A checkpoint is ranked by the last value logged before its save; of
    checkpoints with equal values, the oldest is best."""
    mode: Literal["min", "max"] = "min"
    """Whether smaller (``min``) or larger (``max``) values are better."""
    keep: PositiveInt = 1
    """Number of best checkpoints to keep."""


class Checkpoint(Section):
    """Interval, directory and retention of checkpoints."""

    every: PositiveInt | None = None
    """Steps between two checkpoints; null saves only at the end and on interruption."""
    keep: PositiveInt | None = 2
    """Number of newest checkpoints to keep; null keeps all."""
    keep_every: PositiveInt | None = None
    """Also keep checkpoints whose step is a multiple of this."""
    best: Best | None = None
    """Also keep the best checkpoints, among which ``export: best`` and ``d9d evaluate --checkpoint best`` choose."""
    resume: Literal["auto", "never", "must"] = "auto"
    """``auto`` continues from the newest usable checkpoint if there is one, ``never`` refuses a directory that has a
    checkpoint, ``must`` refuses to start without a checkpoint."""
    asynchronous: bool = True
    """Continue training while a checkpoint is written, from a copy in host memory."""
    tolerate_failures: NonNegativeInt = 10
    """Consecutive storage failures (full disk, input/output errors) that training survives; failed saves are retried
    with growing pauses. One more failure ends the run."""
    trainable_only: bool = False
    """Leave out frozen parameters; a resumed run must load them from another source."""
    dir: PathOrAddress | None = None
    """Directory of the checkpoints: shared by all machines, or an fsspec address such as ``s3://bucket/run``; by
    default, <run>/checkpoints."""

    @model_validator(mode="after")
    def _check_retention(self) -> Checkpoint:
        if self.keep is None and self.keep_every:
            raise ValueError("'keep: null' keeps all checkpoints, so keep_every has no effect; remove one of them")
        if self.keep_every is not None and (self.every is None or self.keep_every % self.every):
            raise ValueError(f"keep_every {self.keep_every} must be a multiple of every, which is {self.every}")
        return self

    def location(self, run: Path) -> Path | str:
        """Path or address of the checkpoints of a run, given the run's directory."""
        if self.dir is None:
            return run / "checkpoints"
        return self.dir if is_address(self.dir) else Path(self.dir)


class Timeouts(Section):
    """Seconds without progress after which a run of several processes counts as hung and ends with a report."""

    startup: Seconds = 600.0
    """Seconds until all processes have started, and until each of them is ready to train."""
    step: Seconds = 600.0
    """Seconds for one step; the first step includes compilation."""
    checkpoint: Seconds = 1800.0
    """Seconds for one checkpoint or export."""


class Loading(Section):
    """Reading of the pretrained weights (``model.pretrained``)."""

    weights: bool = True
    """Load the pretrained weights; false uses only their sizes, tokenizer and settings, and initialises randomly."""
    threads: PositiveInt = 4
    """Concurrent reads per process."""
    read: Literal["each", "once"] = "each"
    """``each``: every process reads the weights that it needs. ``once``: of the processes that need the same weights,
    one reads and sends them to the others, for slow storage and fast networks."""


class Precision(Section):
    """Data types of parameters, gradients and matrix products."""

    parameters: Dtype = "float32"
    """Format of parameters and gradients."""
    autocast: Literal["bfloat16"] | None = None
    """Run matrix products of the forward pass in this format (torch.autocast)."""

    @model_validator(mode="after")
    def _check_autocast(self) -> Precision:
        if self.autocast and self.parameters != "float32":
            raise ValueError(f"autocast is for float32 parameters; parameters is {self.parameters}, so remove autocast")
        return self


class BaseJob(Section):
    """Sections that jobs of every kind have: a model, data, and the layout over processes."""

    _nested: ClassVar[bool] = False

    run: Run = Run()
    """Name and directory of the run."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of initial weights, data order and dropout."""
    device: str = "auto"
    """``auto`` uses the accelerator if there is one, else the CPU; or a device type such as ``cpu`` or ``cuda``."""
    deterministic: bool = False
    """Compute the same bits each time, if necessary with slower algorithms; operations without a deterministic
    algorithm are errors."""
    mesh: Mesh = Mesh()
    """Sizes of the mesh axes."""
    model: Annotated[PluginConfig, Named("model")]
    """Model to train or evaluate."""
    data: Annotated[PluginConfig, Named("dataset")]
    """Dataset of the samples."""
    batch: Batch = Batch()
    """Samples per step."""
    parallel: list[Annotated[PluginConfig, Named("strategy")]] = []
    """Strategies applied to the model."""
    pipeline: Annotated[PluginConfig, Named("schedule")] | None = None
    """Pipeline schedule; null runs the full model on each process."""
    peft: Annotated[PluginConfig, Named("peft method")] | None = None
    """Fine-tuning method; null trains all parameters."""
    precision: Precision = Precision()
    """Number formats."""
    kernels: dict[str, KernelRequest] = {}
    """Op -> name of its backend, or a list of rules, each with a backend for the modules that it matches; backends of
    other ops and modules are chosen automatically."""
    subscribers: list[Annotated[PluginConfig, Named("subscriber")]] = []
    """Observers of the events of the run."""
    loading: Loading = Loading()
    """Reading of the pretrained weights."""
    timeouts: Timeouts = Timeouts()
    """Limits on the time that ranks wait for each other."""
    plugins: Plugins = Plugins()
    """Plugins that may be loaded."""

    @classmethod
    def _owner(cls, info: ValidationInfo) -> str:  # noqa: ARG003
        return "the job file"

    @model_validator(mode="after")
    def _refuse_duplicates(self) -> Self:
        for section in ("parallel", "metrics", "trackers", "subscribers"):
            parts = getattr(self, section, [])
            for index, part in enumerate(parts):
                first = parts.index(part)
                if first != index:
                    raise ValueError(f"{section}[{index}] is the same as {section}[{first}]; remove one")
        names = [tracker.selector for tracker in getattr(self, "trackers", [])]
        for index, name in enumerate(names):
            if (first := names.index(name)) != index:
                raise ValueError(
                    f"trackers[{index}] is '{name}' like trackers[{first}]: both would write to the same place and "
                    "continue the same saved run; keep one of them, with the fields of both"
                )
        return self

    def resolved(self) -> dict[str, Any]:
        """All values, defaults included, as JSON values; reading them gives an equal job."""
        values: dict[str, Any] = speakable(self.model_dump(mode="json"))
        return values

    @property
    def microbatch_size(self) -> int:
        """Samples per forward pass on one process."""
        return self.batch.microbatch or self.batch.size // self.mesh.data_parallel_size

    @property
    def microbatches(self) -> int:
        """Forward passes per optimizer step on one process."""
        return self.batch.size // self.mesh.data_parallel_size // self.microbatch_size


class JobConfig(BaseJob):
    """Job file of training. :class:`d9d_engine.job.Job` can run it."""

    task: Annotated[PluginConfig, Named("task")]
    """Task to learn."""
    epochs: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Passes over the data, in place of ``steps``; 0.5 is half a pass. The number of steps is known once the data is
    open."""
    steps: PositiveInt | None = Field(default=None, validate_default=True)
    """Optimizer steps of the whole run; give either this or ``epochs``."""
    optimizer: Annotated[PluginConfig, Named("optimizer")]
    """Optimizer."""
    lr_schedule: Annotated[PluginConfig, Named("lr schedule")] | None = None
    """Learning-rate schedule; null keeps the rate constant."""
    gradient_clipping: GradientClipping = GradientClipping()
    """Limit on the gradient norm."""
    gradients: Gradients = Gradients()
    """Accumulation and all-reduce of gradients."""
    nonfinite: Literal["error", "skip"] = "error"
    """Policy for a step with a NaN or infinite loss or gradient; such a step never changes the training state."""
    max_skipped: PositiveInt = 10
    """Number of consecutive skipped steps at which a run with ``nonfinite: skip`` ends with an error. Two checkpoints
    are kept in addition: the last one before the run's first skipped step and, while steps are skipped, the last one
    before these steps."""
    metrics: list[Annotated[PluginConfig, Named("metric")]] = []
    """Metrics that are computed over all training steps since the previous logged step."""
    trackers: list[Annotated[PluginConfig, Named("tracker")]] = Field(
        default=[], json_schema_extra={"default": ["console", "jsonl"]}
    )
    """Destinations of logged values."""
    logging: Logging = Logging()
    """Interval of logging, device statistics to log, and level of log messages."""
    evaluation: Evaluation | None = None
    """Evaluation on other data during training."""
    profiling: Profiling | None = None
    """Traces of some steps; null disables them."""
    garbage_collection: GarbageCollection = GarbageCollection()
    """Schedule of Python's garbage collection."""
    checkpoint: Checkpoint = Checkpoint()
    """Interval, directory and retention of checkpoints."""
    export: Literal["adapter", "best"] | bool = True
    """Write the trained model in Hugging Face layout to <run>/model at the end, and the adapter, if the fine-tuning
    method has one, to <run>/adapter; ``adapter`` writes only the adapter, and ``best`` both with the weights of the
    best checkpoint: see ``checkpoint.best``, by default the lowest ``eval/loss``."""

    @model_validator(mode="before")
    @classmethod
    def _choose_by_evaluation_loss(cls, values: Any) -> Any:
        """Set ``checkpoint.best`` to its defaults if ``export: best`` needs it and the job does not set it."""
        checkpoint = (
            values.get("checkpoint", {}) if isinstance(values, dict) and values.get("export") == "best" else None
        )
        if not isinstance(checkpoint, dict) or checkpoint.get("best") is not None:
            return values
        return {**values, "checkpoint": {**checkpoint, "best": {}}}

    @model_validator(mode="after")
    def _check_best_export(self) -> Self:
        if self.export != "best":
            return self
        best, every, evaluation = self.checkpoint.best, self.checkpoint.every, self.evaluation
        if best is None:
            raise ValueError("'export: best' needs a series to compare; set checkpoint.best")
        compares = best.series.startswith("eval/")
        if compares and evaluation is None:
            raise ValueError(
                f"'export: best' compares '{best.series}', but the job has no evaluation; add a section evaluation, or "
                "set export: true"
            )
        if every is None:
            suggested = evaluation.every if evaluation is not None else 100
            raise ValueError(
                "'export: best' chooses among checkpoints, but the job saves only its last step; set "
                f"checkpoint.every: {suggested}"
            )
        if compares and evaluation is not None and every % evaluation.every and evaluation.every % every:
            raise ValueError(
                f"'export: best' needs checkpoints of evaluated steps, but checkpoint.every {every} and "
                f"evaluation.every {evaluation.every} are not multiples; set checkpoint.every: {evaluation.every}"
            )
        return self

    @field_validator("export", mode="before")
    @classmethod
    def _is_known_export(cls, export: Any) -> Any:
        if isinstance(export, bool) or export in ("adapter", "best"):
            return export
        raise ValueError(f"should be true, false, adapter or best, got {export!r}; exports have Hugging Face layout")

    @field_validator("steps")
    @classmethod
    def _require_steps_or_epochs(cls, steps: int | None, info: ValidationInfo) -> int | None:
        epochs = info.data.get("epochs")
        if steps is None and "epochs" in info.data and epochs is None:
            raise ValueError("the length of the run is missing; add 'steps:' or 'epochs:' to the job file")
        if steps is not None and epochs is not None:
            raise ValueError(
                f"steps and 'epochs: {epochs:g}' both give the length of the run; remove one of them, on the command "
                "line by --set epochs=null or --set steps=null"
            )
        return steps
