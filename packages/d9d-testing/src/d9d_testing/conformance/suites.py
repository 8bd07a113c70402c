"""Suites by kind of component, and test classes for components whose author ships no suite.

A distribution ships suites in a module that it names by an entry point of the group ``d9d.conformance``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from d9d_core.registry.entries import Entry

#: Entry-point group whose modules hold a distribution's conformance suites.
GROUP = "d9d.conformance"
#: Name that stands for the kind of component in the suite of a whole declaration module.
DECLARATIONS = "declarations"


@dataclass(frozen=True, slots=True)
class Suite:
    """Conformance suite of one kind of component.

    Attributes:
        target: module and class, as ``module:Class``.
        facts: members that only the author of a component can write; empty if the suite runs without them.
    """

    target: str
    facts: str = ""


#: Kind -> suite. A kind that is absent has no suite of its own: the suite of declarations covers its records.
SUITES: Mapping[str, Suite] = {
    DECLARATIONS: Suite("d9d_testing.suites.plugin:PluginSuite"),
    "model": Suite("d9d_testing.suites.model:ModelSuite"),
    "strategy": Suite("d9d_testing.suites.strategy:StrategySuite"),
    "schedule": Suite("d9d_testing.suites.schedule:ScheduleSuite", "most_held()"),
    "task": Suite("d9d_testing.suites.task:TaskSuite"),
    "inference task": Suite("d9d_testing.suites.inference.task:InferenceTaskSuite", "case()"),
    "writer": Suite("d9d_testing.suites.inference.writer:WriterSuite", "read()"),
    "dataset": Suite("d9d_testing.suites.dataset:DatasetSuite"),
    "metric": Suite("d9d_testing.suites.metric:MetricSuite"),
    "tracker": Suite("d9d_testing.suites.tracker:TrackerSuite"),
    "peft method": Suite("d9d_testing.suites.peft:PeftSuite"),
    "optimizer": Suite("d9d_testing.suites.optimizer:OptimizerSuite"),
    "lr schedule": Suite("d9d_testing.suites.lr_schedule:LrScheduleSuite"),
    "kernel": Suite("d9d_testing.suites.kernel:KernelSuite"),
    "subscriber": Suite("d9d_testing.suites.subscriber:SubscriberSuite"),
    "launcher": Suite("d9d_testing.suites.launcher:LauncherSuite", "started() and unknown()"),
}


def kind_of(suite: type) -> str | None:
    """Kind of component that a test class tests, by its base classes; ``None`` if it is no conformance suite."""
    bases = {f"{base.__module__}:{base.__qualname__}" for base in suite.__mro__}
    return next((kind for kind, known in SUITES.items() if known.target in bases), None)


def written(modules: Iterable[str], entries: Sequence[Entry], others: Sequence[str]) -> str:
    """Source of test classes for declaration modules and components without a shipped suite.

    Args:
        modules: declaration modules.
        entries: components; a kind without a suite, or whose suite needs facts, gets no class.
        others: declaration modules of the other installed plugins, whose capability tokens the modules may use.

    Returns:
        Text of a test module; without classes, empty.
    """
    tests = [(DECLARATIONS, f"    plugin = {module!r}\n    builds_on = {tuple(others)!r}\n") for module in modules]
    tests += [
        (entry.kind.name, f"    plugin = {entry.origin.module!r}\n    target = {entry.spec.key!r}\n")
        for entry in entries
        if (suite := SUITES.get(entry.kind.name)) and not suite.facts
    ]
    lines = ['"""Conformance suites without facts of the author."""', ""]
    for number, (kind, body) in enumerate(tests):
        module, _, name = SUITES[kind].target.partition(":")
        word = re.sub(r"\W", "", kind.title())
        lines += [f"from {module} import {name}  # noqa", f"class Test{word}{number}({name}):", body]
    return "\n".join(lines) if tests else ""
