"""Records: frozen declarations of the components that a plugin offers, with references to their code, and hooks.

Start here: a ``plugin.py`` states its API version and yields records from hooks; a :class:`Ref` names code::

    from d9d_core.plugin import Ref, TaskSpec, hookimpl

    D9D_API = 2

    @hookimpl
    def d9d_tasks():
        yield TaskSpec(
            name="causal_lm",
            summary="Next-token prediction.",
            config=Ref("d9d_nn.causal_lm.config:CausalLMConfig"),
            build=Ref("d9d_nn.causal_lm.task:CausalLM"),
        )

A record is cheap to build. Code that needs torch or pydantic is named by a :class:`Ref` and loaded when a job uses it.
Protocols define the interfaces of the referenced code; the docstring of each record class names its protocol.

Capabilities are tokens such as ``model:blocks``: tokens in ``requires`` must hold for the job, ``provides`` adds tokens
to the job, and tokens in ``conflicts`` must not hold. This module imports neither torch nor pydantic.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterable, Mapping, Set
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from types import ModuleType
from typing import Any, Literal

import pluggy

from d9d_core.containment import directory_kept
from d9d_core.errors import interrupt_behind
from d9d_core.untrusted import visible

__all__ = [
    "ANCHORS", "ANY_MODEL_TYPE", "CapabilitySpec", "CommandSpec", "ConfiguredSpec", "DatasetSpec", "HeadSpec",
    "HealthCheckSpec",
    "InferenceTaskSpec", "JobCheckSpec", "KernelSpec", "LauncherSpec", "LrScheduleSpec", "MetricSpec", "ModelSpec",
    "OptimizerSpec", "PeftSpec", "Ref", "ScheduleSpec", "Spec", "StrategySpec", "SubscriberSpec", "TaskSpec",
    "TrackerSpec", "ViewDim", "ViewSpec", "WriterSpec", "hookimpl",
]  # fmt: skip

_NAME = re.compile(r"[0-9]*[a-z][a-z0-9_]*(\.v[0-9]+)?")

#: Pattern of the text of a :class:`Ref`.
_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
#: Pattern of a single-file plugin's module name (:mod:`d9d_core.registry.single_file`); its group is the file's name.
_FILE = re.compile(r"d9d_file_(\w+)_[0-9a-f]{12}")
#: Pattern of the annotation of a record's field that holds a reference.
_REFERENCE = re.compile(r"\bRef\b")

#: Entry of :attr:`ModelSpec.model_types` that stands for every type that no other record lists.
ANY_MODEL_TYPE = "*"
#: Decorator of the functions in a plugin.py that implement a hook.
hookimpl = pluggy.HookimplMarker("d9d")
#: Order in which strategies act on a freshly built stage, first to last.
ANCHORS = ("inject", "convert", "tensor", "context", "expert", "checkpointing", "compile", "data")
#: When a strategy acts, relative to the other strategies of its anchor, which is one of :data:`ANCHORS`.
POSITIONS = ("before", "at", "after")
#: Namespaces of capability tokens that only core defines; plugins cannot declare tokens in them.
RESERVED = ("mesh", "strategy", "device", "import")


@dataclass(frozen=True, slots=True)
class Ref:
    """Reference ``"package.module:attribute"``: names an attribute of a module without importing the module.

    The module may be a single-file plugin, by its name without ``.py``, unless an installed module has the name.

    Raises:
        ValueError: the text does not have the form ``package.module:attribute``.
    """

    target: str

    def __post_init__(self) -> None:
        if not _TARGET.fullmatch(self.target):
            raise ValueError(f"{self.target!r} is not of the form 'package.module:attribute'")

    def load(self) -> Any:
        """Import the module and return the attribute.

        Raises:
            ImportError: the module cannot be imported.
            AttributeError: the module has no such attribute.
            KeyboardInterrupt: the user pressed Ctrl-C during the import.
        """
        module, _, path = self.target.partition(":")
        try:
            with nullcontext() if module in sys.modules else directory_kept():
                value: Any = _import(module)
        except Exception as error:
            if interrupt_behind(error):
                raise KeyboardInterrupt from error
            raise
        for part in path.split("."):
            value = getattr(value, part)
        return value

    def __str__(self) -> str:
        return self.target


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        loaded = [sys.modules[key] for key in list(sys.modules) if (file := _FILE.fullmatch(key)) and file[1] == name]
        if error.name != name or len(loaded) != 1:  # two versions of a file may be loaded
            raise
        return loaded[0]


def _tokens(value: Iterable[str], what: str = "capability tokens") -> frozenset[str]:
    if isinstance(value, str):
        raise TypeError(f"expected a set of {what}, got the string {value!r}; write {{{value!r}}}")
    return frozenset(value)


def _check_dims(record: str, tensors: Mapping[str, int]) -> None:
    """Refuse a record's ``tensors`` unless it maps names to numbers of dimensions."""
    if not isinstance(tensors, Mapping) or not all(type(dims) is int for dims in tensors.values()):
        raise TypeError(f"{record} is {tensors!r}; map each tensor to its number of dims, such as {{'tokens': 2}}")


def _check_summary(who: str, summary: str) -> None:
    if not summary.strip():
        raise ValueError(f"{who} needs a summary; write a sentence about it")
    if visible(summary) != summary:
        raise ValueError(
            f"{who} has a summary with characters that control a terminal: {summary!r}; remove these characters"
        )


@dataclass(frozen=True, kw_only=True)
class Spec:
    """Base of the records that a plugin declares.

    Attributes:
        name: name by which a job file selects the component: lower case, digits, underscores, optionally ``.v2``.
        summary: one line for ``d9d plugins show``.
        requires: capability tokens that must hold in a job that selects this record.
        provides: capability tokens that hold in a job because it selects this record.
        conflicts: capability tokens that must not hold in a job that selects this record.
    """

    name: str
    summary: str
    requires: Set[str] = frozenset()
    provides: Set[str] = frozenset()
    conflicts: Set[str] = frozenset()

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                f"{type(self).__name__} name {self.name!r}: use lower-case letters, digits and underscores, with a "
                "letter before the first underscore"
            )
        _check_summary(f"{type(self).__name__} {self.name!r}", self.summary)
        for tokens in ("requires", "provides", "conflicts"):
            object.__setattr__(self, tokens, _tokens(getattr(self, tokens)))
        for each in fields(self):
            value = getattr(self, each.name)
            if not isinstance(value, Ref) and _REFERENCE.search(annotation := str(each.type)):
                self._check_no_reference(each.name, value, optional="None" in annotation)

    @property
    def key(self) -> str:
        """Name of the record, unique among records of its kind."""
        return self.name

    def _check_no_reference(self, name: str, value: object, optional: bool) -> None:
        if value is None and optional:
            return
        where = f"{type(self).__name__} {self.name!r}: {name} is"
        if isinstance(value, str):
            raise TypeError(f"{where} a text; write Ref({value!r})")
        if not hasattr(value, "__qualname__"):
            raise TypeError(f"{where} {value!r}; write Ref('package.module:attribute')")
        kind = "class" if isinstance(value, type) else "function"
        # A single-file plugin has no fixed module name to write.
        target = f"{value.__module__}:{value.__qualname__}"
        written = f'f"{{__name__}}:{value.__qualname__}"' if value.__module__.startswith("d9d_file_") else repr(target)
        raise TypeError(
            f"{where} the {kind} {value.__qualname__} itself; write Ref({written}), which is loaded when needed"
        )

    def refs(self) -> dict[str, Ref]:
        """All :class:`Ref` values in this record, by field name."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Ref)}


@dataclass(frozen=True, kw_only=True)
class ConfiguredSpec(Spec):
    """Record of a component with its own section in the job file.

    Attributes:
        config: a :class:`d9d_core.config.PluginConfig` subclass whose ``name`` is this record's name.
        build: function or class that makes the component from the config; its signature depends on the kind.
        composite: whether the component contains components of other plugins: fields of the config are open unions,
            ``Annotated[PluginConfig, Named("dataset")]``. ``build`` then has a further, last argument: a function that
            builds such a component from its config and the arguments of its kind.
    """

    config: Ref
    build: Ref
    composite: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelSpec(ConfiguredSpec):
    """Record of a model family. ``build(config, stage: Stage) -> nn.Module``, called under the meta device.

    Attributes:
        hugging_face: a :class:`d9d_weights.hugging_face.format.HuggingFaceFormat`, for export and import.
        model_types: each ``model_type`` of a ``config.json`` that ``hugging_face`` reads: a job with
            ``model.pretrained`` finds the model by it and need not name it. :data:`ANY_MODEL_TYPE` means each type that
            no other record lists.
        flops: ``(config, sequence_length) -> float``, training FLOPs per token (forward and backward).
        cost: ``(config, stage: Stage, share: Share) -> StageCost``, imported without torch, for ``d9d plan``; see
            :class:`d9d_core.cost.ModelCosts`.
        tiny: ``() -> config``, a configuration that runs in milliseconds on a CPU, for tests and ``d9d verify``; if it
            is ``None``, ``d9d verify`` uses the sizes of the job.
    """

    hugging_face: Ref | None = None
    model_types: Set[str] = frozenset()
    flops: Ref | None = None
    cost: Ref | None = None
    tiny: Ref | None = None


@dataclass(frozen=True, kw_only=True)
class StrategySpec(ConfiguredSpec):
    """Record by which a plugin declares a parallel strategy. ``build(config) -> Strategy``.

    Attributes:
        anchor: point in :data:`ANCHORS`, the fixed order in which strategies are applied, at which this strategy acts.
        position: whether the strategy acts before, at or after the anchor.
        axes: mesh axes that the strategy uses if they have more than one rank.
        cost: ``(config) -> StrategyCost``, imported without torch, for ``d9d plan``; ``None`` if the strategy changes
            costs only through its axes.
        alternatives: ``(config) -> Sequence[config]``, imported without torch: further settings that ``d9d plan``
            tries; for a data-parallel strategy if a step has several microbatches, for another strategy if the job has
            it.
        alters_training: whether results with several ranks along ``axes`` differ from one process by more than
            rounding. Such a strategy is never recommended or chosen, only used if the job names it; ``d9d plan`` keeps
            the job's sizes of these axes.
    """

    anchor: str
    position: Literal["before", "at", "after"] = "at"
    axes: Set[str] = frozenset()
    cost: Ref | None = None
    alternatives: Ref | None = None
    alters_training: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.anchor not in ANCHORS:
            raise ValueError(f"strategy {self.name!r}: unknown anchor {self.anchor!r}; one of {', '.join(ANCHORS)}")
        if self.position not in POSITIONS:
            text = f"unknown position {self.position!r}; one of {', '.join(POSITIONS)}"
            raise ValueError(f"strategy {self.name!r}: {text}")


@dataclass(frozen=True, kw_only=True)
class ScheduleSpec(ConfiguredSpec):
    """Record by which a plugin declares a pipeline schedule. ``build(config) -> Schedule``, imported without torch.

    Attributes:
        handlers: ``(config, executor: Executor) -> Mapping[type[Action], Handler]`` for actions that core itself does
            not run: ``Ref("d9d_pipeline.runtime.handlers:handlers")`` handles all actions that core defines.
        simulate: ``(programs, times: StageTimes) -> float``, seconds of a step, imported without torch, for ``d9d
            plan``: ``Ref("d9d_pipeline.simulator.seconds:seconds")`` simulates any schedule.
        ordered_transfers: whether a step completes even if each transfer waits for all transfers that its rank launched
            before, in both directions; then the streams of transfers may share hardware queues of a GPU.
    """

    handlers: Ref | None = None
    simulate: Ref | None = None
    ordered_transfers: bool = False


@dataclass(frozen=True, kw_only=True)
class TaskSpec(ConfiguredSpec):
    """Record by which a plugin declares a task. ``build(config) -> Task``.

    Attributes:
        observes: names of the observations that :meth:`d9d_core.task.Task.observations` always returns, so that a
            metric that needs another observation is refused before anything is built; ``None`` if unknown.
        on_demand: names of further observations: returned if a metric reads them and the model can compute them
            (:class:`d9d_core.traits.ObservesOnDemand`) or the data has them.
        reads: tensors of a microbatch that the task requires -> number of dimensions, so that a dataset without them is
            refused before it is opened; empty if unknown.
    """

    observes: Set[str] | None = None
    on_demand: Set[str] = frozenset()
    reads: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.observes is not None:
            object.__setattr__(self, "observes", _tokens(self.observes, "observations"))
        object.__setattr__(self, "on_demand", _tokens(self.on_demand, "observations"))
        _check_dims(f"TaskSpec {self.name!r}: reads", self.reads)


@dataclass(frozen=True, kw_only=True)
class InferenceTaskSpec(ConfiguredSpec):
    """Record by which a plugin declares an inference task. ``build(config) -> InferenceTask``.

    Attributes:
        reads: see :attr:`TaskSpec.reads`.
    """

    reads: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_dims(f"InferenceTaskSpec {self.name!r}: reads", self.reads)


@dataclass(frozen=True, kw_only=True)
class WriterSpec(ConfiguredSpec):
    """Record by which a plugin declares an output format of inference jobs. ``build(config) -> Writer``."""


@dataclass(frozen=True, kw_only=True)
class DatasetSpec(ConfiguredSpec):
    """Record by which a plugin declares a dataset. ``build(config, context: DataContext) -> DataStream``.

    Attributes:
        gives: tensors in every microbatch -> number of dimensions; ``None`` if unknown. ``"inner"``: the tensors that
            all datasets inside the config give. A config whose fields decide this is a
            :class:`d9d_core.data.ChoosesTensors`.
    """

    gives: Mapping[str, int] | Literal["inner"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gives is not None and self.gives != "inner":
            _check_dims(f"DatasetSpec {self.name!r}: gives", self.gives)


@dataclass(frozen=True, kw_only=True)
class MetricSpec(ConfiguredSpec):
    """Record by which a plugin declares a metric over the task's observations. ``build(config) -> Metric``.

    Attributes:
        reads: names of the task's observations that the metric requires; empty if it reads tallies of modules, or if
            its config chooses them (:class:`d9d_core.metric.ChoosesObservations`).
    """

    reads: Set[str] = frozenset()

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "reads", _tokens(self.reads, "observations"))


@dataclass(frozen=True, kw_only=True)
class TrackerSpec(ConfiguredSpec):
    """Record by which a plugin declares a tracker. ``build(config) -> Tracker``."""


@dataclass(frozen=True, kw_only=True)
class PeftSpec(ConfiguredSpec):
    """Record by which a plugin declares a fine-tuning method. ``build(config) -> PeftMethod``.

    Attributes:
        cost: ``(config, name: str, weight: Weight, rows: float, share: Share) -> AdapterCost`` of one weight, given its
            qualified name, imported without torch, for ``d9d plan``. For a composite record, the function has a
            further, last argument: a function with the same arguments that returns the cost of any nested method.
    """

    cost: Ref | None = None


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec(ConfiguredSpec):
    """Record of an optimizer. ``build(config, parameters: Mapping[str, nn.Parameter]) -> Optimizer``.

    Attributes:
        cost: ``(config, width: int) -> OptimizerCost`` for parameters of ``width`` bytes, imported without torch, for
            ``d9d plan``. For a composite record, the function has a further, last argument: a function with the same
            arguments that returns the cost of any nested optimizer.
    """

    cost: Ref | None = None


@dataclass(frozen=True, kw_only=True)
class LrScheduleSpec(ConfiguredSpec):
    """Record by which a plugin declares a learning-rate schedule. ``build(config, total_steps: int) -> LrSchedule``."""


@dataclass(frozen=True, kw_only=True)
class SubscriberSpec(ConfiguredSpec):
    """Record by which a plugin declares a subscriber to events of training. ``build(config) -> Subscriber``."""


@dataclass(frozen=True, kw_only=True)
class LauncherSpec(ConfiguredSpec):
    """Record of a launcher, which ``d9d launch --engine NAME`` selects. ``build(config) -> Launcher``, without torch.

    The fields of its config are options of the command line: ``--option FIELD=VALUE``.
    """


@dataclass(frozen=True, kw_only=True)
class KernelSpec(Spec):
    """Record by which a plugin declares a kernel: a backend of one op.

    Attributes:
        op: name of the op, for example ``attention``.
        supports: ``(OpSignature) -> Decision``; decides from the static signature alone.
        build: ``(OpSignature) -> Callable``; returns the function that replaces the op's reference.
        deterministic: whether the kernel computes the same bits each time, at least under
            ``torch.use_deterministic_algorithms``; a job with ``deterministic: true`` refuses other kernels.
        operators: patterns of torch operator names, such as ``aten._scaled_dot_product_*``, that match the operator
            which computes the op's result. If a job tells activation checkpointing to keep this op, the outputs of
            these operators are kept; empty if the kernel has no such operator.
    """

    op: str
    supports: Ref
    build: Ref
    deterministic: bool = True
    operators: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Name of the record as ``op.name``, because backends of two ops may have the same name."""
        return f"{self.op}.{self.name}"


@dataclass(frozen=True, kw_only=True)
class HeadSpec(Spec):
    """Record by which a plugin declares a kind of head, which ``model.heads`` of a job selects by ``kind``.

    Attributes:
        config: a ``d9d_nn.heads.config.PluginHeadConfig`` subclass whose ``kind`` is this record's name. Its method
            ``build`` makes the head.
    """

    config: Ref


@dataclass(frozen=True, kw_only=True)
class HealthCheckSpec(Spec):
    """Record by which a plugin declares a health check of ``d9d doctor``. ``run() -> Health``."""

    run: Ref


@dataclass(frozen=True, kw_only=True)
class JobCheckSpec(Spec):
    """An additional check of a job, run by ``d9d check`` after names, values and capabilities.

    Attributes:
        run: function of the :class:`~d9d_core.job.JobFile` and the number of processes (``None``: as many as the mesh
            needs). It prints its findings and raises :class:`~d9d_core.errors.D9dError` if the job cannot run.
        memory: whether ``run`` has a third argument: bytes of a device's memory that the job must fit into, or
            ``None`` without ``d9d check --memory``.
    """

    run: Ref
    memory: bool = False


@dataclass(frozen=True, kw_only=True)
class CommandSpec(Spec):
    """Record by which a plugin declares a sub-command of ``d9d``.

    Attributes:
        app: a ``typer.Typer``, imported when the command is used.
        group: word before the name, such as ``new`` in ``d9d new job``; empty for none. Several packages may add
            commands to one group.
    """

    app: Ref
    group: str = ""

    @property
    def key(self) -> str:
        """Words of the command after ``d9d``."""
        return f"{self.group} {self.name}".strip()


@dataclass(frozen=True, slots=True)
class ViewDim:
    """Dimension of a view, which is another shape of the mesh (:class:`ViewSpec`).

    Its size is the product of the sizes of some mesh axes, divided by the sizes of the axes that overlap them.

    Attributes:
        name: name of the dimension in device meshes.
        axes: mesh axes whose sizes are multiplied.
        over: mesh axes that reuse the ranks of ``axes``, such as ``ep``; the product is divided by their sizes. An axis
            larger than the product uses all of it, and continues in the next outer dimension whose ``over`` contains
            the axis.
    """

    name: str
    axes: tuple[str, ...]
    over: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ViewSpec(Spec):
    """A view of the mesh: the same ranks in the same order, reshaped into other dimensions.

    Attributes:
        dims: dimensions, outermost first; the product of their sizes is the number of processes.
    """

    dims: tuple[ViewDim, ...]


@dataclass(frozen=True, kw_only=True)
class CapabilitySpec:
    """Record by which a plugin declares its own capability token, so that the token is not mistaken for a typing error.

    Attributes:
        token: ``namespace:word``. The namespace is the plugin's own, or ``model`` for a property that models of several
            plugins may have. Core's other namespaces (``mesh``, ``strategy``, ``device``, ``import``) are reserved.
        summary: meaning of the token, and how to obtain it if it is missing.
    """

    token: str
    summary: str

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9_-]*:[A-Za-z0-9_.>=<-]+", self.token):
            raise ValueError(f"capability token {self.token!r} is not of the form 'namespace:word'")
        if self.token.partition(":")[0] in RESERVED:
            raise ValueError(f"capability token {self.token!r}: the namespace is d9d-core's; use one of your own")
        _check_summary(f"capability {self.token!r}", self.summary)

    @property
    def key(self) -> str:
        """Key of the record, equal to the token."""
        return self.token
