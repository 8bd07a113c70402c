"""From entry points to a registry: one scan, filtered before import, each plugin on its own.

Order never decides anything: candidates are sorted, and two plugins that declare one name are an error when it is used.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import json
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib.metadata import Distribution, entry_points, version
from pathlib import Path

import pluggy

from d9d_core.errors import PluginError
from d9d_core.plugin import hooks
from d9d_core.plugin.known import KnownPlugins
from d9d_core.plugin.policy import PluginPolicy, normalise
from d9d_core.plugin.registry import Entry, Origin, Problem, Record, Registry

BUILTINS = "d9d_core.builtins"
_HEAVY = ("torch", "pydantic")


def discover(policy: PluginPolicy | None = None, *, known: KnownPlugins | None = None) -> Registry:
    """Load core's own records, the installed plugins that ``policy`` admits, and its single-file plugins.

    Raises:
        PluginError: a required plugin is missing or broken; a single-file plugin cannot be loaded; with ``strict``, any
            problem.
    """
    policy = policy or PluginPolicy()
    collector = _Collector(known or KnownPlugins.shipped())
    collector.add(_core_origin(), lambda: importlib.import_module(BUILTINS))
    for origin in _scan():
        reason = policy.refusal(origin.distribution)
        if reason:
            collector.blocked[origin.distribution] = reason
        else:
            collector.add(origin, lambda module=origin.module: importlib.import_module(module), light=True)  # type: ignore[misc]
    for path in policy.files:
        collector.add(*_file_plugin(path), must=True)
    registry = collector.registry()
    _enforce(policy, registry)
    return registry


def load_explicit(plugins: Iterable[object], *, known: KnownPlugins | None = None) -> Registry:
    """A registry of exactly these modules or objects, and core's own records.

    Raises:
        PluginError: one of them cannot be loaded.
    """
    collector = _Collector(known or KnownPlugins.shipped())
    collector.add(_core_origin(), lambda: importlib.import_module(BUILTINS))
    for plugin in plugins:
        name = str(getattr(plugin, "__name__", type(plugin).__name__))
        collector.add(_origin_of_module(name), lambda plugin=plugin: plugin, must=True)  # type: ignore[misc]
    return collector.registry()


def _core_origin() -> Origin:
    return Origin("d9d-core", version("d9d-core"), BUILTINS)


def _origin_of_module(module: str) -> Origin:
    for origin in _scan():
        if origin.module == module:
            return origin
    return Origin(module, "", module)


def _scan() -> list[Origin]:
    # importlib.metadata lists entry points in directory order, which differs between file systems, hence the sorting.
    found = {}
    for point in entry_points(group=hooks.PROJECT):
        if point.dist is None:
            continue
        origin = Origin(normalise(point.dist.name), point.dist.version, point.module, _is_editable(point.dist))
        found[origin.distribution, origin.module] = origin
    return [found[key] for key in sorted(found)]


def _is_editable(distribution: Distribution) -> bool:
    text = distribution.read_text("direct_url.json")
    return bool(text and json.loads(text).get("dir_info", {}).get("editable"))


def _file_plugin(path: Path) -> tuple[Origin, Callable[[], object]]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise PluginError(f"plugin file {path}: {error.strerror or error}; give the path of a Python file") from error
    digest = hashlib.sha256(content).hexdigest()
    # The content is part of the name: references written as f"{__name__}:Thing" resolve, and two versions can coexist.
    name = f"d9d_file_{path.stem}_{digest[:12]}"

    def load() -> object:
        if name in sys.modules:
            return sys.modules[name]
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} is not a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module

    return Origin(str(path), "", name, digest=digest), load


def _enforce(policy: PluginPolicy, registry: Registry) -> None:
    loaded = {origin.distribution for origin in registry.plugins}
    for distribution in sorted(policy.require - loaded):
        broken = next((p for p in registry.problems if p.origin.distribution == distribution), None)
        if broken:
            raise _as_error(f"plugins.require: {broken}", broken.error) from broken.error
        reason = registry.blocked.get(distribution)
        hint = (
            f"is not loaded: {reason}" if reason else f"is not installed; install it with: pip install {distribution}"
        )
        raise PluginError(f"plugins.require: {distribution} {hint}")
    texts = [str(problem) for problem in registry.problems] + registry.conflicts()
    if policy.strict and texts:
        raise PluginError("--strict-plugins: " + "; ".join(texts))


def _as_error(text: str, origin: Exception | None) -> PluginError:
    error = PluginError(text)
    error.origin = origin
    return error


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

    def add(self, origin: Origin, load: Callable[[], object], *, must: bool = False, light: bool = False) -> None:
        """Load a plugin. ``must``: a failure is raised. ``light``: importing torch or pydantic is reported."""
        before = {name for name in _HEAVY if name in sys.modules}
        start = time.perf_counter()
        try:
            plugin = self._import(load)
            entries = self._collect(plugin, origin)
        except _RefusedError as refusal:
            cause = refusal.__cause__ if isinstance(refusal.__cause__, Exception) else None
            problem = Problem(origin, str(refusal), cause)
            if must:
                raise _as_error(str(problem), cause) from cause
            self._problems.append(problem)
            return
        origin = replace(origin, seconds=time.perf_counter() - start)
        self._plugins.append(origin)
        self._entries.extend(replace(entry, origin=origin) for entry in entries)
        heavy = [name for name in _HEAVY if name in sys.modules and name not in before]
        if light and heavy:
            text = f"its declaration module {origin.module} imports {' and '.join(heavy)}; refer to heavy code with Ref"
            self._problems.append(Problem(origin, text, loaded=True))

    @staticmethod
    def _import(load: Callable[[], object]) -> object:
        try:
            return load()
        except Exception as error:
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
        except Exception as error:
            raise _RefusedError(f"failed in {kind.hook}: {error!r}") from error
        for record in records:
            if not isinstance(record, kind.record):
                expected, got = kind.record.__name__, type(record).__name__
                raise _RefusedError(f"yields {got} from {kind.hook}, which takes {expected}")
        return sorted(records, key=lambda record: record.key)


class _RefusedError(Exception):
    """Why a plugin is not loaded; the text follows its name."""


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
