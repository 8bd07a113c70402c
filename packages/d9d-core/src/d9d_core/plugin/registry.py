"""Registry of what is installed: an ordinary immutable object that is handed down, never a global."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from d9d_core.errors import PluginError
from d9d_core.plugin.hooks import KINDS, Kind
from d9d_core.plugin.known import KnownPlugins
from d9d_core.plugin.policy import FOUNDATION, normalise
from d9d_core.plugin.records import CapabilitySpec, Spec

Record = Spec | CapabilitySpec


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of a plugin: distribution or file, and version.

    Attributes:
        distribution: normalised name of the distribution, or the path of a single-file plugin.
        version: its version; empty for a file.
        module: the imported declaration module.
        editable: installed in editable mode, so the version does not pin the content.
        digest: sha256 of a single-file plugin, else empty.
        seconds: how long the declaration took to import.
    """

    distribution: str
    version: str
    module: str
    editable: bool = False
    digest: str = ""
    seconds: float = field(default=0.0, compare=False)

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}".rstrip()

    def is_called(self, name: str) -> bool:
        """Whether a user who writes this name means this plugin; ``D9D_Moe`` is ``d9d-moe``."""
        return self.distribution in (name, normalise(name))


@dataclass(frozen=True, slots=True)
class Entry:
    """Record, and the plugin that declared it."""

    kind: Kind
    spec: Record
    origin: Origin

    def __str__(self) -> str:
        return f"'{self.spec.key}' ({self.origin})"


@dataclass(frozen=True, slots=True)
class Problem:
    """Problem of a plugin that was not loaded.

    Attributes:
        origin: the plugin.
        text: what is wrong, without the plugin's name.
        error: the exception behind it, if there is one.
        loaded: whether its records are in the registry nevertheless.
    """

    origin: Origin
    text: str
    error: BaseException | None = None
    loaded: bool = False

    def __str__(self) -> str:
        return f"{self.origin} {self.text}"


class Registry:
    """Records of all loaded plugins, by kind and name.

    Args:
        entries: every record with its origin.
        plugins: the loaded plugins.
        problems: plugins that could not be loaded, or that break a rule.
        blocked: distributions that the policy excluded, with the reason.
        known: which first-party distribution offers which name.
    """

    def __init__(
        self,
        entries: Iterable[Entry] = (),
        plugins: Iterable[Origin] = (),
        problems: Iterable[Problem] = (),
        blocked: Mapping[str, str] | None = None,
        known: KnownPlugins | None = None,
    ) -> None:
        table: dict[str, dict[str, list[Entry]]] = {kind.name: defaultdict(list) for kind in KINDS}
        for entry in entries:
            table[entry.kind.name][entry.spec.key].append(entry)
        self._table = {kind: {name: tuple(found) for name, found in names.items()} for kind, names in table.items()}
        self.plugins = tuple(plugins)
        self.problems = tuple(problems)
        self.blocked: Mapping[str, str] = MappingProxyType(dict(blocked or {}))
        self._known = known if known is not None else KnownPlugins.shipped()

    @classmethod
    def of(cls, *plugins: object, known: KnownPlugins | None = None) -> Registry:
        """Registry of exactly these plugin modules (or objects with hook methods) and core's own records.

        Nothing is discovered. Meant for tests and for programs that assemble a job themselves.

        Raises:
            PluginError: one of them cannot be loaded.
        """
        from d9d_core.plugin.loader import load_explicit

        return load_explicit(plugins, known=known)

    def entries(self, kind: str | None = None) -> list[Entry]:
        """Records of one kind or of all, sorted by kind, name and distribution."""
        kinds = [kind] if kind else list(self._table)
        found = [entry for name in kinds for same in self._table[name].values() for entry in same]
        return sorted(found, key=lambda e: (list(self._table).index(e.kind.name), e.spec.key, e.origin.distribution))

    def conflicts(self) -> list[str]:
        """Conflicts of names, one message per name that several plugins declare. Only using such a name is an error.

        Commands of the foundation are no such names: they always win.
        """
        return [
            _ambiguous(kind, name, same)
            for kind, names in self._table.items()
            for name, same in sorted(names.items())
            if len(same) > 1 and not (kind == "command" and any(e.origin.distribution in FOUNDATION for e in same))
        ]

    def find(self, kind: str, selector: str) -> Entry:
        """Find the record that ``name`` or ``distribution/name`` selects.

        Raises:
            PluginError: it is unknown, ambiguous, or comes from a plugin that is absent, blocked or broken.
        """
        distribution, _, name = selector.rpartition("/")
        same = self._table[kind].get(name, ())
        if distribution:
            same = tuple(entry for entry in same if entry.origin.is_called(distribution))
        if len(same) == 1:
            return same[0]
        if same:
            raise PluginError(_ambiguous(kind, name, same))
        self._raise_missing(kind, name, distribution)
        raise AssertionError("unreachable")

    def _raise_missing(self, kind: str, name: str, distribution: str) -> None:
        known = self._known.home(kind, name)
        home = normalise(distribution) or known
        broken = [problem for problem in self.problems if not problem.loaded]
        for problem in broken:
            if home and problem.origin.is_called(home):
                text = f"{kind} '{name}' comes from {problem.origin}, which {problem.text}"
                raise plugin_error(text, problem.error) from problem.error
        if home and home in self.blocked:
            raise PluginError(f"{kind} '{name}' comes from {home}, which is not loaded: {self.blocked[home]}")
        absent = home and not any(origin.is_called(distribution or home) for origin in self.plugins)
        if absent and home == known:
            raise PluginError(f"{kind} '{name}' comes from {home}; install it with: pip install {home}")
        if absent:
            raise PluginError(f"no plugin '{distribution}' is installed; {self._offers(kind, name)}")
        raise PluginError(self._unknown(kind, name, home, broken))

    def _offers(self, kind: str, name: str) -> str:
        if same := self._table[kind].get(name):
            return f"'{name}' is offered by {_listed(entry.origin for entry in same)}"
        if (known := self._known.home(kind, name)) and known not in self.blocked:
            return f"'{name}' comes from {known}; install it with: pip install {known}"
        return f"installed: {', '.join(sorted(origin.distribution for origin in self.plugins))}"

    def _unknown(self, kind: str, name: str, home: str | None, broken: list[Problem]) -> str:
        names = self._table[kind]
        known = self._known.names(kind)
        text = f"unknown {kind} '{name}'" + (f" in {home}" if home else "")
        near = difflib.get_close_matches(name, sorted({*names, *known}), n=1, cutoff=0.6)
        if near and near[0] in names:
            text += f"; did you mean {' or '.join(str(entry) for entry in names[near[0]])}?"
        elif near:
            text += f"; did you mean '{near[0]}' (pip install {known[near[0]]})?"
        text += f"{'' if near else ';'} installed: {', '.join(sorted(names)) or 'none'}"
        if broken:
            text += f"; not loaded: {'; '.join(str(problem) for problem in broken)}"
        return text


def plugin_error(text: str, origin: BaseException | None) -> PluginError:
    """PluginError about a failure in the plugin's own code, whose traceback is shown."""
    error = PluginError(text)
    error.origin = origin
    return error


def _ambiguous(kind: str, name: str, same: Sequence[Entry]) -> str:
    last = max(same, key=lambda entry: entry.origin.distribution)
    selector = last.spec.name if isinstance(last.spec, Spec) else name  # a kernel's op is no part of its selector
    listed = _listed(entry.origin for entry in same)
    return f"{kind} '{name}' is declared by {listed}; write '{last.origin.distribution}/{selector}' or block one"


def _listed(origins: Iterable[Origin]) -> str:
    *others, last = sorted(origins, key=lambda origin: origin.distribution)
    return f"{', '.join(map(str, others))} and {last}" if others else str(last)
