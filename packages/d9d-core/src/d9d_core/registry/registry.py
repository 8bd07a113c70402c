"""Registry of the installed plugins' records: an immutable object that is passed as an argument, not a global."""

from __future__ import annotations

import difflib
import importlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

from d9d_core.errors import PluginError
from d9d_core.plugin import Spec
from d9d_core.registry import installed
from d9d_core.registry.collect import Collector
from d9d_core.registry.entries import Entry, Origin, Problem, plugin_error
from d9d_core.registry.hooks import KINDS
from d9d_core.registry.known import KnownPlugins
from d9d_core.registry.policy import FOUNDATION, normalise
from d9d_core.words import Row, find

__all__ = ["Registry"]

#: Backend name of an op's PyTorch reference, which runs on every device and belongs to no plugin.
REFERENCE = "reference"
#: Largest number of characters of a name; a longer text is refused without further hints.
_LONGEST = 200
#: Component kind -> its counterpart in the other job type, and the command that runs such jobs; for hints in errors.
_OTHER_JOBS = {"task": ("inference task", "d9d infer"), "inference task": ("task", "d9d train")}

#: Component kind -> hint for a name with slashes or dots: how the job file names a directory or a file.
_AS_FILES = {
    "model": "for a directory of weights write model: {pretrained: DIRECTORY}",
    "dataset": "for files write data: {name: text, sources: [FILE], sequence_length: N}",
}


class Registry:
    """Records of all loaded plugins, by kind and name.

    Args:
        entries: every record with its origin.
        plugins: loaded plugins.
        problems: plugins that could not be loaded, or that break a rule.
        blocked: excluded distribution -> reason.
        known: names that first-party distributions offer.
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
        self._table = {
            kind: {name: tuple(sorted(names[name], key=_distribution)) for name in sorted(names)}
            for kind, names in table.items()
        }
        self.plugins = tuple(plugins)
        self.problems = tuple(problems)
        self.blocked: Mapping[str, str] = MappingProxyType(dict(blocked or {}))
        self._known = known if known is not None else KnownPlugins.shipped()

    @classmethod
    def of(cls, *plugins: object, known: KnownPlugins | None = None) -> Registry:
        """Registry of exactly these plugin modules (or objects with hook methods) and d9d's own packages.

        Other installed plugins are ignored. For tests, and for programs that assemble a job themselves.

        Raises:
            PluginError: one of the plugins cannot be loaded.
        """
        collector = Collector(known or KnownPlugins.shipped())
        installed_ones = installed.scan()
        for candidate in installed_ones:
            if candidate.origin.distribution in FOUNDATION:
                module = candidate.origin.module
                collector.add(candidate.origin, lambda module=module: importlib.import_module(module), light=True)  # type: ignore[misc]
        for plugin in plugins:
            name = str(getattr(plugin, "__name__", type(plugin).__name__))
            origins = (candidate.origin for candidate in installed_ones)
            origin = next((origin for origin in origins if origin.module == name), Origin(name, "", name))
            if origin.distribution not in FOUNDATION:  # already added
                collector.add(origin, lambda plugin=plugin: plugin, must=True)  # type: ignore[misc]
        return cls.collected(collector)

    @classmethod
    def collected(cls, collector: Collector) -> Registry:
        """Make a registry from the records, plugins and problems that a collector holds."""
        return cls(collector.entries, collector.plugins, collector.problems, collector.blocked, collector.known)

    def entries(self, kind: str | None = None) -> list[Entry]:
        """Records of one kind or of all, sorted by kind, name and distribution."""
        kinds = [kind] if kind else list(self._table)
        return [entry for name in kinds for same in self._table[name].values() for entry in same]

    def kernels(self, op: str) -> list[Entry]:
        """Backends of an op, sorted by name and distribution."""
        return [entry for key, same in self._table["kernel"].items() if key.startswith(f"{op}.") for entry in same]

    def conflicts(self, among: Collection[str] | None = None) -> list[str]:
        """Messages about names that several plugins declare; it is an error only to use such a name.

        Names of d9d's own commands are left out, because these commands always take precedence.

        Args:
            among: report only conflicts that involve one of these distributions; all by default.
        """
        return [
            _ambiguous(kind, name, same)
            for kind, names in self._table.items()
            for name, same in names.items()
            if len(same) > 1
            and (among is None or any(entry.origin.distribution in among for entry in same))
            and not (kind == "command" and any(entry.origin.distribution in FOUNDATION for entry in same))
        ]

    def find(self, kind: str, selector: str) -> Entry:
        """Find the record that ``name`` or ``distribution/name`` selects.

        Raises:
            PluginError: the name is unknown or ambiguous, or its plugin is absent, blocked or broken.
        """
        distribution, _, name = selector.rpartition("/")
        same = self._table[kind].get(name, ())
        if distribution:
            same = tuple(entry for entry in same if entry.origin.is_called(distribution))
        if len(same) == 1:
            return same[0]
        if same:
            raise PluginError(_ambiguous(kind, name, same))
        if len(selector) > _LONGEST:
            raise PluginError(f"unknown {kind} '{selector[:40]}...': a name cannot have {len(selector):,} characters")
        self._raise_missing(kind, name, distribution)
        raise AssertionError("unreachable")

    def find_kernel(self, op: str, selector: str) -> Entry | None:
        """Backend of ``op`` that ``name`` or ``distribution/name`` selects; ``None`` for the reference.

        Raises:
            PluginError: the name is unknown or ambiguous, or its plugin is absent, blocked or broken.
        """
        if selector == REFERENCE:
            return None
        distribution, slash, name = selector.rpartition("/")
        try:
            return self.find("kernel", f"{distribution}{slash}{op}.{name}")
        except PluginError as error:
            # The op may exist only in a named or a broken plugin; then the original error says more.
            if not distribution and all(problem.loaded for problem in self.problems):
                names = {*self._table["kernel"], *KnownPlugins.shipped().names("kernel")}
                ops = sorted({known.partition(".")[0] for known in names})
                if op not in ops:
                    text = f"kernels.{op}: unknown op '{op}': it has no kernels; ops with kernels: {', '.join(ops)}"
                    raise PluginError(text) from None
            raise plugin_error(f"kernels.{op}: {error}", error.origin) from error.origin

    def known_homes(self, kind: str) -> Mapping[str, str]:
        """Names of a kind that first-party packages offer, installed or not -> distribution.

        ``kind`` is a kind of record, or ``model type`` for values of ``model_type`` in ``config.json`` files.
        """
        return self._known.names(kind)

    def _raise_missing(self, kind: str, name: str, distribution: str) -> None:
        known = self._known.home(kind, name)
        home = normalise(distribution) or known
        homes = [home] if home else [other.distribution for other in self._known.third_party(kind, name)]
        broken = [problem for problem in self.problems if not problem.loaded]
        for problem in broken:
            if any(problem.origin.is_called(place) for place in homes):
                text = f"{kind} '{name}' comes from {problem.origin}, which {problem.text}"
                raise plugin_error(text, problem.error) from problem.error
        for place in homes:
            if place in self.blocked:
                raise PluginError(f"{kind} '{name}' comes from {place}, which is not loaded: {self.blocked[place]}")
        absent = home and not any(origin.is_called(distribution or home) for origin in self.plugins)
        if absent and home == known:
            raise PluginError(f"{kind} '{name}' comes from {home}; install it with: pip install {home}")
        others = self._by_third_parties(kind, name, normalise(distribution)) if absent or not home else ""
        if others and find(name, [kind]):  # a word of another tool, for which d9d has a component of its own
            raise PluginError(f"{self._unknown(kind, name, home, broken)}; or {others}")
        if others:
            raise PluginError(f"unknown {kind} '{name}': {others}")
        if absent:
            as_file = f"{_AS_FILES[kind]}; " if kind in _AS_FILES else ""
            raise PluginError(
                f"{kind} '{distribution}/{name}': no plugin '{distribution}' is installed; "
                f"{as_file}{self._offers(kind, name)}"
            )
        raise PluginError(self._unknown(kind, name, home, broken))

    def _by_third_parties(self, kind: str, name: str, distribution: str) -> str:
        """Advice to install a third-party package of d9d's list that offers the name; empty if there is none."""
        loaded = {origin.distribution for origin in self.plugins}
        offers = [
            f"it comes from {other}, which d9d's authors do not check; install it with: pip install {other.install}"
            for other in self._known.third_party(kind, name)
            if distribution in ("", other.distribution) and other.distribution not in loaded
        ]
        return "; or ".join(offers)

    def _offers(self, kind: str, name: str) -> str:
        if same := self._table[kind].get(name):
            return f"'{name}' is offered by {_listed(entry.origin for entry in same)}"
        if (known := self._known.home(kind, name)) and known not in self.blocked:
            return f"'{name}' comes from {known}; install it with: pip install {known}"
        return f"installed: {', '.join(sorted(origin.distribution for origin in self.plugins))}"

    def _sources(self, kind: str, known: Mapping[str, str]) -> str:
        if known:
            offers = ", ".join(f"{name} (pip install {home})" for name, home in sorted(known.items()))
            return f"; packages of d9d do: {offers}"
        write = f"write one (docs/writing-a-plugin.md: {_hook(kind)})"
        return f", and no package of d9d does; install a plugin that does, or {write}"

    def _unknown(self, kind: str, name: str, home: str | None, broken: list[Problem]) -> str:
        op = name.partition(".")[0] + "." if kind == "kernel" else ""  # kernels of other ops are no help
        names = {key: same for key, same in self._table[kind].items() if key.startswith(op)}
        known = {key: home for key, home in self._known.names(kind).items() if key.startswith(op)}
        text = f"unknown {kind} '{name}'" + (f" in {home}" if home else "")
        other, command = _OTHER_JOBS.get(kind, (None, ""))
        if other and name in self._table[other]:
            return f"{text}: the name belongs to another kind, {other}; run jobs with it by: {command}"
        row = find(name.removeprefix(op), [kind])
        is_similar = row or difflib.get_close_matches(name, known, n=1, cutoff=0.6)
        if not names and not home and not broken and not is_similar:
            return f"{text}: no installed plugin offers a {kind}{self._sources(kind, known)}"
        near = difflib.get_close_matches(name, sorted({*names, *known}), n=1, cutoff=0.6)
        if row:
            text += f"; {_told(row, name, op, names, known)}"
        elif kind in _AS_FILES and "." in name:
            text += f"; {_AS_FILES[kind]}"
        elif near and near[0] in names:
            text += f"; did you mean {' or '.join(str(entry) for entry in names[near[0]])}?"
        elif near:
            text += f"; did you mean '{near[0]}' (pip install {known[near[0]]})?"
        text += f"{'' if text.endswith('?') else ';'} installed: {', '.join(sorted(names)) or 'none'}"
        if broken:
            text += f"; not loaded: {'; '.join(str(problem) for problem in broken)}"
        return text


def _told(row: Row, name: str, op: str, names: Mapping[str, Sequence[Entry]], known: Mapping[str, str]) -> str:
    """Hint for a name of another tool, with the distribution that offers the component of d9d."""
    ours = f"{op}{row.ours}"
    if ours in names:
        home = " or ".join(str(entry.origin) for entry in names[ours])
    elif ours in known:
        home = f"pip install {known[ours]}"
    else:
        return row.hint(name)
    return f"d9d calls it '{row.ours}' ({home})" + (f": {row.note}" if row.note else "")


def _distribution(entry: Entry) -> str:
    return entry.origin.distribution


def _hook(kind: str) -> str:
    return next(known.hook for known in KINDS if known.name == kind)


def _ambiguous(kind: str, name: str, same: Sequence[Entry]) -> str:
    spec = same[0].spec
    selector = spec.name if isinstance(spec, Spec) else name  # the selector of a kernel omits the op
    listed = _listed(entry.origin for entry in same)
    choices = " or ".join(f"'{entry.origin.distribution}/{selector}'" for entry in sorted(same, key=_distribution))
    return f"{kind} '{name}' is declared by {listed}; write {choices}, or block one in plugins.block"


def _listed(origins: Iterable[Origin]) -> str:
    *others, last = sorted(origins, key=lambda origin: origin.distribution)
    return f"{', '.join(map(str, others))} and {last}" if others else str(last)
