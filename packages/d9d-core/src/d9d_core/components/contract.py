"""Checks of components against their protocols; errors name the distribution."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Set
from numbers import Real
from types import ModuleType
from typing import Any, Protocol

from d9d_core import model as model_module
from d9d_core import traits as traits_module
from d9d_core.data import DataStream
from d9d_core.errors import BuildError
from d9d_core.events import CATALOGUE
from d9d_core.inference import InferenceTask, Writer
from d9d_core.launcher import Launcher
from d9d_core.metric import Metric
from d9d_core.optimizer import LrSchedule, Optimizer
from d9d_core.peft import PeftMethod
from d9d_core.registry.capabilities import Chosen
from d9d_core.strategy import Strategy
from d9d_core.subscriber import Subscriber
from d9d_core.task import Task
from d9d_core.tracker import Tracker

#: Operations that can merge a metric's states.
REDUCTIONS = ("sum", "max", "min")
#: Kind of record -> protocol of its component.
_PROTOCOLS: Mapping[str, type] = {
    "task": Task,
    "inference task": InferenceTask,
    "writer": Writer,
    "dataset": DataStream,
    "metric": Metric,
    "tracker": Tracker,
    "peft method": PeftMethod,
    "optimizer": Optimizer,
    "lr schedule": LrSchedule,
    "subscriber": Subscriber,
    "launcher": Launcher,
    "strategy": Strategy,
}


def subject(chosen: Chosen) -> str:
    """Text that names a component in messages: its field in the job, kind, name and distribution."""
    return f"{chosen.where}: {chosen.entry.kind.name} {chosen.entry}"


def check_component(chosen: Chosen, component: object) -> None:
    """Check a component against the protocol of its kind.

    Raises:
        BuildError: the component is ``None``, a model is not a module, a member is missing or of another form, a method
            takes other arguments, or a member has a wrong value.
    """
    kind = chosen.entry.kind.name
    if component is None:
        raise BuildError(f"{subject(chosen)}: build returned nothing; return the component")
    if kind == "model":
        problems = _problems_of_modules(chosen, component)
    elif (protocol := _PROTOCOLS.get(kind)) is None:
        problems = []
    else:
        problems = deviations(component, protocol) or optional_deviations(component, protocol)
    if problems:
        raise BuildError("\n".join(f"{subject(chosen)}: {problem}" for problem in problems))
    further = {
        "task": _check_task,
        "dataset": _check_stream,
        "lr schedule": _check_lr_schedule,
        "subscriber": _check_subscriber,
    }
    if kind in further:
        further[kind](chosen, component)


def _problems_of_modules(chosen: Chosen, component: object) -> list[str]:
    """Deviations of a model's modules from the trait protocols that they implement; each class is checked once."""
    from torch import nn  # a model exists, so torch is installed

    if not isinstance(component, nn.Module):
        raise BuildError(f"{subject(chosen)}: build returned {type_of(component)}, which is not a torch.nn.Module")
    traits = [*_protocols(traits_module), *_protocols(model_module)]
    classes = {type(module): module for module in component.modules()}
    return [problem for module in classes.values() for trait in traits for problem in _optional(module, trait)]


def optional_deviations(component: object, protocol: type) -> list[str]:
    """Deviations of a component from the optional protocols that are defined in the same module as ``protocol``.

    A component with only some members of an optional protocol is reported too: otherwise the caller would silently
    treat it as if it did not implement the protocol.
    """
    required = vars(protocol).keys()
    problems = []
    for optional in _protocols(sys.modules[protocol.__module__]):
        members = [name for name in _members(optional) if name not in required]
        has = [name for name in members if hasattr(type(component), name)]
        lacks = [name for name in members if name not in has and not hasattr(component, name)]
        if has and lacks:
            source = f"{optional.__module__}:{optional.__name__}"
            problems.append(
                f"{type(component).__name__} has {', '.join(has)} of {source}, but lacks {', '.join(lacks)}; "
                "add the missing members, or rename the present ones"
            )
        problems += _optional(component, optional)
    return problems


def _optional(component: object, protocol: type) -> list[str]:
    return deviations(component, protocol) if isinstance(component, protocol) else []


def _protocols(module: ModuleType) -> list[type]:
    """Runtime-checkable protocols that a module defines."""
    own = [value for value in vars(module).values() if isinstance(value, type) and value.__module__ == module.__name__]
    # `_is_runtime_protocol` is private to typing; isinstance accepts only protocols that have it.
    return [value for value in own if Protocol in value.__bases__ and getattr(value, "_is_runtime_protocol", False)]


def _members(protocol: type) -> list[str]:
    """Public methods and properties that a protocol declares itself."""
    return [
        name
        for name, declared in vars(protocol).items()
        if (name == "__call__" or not name.startswith("_"))
        and (inspect.isfunction(declared) or isinstance(declared, property))
    ]


def deviations(component: object, protocol: type) -> list[str]:
    """Deviations of a component from a protocol, one message per missing or different member."""
    name = type(component).__name__
    source = f"{protocol.__module__}:{protocol.__name__}"
    problems = []
    for member in _members(protocol):
        declared = vars(protocol)[member]
        is_property = not inspect.isfunction(declared)
        static = inspect.getattr_static(component, member, None)
        if static is None and not hasattr(component, member):
            problems.append(f"{name} lacks {member}{'' if is_property else '()'} of {source}")
        elif is_property and inspect.isfunction(static):
            problems.append(f"{name}.{member} is a method; {source} has a property: write @property above it")
        elif inspect.isfunction(declared) and (problem := _call_problem(component, member, declared)):
            problems.append(f"{name}.{member} {problem}, as {source} says")
    return problems


def _call_problem(component: object, member: str, declared: Callable[..., Any]) -> str | None:
    if isinstance(inspect.getattr_static(type(component), member, None), property):
        return "is a property; make it a method"
    method = getattr(component, member)
    if not callable(method):
        return "is not a method; make it one"
    _, *parameters = inspect.signature(declared).parameters.values()
    given = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):  # built-in functions have no signature
        return None
    try:
        signature.bind(*given)
    except TypeError:
        return f"takes {signature}; it is called with ({', '.join(given)})"
    return None


def check_returned(chosen: Chosen, call: str, value: object, *kinds: type) -> None:
    """Check the type of a value that a component returned.

    Args:
        chosen: the component.
        call: the call, as text for the message.
        value: returned value.
        kinds: accepted types; a bool is never accepted.

    Raises:
        BuildError: the value has another type.
    """
    if not isinstance(value, kinds) or isinstance(value, bool):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise BuildError(f"{subject(chosen)}: {call} returned {type_of(value)}, not {wanted}")


def check_mapping(chosen: Chosen, call: str, value: object, kind: type) -> None:
    """Check that a component returned a mapping from names to values of one type.

    Raises:
        BuildError: the value is not a mapping, or a key or value has a wrong type.
    """
    check_returned(chosen, call, value, Mapping)
    assert isinstance(value, Mapping)
    for name, one in value.items():
        check_returned(chosen, f"{call}, for {name!r},", one, kind)


def _check_task(chosen: Chosen, task: Any) -> None:
    check_mapping(chosen, "coefficients", task.coefficients, Real)
    if not task.coefficients:
        raise BuildError(f"{subject(chosen)}: coefficients is empty; a task has at least one loss term")


def _check_stream(chosen: Chosen, stream: Any) -> None:
    check_returned(chosen, "facts", stream.facts, Mapping)


def _check_lr_schedule(chosen: Chosen, schedule: Any) -> None:
    check_returned(chosen, "the call with step 0", schedule(0), Real)


def check_optimizer(chosen: Chosen, optimizer: Optimizer) -> None:
    """Check the state, description and learning rate that an optimizer returns.

    Raises:
        BuildError: the state, description or learning rate has a wrong type.
    """
    from torch import Tensor

    check_mapping(chosen, "state()", optimizer.state(), Tensor)
    check_returned(chosen, "describe()", optimizer.describe(), Mapping)
    check_returned(chosen, "lr", optimizer.lr, Real)


def _check_subscriber(chosen: Chosen, subscriber: Any) -> None:
    pairs: object = subscriber.subscriptions()
    check_returned(chosen, "subscriptions()", pairs, Iterable)
    assert isinstance(pairs, Iterable)
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2 or not callable(pair[1]):
            raise BuildError(
                f"{subject(chosen)}: subscriptions() contains {pair!r}; return pairs of an event type and a function"
            )
        if pair[0] not in CATALOGUE:
            known = ", ".join(event.__name__ for event in CATALOGUE)
            raise BuildError(f"{subject(chosen)}: subscribes to {pair[0]!r}; events are: {known}")


def check_metric(chosen: Chosen, metric: Metric) -> None:
    """Check a metric's state and reductions; for a ``StageMetric``, call this after its ``attach``.

    Raises:
        BuildError: state or reductions have a wrong type, a reduction is unknown, or state and reductions have
            different names.
    """
    reductions: object = metric.reductions
    check_mapping(chosen, "reductions", reductions, str)
    assert isinstance(reductions, Mapping)
    for name, reduction in reductions.items():
        if reduction not in REDUCTIONS:
            known = f"choose from: {', '.join(REDUCTIONS)}; express a mean by a sum and a count"
            raise BuildError(f"{subject(chosen)}: 'reductions' gives '{name}' the unknown '{reduction}'; {known}")
    from torch import Tensor

    state = metric.state()
    check_mapping(chosen, "state()", state, Tensor)
    if state.keys() != reductions.keys():
        names = ", ".join(sorted(state.keys() ^ reductions.keys()))
        raise BuildError(f"{subject(chosen)}: state() and reductions must have the same names; only one has: {names}")


def check_trainable(chosen: Chosen, trainable: object) -> None:
    """Check the set of trainable parameter names that a fine-tuning method returned.

    Raises:
        BuildError: the value is not a set.
    """
    check_returned(chosen, "inject()", trainable, Set)


def type_of(value: object) -> str:
    """Type of a value with its article, such as ``an int``, for error messages; ``nothing`` for ``None``."""
    name = type(value).__name__
    return "nothing" if value is None else f"{'an' if name[0] in 'aeiouAEIO' else 'a'} {name}"
