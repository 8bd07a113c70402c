"""Records: frozen declarations of what a plugin offers, its references and its hooks.

Start here: a ``plugin.py`` states its API and yields a record from a hook; a :class:`Ref` names the code behind it::

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

A record is cheap to build. Code that needs torch or pydantic is a :class:`Ref`, loaded when the job asks for it. The
signatures behind the references are protocols; each record says which one.

Capabilities are flat tokens: ``requires`` must hold for the job, ``provides`` adds tokens to it, ``conflicts`` must not
hold. This module imports neither torch nor pydantic.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterable, Mapping, Set
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import pluggy

from d9d_core.containment import directory_kept
from d9d_core.errors import interrupt_behind
from d9d_core.untrusted import visible

__all__ = [
    "ANCHORS", "CapabilitySpec", "CommandSpec", "ConfiguredSpec", "DatasetSpec", "HealthCheckSpec",
    "InferenceTaskSpec", "JobCheckSpec", "KernelSpec", "LrScheduleSpec", "MetricSpec", "ModelSpec", "OptimizerSpec",
    "PeftSpec", "Ref", "ScheduleSpec", "Spec", "StrategySpec", "SubscriberSpec", "TaskSpec", "TrackerSpec", "ViewDim",
    "ViewSpec", "WriterSpec", "hookimpl",
]  # fmt: skip

_NAME = re.compile(r"[0-9]*[a-z][a-z0-9_]*(\.v[0-9]+)?")

#: The form of a :class:`Ref`.
_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
#: The annotation of a field that holds a reference.
_REFERENCE = re.compile(r"\bRef\b")

#: Marks the functions of a plugin.py that implement a hook.
hookimpl = pluggy.HookimplMarker("d9d")
#: Order in which strategies act on a freshly built stage, first to last.
ANCHORS = ("inject", "convert", "tensor", "context", "expert", "checkpointing", "compile", "data")
#: Where a strategy stands relative to its anchor.
POSITIONS = ("before", "at", "after")
#: Namespaces of capability tokens whose words core defines, so that no plugin declares any.
RESERVED = ("mesh", "strategy", "device", "import")


@dataclass(frozen=True, slots=True)
class Ref:
    """Reference ``"package.module:attribute"``: a plugin's declaration names heavy code without importing it.

    Raises:
        ValueError: the text does not have that form.
    """

    target: str

    def __post_init__(self) -> None:
        if not _TARGET.fullmatch(self.target):
            raise ValueError(f"{self.target!r} is not of the form 'package.module:attribute'")

    def load(self) -> Any:
        """Import the module and return the attribute.

        Raises:
            ImportError: the module cannot be imported.
            AttributeError: it has no such attribute.
            KeyboardInterrupt: of the user.
        """
        module, _, path = self.target.partition(":")
        try:
            with nullcontext() if module in sys.modules else directory_kept():
                value: Any = importlib.import_module(module)
        except Exception as error:
            if interrupt_behind(error):
                raise KeyboardInterrupt from error
            raise
        for part in path.split("."):
            value = getattr(value, part)
        return value

    def __str__(self) -> str:
        return self.target


def _tokens(value: Iterable[str], what: str = "capability tokens") -> frozenset[str]:
    if isinstance(value, str):
        raise TypeError(f"expected a set of {what}, got the string {value!r}")
    return frozenset(value)


def _check_dims(record: str, tensors: Mapping[str, int]) -> None:
    """Refuse tensors without a number of dims, such as a set of names."""
    if not isinstance(tensors, Mapping) or not all(type(dims) is int for dims in tensors.values()):
        raise TypeError(f"{record} is {tensors!r}; give the number of dims of each tensor, such as {{'tokens': 2}}")


def _check_summary(who: str, summary: str) -> None:
    if not summary.strip():
        raise ValueError(f"{who} needs a summary")
    if visible(summary) != summary:
        raise ValueError(f"{who} has a summary with characters that control a terminal: {summary!r}")


@dataclass(frozen=True, kw_only=True)
class Spec:
    """Base of the records that a plugin declares.

    Attributes:
        name: how a job file selects it: lower case, digits, underscores, optionally ``.v2``.
        summary: one line for ``d9d plugins show``.
        requires: capability tokens that must hold.
        provides: capability tokens that hold once this is selected.
        conflicts: capability tokens that must not hold.
    """

    name: str
    summary: str
    requires: Set[str] = frozenset()
    provides: Set[str] = frozenset()
    conflicts: Set[str] = frozenset()

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"{type(self).__name__} name {self.name!r}: use lower case, digits and underscores")
        _check_summary(f"{type(self).__name__} {self.name!r}", self.summary)
        for tokens in ("requires", "provides", "conflicts"):
            object.__setattr__(self, tokens, _tokens(getattr(self, tokens)))
        for each in fields(self):
            value = getattr(self, each.name)
            if not isinstance(value, Ref) and _REFERENCE.search(annotation := str(each.type)):
                self._check_no_reference(each.name, value, optional="None" in annotation)

    @property
    def key(self) -> str:
        """Name of the record, unique among those of one kind."""
        return self.name

    def _check_no_reference(self, name: str, value: object, optional: bool) -> None:
        if value is None and optional:
            return
        where = f"{type(self).__name__} {self.name!r}: {name} is"
        if isinstance(value, str):
            raise TypeError(f"{where} a text; write Ref({value!r})")
        if not hasattr(value, "__qualname__"):
            raise TypeError(f"{where} {value!r}; give it a Ref")
        kind = "class" if isinstance(value, type) else "function"
        # A single file has no name that it could write down.
        target = f"{value.__module__}:{value.__qualname__}"
        written = f'f"{{__name__}}:{value.__qualname__}"' if value.__module__.startswith("d9d_file_") else repr(target)
        raise TypeError(
            f"{where} the {kind} {value.__qualname__} itself; write Ref({written}), which is loaded when needed"
        )

    def refs(self) -> dict[str, Ref]:
        """References in this record, by field name."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Ref)}


@dataclass(frozen=True, kw_only=True)
class ConfiguredSpec(Spec):
    """A record with its own section in the job file.

    Attributes:
        config: a :class:`d9d_core.config.PluginConfig` subclass whose ``name`` is this record's name.
        build: what makes the component from the config; its signature depends on the kind.
        composite: whether components of other plugins are inside: fields of the config are open unions,
            ``Annotated[PluginConfig, Named("dataset")]``. ``build`` then has a further argument, the last one: a
            function that builds such a component of its config and the arguments of its kind.
    """

    config: Ref
    build: Ref
    composite: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelSpec(ConfiguredSpec):
    """A model family. ``build(config, stage: Stage) -> nn.Module``, called under the meta device.

    Attributes:
        hugging_face: a :class:`d9d_weights.hugging_face.format.HuggingFaceFormat`, for export and import.
        flops: ``(config, sequence_length) -> float``, training FLOPs per token (forward and backward).
        cost: ``(config, stage: Stage, share: Share) -> StageCost``, imported without torch, for ``d9d plan``; see
            :class:`d9d_core.cost.ModelCosts`.
        tiny: ``() -> config``, a configuration that runs in milliseconds on a CPU, for tests and ``d9d verify``.
    """

    hugging_face: Ref | None = None
    flops: Ref | None = None
    cost: Ref | None = None
    tiny: Ref


@dataclass(frozen=True, kw_only=True)
class StrategySpec(ConfiguredSpec):
    """Record by which a plugin declares a parallel strategy. ``build(config) -> Strategy``.

    Attributes:
        anchor: the point in :data:`ANCHORS` it belongs to.
        position: before, at or after that anchor.
        axes: mesh axes it makes use of, if they have more than one rank.
        cost: ``(config) -> StrategyCost``, imported without torch, for ``d9d plan``; ``None`` changes no cost but what
            the axes do.
        alternatives: ``(config) -> Sequence[config]``, imported without torch: further settings that ``d9d plan``
            tries; those of data parallelism where a step has several microbatches, others where a job has it.
    """

    anchor: str
    position: Literal["before", "at", "after"] = "at"
    axes: Set[str] = frozenset()
    cost: Ref | None = None
    alternatives: Ref | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.anchor not in ANCHORS:
            raise ValueError(f"strategy {self.name!r}: unknown anchor {self.anchor!r}; one of {', '.join(ANCHORS)}")
        if self.position not in POSITIONS:
            text = f"unknown position {self.position!r}; one of {', '.join(POSITIONS)}"
            raise ValueError(f"strategy {self.name!r}: {text}")


@dataclass(frozen=True, kw_only=True)
class ScheduleSpec(ConfiguredSpec):
    """A pipeline schedule. ``build(config) -> Schedule``, imported without torch.

    Attributes:
        handlers: ``(config, executor: Executor) -> Mapping[type[Action], Handler]`` for the actions that core does not
            run: ``Ref("d9d_pipeline.runtime.handlers:handlers")`` runs all of those that core defines.
        simulate: ``(programs, times: StageTimes) -> float``, seconds of a step, imported without torch, for ``d9d
            plan``: ``Ref("d9d_pipeline.simulator.seconds:seconds")`` simulates any schedule.
        ordered_transfers: whether a step still ends if each transfer waits for those that its rank launched before it,
            in either direction; then the streams of transfers may share the hardware queues of a GPU.
    """

    handlers: Ref | None = None
    simulate: Ref | None = None
    ordered_transfers: bool = False


@dataclass(frozen=True, kw_only=True)
class TaskSpec(ConfiguredSpec):
    """Record by which a plugin declares a task. ``build(config) -> Task``.

    Attributes:
        observes: names of what :meth:`d9d_core.task.Task.observations` returns, so that a metric that cannot work
            with the task is refused before anything is built; ``None`` if they are not known here.
        on_demand: further names, of what is there if a metric reads it and the model can compute it
            (:class:`d9d_core.traits.ObservesOnDemand`), or if the data has it.
        reads: tensors of a microbatch that the task cannot do without -> their number of dims, so that a dataset that
            does not give them is refused before it is opened; empty if they are not known here.
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
    """An inference task. ``build(config) -> InferenceTask``.

    Attributes:
        reads: as :attr:`TaskSpec.reads`.
    """

    reads: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_dims(f"InferenceTaskSpec {self.name!r}: reads", self.reads)


@dataclass(frozen=True, kw_only=True)
class WriterSpec(ConfiguredSpec):
    """A format of the output of inference jobs. ``build(config) -> Writer``."""


@dataclass(frozen=True, kw_only=True)
class DatasetSpec(ConfiguredSpec):
    """A dataset. ``build(config, context: DataContext) -> DataStream``.

    Attributes:
        gives: tensors that every microbatch has -> their number of dims; ``None`` if they are not known here.
            ``"inner"``: the tensors that all datasets inside of its config give. A config whose fields decide it is a
            :class:`d9d_core.data.ChoosesTensors`.
    """

    gives: Mapping[str, int] | Literal["inner"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gives is not None and self.gives != "inner":
            _check_dims(f"DatasetSpec {self.name!r}: gives", self.gives)


@dataclass(frozen=True, kw_only=True)
class MetricSpec(ConfiguredSpec):
    """A metric over the task's observations. ``build(config) -> Metric``.

    Attributes:
        reads: names of the task's observations that it cannot do without; empty if it reads what modules tally, or if
            its config says which they are (:class:`d9d_core.metric.ChoosesObservations`).
    """

    reads: Set[str] = frozenset()

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "reads", _tokens(self.reads, "observations"))


@dataclass(frozen=True, kw_only=True)
class TrackerSpec(ConfiguredSpec):
    """A tracker. ``build(config) -> Tracker``."""


@dataclass(frozen=True, kw_only=True)
class PeftSpec(ConfiguredSpec):
    """A fine-tuning method. ``build(config) -> PeftMethod``.

    Attributes:
        cost: ``(config, name: str, weight: Weight, rows: float, share: Share) -> AdapterCost`` of one weight by its
            whole name, imported without torch, for ``d9d plan``. That of a composite record gets a function of the same
            arguments as its last one, which is the cost of any method inside.
    """

    cost: Ref | None = None


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec(ConfiguredSpec):
    """An optimizer. ``build(config, parameters: Mapping[str, nn.Parameter]) -> Optimizer``.

    Attributes:
        cost: ``(config, width: int) -> OptimizerCost`` of a parameter of so many bytes, imported without torch, for
            ``d9d plan``.
    """

    cost: Ref | None = None


@dataclass(frozen=True, kw_only=True)
class LrScheduleSpec(ConfiguredSpec):
    """A learning-rate schedule. ``build(config, total_steps: int) -> LrSchedule``."""


@dataclass(frozen=True, kw_only=True)
class SubscriberSpec(ConfiguredSpec):
    """A subscriber to events of the training loop. ``build(config) -> Subscriber``."""


@dataclass(frozen=True, kw_only=True)
class KernelSpec(Spec):
    """Record by which a plugin declares a kernel: a backend of one op.

    Attributes:
        op: the op it implements, for example ``attention``.
        supports: ``(OpSignature) -> Decision``; decides from the static signature alone.
        build: ``(OpSignature) -> Callable``; the function that replaces the op's reference.
        deterministic: it computes the same bits each time, at least where ``torch.use_deterministic_algorithms`` is on;
            a job that is ``deterministic`` refuses one that does not.
        operators: patterns over names of torch's operators, such as ``aten._scaled_dot_product_*``, one of which
            computes what the op returns. Checkpointed blocks keep their outputs where a job says so by the op's name;
            empty: they cannot.
    """

    op: str
    supports: Ref
    build: Ref
    deterministic: bool = True
    operators: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Name of the record as ``op.name``: two ops may have backends of one name."""
        return f"{self.op}.{self.name}"


@dataclass(frozen=True, kw_only=True)
class HealthCheckSpec(Spec):
    """A health check of ``d9d doctor``. ``run() -> Health``."""

    run: Ref


@dataclass(frozen=True, kw_only=True)
class JobCheckSpec(Spec):
    """A further check of a job, made by ``d9d check`` after names, values and capabilities.

    Attributes:
        run: function of the :class:`~d9d_core.job.JobFile` and the number of processes (``None``: what the mesh needs).
            It prints what it found and raises :class:`~d9d_core.errors.D9dError` if the job cannot run.
        memory: whether ``run`` has a third argument: bytes of a device's memory that the job must fit into, or
            ``None`` if the user named none (``d9d check --memory``).
    """

    run: Ref
    memory: bool = False


@dataclass(frozen=True, kw_only=True)
class CommandSpec(Spec):
    """An extra sub-command of ``d9d``. ``app`` is a ``typer.Typer``, imported when the command is used."""

    app: Ref


@dataclass(frozen=True, slots=True)
class ViewDim:
    """Dimension of a view: its size is the product of mesh axes, divided by the axes that lie over them.

    Attributes:
        name: what meshes call it.
        axes: mesh axes whose sizes multiply.
        over: mesh axes that are laid over these and replace them. One that is larger than the product covers all
            of it and goes on over the next dimension outwards that names it.
    """

    name: str
    axes: tuple[str, ...]
    over: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ViewSpec(Spec):
    """A view of the grid of ranks: the same ranks in the same order, cut into other dimensions.

    Attributes:
        dims: outermost first; the product of their sizes is the number of processes.
    """

    dims: tuple[ViewDim, ...]


@dataclass(frozen=True, kw_only=True)
class CapabilitySpec:
    """Record by which a plugin declares a capability token of its own, so that it is not taken for a typing error.

    Attributes:
        token: ``namespace:word``. The namespace is the plugin's own, or ``model`` for something that models of several
            plugins may offer. Core's other namespaces (``mesh``, ``strategy``, ``device``, ``import``) are reserved.
        summary: what it means, and how to obtain it when it is missing.
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
        """Name of the record: the token, so that capabilities are listed like other records."""
        return self.token
