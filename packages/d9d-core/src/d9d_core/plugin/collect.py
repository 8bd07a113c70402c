"""Collection of records from declaration modules: one plugin at a time, so that a broken one leaves nothing behind."""

from __future__ import annotations

import difflib
import inspect
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

import pluggy

from d9d_core.plugin import hooks
from d9d_core.plugin.entries import Entry, Origin, Problem, Record, plugin_error
from d9d_core.plugin.known import KnownPlugins
from d9d_core.plugin.ref import FOREIGN_FAILURES

#: Modules that a declaration must not import.
_HEAVY = ("torch", "pydantic")


class Collector:
    """Collector of records, one plugin at a time, so that a broken one leaves nothing behind."""

    def __init__(self, known: KnownPlugins) -> None:
        self.known = known
        self.blocked: dict[str, str] = {}
        self.entries: list[Entry] = []
        self.plugins: list[Origin] = []
        self.problems: list[Problem] = []

    def refuse(self, problem: Problem) -> None:
        """Go on without a plugin."""
        self.problems.append(problem)

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
        self.plugins.append(origin)
        self.entries.extend(replace(entry, origin=origin) for entry in entries)
        heavy = [name for name in _HEAVY if name in sys.modules and name not in before]
        if light and heavy:
            text = (
                f"imports {' and '.join(heavy)} in its declaration module {origin.module}; refer to heavy code with Ref"
            )
            self.problems.append(Problem(origin, text, loaded=True))

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
        hook = getattr(manager.hook, kind.hook)
        try:
            results = hook()
            _check_results(results, kind, implemented=bool(hook.get_hookimpls()))
            records = [record for result in results for record in result]
        except _RefusedError:
            raise
        except FOREIGN_FAILURES as error:
            raise _RefusedError(f"failed in {kind.hook}: {error!r}") from error
        for record in records:
            if not isinstance(record, kind.record):
                expected, got = kind.record.__name__, type(record).__name__
                raise _RefusedError(f"yields {got} from {kind.hook}, which takes {expected}")
        return sorted(records, key=lambda record: record.key)


class _RefusedError(Exception):
    """Why a plugin is not loaded; the text follows its name."""


def _check_results(results: list[object], kind: hooks.Kind, implemented: bool) -> None:
    for result in results:
        if isinstance(result, kind.record):
            name = kind.record.__name__
            raise _RefusedError(
                f"returns one {name} from {kind.hook}; write yield in place of return, or return a list"
            )
    wrong = [type(result).__name__ for result in results if not isinstance(result, Iterable)]
    if wrong or (implemented and not results):  # pluggy leaves None out
        what = wrong[0] if wrong else "nothing"
        raise _RefusedError(f"returns {what} from {kind.hook}; write yield in front of each record")


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
