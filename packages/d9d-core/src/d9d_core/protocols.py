"""What the components of a job look like to the training loop. Implementations live in plugins.

Tensors cross these seams by name (``Mapping[str, Tensor]``), so that a dataset, a task and a model from three authors
meet without sharing classes. The names for language modelling, used by first-party packages (B samples, S positions):

    tokens     int64 [B, S]   input token ids
    targets    int64 [B, S]   token ids to predict; -100 where nothing is predicted
    positions  int64 [B, S]   position inside the document
    documents  int64 [B, S]   number of the document inside the sample; tokens see their own document only
    lengths    int64 [B]      tokens of a right-padded sample; absent if there is no padding
    labels     int64 [B]      class of the sample; -100 where it does not count
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from d9d_core.state.mapper import Mapper
    from d9d_core.topology.mesh import Topology

Microbatch = Mapping[str, Tensor]
#: The microbatches of one optimizer step, for one data-parallel rank.
Pack = Sequence[Microbatch]
#: What JSON can hold; all state outside tensors.
Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]
State = Mapping[str, Json]


# --- model


@dataclass(frozen=True, slots=True)
class Stage:
    """Which part of the model to build: stage ``index`` of ``count``.

    Attributes:
        layers: how many layers each stage has, if the job says so; ``None`` leaves it to the model.
    """

    index: int = 0
    count: int = 1
    layers: tuple[int, ...] | None = None

    @property
    def is_first(self) -> bool:
        """Whether the stage receives tokens."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage holds the head."""
        return self.index == self.count - 1


class HuggingFaceFormat(Protocol):
    """How a model is written in Hugging Face layout."""

    def config_json(self, config: Any, dtype: str) -> dict[str, Any]:
        """The contents of ``config.json`` for a model of this config, with parameters of ``dtype`` (``"float32"``)."""
        ...

    def config_from_json(self, data: Mapping[str, Any]) -> Any:
        """The config of the model that a ``config.json`` describes.

        Raises:
            CheckpointError: it describes another architecture, or a variant that this model does not compute.
        """
        ...

    def importer(self, config: Any, stored: Any) -> Mapper:
        """From the names and layouts in Hugging Face files to those of the model.

        Args:
            config: of the model to be filled.
            stored: what :meth:`config_from_json` made of the files' ``config.json``; it may differ from ``config``, for
                example in its heads. What the files lack on purpose is declared with ``Fresh``.
        """
        ...

    def exporter(self, config: Any) -> Mapper:
        """From the model's names and layouts to those of Hugging Face. Tied weights appear once."""
        ...


# --- data


@dataclass(frozen=True, slots=True)
class DataContext:
    """What a data stream must know about the job.

    Attributes:
        seed: data order depends on this and on the number of consumed samples, on nothing else.
        batch_size: samples of one optimizer step, over all ranks.
        microbatch_size: samples of one microbatch on one rank.
        rank, ranks: the slice of each pack this process gets, along the data-parallel axis.
        cache_dir: where prepared data may be kept between runs.
        note: prints one line about long work, such as tokenisation.
    """

    seed: int
    batch_size: int
    microbatch_size: int
    cache_dir: Path
    rank: int = 0
    ranks: int = 1
    note: Callable[[str], None] = lambda _text: None


class DataStream(Protocol):
    """An endless, resumable stream of packs for one data-parallel rank."""

    @property
    def facts(self) -> State:
        """What is known about the data, such as ``vocab_size``, ``sequence_length`` or ``unigram_entropy``."""
        ...

    def next_pack(self) -> Pack:
        """The microbatches of the next optimizer step, as CPU tensors."""
        ...

    def state(self) -> State:
        """Where the stream stands: after a load, :meth:`next_pack` returns exactly the packs not yet taken."""
        ...

    def load_state(self, state: State) -> None:
        """Continue at ``state``.

        Raises:
            DataError: the state belongs to other data.
        """
        ...

    def save_assets(self, directory: Path) -> None:
        """Write what an exported model needs from the data, such as tokenizer files."""
        ...


# --- task


@dataclass(frozen=True, slots=True)
class StageInputs:
    """Keyword arguments of a stage's forward.

    Attributes:
        first: for the first stage only; later stages get the previous stage's outputs instead.
        shared: for every stage.
    """

    first: Mapping[str, Tensor]
    shared: Mapping[str, Tensor] = field(default_factory=dict)


class Task(Protocol):
    """What is learned: from a microbatch to model inputs, and from outputs to loss sums.

    The loss of a step is the sum over its terms of ``coefficient * (sum of the term) / (global weight of the term)``.
    Weights depend on the microbatch alone, so they are known before the first backward and no pass over gradients is
    needed. A term of zero weight contributes zero.
    """

    @property
    def coefficients(self) -> Mapping[str, float]:
        """The loss terms and their coefficients."""
        ...

    def check(self, model: Any, facts: State) -> None:
        """Compare the model's config with the facts of the data, before anything is built.

        Args:
            model: its config.
            facts: what the data stream knows of itself, which may be little; nothing while a job is planned.

        Raises:
            D9dError: they do not go together, for example a vocabulary larger than the model's.
        """
        ...

    def count(self, microbatch: Microbatch) -> int:
        """Tokens (or samples) of this microbatch, from shapes alone; for throughput."""
        ...

    def weights(self, microbatch: Microbatch) -> Mapping[str, Tensor]:
        """Term -> its weight in this microbatch, a 0-d tensor on the microbatch's device."""
        ...

    def inputs(self, microbatch: Microbatch) -> StageInputs:
        """The keyword arguments of the model."""
        ...

    def losses(self, outputs: Mapping[str, Tensor], microbatch: Microbatch) -> Mapping[str, Tensor]:
        """Term -> its sum over this microbatch, a 0-d float32 tensor with a graph; finite also where nothing counts."""
        ...

    def observations(self, outputs: Mapping[str, Tensor], microbatch: Microbatch) -> Mapping[str, Tensor]:
        """What metrics may look at, detached."""
        ...


# --- optimisation


class Optimizer(Protocol):
    """Updates parameters in place. State is keyed by parameter name, so any layout can resume from any other.

    It is given the trained parameters of the whole model, so that its rules mean the same on every rank. Those of other
    pipeline ranks are on the meta device and never have a gradient; the state made for them is there too.

    Parameters and gradients may be DTensors; state made with ``torch.zeros_like`` then is sharded like them. An update
    that is elementwise works on :func:`d9d_core.topology.local.local` of each.
    """

    def init_state(self) -> None:
        """Materialise all state, so that it can be loaded into."""
        ...

    def step(self, gate: Tensor) -> None:
        """Update from ``parameter.grad``. A parameter without a gradient is left alone.

        Args:
            gate: 0-d bool tensor on the parameters' device; where it is false, neither parameters nor state change.
        """
        ...

    def set_lr_factor(self, factor: float) -> None:
        """Multiply the base learning rate of every group for the coming steps."""
        ...

    @property
    def lr(self) -> float:
        """The learning rate of the first group now."""
        ...

    def describe(self) -> Mapping[str, Any]:
        """The parameter groups in words, for ``d9d explain``: group -> settings and parameter names."""
        ...

    def state(self) -> Mapping[str, Tensor]:
        """``"<parameter name>/<slot>"`` -> tensor. The tensors are the optimizer's own: loading copies into them."""
        ...


class LrSchedule(Protocol):
    """The factor on the base learning rate, a pure function of the step."""

    def __call__(self, step: int) -> float:
        """The factor used in step ``step`` (0-based)."""
        ...


# --- strategies and fine-tuning


@dataclass(frozen=True, slots=True)
class GradientOwner:
    """Who reduces the gradient of one parameter over one mesh axis, and how.

    A parameter that belongs to a view (:attr:`Applied.views`) has that view's dimensions in place of the axes.
    """

    parameter: str
    axis: str
    owner: Literal["fsdp", "sync", "none"]
    operation: Literal["sum", "max"] = "sum"


class Reducer(Protocol):
    """Reduces gradients over ranks while a backward runs, and is told which one is coming."""

    def before_backward(self, last: bool, complete: bool = True) -> None:
        """A backward of the stage is about to start.

        Args:
            last: it is the last of the step; when it has ended, all gradients are reduced or being reduced.
            complete: it computes all gradients of its microbatch. If not, those of weights follow some time later, so
                nothing may be reduced before :meth:`reduce`, and ``last`` is false.
        """
        ...

    def after_weights(self) -> None:
        """Gradients of weights that a backward had left for later were added to those of earlier microbatches."""
        ...

    def reduce(self) -> None:
        """All gradients are there: reduce what waits. Only called if some backward of the step was not complete."""
        ...


@dataclass(frozen=True, slots=True)
class Applied:
    """What a strategy did. One that changed no module is an error: nothing in a job file does nothing.

    Attributes:
        modules: qualified names of the modules it changed; the stage itself is ``""``.
        gradients: the reductions it takes responsibility for.
        views: parameter -> the view of the mesh that it is spread over, if that is none of the base axes.
        reducers: what must know when a backward starts.
        compute_dtype: what it converts parameters and inputs to for the forward, if it does.
        on_host: names of the parameters that live in the host's memory, whatever the device.
        unmatched: what the config asks for and this stage lacks, such as a pattern that no parameter has, and the text
            of the error if no other stage has it either.
    """

    modules: tuple[str, ...]
    gradients: tuple[GradientOwner, ...] = ()
    views: Mapping[str, str] = field(default_factory=dict)
    reducers: tuple[Reducer, ...] = ()
    compute_dtype: torch.dtype | None = None
    on_host: frozenset[str] = frozenset()
    unmatched: Mapping[str, str] = field(default_factory=dict)


class Strategy(Protocol):
    """Changes a built stage in place; parameter names stay what they were."""

    def apply(self, stage: nn.Module, topology: Topology) -> Applied:
        """Apply to the stage, on the meta device. Collective over all ranks if it takes a mesh from the topology.

        Raises:
            BuildError: the stage lacks what the strategy needs.
        """
        ...


class PeftMethod(Protocol):
    """A fine-tuning method."""

    def inject(self, stage: nn.Module) -> frozenset[str]:
        """Change the stage in place and return the names of the parameters that train; all others are frozen.

        Raises:
            BuildError: nothing matched.
        """
        ...

    def merge(self, stage: nn.Module) -> None:
        """Fold what was injected back into the original parameters, for export.

        Called for every export; the stage, its tensors and this object are put back afterwards, bit for bit.
        """
        ...


# --- what is observed


@dataclass(frozen=True, slots=True)
class Table:
    """A logged value with two dimensions, such as the load of each expert of each layer.

    Attributes:
        values: [rows, columns]; NaN where there is nothing.
        row: what a row is, for example ``layer``.
        column: what a column is.
        unit: what a value is.
        neutral: the value in the middle of a picture's colours; ``None`` if there is no such value.
        rows: what each row is called, for example the number of its layer; empty if they are counted from 0.

    Raises:
        ValueError: there are names, but not one for each row.
    """

    values: Tensor
    row: str = "row"
    column: str = "column"
    unit: str = "value"
    neutral: float | None = None
    rows: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.rows and len(self.rows) != len(self.values):
            raise ValueError(
                f"a table of {len(self.values)} rows has {len(self.rows)} names for them; name each or none"
            )


class Metric(Protocol):
    """A statistic whose state can be merged over ranks and saved."""

    @property
    def reductions(self) -> Mapping[str, Literal["sum", "max", "min"]]:
        """State name -> how the states of two shards are merged."""
        ...

    def update(self, observations: Mapping[str, Tensor]) -> None:
        """Take in one microbatch, on the device, without waiting for it."""
        ...

    def state(self) -> dict[str, Tensor]:
        """The accumulated state. Names, shapes and dtypes are the same from construction on: it is loaded into."""
        ...

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a (merged or saved) state."""
        ...

    def compute(self) -> Mapping[str, Tensor | Table]:
        """Series name -> 0-d value or table, from the present state; device tensors."""
        ...

    def reset(self) -> None:
        """Forget everything."""
        ...


@runtime_checkable
class StageMetric(Protocol):
    """A metric over what a model's modules tally (:class:`d9d_core.traits.HasTallies`).

    In place of what the task observes, it takes in each tally of a microbatch as ``"<module name>/<tally>"``: those of
    one pipeline stage at a time.
    """

    def attach(self, stage: nn.Module) -> None:
        """Look at the whole model, once and before anything else, so that the state has its final shapes.

        Stages of other pipeline ranks are on the meta device.

        Raises:
            BuildError: the model has nothing to observe.
        """
        ...


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What a tracker may know about the run.

    Attributes:
        name: the run's name.
        directory: the run's directory.
        description: free text from the job file.
        config: the resolved job.
        total_steps: optimizer steps of the whole run.
        resumed_step: steps already done and saved, 0 for a new run. Entries of later steps must disappear.
    """

    name: str
    directory: Path
    description: str
    config: State
    total_steps: int
    resumed_step: int


class TrackerRun(Protocol):
    """An open run of a tracker. A failing tracker is reported once and never ends the training."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Series name -> value after ``step`` steps (1-based)."""
        ...

    def flush(self) -> None:
        """Make everything written so far survive a crash; called before each checkpoint."""
        ...

    def state(self) -> State:
        """What :meth:`Tracker.open` needs to continue this run, such as a run id."""
        ...

    def close(self, status: Literal["finished", "stopped", "failed"]) -> None:
        """End the run."""
        ...


@runtime_checkable
class TakesTables(Protocol):
    """A tracker's run that takes tables too. Those that do not never see any."""

    def write_tables(self, step: int, tables: Mapping[str, Table]) -> None:
        """Name -> table, in the host's memory, after ``step`` steps (1-based)."""
        ...


class Tracker(Protocol):
    """Where logged values go."""

    def open(self, run: RunInfo, state: State | None) -> TrackerRun:
        """Start a run, or continue the one whose ``state`` a checkpoint kept."""
        ...


class Subscriber(Protocol):
    """An observer of the loop."""

    def subscriptions(self) -> Iterable[tuple[type[Any], Callable[[Any], None]]]:
        """Pairs of an event type from :mod:`d9d_core.loop.events` and the function it calls."""
        ...


@dataclass(frozen=True, slots=True)
class Health:
    """The outcome of one health check."""

    ok: bool
    message: str
