"""``d9d doctor``: runs the health checks of this machine and reports problems of plugins."""

from __future__ import annotations

from collections.abc import Collection
from importlib.metadata import version

from rich.text import Text

from d9d_core.cli.group import shadowed_commands
from d9d_core.containment import FOREIGN_FAILURES
from d9d_core.health import Health
from d9d_core.plugin import HealthCheckSpec, Spec
from d9d_core.registry.capabilities import how_to_get, missing_modules
from d9d_core.registry.entries import shown
from d9d_core.registry.registry import Registry
from d9d_core.terminal.console import console_for


def examine(registry: Registry, own_commands: Collection[str] = ()) -> bool:
    """Run every health check of ``d9d doctor`` and print every plugin problem. Returns false if there is any.

    Args:
        registry: records of the installed plugins.
        own_commands: names of d9d-core's sub-commands, which hide plugins' sub-commands of the same name.
    """
    console = console_for()
    sound = True
    if text := nothing_installed(registry):
        console.print(_line(True, text))
    for entry in registry.entries("health check"):
        assert isinstance(entry.spec, HealthCheckSpec)
        if missing := missing_modules(entry.spec):
            names = " ".join(missing)
            sound = False
            console.print(_line(False, f"{entry.spec.name}: {names} is not installed; pip install {names}"))
            continue
        try:
            health: Health = entry.spec.run.load()()
        except FOREIGN_FAILURES as error:
            health = Health(False, f"the check failed: {shown(error)}")
        sound &= health.ok
        console.print(_line(health.ok, f"{entry.spec.name}: {health.message}"))
    for origin in registry.plugins:
        editable = ", editable" if origin.editable else ""
        console.print(_line(True, f"plugin {origin}{editable} ({origin.seconds * 1000:.0f} ms)"))
    problems = [f"plugin {problem}" for problem in registry.problems]
    for text in problems + registry.conflicts() + shadowed_commands(registry, own_commands):
        sound = False
        console.print(_line(False, text))
    blocked = [f"plugin {distribution}: {reason}" for distribution, reason in registry.blocked.items()]
    for text in _without_library(registry) + blocked:
        console.print(Text.assemble(("--", "yellow"), f"  {text}"))
    return sound


def nothing_installed(registry: Registry) -> str | None:
    """Message that names the package to install if d9d-core is installed alone; ``None`` if any plugin is installed."""
    if registry.entries() or registry.plugins or registry.problems or registry.blocked:
        return None
    return f"d9d-core {version('d9d-core')}: no plugin is installed; to train, begin with: pip install d9d-engine"


def _without_library(registry: Registry) -> list[str]:
    """Messages about libraries that are not installed: plugin, library, affected components, and how to install it."""
    without: dict[tuple[str, str, str], list[str]] = {}
    for entry in registry.entries():
        if isinstance(entry.spec, Spec):
            for module in missing_modules(entry.spec):
                key = (str(entry.origin), entry.origin.distribution, module)
                without.setdefault(key, []).append(f"{entry.kind.name} '{entry.spec.key}'")
    return [
        f"plugin {origin}: without {module}, not available: {', '.join(names)}; {how_to_get(distribution, module)}"
        for (origin, distribution, module), names in without.items()
    ]


def _line(ok: bool, text: str) -> Text:
    # Text, not markup: messages may contain brackets.
    return Text.assemble(("ok", "green") if ok else ("no", "red"), f"  {text}")
