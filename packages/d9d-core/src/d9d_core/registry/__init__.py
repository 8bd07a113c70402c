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

from d9d_core.plugin import (
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
    Ref,
    ScheduleSpec,
    Spec,
    StrategySpec,
    SubscriberSpec,
    TaskSpec,
    TrackerSpec,
    ViewDim,
    ViewSpec,
    WriterSpec,
    hookimpl,
)
from d9d_core.registry.entries import Entry, Origin
from d9d_core.registry.hooks import API_VERSION, KINDS, Kind
from d9d_core.registry.loader import discover
from d9d_core.registry.manifest import Manifest
from d9d_core.registry.policy import PluginPolicy
from d9d_core.registry.registry import Registry

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
