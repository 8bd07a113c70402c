"""API reference of the declared modules: one page each, read from the sources without importing them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import griffe
from roles import comment_of

SUITES = "d9d_testing.suites"
#: Packages whose modules with ``__all__`` are documented; in the first two, one page per folder.
FOUNDATION = ("d9d_core", "d9d_weights", "d9d_engine")
#: Modules of the first page, in the order in which a script uses them: the job, the trainer and its steps, the result.
FIRST = ("d9d_engine.job", "d9d_engine.run.trainer", "d9d_engine.run.life_cycle", "d9d_engine.compose.plan",
         "d9d_engine.trackers.config")  # fmt: skip
#: Methods of a job in the order of use; most of them are its bases' methods.
JOB_OPTIONS = (
    "    options: {members: [load, from_values, plan, build, joined], inherited_members: true, "
    "preload_modules: [d9d_core]}"
)


def file_of(root: Path, module: str) -> Path:
    """Source file of a module of a package."""
    package, _, rest = module.partition(".")
    base = root / "packages" / package.replace("_", "-") / "src" / package
    inner = base.joinpath(*rest.split(".")) if rest else base
    return inner / "__init__.py" if inner.is_dir() else inner.with_suffix(".py")


def public_names(root: Path, module: str) -> list[str]:
    """Names in a module's ``__all__``; empty without it."""
    for node in ast.parse(file_of(root, module).read_text("utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            assert isinstance(node, ast.Assign)
            return list(ast.literal_eval(node.value))
    return []


def declared(root: Path) -> dict[str, list[str]]:
    """Page -> its modules: all of d9d-engine first, then a top-level module or a folder of d9d-core or d9d-weights."""
    found: dict[str, list[str]] = {"d9d_engine": [*FIRST]}
    for package in FOUNDATION:
        source = root / "packages" / package.replace("_", "-") / "src"
        for file in sorted((source / package).rglob("*.py")):
            module = ".".join(file.relative_to(source).with_suffix("").parts)
            if file.name != "__init__.py" and module not in FIRST and public_names(root, module):
                page = package if package == "d9d_engine" else ".".join(module.split(".")[:2])
                found.setdefault(page, []).append(module)
    return found


def suites(root: Path) -> dict[str, str]:
    """Conformance suite -> its module."""
    package = root / "packages" / "d9d-testing" / "src"
    return {
        name: ".".join(file.relative_to(package).with_suffix("").parts)
        for file in sorted((package / "d9d_testing" / "suites").rglob("*.py"))
        for name in re.findall(r"^class (\w+Suite)\b", file.read_text("utf-8"), re.MULTILINE)
    }


def pages(root: Path) -> dict[str, str]:
    """Page -> its Markdown text."""
    found: dict[str, str] = {}
    for page, modules in declared(root).items():
        lines = [f"# {page}", ""]
        for module in modules:
            lines += ["", *([f"## {module}", ""] if modules != [page] else []), _introduction(root, module), ""]
            options = [JOB_OPTIONS] if module == FIRST[0] else []
            lines += [line for name in public_names(root, module) for line in (f"::: {module}.{name}", *options, "")]
        found[page] = "\n".join(lines)
    lines = [f"# {SUITES}", "", "Conformance suites: derive a class, say what to test, and run pytest.", ""]
    for name, module in suites(root).items():
        lines += [f"::: {module}.{name}", "    options: {heading_level: 2}", ""]
    found[SUITES] = "\n".join(lines)
    return found


def _introduction(root: Path, module: str) -> str:
    """Module docstring as Markdown, which renders an indented literal block after ``::`` as code too."""
    doc = ast.get_docstring(ast.parse(file_of(root, module).read_text("utf-8"))) or ""
    return re.sub(r":\w+:`~?([^`]+)`", r"`\1`", re.sub(r"::$", ":", doc, flags=re.MULTILINE)).replace("``", "`")


def undocumented(root: Path) -> Iterator[str]:
    """One message for each public name, and each public member of a class, without a docstring."""
    loader = griffe.GriffeLoader(search_paths=[root / "packages" / p.replace("_", "-") / "src" for p in FOUNDATION])
    for package in FOUNDATION:
        loader.load(package)
    loader.resolve_aliases(implicit=True, external=False)
    for module in (module for modules in declared(root).values() for module in modules):
        for name in public_names(root, module):
            for lacking in _lacking(loader.modules_collection[f"{module}.{name}"]):
                yield f"the public name {lacking.canonical_path} has no docstring"


def _lacking(target: griffe.Object | griffe.Alias) -> Iterator[griffe.Object | griffe.Alias]:
    if not _is_documented(target):
        yield target
    if isinstance(target, griffe.Class):
        for name, member in target.members.items():
            own = isinstance(member, griffe.Function) or "property" in member.labels
            if own and not name.startswith("_") and not _is_documented(member) and not _is_inherited(target, name):
                yield member


def _is_documented(target: griffe.Object | griffe.Alias) -> bool:
    if target.docstring is not None and target.docstring.value.strip():
        return True
    return isinstance(target, griffe.Attribute) and comment_of(target) != ""


def _is_inherited(owner: griffe.Class, name: str) -> bool:
    return any(name in parent.members and _is_documented(parent.members[name]) for parent in owner.mro())
