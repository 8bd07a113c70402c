"""``d9d plugins``: what is installed, in detail, and whether it is sound."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from d9d_core.cli.output import console_for
from d9d_core.errors import PluginError
from d9d_core.plugin.records import CapabilitySpec, ConfiguredSpec, Spec
from d9d_core.plugin.registry import Entry, Registry


def list_records(registry: Registry, as_json: bool) -> None:
    """Print every record."""
    if as_json:
        print(json.dumps([_summary(entry) for entry in registry.entries()], indent=1))  # noqa: T201
        return
    table = Table(box=None, header_style="bold")
    for title in ("extension point", "name", "distribution"):
        table.add_column(title, no_wrap=True)
    table.add_column("what it is")
    for entry in registry.entries():
        table.add_row(entry.kind.name, entry.spec.key, str(entry.origin), entry.spec.summary)
    console_for().print(table)


def show_records(registry: Registry, selector: str, as_json: bool) -> None:
    """Print every record of one name in full.

    Raises:
        PluginError: there is none.
    """
    distribution, _, name = selector.rpartition("/")
    entries = [
        entry
        for entry in registry.entries()
        if entry.spec.key == name and distribution in ("", entry.origin.distribution)
    ]
    if not entries:
        names = ", ".join(sorted({entry.spec.key for entry in registry.entries()}))
        raise PluginError(f"nothing is called '{selector}'; names: {names}")
    if as_json:
        print(json.dumps([_detail(entry) for entry in entries], indent=1))  # noqa: T201
        return
    console = console_for()
    for entry in entries:
        _print_detail(console, entry)


def check_plugins(registry: Registry, distribution: str | None, as_json: bool) -> bool:
    """Load everything that records refer to; false if anything is broken."""
    known = {origin.distribution for origin in registry.plugins} | {p.origin.distribution for p in registry.problems}
    if distribution is not None and distribution not in known:
        raise PluginError(f"no plugin '{distribution}'; loaded: {', '.join(sorted(known))}")
    findings = [
        {"plugin": str(problem.origin), "problem": problem.text}
        for problem in registry.problems
        if distribution in (None, problem.origin.distribution)
    ]
    entries = [entry for entry in registry.entries() if distribution in (None, entry.origin.distribution)]
    for entry in entries:
        findings += [{"plugin": str(entry.origin), "problem": text} for text in _broken_references(entry)]
    if as_json:
        print(json.dumps({"records": len(entries), "problems": findings}, indent=1))  # noqa: T201
    else:
        console = console_for()
        for finding in findings:
            console.print(Text.assemble(("no", "red"), f"  {finding['plugin']}: {finding['problem']}"))
        console.print(f"{len(entries)} records checked, {len(findings)} problems")
    return not findings


def _broken_references(entry: Entry) -> Iterator[str]:
    if isinstance(entry.spec, CapabilitySpec):
        return
    for field, ref in entry.spec.refs().items():
        try:
            value = ref.load()
        except Exception as error:
            yield f"{entry.kind.name} '{entry.spec.key}': {field} {ref} failed to load: {error!r}"
            continue
        if field == "config" and value.model_fields["name"].default != entry.spec.name:
            yield f"{entry.kind.name} '{entry.spec.key}': the name of {ref} is {value.model_fields['name'].default!r}"


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
        detail["config"] = entry.spec.config.load().model_json_schema()
    return detail


def _print_detail(console: Console, entry: Entry) -> None:
    console.print(
        f"[bold]{entry.kind.name} {entry.spec.key}[/] ({entry.origin}): {entry.spec.summary}", highlight=False
    )
    if isinstance(entry.spec, Spec):
        for word in ("requires", "provides", "conflicts"):
            if tokens := sorted(getattr(entry.spec, word)):
                console.print(f"  {word}: {', '.join(tokens)}", markup=False, highlight=False)
    if not isinstance(entry.spec, ConfiguredSpec):
        return
    table = Table("field", "type", "default", "meaning", box=None, header_style="bold", padding=(0, 2))
    for name, field in entry.spec.config.load().model_fields.items():
        default = "required" if field.is_required() else repr(field.get_default(call_default_factory=True))
        kind = getattr(field.annotation, "__name__", None) or str(field.annotation).replace("typing.", "")
        table.add_row(name, kind, default, field.description or "")
    console.print(table)
