"""Names for plugin authors: contracts of every extension point, and the helpers that go with them.

Declarations (records, ``Ref``, ``hookimpl``) stand in :mod:`d9d_core.plugin`, which imports neither torch nor pydantic.
Everything a component itself needs is here; importing this module imports no torch.

| seam | names |
|---|---|
| configuration | ``PluginConfig``, ``ModelConfig``, ``ScheduleConfig``, ``Section``, ``Named``, ``closest`` |
| errors | ``D9dError`` and its kinds |
| foreign files | ``read_regular``, ``parse_json`` |
| tensors | ``Microbatch``, ``Pack``, ``State``, ``TensorSpec``, ``local``, ``full``, ``beside``, ``wide_dtype`` |
| data | ``DataContext``, ``DataStream``, ``PacksDocuments``, ``packs_documents``, ``SampleLengths`` |
| task | ``Task`` and what one may be besides (``StatefulTask``, ...), ``StageInputs``, ``TwoPassTask``, ``FirstPass`` |
| inference | ``InferenceTask``, ``ReadsModules``, ``ContinuesRows``, ``WritesText``, ``Writer``, ``Columns`` |
| model | ``Stage``, the traits (``HasBlocks``, ``PipelineStage``, ...), ``OpSlot``, ``Deferral`` |
| optimizer, learning rate | ``Optimizer`` and what one may be besides (``DividesGradients``, ...), ``LrSchedule`` |
| strategy | ``Strategy``, ``Applied``, ``GradientOwner``, ``Reducer``, ``Topology``, ``Collective``, ``StepShape`` |
| fine-tuning | ``PeftMethod``, ``StartsFromWeights``, ``SwitchesOff`` |
| kernel | ``OpSignature``, ``Decision`` |
| metric | ``Metric``, ``AccumulatedMetric`` of ``Accumulator``, ``StageMetric``, ``Vector``, ``Table`` |
| tracker | ``Tracker``, ``TrackerRun``, ``RunInfo``, ``TakesTables`` and its like, ``Histogram``, ``split_tags`` |
| log of a run | ``RunLog``, ``LogsValues`` |
| subscriber | ``Subscriber``, ``subscribe``, ``OwnEvent``, ``StatefulSubscriber``, ``EndsTraining``, the events |
| schedule | ``Schedule``, ``Program``, the actions, ``StageRunner`` and what handlers share |
| costs | ``Share``, ``StageCost`` of ``BlockCost`` of ``OpCost``, ``StrategyCost``, ``OptimizerCost``, ``StageTimes`` |

Strategies and handlers of schedules find more in :mod:`d9d_engine.extend`, models and fine-tuning methods in
:mod:`d9d_weights`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from d9d_core.config.base import ModelConfig, PluginConfig, ScheduleConfig, Section, closest
from d9d_core.config.lookup import load_config
from d9d_core.config.open_union import Named
from d9d_core.errors import (
    BuildError,
    CheckpointError,
    D9dError,
    DataError,
    JobError,
    NonFiniteError,
    PluginError,
    SaveError,
    TrainingError,
)
from d9d_core.events import (
    CATALOGUE,
    CheckpointSaved,
    CheckpointStarts,
    DataReady,
    EvaluationEnds,
    EvaluationStarts,
    EventsReady,
    ForwardBackwardEnds,
    ForwardBackwardStarts,
    ForwardReady,
    InferenceFailed,
    InferenceFinished,
    InferenceStarts,
    InferenceStopped,
    JobConfigured,
    ModelPlanned,
    ModelReady,
    OptimizerReady,
    OptimizerStepEnds,
    OptimizerStepStarts,
    PackEnds,
    PackStarts,
    RowsWritten,
    SaveReport,
    SleepEnds,
    SleepStarts,
    StepEnds,
    StepResult,
    StepStarts,
    TrainingFailed,
    TrainingFinished,
    TrainingStarts,
    TrainingStopped,
    ValuesLogged,
    WakeEnds,
    WakeStarts,
)
from d9d_core.grid import AXES, Grid
from d9d_core.job import JobFile
from d9d_core.ops import Decision, OpSignature, OpSlot
from d9d_core.plugin.entries import plugin_error
from d9d_core.plugin.ref import FOREIGN_FAILURES
from d9d_core.program.actions import (
    Action,
    Backward,
    Forward,
    InputBackward,
    MicrobatchAction,
    Overlap,
    Program,
    ReceiveActivation,
    ReceiveGradient,
    Reduce,
    Schedule,
    SendActivation,
    SendGradient,
    WeightBackward,
    compute_parts,
    count_stages,
    forward_only,
    single_stage,
)
from d9d_core.program.costs import (
    BlockCost,
    Exchange,
    ModelCosts,
    OpCost,
    OptimizerCost,
    Share,
    StageCost,
    StageTimes,
    StrategyCost,
)
from d9d_core.program.deadlock import awaited, find_deadlock
from d9d_core.program.index import ProgramIndex
from d9d_core.program.runner import Arrival, Handler, StageRunner, StepState, Visit
from d9d_core.program.text import diff_programs, format_programs, parse_programs
from d9d_core.program.validation import placement, problems_of, validate
from d9d_core.protocols.data import (
    DataContext,
    DataStream,
    PacksDocuments,
    SampleLengths,
    StatesLengths,
    packs_documents,
    sample_lengths,
)
from d9d_core.protocols.first_pass import DataRanks, FirstPass, PassModel, TwoPassTask
from d9d_core.protocols.forward import ForwardPass
from d9d_core.protocols.health import Health
from d9d_core.protocols.inference import (
    ROW,
    Columns,
    Continuation,
    ContinuesRows,
    InferenceTask,
    ReadsModules,
    Writer,
    WritesText,
)
from d9d_core.protocols.metric import ChoosesObservations, Metric, StageMetric, Table, Vector
from d9d_core.protocols.model import (
    ContextShare,
    HasHeads,
    HasLinearTerms,
    PositionShare,
    SeesContext,
    SeesSequence,
    SequenceShare,
    SharesAttention,
    SplitsContext,
    SplitsFeatures,
    SplitsSequence,
    SplitsVocabulary,
    Stage,
    TermKind,
    VocabularyShare,
)
from d9d_core.protocols.optimizer import AveragesWeights, DeclaresCollectives, DividesGradients, LrSchedule, Optimizer
from d9d_core.protocols.peft import PeftMethod, StartsFromWeights, SwitchesOff
from d9d_core.protocols.strategy import (
    Applied,
    Collective,
    CommunicatesAlone,
    CommunicatesInContext,
    Communication,
    ContextCall,
    GradientOwner,
    Kind,
    Pass,
    Reducer,
    StepShape,
    Strategy,
    no_collectives,
)
from d9d_core.protocols.subscriber import (
    EndsTraining,
    OwnEvent,
    StatefulSubscriber,
    Subscriber,
    Subscribes,
    subscribe,
)
from d9d_core.protocols.task import (
    FinishesTraining,
    HasHparams,
    LanguageModelTask,
    OwnsMetrics,
    SeesSteps,
    SplitsPositions,
    StageInputs,
    StatefulTask,
    Task,
    UsesTopology,
    WeighsOutputs,
)
from d9d_core.protocols.topology import Topology
from d9d_core.protocols.tracker import (
    Histogram,
    LogsValues,
    Picture,
    RunInfo,
    RunLog,
    SeriesName,
    TakesFiles,
    TakesHistograms,
    TakesPictures,
    TakesTables,
    TakesTexts,
    Tracker,
    TrackerRun,
    flatten,
    split_tags,
)
from d9d_core.traits import (
    TRAITS,
    Adapts,
    AddsLosses,
    ContextParallelizable,
    DefersWeights,
    Dispatched,
    Dispatcher,
    Divisible,
    HasBanks,
    HasBlocks,
    HasExperts,
    HasOps,
    HasTallies,
    LateInit,
    LayoutDependent,
    LossTerm,
    ObservesOnDemand,
    PipelineStage,
    Routing,
    TensorParallelizable,
    TensorStyle,
    Transfer,
    modules_with,
)
from d9d_core.types import Json, Microbatch, Pack, State, TensorSpec
from d9d_core.untrusted import parse_json, read_regular

if TYPE_CHECKING:
    from d9d_core.components.accumulators import AccumulatedMetric, Accumulator
    from d9d_core.deferral import Deferral, DeferredWeights
    from d9d_core.tensors import beside, encode_png, full, is_dtensor, local, wide_dtype

#: Module of the names that need torch; they are imported when they are used.
_LAZY = {
    "beside": "d9d_core.tensors",
    "encode_png": "d9d_core.tensors",
    "AccumulatedMetric": "d9d_core.components.accumulators",
    "Accumulator": "d9d_core.components.accumulators",
    "Deferral": "d9d_core.deferral",
    "DeferredWeights": "d9d_core.deferral",
    "full": "d9d_core.tensors",
    "is_dtensor": "d9d_core.tensors",
    "local": "d9d_core.tensors",
    "wide_dtype": "d9d_core.tensors",
}

__all__ = [
    "AXES",
    "CATALOGUE",
    "FOREIGN_FAILURES",
    "ROW",
    "TRAITS",
    "AccumulatedMetric",
    "Accumulator",
    "Action",
    "Adapts",
    "AddsLosses",
    "Applied",
    "Arrival",
    "AveragesWeights",
    "Backward",
    "BlockCost",
    "BuildError",
    "CheckpointError",
    "CheckpointSaved",
    "CheckpointStarts",
    "ChoosesObservations",
    "Collective",
    "Columns",
    "CommunicatesAlone",
    "CommunicatesInContext",
    "Communication",
    "ContextCall",
    "ContextParallelizable",
    "ContextShare",
    "Continuation",
    "ContinuesRows",
    "D9dError",
    "DataContext",
    "DataError",
    "DataRanks",
    "DataReady",
    "DataStream",
    "Decision",
    "DeclaresCollectives",
    "Deferral",
    "DeferredWeights",
    "DefersWeights",
    "Dispatched",
    "Dispatcher",
    "DividesGradients",
    "Divisible",
    "EndsTraining",
    "EvaluationEnds",
    "EvaluationStarts",
    "EventsReady",
    "Exchange",
    "FinishesTraining",
    "FirstPass",
    "Forward",
    "ForwardBackwardEnds",
    "ForwardBackwardStarts",
    "ForwardPass",
    "ForwardReady",
    "GradientOwner",
    "Grid",
    "Handler",
    "HasBanks",
    "HasBlocks",
    "HasExperts",
    "HasHeads",
    "HasHparams",
    "HasLinearTerms",
    "HasOps",
    "HasTallies",
    "Health",
    "Histogram",
    "InferenceFailed",
    "InferenceFinished",
    "InferenceStarts",
    "InferenceStopped",
    "InferenceTask",
    "InputBackward",
    "JobConfigured",
    "JobError",
    "JobFile",
    "Json",
    "Kind",
    "LanguageModelTask",
    "LateInit",
    "LayoutDependent",
    "LogsValues",
    "LossTerm",
    "LrSchedule",
    "Metric",
    "Microbatch",
    "MicrobatchAction",
    "ModelConfig",
    "ModelCosts",
    "ModelPlanned",
    "ModelReady",
    "Named",
    "NonFiniteError",
    "ObservesOnDemand",
    "OpCost",
    "OpSignature",
    "OpSlot",
    "Optimizer",
    "OptimizerCost",
    "OptimizerReady",
    "OptimizerStepEnds",
    "OptimizerStepStarts",
    "Overlap",
    "OwnEvent",
    "OwnsMetrics",
    "Pack",
    "PackEnds",
    "PackStarts",
    "PacksDocuments",
    "Pass",
    "PassModel",
    "PeftMethod",
    "Picture",
    "PipelineStage",
    "PluginConfig",
    "PluginError",
    "PositionShare",
    "Program",
    "ProgramIndex",
    "ReadsModules",
    "ReceiveActivation",
    "ReceiveGradient",
    "Reduce",
    "Reducer",
    "Routing",
    "RowsWritten",
    "RunInfo",
    "RunLog",
    "SampleLengths",
    "SaveError",
    "SaveReport",
    "Schedule",
    "ScheduleConfig",
    "Section",
    "SeesContext",
    "SeesSequence",
    "SeesSteps",
    "SendActivation",
    "SendGradient",
    "SequenceShare",
    "SeriesName",
    "Share",
    "SharesAttention",
    "SleepEnds",
    "SleepStarts",
    "SplitsContext",
    "SplitsFeatures",
    "SplitsPositions",
    "SplitsSequence",
    "SplitsVocabulary",
    "Stage",
    "StageCost",
    "StageInputs",
    "StageMetric",
    "StageRunner",
    "StageTimes",
    "StartsFromWeights",
    "State",
    "StatefulSubscriber",
    "StatefulTask",
    "StatesLengths",
    "StepEnds",
    "StepResult",
    "StepShape",
    "StepStarts",
    "StepState",
    "Strategy",
    "StrategyCost",
    "Subscriber",
    "Subscribes",
    "SwitchesOff",
    "Table",
    "TakesFiles",
    "TakesHistograms",
    "TakesPictures",
    "TakesTables",
    "TakesTexts",
    "Task",
    "TensorParallelizable",
    "TensorSpec",
    "TensorStyle",
    "TermKind",
    "Topology",
    "Tracker",
    "TrackerRun",
    "TrainingError",
    "TrainingFailed",
    "TrainingFinished",
    "TrainingStarts",
    "TrainingStopped",
    "Transfer",
    "TwoPassTask",
    "UsesTopology",
    "ValuesLogged",
    "Vector",
    "Visit",
    "VocabularyShare",
    "WakeEnds",
    "WakeStarts",
    "WeighsOutputs",
    "WeightBackward",
    "Writer",
    "WritesText",
    "awaited",
    "beside",
    "closest",
    "compute_parts",
    "count_stages",
    "diff_programs",
    "encode_png",
    "find_deadlock",
    "flatten",
    "format_programs",
    "forward_only",
    "full",
    "is_dtensor",
    "load_config",
    "local",
    "modules_with",
    "no_collectives",
    "packs_documents",
    "parse_json",
    "parse_programs",
    "placement",
    "plugin_error",
    "problems_of",
    "read_regular",
    "sample_lengths",
    "single_stage",
    "split_tags",
    "subscribe",
    "validate",
    "wide_dtype",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
