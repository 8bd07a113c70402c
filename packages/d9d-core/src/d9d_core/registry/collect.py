"""Collection of records from declaration modules, one plugin at a time; a broken plugin adds no records."""

from __future__ import annotations

import difflib
import inspect
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from types import FrameType
from typing import Any

import pluggy

from d9d_core.containment import FOREIGN_FAILURES, directory_kept, exits_raised
from d9d_core.errors import PluginError, interrupt_behind
from d9d_core.registry import hooks
from d9d_core.registry.entries import Entry, Origin, Problem, Record, plugin_error, shown
from d9d_core.registry.imports import import_advice
from d9d_core.registry.known import KnownPlugins

#: Modules that a declaration must not import.
_HEAVY = ("torch", "pydantic")
#: Environment variable: seconds that a plugin's declarations may take; 0 for no limit.
LIMIT = "D9D_PLUGIN_SECONDS"
_SECONDS = "120"


class Collector:
    """Collector of records from plugins, one plugin at a time; a broken plugin adds no records."""

    def __init__(self, known: KnownPlugins) -> None:
        self.known = known
        self.blocked: dict[str, str] = {}
        self.entries: list[Entry] = []
        self.plugins: list[Origin] = []
        self.problems: list[Problem] = []
        self._managers: list[pluggy.PluginManager] = []

    def refuse(self, problem: Problem) -> None:
        """Record that a plugin is not loaded, and continue without it."""
        self.problems.append(problem)

    def add(self, origin: Origin, load: Callable[[], object], *, must: bool = False, light: bool = False) -> None:
        """Load a plugin. ``must``: raise if loading fails. ``light``: an import of torch or pydantic is a problem."""
        before = {name for name in _HEAVY if name in sys.modules}
        start = time.perf_counter()
        try:
            with contained(str(origin)):
                plugin = self._import(load)
                api = self._check_api(plugin, origin)
                entries = self._collect(plugin, origin)
        except RefusedError as refusal:
            problem = Problem(origin, str(refusal), refusal.__cause__)
            if must:
                raise plugin_error(str(problem), problem.error) from problem.error
            self.refuse(problem)
            return
        origin = replace(origin, seconds=time.perf_counter() - start, api=api)
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
            raise RefusedError(f"failed to import: {shown(error)}{import_advice(error)}") from error

    def _collect(self, plugin: object, origin: Origin) -> list[Entry]:
        # The manager is out of the list while in use. If the plugin fails, it may still be registered in the manager,
        # which is then not put back.
        manager = self._managers.pop() if self._managers else _manager()
        _check_hook_names(plugin)
        try:
            manager.register(plugin, name=origin.module)
            manager.check_pending()
        except pluggy.PluginValidationError as error:
            raise RefusedError(f"has an invalid hook: {error}") from error
        entries: list[Entry] = []
        for kind in hooks.KINDS:
            records = self._call(manager, kind)
            keys = [record.key for record in records]
            if twice := sorted(key for key in {*keys} if keys.count(key) > 1):
                raise RefusedError(f"declares {kind.name} '{twice[0]}' twice; rename or remove one of the two")
            entries += [Entry(kind, record, origin) for record in records]
        manager.unregister(plugin)
        self._managers.append(manager)
        return entries

    def _check_api(self, plugin: object, origin: Origin) -> int:
        """Plugin API that the plugin states; 0 for a single file that states none."""
        written_for = getattr(plugin, "D9D_API", None)
        oldest, newest = hooks.OLDEST_API, hooks.NEWEST_API
        if type(written_for) is int and oldest <= written_for <= newest:
            return written_for
        if written_for is None and not origin.version:
            return 0
        if written_for is None:
            raise RefusedError(f"does not state its plugin API; write D9D_API = {newest} in {origin.module}")
        if type(written_for) is not int:
            raise RefusedError(f"states D9D_API = {shown(written_for)}, not an integer; write D9D_API = {newest}")
        offered = f"API {newest}" if oldest == newest else f"APIs {oldest} to {newest}"
        text = f"was written for plugin API {written_for}, this d9d-core offers {offered}; "
        if written_for > newest:
            raise RefusedError(text + "install a newer d9d-core")
        if not origin.version:
            raise RefusedError(f"{text}correct its imports and write D9D_API = {newest}")
        minimum = self.known.versions.get(origin.distribution)
        release = f"{origin.distribution}>={minimum}" if minimum else f"a newer {origin.distribution}"
        raise RefusedError(f"{text}install {release}")

    @staticmethod
    def _call(manager: pluggy.PluginManager, kind: hooks.Kind) -> list[Record]:
        hook = getattr(manager.hook, kind.hook)
        try:
            results = hook()
            _check_results(results, kind, implemented=bool(hook.get_hookimpls()))
            records = [record for result in results for record in result]
        except RefusedError:
            raise
        except FOREIGN_FAILURES as error:
            raise RefusedError(f"failed in {kind.hook}: {shown(error)}") from error
        for record in records:
            if not isinstance(record, kind.record):
                expected, got = kind.record.__name__, type(record).__name__
                raise RefusedError(
                    f"yields an object of type {got} from the hook {kind.hook}; yield {expected} records"
                )
        return records


def _manager() -> pluggy.PluginManager:
    """Plugin manager with d9d's hooks. Reused, because inspecting the hooks takes as long as collecting a plugin."""
    manager = pluggy.PluginManager(hooks.PROJECT)
    manager.add_hookspecs(hooks)
    return manager


class RefusedError(Exception):
    """Reason why a plugin is not loaded; the text continues a sentence that begins with the plugin's name."""


class _TooLongError(BaseException):
    """A plugin's declarations exceeded the time limit; a BaseException, because plugins may catch Exception."""


@contextmanager
def contained(who: str) -> Iterator[None]:
    """Run declarations of a plugin: prints go to standard error, time is limited, all exceptions become RefusedError.

    The time limit works only in the main thread, and if no other code handles the signal SIGALRM.

    Args:
        who: plugin, named in the last message of a process that must be killed because the plugin ignores the limit.

    Raises:
        RefusedError: the plugin raised any exception, tried to end the process, or took too long.
        KeyboardInterrupt: the user pressed Ctrl-C.
        PluginError: the configured limit is not a number of seconds.
    """
    interrupted = False
    raised: BaseException | None = None

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        signal.default_int_handler(number, frame)

    seconds = _seconds()
    try:
        with (
            _handler("SIGINT", interrupt, signal.default_int_handler),
            _limited(who, seconds),
            exits_raised(),
            directory_kept(),
            redirect_stdout(sys.stderr),
        ):
            try:
                yield
            except BaseException as error:
                raised = error
                raise
    except RefusedError:
        raise
    except _TooLongError as error:
        raise RefusedError(str(error)) from error
    except BaseException as error:
        # A KeyboardInterrupt before d9d's handler is installed, or after it is removed, also comes from the user.
        if isinstance(error, KeyboardInterrupt) and (interrupted or error is not raised):
            raise
        if interrupted and interrupt_behind(error):
            raise KeyboardInterrupt from error
        raise RefusedError(f"failed to declare its records: {shown(error)}") from error


@contextmanager
def _handler(name: str, handler: Callable[[int, FrameType | None], None], before: object) -> Iterator[bool]:
    """Install a signal handler inside the block, if in the main thread and if no other code has one; yield success."""
    number: Any = getattr(signal, name, None)
    main = threading.current_thread() is threading.main_thread()
    if number is None or not main or signal.getsignal(number) is not before:
        yield False
        return
    previous = signal.signal(number, handler)
    try:
        yield True
    finally:
        signal.signal(number, previous)


def _seconds() -> float:
    """Time limit in seconds for a plugin's declarations, from the environment variable :data:`LIMIT`."""
    text = os.environ.get(LIMIT) or _SECONDS
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise PluginError(
            f"the environment variable {LIMIT} is '{text}'; make it a number of seconds, such as {_SECONDS}"
        )
    return seconds


@contextmanager
def _limited(who: str, seconds: float) -> Iterator[None]:
    text = f"takes longer than {seconds:g} s (the environment variable {LIMIT} sets this limit)"
    again = False

    def alarm(_number: int, _frame: FrameType | None) -> None:
        nonlocal again
        if again:  # the plugin caught the first _TooLongError
            os.write(2, f"error: {who} {text} and cannot be interrupted\n".encode())
            os.kill(os.getpid(), signal.SIGKILL)
        again = True
        raise _TooLongError(text)

    with _handler("SIGALRM", alarm, signal.SIG_DFL) as handled:
        if handled:
            signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
        try:
            yield
        finally:
            if handled:
                signal.setitimer(signal.ITIMER_REAL, 0)


def _check_results(results: list[object], kind: hooks.Kind, implemented: bool) -> None:
    for result in results:
        if isinstance(result, kind.record):
            name = kind.record.__name__
            raise RefusedError(
                f"returns one {name} from the hook {kind.hook}; use yield instead of return, or return a list"
            )
    wrong = [type(result).__name__ for result in results if not isinstance(result, Iterable)]
    if wrong or (implemented and not results):  # pluggy drops results that are None
        what = wrong[0] if wrong else "nothing"
        raise RefusedError(f"returns {what} from the hook {kind.hook}; write yield in front of each record")


def _check_hook_names(plugin: object) -> None:
    known = [kind.hook for kind in hooks.KINDS]
    for name, value in inspect.getmembers(plugin, inspect.isroutine):
        marked = hasattr(value, f"{hooks.PROJECT}_impl")
        if marked and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"hooks: {', '.join(known)}"
            raise RefusedError(f"implements an unknown hook '{name}'; {hint}")
        if name in known and not marked:
            raise RefusedError(f"defines {name} without the decorator; write @hookimpl above it")
