"""Sections of a job file. Every field with a sensible default has one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

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
from d9d_core.job_file.sections.logging import Logging
from d9d_core.job_file.sections.plugins import Plugins
from d9d_core.job_file.sections.profiling import Profiling

__all__ = ["Batch", "Checkpoint", "GradientClipping", "Gradients", "Loading", "Mesh", "Precision", "Run", "Timeouts"]

# float16 would need a loss scaler, which the loop does not have.
Dtype = Literal["float32", "bfloat16"]
# Three years: clocks of libraries overflow at some hundreds.
Seconds = Annotated[float, Field(gt=0, le=1e8, allow_inf_nan=False)]


#: Mesh axes of which one can be ``auto``: what the other axes leave of the processes.
DATA_AXES = frozenset({"dp_replicate", "dp_shard"})
#: Processes of the largest mesh: each is known to every other one.
MAX_RANKS = 1 << 17
#: Forward passes of the longest step on one rank: each is an action of the step's program.
MAX_MICROBATCHES = 1 << 14


class Run(Section):
    """Name, description and directory of a run."""

    name: Annotated[str, Field(pattern=r"^\w[\w.-]*$")] = "run"
    """Name of the run, and of its directory: letters, digits, ``_``, ``-``, and ``.`` but not first."""
    dir: Path = Path("runs")
    """Parent of the run's directory, relative to where the command is started."""
    description: str = ""
    """Free text for the trackers."""
    hparams: dict[str, JsonValue] = {}
    """Hyperparameters for the trackers, for example what a sweep varies: any names, and values that may be nested."""
    tags: list[Annotated[str, Field(min_length=1)]] = []
    """Words for the trackers, by which runs are found."""

    @field_validator("tags")
    @classmethod
    def _each_tag_once(cls, tags: list[str]) -> list[str]:
        if twice := next((tag for tag in tags if tags.count(tag) > 1), None):
            raise ValueError(f"'{twice}' stands there twice; remove one")
        return tags

    @property
    def directory(self) -> Path:
        """Directory of everything that the run writes."""
        return self.dir / self.name

    @property
    def cache(self) -> Path:
        """Directory of prepared data, shared by the runs of one parent directory."""
        return self.dir / ".cache"


#: Size of a data-parallel axis. A job file may write ``auto``, which is a number by the time that this is validated.
DataSize = Annotated[
    PositiveInt,
    WithJsonSchema({"anyOf": [{"type": "integer", "exclusiveMinimum": 0}, {"const": "auto"}]}),
]


class Mesh(Section):
    """Sizes of the mesh axes. Their product, without ``ep``, is the number of processes."""

    pp: Annotated[PositiveInt, Field(le=4096)] = 1
    """Pipeline stages."""
    dp_replicate: DataSize = 1
    """Replicas of the (sharded) model; this or ``dp_shard`` can be ``auto``."""
    dp_shard: DataSize = 1
    """Shards of the parameters; ``auto`` is what the other axes leave of the processes."""
    cp: PositiveInt = 1
    """Ranks that share each sequence."""
    tp: PositiveInt = 1
    """Ranks that share each matrix."""
    ep: PositiveInt = 1
    """Expert groups, laid over the innermost axes; does not multiply the number of processes."""

    @field_validator("*", mode="before")
    @classmethod
    def _auto_is_settled(cls, value: Any, info: ValidationInfo) -> Any:
        if value != "auto":
            return value
        if info.context is None:
            raise ValueError("'auto' is settled where a job file is read (Job.load); here, give the number")
        axes = " or ".join(sorted(DATA_AXES, reverse=True))
        if info.field_name in DATA_AXES:
            raise ValueError(f"auto on two axes: only one of {axes} can take what is left of the processes")
        raise ValueError(f"auto is for {axes}, which can take what is left of the processes; give the number")

    @model_validator(mode="after")
    def _is_buildable(self) -> Mesh:
        if self.world_size > MAX_RANKS:
            raise ValueError(f"these are {self.world_size:,} processes; a mesh has at most {MAX_RANKS:,}")
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
    """Batches that are taken and copied to the device ahead of their step; 0 takes each when its step begins, as where
    the data of a step depends on the step before."""


class GradientClipping(Section):
    """Clipping of gradients by their global norm."""

    max_norm: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = 1.0
    """Largest norm; null switches clipping off, the norm is still measured."""
    p: Annotated[float, Field(gt=0, allow_inf_nan=True)] = 2.0
    """Which norm; ``inf`` is allowed."""


class Gradients(Section):
    """Accumulation of gradients over microbatches, and their all-reduce over ranks."""

    accumulate: Literal["float32"] | None = None
    """Number format in which microbatches add up; that of the parameters if null."""
    bucket_mib: PositiveInt = 32
    """Size of the buckets in which gradients outside of FSDP are all-reduced."""


class Best(Section):
    """Retention of the checkpoints with the best values of a logged series."""

    series: str = "eval/loss"
    """Its name, such as ``eval/loss``; the last value before the save counts."""
    mode: Literal["min", "max"] = "min"
    """Direction of improvement: smaller or larger values are better."""
    keep: PositiveInt = 1
    """How many checkpoints."""


class Checkpoint(Section):
    """Interval, directory and retention of checkpoints."""

    every: PositiveInt | None = None
    """Steps between two checkpoints; null saves at the end and on interruption only."""
    keep: PositiveInt | None = 2
    """How many of the newest checkpoints stay; null keeps all."""
    keep_every: PositiveInt | None = None
    """Checkpoints of steps that are multiples of this stay too."""
    best: Best | None = None
    """The best checkpoints stay too."""
    resume: Literal["auto", "never", "must"] = "auto"
    """``auto`` continues from the newest usable checkpoint if there is one, ``never`` refuses a directory that holds
    one, ``must`` refuses to start without."""
    asynchronous: bool = True
    """Train on while a checkpoint is written, from a copy in the host's memory."""
    tolerate_failures: NonNegativeInt = 10
    """Failures of the storage in a row (full disk, input/output errors) after which training goes on; a save that
    failed is tried again with growing pauses. One more ends the run."""
    trainable_only: bool = False
    """Leave frozen parameters out; what resumes must get them from elsewhere."""
    dir: PathOrAddress | None = None
    """Directory of the checkpoints: one that all machines share, or an fsspec address such as ``s3://bucket/run``;
    <run>/checkpoints by default."""

    @model_validator(mode="after")
    def _rules_have_an_effect(self) -> Checkpoint:
        if self.keep is None and (self.keep_every or self.best):
            rule = "keep_every" if self.keep_every else "best"
            raise ValueError(f"'keep: null' keeps all checkpoints, so {rule} changes nothing; remove one of them")
        if self.keep_every is not None and (self.every is None or self.keep_every % self.every):
            raise ValueError(f"keep_every {self.keep_every} must be a multiple of every, which is {self.every}")
        return self

    def location(self, run: Path) -> Path | str:
        """Path or address of the checkpoints of the run in this directory."""
        if self.dir is None:
            return run / "checkpoints"
        return self.dir if is_address(self.dir) else Path(self.dir)


class Timeouts(Section):
    """Seconds without progress after which a run of several processes counts as stuck and ends with a report."""

    startup: Seconds = 600.0
    """Until all processes have started, and until each of them is ready to train."""
    step: Seconds = 600.0
    """For one step, the first one with all compilation included."""
    checkpoint: Seconds = 1800.0
    """For one checkpoint or export."""


class Loading(Section):
    """Reading of the weights that the model starts from (``model.pretrained``)."""

    weights: bool = True
    """Start from these weights; false takes their sizes, tokenizer and settings only, and draws all weights."""
    threads: PositiveInt = 4
    """Reads at a time, on each process."""
    read: Literal["each", "once"] = "each"
    """``each`` process reads what it holds; ``once``: of processes that hold the same, one reads and sends it on, which
    is for slow storage and fast networks."""


class Precision(Section):
    """Number formats."""

    parameters: Dtype = "float32"
    """Format of parameters and gradients."""
    autocast: Literal["bfloat16"] | None = None
    """Run matrix products of the forward pass in this format (torch.autocast)."""

    @model_validator(mode="after")
    def _useful(self) -> Precision:
        if self.autocast and self.parameters != "float32":
            raise ValueError(f"autocast is for float32 parameters; these are {self.parameters} already")
        return self


class BaseJob(Section):
    """Sections that jobs of every kind have: a model, data, and how they are laid out over processes."""

    run: Run = Run()
    """Name and directory of the run."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Initial weights, data order and dropout depend on this."""
    device: str = "auto"
    """``auto`` takes the accelerator if there is one, else the CPU; or a name such as ``cpu`` or ``cuda``."""
    deterministic: bool = False
    """Compute the same bits each time, with slower algorithms where it takes those; an operation that cannot is an
    error."""
    mesh: Mesh = Mesh()
    """The process grid."""
    model: Annotated[PluginConfig, Named("model")]
    """Model."""
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
    kernels: dict[str, str] = {}
    """Op -> backend by name; the others are chosen automatically."""
    subscribers: list[Annotated[PluginConfig, Named("subscriber")]] = []
    """Observers of the training loop."""
    loading: Loading = Loading()
    """Reading of the weights that the model starts from."""
    timeouts: Timeouts = Timeouts()
    """Time limits of ranks that wait for each other."""
    plugins: Plugins = Plugins()
    """Selection of the plugins that may be loaded."""

    @classmethod
    def _owner(cls, info: ValidationInfo) -> str:  # noqa: ARG003
        return "the job file"

    @model_validator(mode="after")
    def _nothing_twice(self) -> Self:
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
                    f"trackers[{index}] is '{name}' like trackers[{first}]: both would write to one place and continue "
                    "one saved run; keep one of them, with the fields of both"
                )
        return self

    def resolved(self) -> dict[str, Any]:
        """All values with their defaults, as JSON can hold them; reads back to an equal job."""
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
    """A job file. See :class:`d9d_engine.job.Job` for what can be done with it."""

    task: Annotated[PluginConfig, Named("task")]
    """Task to learn."""
    epochs: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Passes over the data, in place of ``steps``; 0.5 is half of one. Steps are counted when the data is open."""
    steps: PositiveInt | None = Field(default=None, validate_default=True)
    """Optimizer steps of the whole run; this or ``epochs``."""
    optimizer: Annotated[PluginConfig, Named("optimizer")]
    """Updates the parameters."""
    lr_schedule: Annotated[PluginConfig, Named("lr schedule")] | None = None
    """Learning-rate schedule; null keeps the rate constant."""
    gradient_clipping: GradientClipping = GradientClipping()
    """Limit on the gradient norm."""
    gradients: Gradients = Gradients()
    """Accumulation and all-reduce of gradients."""
    nonfinite: Literal["error", "skip"] = "error"
    """Policy for a step with a NaN or infinite loss or gradient; such a step never changes anything."""
    max_skipped: PositiveInt = 10
    """Steps in a row that ``nonfinite: skip`` leaves out; then the run ends with an error. Before these, and before the
    first skipped step of the run, the last checkpoint stays."""
    metrics: list[Annotated[PluginConfig, Named("metric")]] = []
    """Statistics over each logging period."""
    trackers: list[Annotated[PluginConfig, Named("tracker")]] = Field(
        default=[], json_schema_extra={"default": ["console", "jsonl"]}
    )
    """Destinations of logged values."""
    logging: Logging = Logging()
    """Log entries and log lines."""
    evaluation: Evaluation | None = None
    """Evaluation on other data during training."""
    profiling: Profiling | None = None
    """Traces of some steps; null is off."""
    garbage_collection: GarbageCollection = GarbageCollection()
    """Moments of Python's garbage collection."""
    checkpoint: Checkpoint = Checkpoint()
    """Interval, directory and retention of checkpoints."""
    export: Literal["adapter"] | bool = True
    """Write the trained model in Hugging Face layout to <run>/model at the end, and the adapter of a fine-tuning method
    that has one to <run>/adapter; ``adapter`` writes only that."""

    @field_validator("steps")
    @classmethod
    def _says_how_long(cls, steps: int | None, info: ValidationInfo) -> int | None:
        epochs = info.data.get("epochs")
        if steps is None and "epochs" in info.data and epochs is None:
            raise ValueError("missing; add 'steps:' or 'epochs:' to the job file")
        if steps is not None and epochs is not None:
            raise ValueError(f"'epochs: {epochs:g}' already says how long the run is; remove one of them")
        return steps
