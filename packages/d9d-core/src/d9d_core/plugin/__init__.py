"""Declarations of plugins: records, :class:`Ref`, :data:`hookimpl`, and the registry. Imports no torch, no pydantic.

A ``plugin.py`` is a table::

    from d9d_core.plugin import Ref, TaskSpec, hookimpl

    D9D_API = 1

    @hookimpl
    def d9d_tasks():
        yield TaskSpec(
            name="causal_lm",
            summary="Next-token prediction.",
            config=Ref("d9d_nn.causal_lm.config:CausalLMConfig"),
            build=Ref("d9d_nn.causal_lm.task:CausalLM"),
        )
"""

from d9d_core.plugin.entries import Entry, Origin
from d9d_core.plugin.hooks import API_VERSION, KINDS, Kind, hookimpl
from d9d_core.plugin.loader import discover
from d9d_core.plugin.manifest import Manifest
from d9d_core.plugin.policy import PluginPolicy
from d9d_core.plugin.records import (
    ANCHORS,
    CapabilitySpec,
    CommandSpec,
    ConfiguredSpec,
    DatasetSpec,
    HealthCheckSpec,
    InferenceTaskSpec,
    JobCheckSpec,
    KernelSpec,
    LrScheduleSpec,
    MetricSpec,
    ModelSpec,
    OptimizerSpec,
    PeftSpec,
    ScheduleSpec,
    Spec,
    StrategySpec,
    SubscriberSpec,
    TaskSpec,
    TrackerSpec,
    ViewDim,
    ViewSpec,
    WriterSpec,
)
from d9d_core.plugin.ref import Ref
from d9d_core.plugin.registry import Registry

__all__ = [
    "ANCHORS",
    "API_VERSION",
    "KINDS",
    "CapabilitySpec",
    "CommandSpec",
    "ConfiguredSpec",
    "DatasetSpec",
    "Entry",
    "HealthCheckSpec",
    "InferenceTaskSpec",
    "JobCheckSpec",
    "KernelSpec",
    "Kind",
    "LrScheduleSpec",
    "Manifest",
    "MetricSpec",
    "ModelSpec",
    "OptimizerSpec",
    "Origin",
    "PeftSpec",
    "PluginPolicy",
    "Ref",
    "Registry",
    "ScheduleSpec",
    "Spec",
    "StrategySpec",
    "SubscriberSpec",
    "TaskSpec",
    "TrackerSpec",
    "ViewDim",
    "ViewSpec",
    "WriterSpec",
    "discover",
    "hookimpl",
]
