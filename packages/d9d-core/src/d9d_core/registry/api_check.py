"""Checks of plugins' sources against the public API: private names, old names, and names that a stated API lacks."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from d9d_core.deprecation import deprecation_text
from d9d_core.plugin import Spec
from d9d_core.registry import hooks
from d9d_core.registry.api import Api, Use, imported_modules, references
from d9d_core.registry.entries import Entry, Origin
from d9d_core.registry.policy import FOUNDATION, normalise
from d9d_core.registry.registry import Registry

__all__ = ["Finding", "api_findings", "sources_of"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Use of d9d's packages that breaks, or will break, a plugin.

    Attributes:
        origin: the plugin.
        text: the problem, with its place, without the plugin's name.
        deprecated: whether the plugin works until a later release.
    """

    origin: Origin
    text: str
    deprecated: bool = False

    def __str__(self) -> str:
        return f"{self.origin}: {self.text}"


def api_findings(registry: Registry, among: Collection[str] | None = None, api: Api | None = None) -> Iterator[Finding]:
    """Findings in the sources of loaded plugins; imports none of the sources.

    Args:
        registry: records of the installed plugins.
        among: distributions to check; all by default. d9d's own packages are never checked: they are released together.
        api: public API; by default of the installed d9d-core.
    """
    api = api or Api.shipped()
    for origin in registry.plugins:
        package = _package_around(Path(origin.distribution)) if origin.digest else origin.module.partition(".")[0]
        if normalise(package) not in FOUNDATION and (among is None or origin.distribution in among):
            own = [entry for entry in registry.entries() if entry.origin == origin]
            yield from (Finding(origin, *found) for found in _of_plugin(origin, own, api))


def _package_around(file: Path) -> str:
    """Top-level package that holds a file; empty if no package does."""
    found = ""
    for folder in file.parents:
        if not (folder / "__init__.py").is_file():
            break
        found = folder.name
    return found


def sources_of(module: str, entries: Iterable[Entry], packages: Collection[str]) -> dict[str, Path]:
    """Source files of a plugin, by their paths from the directory that holds the package.

    Args:
        module: declaration module.
        entries: records of the plugin; the packages that their references name belong to the plugin.
        packages: packages of d9d; such a package belongs to the plugin only if it holds ``module``.
    """
    own = module.partition(".")[0]
    targets = [ref.target for entry in entries if isinstance(entry.spec, Spec) for ref in entry.spec.refs().values()]
    names = {target.partition(":")[0].partition(".")[0] for target in targets} - set(packages)
    found: dict[str, Path] = {}
    for name in sorted({own} | names):
        spec = _spec(name)
        for place in map(Path, (spec and spec.submodule_search_locations) or ()):
            found |= {file.relative_to(place.parent).as_posix(): file for file in sorted(place.rglob("*.py"))}
        if spec is not None and not spec.submodule_search_locations and str(spec.origin).endswith(".py"):
            found[Path(str(spec.origin)).name] = Path(str(spec.origin))
    return found


def _spec(name: str) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ValueError:  # a module without a spec, which a program made
        return None


def _of_plugin(origin: Origin, entries: Iterable[Entry], api: Api) -> Iterator[tuple[str, bool]]:
    """Text of each finding, and whether it is a deprecation."""
    allowed = _allowed(origin)
    stated = origin.api or hooks.NEWEST_API
    since = hooks.API_RELEASES[stated]
    if _older_allowed("d9d-core", since, allowed, api):
        text = f"states D9D_API = {stated}, which d9d-core has since {since}, but requires {allowed['d9d-core'][0]}"
        yield f"{text}; require d9d-core>={since}, or state an older API", False
    exempt = api.exempt(origin.module.partition(".")[0])
    for place, file in sources_of(origin.module, entries, api.packages).items():
        for use in _uses(file):
            if use.module.partition(".")[0] in api.packages - exempt:
                for text, deprecated in _of_use(use, origin, allowed, api):
                    yield f"{place}:{use.line} {text}", deprecated


def _uses(file: Path) -> list[Use]:
    try:
        source = file.read_text("utf-8")
        return [*imported_modules(source), *references(source)]
    except (SyntaxError, ValueError, OSError, RecursionError, MemoryError):  # a template, or code for another Python
        return []


def _of_use(
    use: Use, origin: Origin, allowed: Mapping[str, tuple[str, SpecifierSet]], api: Api
) -> Iterator[tuple[str, bool]]:
    name = f"{use.module}.{use.name}".rstrip(".")
    old = api.deprecated.get(use.module, {}).get(use.name)
    if old is not None and origin.api > old.last_api:
        text = f"uses {name}, which is not in plugin API {origin.api}; use {old.use}, or write "
        yield f"{text}D9D_API = {old.last_api} in {origin.module}", False
    elif old is not None:
        yield deprecation_text(name, old.use, old.ends), True
    elif api.undeclared([use]):
        homes = [module for module, names in api.names.items() if use.name in names and module not in api.for_suites]
        public = " or ".join(f"{module}.{use.name}" for module in homes) or "a name in __all__ of a public module"
        yield f"uses {name}, which is in no plugin API and may change in any release; use {public}", False
    elif since := api.names.get(use.module, {}).get(use.name):
        member = normalise(use.module.partition(".")[0])
        if _older_allowed(member, since, allowed, api):
            text = f"uses {name}, which {member} has since {since}, but the plugin requires {allowed[member][0]}"
            yield f"{text}; require {member}>={since}", False


def _allowed(origin: Origin) -> dict[str, tuple[str, SpecifierSet]]:
    """Requirements of a plugin's distribution, without its extras: distribution -> text and versions."""
    try:
        parsed = [Requirement(text) for text in importlib.metadata.requires(origin.distribution) or []]
    except Exception:  # a single file has no metadata, and metadata may be damaged
        return {}
    return {
        normalise(each.name): (f"{each.name}{each.specifier}", each.specifier)
        for each in parsed
        if "extra" not in str(each.marker)
    }


def _older_allowed(distribution: str, since: str, allowed: Mapping[str, tuple[str, SpecifierSet]], api: Api) -> bool:
    """Whether the requirement of a distribution allows a release older than ``since``.

    Only releases in the tables of plugin APIs and of names are considered.
    """
    if distribution not in allowed:
        return False
    known = {*hooks.API_RELEASES.values(), *(release for names in api.names.values() for release in names.values())}
    older = [release for release in known if Version(release) < Version(since)]
    # `.9999` stands for the last patch of the release.
    return any(allowed[distribution][1].contains(f"{release}.9999") for release in older)
