"""``d9d plugins``: lists installed plugins, shows their records, and checks that they load."""

from __future__ import annotations

import importlib.util
import json
import sys
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from d9d_core.cli.group import shadowed_commands
from d9d_core.cli.health import nothing_installed
from d9d_core.deprecation import DeprecatedNameWarning
from d9d_core.errors import PluginError
from d9d_core.job_file.fields import fields_of
from d9d_core.job_file.lookup import config_schema, load_config
from d9d_core.plugin import CapabilitySpec, ConfiguredSpec, Ref, Spec
from d9d_core.registry.api import Api
from d9d_core.registry.api_check import api_findings
from d9d_core.registry.collect import RefusedError, contained
from d9d_core.registry.entries import Entry, shown
from d9d_core.registry.hooks import KINDS
from d9d_core.registry.policy import normalise
from d9d_core.registry.registry import Registry
from d9d_core.terminal.console import console_for
from d9d_core.words import find


def list_records(registry: Registry, as_json: bool) -> None:
    """Print every record of the registry."""
    if not as_json and (text := nothing_installed(registry)):
        console_for().print(text)
        return
    _list(registry.entries(), as_json)


def _list(entries: Iterable[Entry], as_json: bool) -> None:
    if as_json:
        print(json.dumps([_summary(entry) for entry in entries], indent=1))  # noqa: T201
        return
    table = Table(box=None, header_style="bold")
    for title in ("extension point", "name", "distribution"):
        table.add_column(title, no_wrap=True)
    table.add_column("summary")
    for entry in entries:
        table.add_row(entry.kind.name, entry.spec.key, str(entry.origin), entry.spec.summary)
    console_for().print(table)


def show_records(registry: Registry, selector: str, as_json: bool) -> None:
    """Print every record of a name in full, or the list of a distribution's records, for ``d9d plugins show``.

    Raises:
        PluginError: no record and no distribution has this name.
    """
    distribution, _, name = selector.rpartition("/")
    entries = [
        entry
        for entry in registry.entries()
        if entry.spec.key == name and (not distribution or entry.origin.is_called(distribution))
    ]
    if not entries and (own := [entry for entry in registry.entries() if entry.origin.is_called(selector)]):
        _list(own, as_json)
        return
    if not entries:
        names = ", ".join(sorted({entry.spec.key for entry in registry.entries()}))
        row = find(selector, [kind.name for kind in KINDS])
        hint = f"{row.hint(selector)}; " if row else ""
        raise PluginError(f"no record is called '{selector}'; {hint}names: {names}")
    if as_json:
        with redirect_stdout(sys.stderr):  # plugins may print when they are imported
            details = [_detail(entry) for entry in entries]
        print(json.dumps(details, indent=1))  # noqa: T201
        return
    console = console_for()
    for entry in entries:
        _print_detail(console, entry)


def check_plugins(
    registry: Registry,
    name: str | None,
    as_json: bool,
    own_commands: Collection[str] = (),
    strict: bool = False,
    api: Api | None = None,
) -> bool:
    """Load every reference of plugins' records and print the problems. Returns false if there is any.

    Args:
        registry: records of the installed plugins.
        name: plugin to check; all by default.
        as_json: print JSON.
        own_commands: names of d9d-core's sub-commands, which hide plugins' sub-commands of the same name.
        strict: whether the use of a deprecated name is a problem; if not, it is only listed.
        api: public API with which imports are compared; by default the API of this d9d-core.

    Raises:
        PluginError: no plugin has this name, or the plugin is not loaded.
    """
    origins = [*registry.plugins, *(problem.origin for problem in registry.problems)]
    chosen = {origin.distribution for origin in origins if name is None or origin.is_called(name)}
    if not chosen and (message := nothing_installed(registry)):
        raise PluginError(message)
    if not chosen:
        known = ", ".join(sorted({origin.distribution for origin in origins}))
        reason = registry.blocked.get(normalise(name or ""))
        raise PluginError(
            f"plugin '{name}' is not loaded: {reason}" if reason else f"no plugin '{name}'; loaded: {known}"
        )
    findings = [
        {"plugin": str(problem.origin), "problem": problem.text}
        for problem in registry.problems
        if problem.origin.distribution in chosen
    ]
    entries = [entry for entry in registry.entries() if entry.origin.distribution in chosen]
    absent: defaultdict[str, list[Entry]] = defaultdict(list)
    with _old_names() as warned:
        for entry in entries:
            findings += [{"plugin": str(entry.origin), "problem": text} for text in _broken_references(entry, absent)]
    for module, needing in sorted(absent.items()):
        references = f"{len(needing)} reference{' needs' if len(needing) == 1 else 's need'}"
        text = f"{references} the module {module}, which is not installed; install it with: pip install {module}"
        findings.append({"plugin": ", ".join(sorted({str(entry.origin) for entry in needing})), "problem": text})
    clashes = registry.conflicts(chosen) + shadowed_commands(registry, own_commands, chosen)
    findings += [{"plugin": name or "several plugins", "problem": text} for text in clashes]
    found = list(api_findings(registry, chosen, api))
    findings += [{"plugin": str(each.origin), "problem": each.text} for each in found if not each.deprecated]
    old = [{"plugin": str(each.origin), "problem": each.text} for each in found if each.deprecated]
    said = [finding["problem"].partition(" ")[2] for finding in old]
    old += [{"plugin": each.user, "problem": each.text} for each in warned if each.text not in said]
    if strict:
        findings, old = findings + old, []
    if as_json:
        print(json.dumps({"records": len(entries), "problems": findings, "deprecations": old}, indent=1))  # noqa: T201
    else:
        console = console_for()
        for mark, lines in ((("no", "red"), findings), (("--", "yellow"), old)):
            for finding in lines:
                console.print(Text.assemble(mark, f"  {finding['plugin']}: {finding['problem']}"))
        console.print(f"{len(entries)} records checked, {len(findings)} problems")
    return not findings


@contextmanager
def _old_names() -> Iterator[list[DeprecatedNameWarning]]:
    """Collect the warnings about deprecated names inside the block, and show other warnings as usual."""
    found: list[DeprecatedNameWarning] = []
    with warnings.catch_warnings():
        show = warnings.showwarning

        def collect(message: Warning | str, *place: Any) -> None:
            if isinstance(message, DeprecatedNameWarning):
                found.append(message)
            else:
                show(message, *place)

        warnings.filterwarnings("always", category=DeprecatedNameWarning)
        warnings.showwarning = collect  # type: ignore[assignment]
        yield found


def _broken_references(entry: Entry, absent: defaultdict[str, list[Entry]]) -> Iterator[str]:
    """Yield a message per broken reference or config; entries that lack only a package go to ``absent`` instead."""
    if isinstance(entry.spec, CapabilitySpec):
        return
    broken = []
    for field, reference in entry.spec.refs().items():
        try:
            with contained(str(entry.origin)):
                reference.load()
        except RefusedError as refusal:
            error = refusal.__cause__ or refusal
            broken.append(field)
            if module := _absent_package(reference, error):
                absent[module].append(entry)
                continue
            yield f"{entry.kind.name} '{entry.spec.key}': {field} {reference} failed to load: {shown(error)}"
    if isinstance(entry.spec, ConfiguredSpec) and "config" not in broken:
        try:
            with contained(str(entry.origin)):
                config_schema(entry)
        except RefusedError as refusal:
            yield str(refusal.__cause__) if isinstance(refusal.__cause__, PluginError) else f"{entry} {refusal}"


def _absent_package(reference: Ref, error: BaseException) -> str | None:
    """Missing package that made a reference fail; ``None`` for other failures or a module of the plugin itself."""
    if not isinstance(error, ModuleNotFoundError) or not error.name or "." in error.name:
        return None
    own = reference.target.partition(":")[0].partition(".")[0]
    return error.name if error.name != own and importlib.util.find_spec(error.name) is None else None


def _summary(entry: Entry) -> dict[str, Any]:
    return {
        "kind": entry.kind.name,
        "name": entry.spec.key,
        "distribution": entry.origin.distribution,
        "version": entry.origin.version,
        "summary": entry.spec.summary,
    }


def _detail(entry: Entry) -> dict[str, Any]:
    detail = _summary(entry)
    if isinstance(entry.spec, Spec):
        detail |= {word: sorted(getattr(entry.spec, word)) for word in ("requires", "provides", "conflicts")}
        detail["references"] = {field: str(ref) for field, ref in entry.spec.refs().items()}
    if isinstance(entry.spec, ConfiguredSpec):
        detail["config"] = config_schema(entry)
    return detail


def _print_detail(console: Console, entry: Entry) -> None:
    subject = (f"{entry.kind.name} {entry.spec.key}", "bold")
    console.print(Text.assemble(subject, f" ({entry.origin}): {entry.spec.summary}"))
    if isinstance(entry.spec, Spec):
        for word in ("requires", "provides", "conflicts"):
            if tokens := sorted(getattr(entry.spec, word)):
                console.print(f"  {word}: {', '.join(tokens)}")
    if not isinstance(entry.spec, ConfiguredSpec):
        return
    table = Table("field", "accepts", "default", "meaning", box=None, header_style="bold", padding=(0, 2))
    for field in fields_of(load_config(entry)):
        table.add_row(*map(Text, (field.name, field.kind, field.default or "required", field.meaning)))
    console.print(table)
