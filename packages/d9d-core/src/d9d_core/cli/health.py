"""``d9d doctor``: runs the health checks of this machine and reports problems of plugins."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from importlib.metadata import version

from rich.console import Console
from rich.text import Text

from d9d_core.cli.group import shadowed_commands
from d9d_core.cli.machine import machine
from d9d_core.containment import FOREIGN_FAILURES
from d9d_core.health import Health
from d9d_core.plugin import HealthCheckSpec, Spec
from d9d_core.registry.capabilities import BY_HAND, how_to_get, missing_extras, missing_modules
from d9d_core.registry.entries import shown
from d9d_core.registry.registry import Registry
from d9d_core.terminal.console import console_for


def examine(registry: Registry, own_commands: Collection[str] = (), verbose: bool = False) -> bool:
    """Check the machine, run every health check of ``d9d doctor``, and print every plugin problem.

    Args:
        registry: records of the installed plugins.
        own_commands: names of d9d-core's sub-commands, which hide plugins' sub-commands of the same name.
        verbose: print a line for each plugin and for each library that is not installed.

    Returns:
        False if there is any problem.
    """
    console = console_for()
    outcomes = [*machine(verbose), *_checks(registry)]
    for name, health in outcomes:
        _print(console, health.ok, f"{name}: {health.message}", health.advice)
    if text := nothing_installed(registry):
        _print(console, True, text)
    if verbose:
        for origin in registry.plugins:
            editable = ", editable" if origin.editable else ""
            _print(console, True, f"plugin {origin}{editable} ({origin.seconds * 1000:.0f} ms)")
    elif registry.plugins:
        count = len(registry.plugins)
        _print(console, True, f"plugins: {count} load{'s' if count == 1 else ''}; d9d doctor --verbose lists them")
    problems = [f"plugin {problem}" for problem in registry.problems]
    problems += registry.conflicts() + shadowed_commands(registry, own_commands)
    for text in problems:
        _print(console, False, text)
    blocked = [f"plugin {distribution}: {reason}" for distribution, reason in registry.blocked.items()]
    for text in [*_without_library(registry, verbose), *_without_extra(registry), *blocked]:
        _print(console, None, text)
    return not problems and all(health.ok for _, health in outcomes)


def _checks(registry: Registry) -> Iterator[tuple[str, Health]]:
    """Run the health checks of plugins; yield name and outcome of each check."""
    for entry in registry.entries("health check"):
        assert isinstance(entry.spec, HealthCheckSpec)
        if missing := missing_modules(entry.spec):
            names = " ".join(missing)
            yield entry.spec.name, Health(False, f"{names} is not installed; pip install {names}")
            continue
        try:
            yield entry.spec.name, entry.spec.run.load()()
        except FOREIGN_FAILURES as error:
            yield entry.spec.name, Health(False, f"the check failed: {shown(error)}")


def nothing_installed(registry: Registry) -> str | None:
    """Message that names the package to install if d9d-core is installed alone; ``None`` if any plugin is installed."""
    if registry.entries() or registry.plugins or registry.problems or registry.blocked:
        return None
    return f"d9d-core {version('d9d-core')}: no plugin is installed; to train, begin with: pip install d9d-engine"


def _without_library(registry: Registry, verbose: bool) -> list[str]:
    """Messages about libraries that are not installed: plugin, library, affected components, and how to install it.

    Args:
        registry: records of the installed plugins.
        verbose: whether each library has a message; otherwise, all libraries that pip cannot install for a plugin
            share one message.
    """
    without: dict[tuple[str, str, str], list[str]] = {}
    for entry in registry.entries():
        if isinstance(entry.spec, Spec):
            for module in missing_modules(entry.spec):
                key = (str(entry.origin), entry.origin.distribution, module)
                without.setdefault(key, []).append(f"{entry.kind.name} '{entry.spec.key}'")
    messages, others = [], []
    for (origin, distribution, module), names in without.items():
        how = how_to_get(distribution, module)
        if verbose or not how.startswith(BY_HAND):
            messages.append(f"plugin {origin}: without {module}, not available: {', '.join(names)}; {how}")
        else:
            others.append(f"{module} ({', '.join(names)})")
    if others:
        messages.append(f"optional: {', '.join(others)}; d9d doctor --verbose says where to get them")
    return messages


def _without_extra(registry: Registry) -> list[str]:
    """Messages about extras of plugins' distributions whose packages are not installed."""
    return [
        f"optional: {', '.join(packages)}; pip install '{origin.distribution}[{extra}]'"
        for origin in registry.plugins
        for extra, packages in missing_extras(origin.distribution).items()
    ]


def _print(console: Console, ok: bool | None, text: str, advice: str = "") -> None:
    """Print a line that begins with ``no`` if ``ok`` is false, ``--`` if it is None or there is advice, else ``ok``."""
    mark, colour = ("no", "red") if ok is False else ("ok", "green") if ok and not advice else ("--", "yellow")
    # Print a Text instead of markup, because messages may contain brackets.
    console.print(Text.assemble((mark, colour), f"  {text}", f"; {advice}" if advice else ""))
