"""Discovery of plugins, from entry points to a registry: one scan, filtered before import, each plugin on its own.

Order never decides anything: candidates are sorted, and two plugins that declare one name are an error when it is used.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

import pluggy

from d9d_core.errors import PluginError
from d9d_core.plugin import hooks, installed
from d9d_core.plugin.known import KnownPlugins
from d9d_core.plugin.policy import FOUNDATION, PluginPolicy
from d9d_core.plugin.ref import FOREIGN_FAILURES
from d9d_core.plugin.registry import Entry, Origin, Problem, Record, Registry, plugin_error
from d9d_core.plugin.single_file import file_plugin

_HEAVY = ("torch", "pydantic")


def discover(policy: PluginPolicy | None = None, *, known: KnownPlugins | None = None) -> Registry:
    """Load the records of the foundation, the installed plugins that ``policy`` admits, and its single-file plugins.

    Raises:
        PluginError: the policy names a plugin that is not installed; a required plugin is missing or broken; a
            single-file plugin cannot be loaded; with ``strict``, any problem.
    """
    policy = policy or PluginPolicy()
    collector = _Collector(known or KnownPlugins.shipped())
    candidates = installed.scan()
    policy.check(candidate.origin.distribution for candidate in candidates)
    for candidate in candidates:
        origin, damage = candidate.origin, candidate.damage
        if reason := policy.refusal(origin.distribution):
            collector.blocked[origin.distribution] = reason
        elif damage is not None:
            collector.refuse(Problem(origin, f"has damaged metadata: {damage!r}; install it again", damage))
        else:
            collector.add(origin, lambda module=origin.module: importlib.import_module(module), light=True)  # type: ignore[misc]
    for path in policy.files:
        collector.add(*file_plugin(path), must=True)
    registry = collector.registry()
    _enforce(policy, registry)
    return registry


def load_explicit(plugins: Iterable[object], *, known: KnownPlugins | None = None) -> Registry:
    """Registry of exactly these modules or objects, and the foundation's records.

    Raises:
        PluginError: one of them cannot be loaded.
    """
    collector = _Collector(known or KnownPlugins.shipped())
    installed_ones = installed.scan()
    for candidate in installed_ones:
        if candidate.origin.distribution in FOUNDATION:
            module = candidate.origin.module
            collector.add(candidate.origin, lambda module=module: importlib.import_module(module), light=True)  # type: ignore[misc]
    for plugin in plugins:
        name = str(getattr(plugin, "__name__", type(plugin).__name__))
        origins = (candidate.origin for candidate in installed_ones)
        origin = next((origin for origin in origins if origin.module == name), Origin(name, "", name))
        collector.add(origin, lambda plugin=plugin: plugin, must=True)  # type: ignore[misc]
    return collector.registry()


def _enforce(policy: PluginPolicy, registry: Registry) -> None:
    loaded = {origin.distribution for origin in registry.plugins}
    for distribution in sorted(policy.require - loaded):
        broken = next((p for p in registry.problems if p.origin.distribution == distribution), None)
        if broken:
            raise plugin_error(f"plugins.require: {broken}", broken.error) from broken.error
        reason = registry.blocked.get(distribution)
        hint = (
            f"is not loaded: {reason}" if reason else f"is not installed; install it with: pip install {distribution}"
        )
        raise PluginError(f"plugins.require: {distribution} {hint}")
    texts = [str(problem) for problem in registry.problems] + registry.conflicts()
    if policy.strict and texts:
        raise PluginError("--strict-plugins: " + "; ".join(texts))


class _Collector:
    """Collects the records of one plugin at a time, so that a broken one leaves nothing behind."""

    def __init__(self, known: KnownPlugins) -> None:
        self.known = known
        self.blocked: dict[str, str] = {}
        self._entries: list[Entry] = []
        self._plugins: list[Origin] = []
        self._problems: list[Problem] = []

    def registry(self) -> Registry:
        return Registry(self._entries, self._plugins, self._problems, self.blocked, self.known)

    def refuse(self, problem: Problem) -> None:
        """Go on without a plugin."""
        self._problems.append(problem)

    def add(self, origin: Origin, load: Callable[[], object], *, must: bool = False, light: bool = False) -> None:
        """Load a plugin. ``must``: a failure is raised. ``light``: importing torch or pydantic is reported."""
        before = {name for name in _HEAVY if name in sys.modules}
        start = time.perf_counter()
        try:
            plugin = self._import(load)
            entries = self._collect(plugin, origin)
        except _RefusedError as refusal:
            problem = Problem(origin, str(refusal), refusal.__cause__)
            if must:
                raise plugin_error(str(problem), problem.error) from problem.error
            self.refuse(problem)
            return
        origin = replace(origin, seconds=time.perf_counter() - start)
        self._plugins.append(origin)
        self._entries.extend(replace(entry, origin=origin) for entry in entries)
        heavy = [name for name in _HEAVY if name in sys.modules and name not in before]
        if light and heavy:
            text = (
                f"imports {' and '.join(heavy)} in its declaration module {origin.module}; refer to heavy code with Ref"
            )
            self._problems.append(Problem(origin, text, loaded=True))

    @staticmethod
    def _import(load: Callable[[], object]) -> object:
        try:
            return load()
        except FOREIGN_FAILURES as error:
            raise _RefusedError(f"failed to import: {error!r}") from error

    def _collect(self, plugin: object, origin: Origin) -> list[Entry]:
        self._check_api(plugin, origin)
        manager = pluggy.PluginManager(hooks.PROJECT)
        manager.add_hookspecs(hooks)
        _check_hook_names(plugin)
        try:
            manager.register(plugin, name=origin.module)
            manager.check_pending()
        except pluggy.PluginValidationError as error:
            raise _RefusedError(f"has an invalid hook: {error}") from error
        entries: list[Entry] = []
        for kind in hooks.KINDS:
            for record in self._call(manager, kind):
                if any(e.kind == kind and e.spec.key == record.key for e in entries):
                    raise _RefusedError(f"declares {kind.name} '{record.key}' twice")
                entries.append(Entry(kind, record, origin))
        return entries

    def _check_api(self, plugin: object, origin: Origin) -> None:
        written_for = getattr(plugin, "D9D_API", None)
        offered = hooks.API_VERSION
        if written_for == offered or (written_for is None and not origin.version):
            return
        if written_for is None:
            raise _RefusedError(f"does not state its plugin API; write D9D_API = {offered} in {origin.module}")
        text = f"was written for plugin API {written_for}, this d9d-core offers API {offered}; install "
        if isinstance(written_for, int) and written_for > offered:
            raise _RefusedError(text + "a newer d9d-core")
        minimum = self.known.versions.get(origin.distribution)
        raise _RefusedError(
            text + (f"{origin.distribution}>={minimum}" if minimum else f"a newer {origin.distribution}")
        )

    @staticmethod
    def _call(manager: pluggy.PluginManager, kind: hooks.Kind) -> list[Record]:
        try:
            records = [record for result in getattr(manager.hook, kind.hook)() for record in result or ()]
        except FOREIGN_FAILURES as error:
            raise _RefusedError(f"failed in {kind.hook}: {error!r}") from error
        for record in records:
            if not isinstance(record, kind.record):
                expected, got = kind.record.__name__, type(record).__name__
                raise _RefusedError(f"yields {got} from {kind.hook}, which takes {expected}")
        return sorted(records, key=lambda record: record.key)


class _RefusedError(Exception):
    """Reason why a plugin is not loaded; the text follows its name."""


def _check_hook_names(plugin: object) -> None:
    known = [kind.hook for kind in hooks.KINDS]
    for name, value in inspect.getmembers(plugin, inspect.isroutine):
        marked = hasattr(value, f"{hooks.PROJECT}_impl")
        if marked and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"hooks: {', '.join(known)}"
            raise _RefusedError(f"implements an unknown hook '{name}'; {hint}")
        if name in known and not marked:
            raise _RefusedError(f"defines {name} without the decorator; write @hookimpl above it")
