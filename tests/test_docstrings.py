"""What docstrings refer to exists."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(file for top in ("packages", "plugins") for file in (ROOT / top).glob("*/src/**/*.py"))
ROLE = re.compile(r":(?:mod|class|func|meth|attr|data|exc|obj):`~?([^`<]+)`")


@dataclass(frozen=True)
class Reference:
    """A name that a docstring or comment mentions.

    Attributes:
        target: the name.
        line: of the file.
        classes: the classes around it, outermost first.
    """

    target: str
    line: int
    classes: tuple[ast.ClassDef, ...] = ()


def references(source: str) -> Iterator[Reference]:
    """All references of a file; those in a class with the classes around them."""
    tree = ast.parse(source)
    spans = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    for number, text in enumerate(source.splitlines(), 1):
        for match in ROLE.finditer(text):
            around = [node for node in spans if node.lineno <= number <= (node.end_lineno or 0)]
            yield Reference(match[1], number, tuple(sorted(around, key=lambda node: node.lineno)))


def dead(source: str, module: ModuleType) -> list[str]:
    """The references of a module that lead nowhere."""
    imported = dict(imports(ast.parse(source)))
    return [f"{r.line}: {r.target}" for r in references(source) if not resolves(r, module, imported)]


def imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Name -> where it comes from, also of imports for type checkers only."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)


def resolves(reference: Reference, module: ModuleType, imported: dict[str, str]) -> bool:
    first, *rest = reference.target.split(".")
    for number in range(len(reference.classes), 0, -1):
        around = reference.classes[:number]
        owner: Any = module
        for node in around:
            owner = getattr(owner, node.name, None)
        if leads_on(owner, [first, *rest]) or (not rest and first in assigned(around[-1])):
            return True
    if leads_on(module, [first, *rest]) or hasattr(builtins, first):
        return True
    return exists(".".join([imported.get(first, first), *rest]))


def assigned(node: ast.ClassDef) -> set[str]:
    """Attributes that methods of a class give to its instances."""
    targets = [t for n in ast.walk(node) if isinstance(n, ast.Assign) for t in n.targets]
    targets += [n.target for n in ast.walk(node) if isinstance(n, ast.AnnAssign)]
    return {t.attr for t in targets if isinstance(t, ast.Attribute)} | {
        t.id for t in targets if isinstance(t, ast.Name)
    }


def exists(path: str) -> bool:
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        return leads_on(module, parts[length:])
    return False


def leads_on(value: Any, path: list[str]) -> bool:
    for part in path:
        if isinstance(value, type) and any(part in inspect.get_annotations(base) for base in value.__mro__):
            return True
        if not hasattr(value, part):
            return False
        value = getattr(value, part)
    return True


def module_of(file: Path) -> ModuleType:
    parts = file.relative_to(next(p for p in file.parents if p.name == "src")).with_suffix("").parts
    return importlib.import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))


@pytest.mark.thorough
def test_references_of_docstrings_lead_somewhere() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{text}"
        for file in FILES
        if ROLE.search(source := file.read_text("utf-8"))
        for text in dead(source, module_of(file))
    ]
    assert found == []


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("target", "found"),
    [
        ("Reference", True),
        ("Reference.target", True),
        ("Reference.targets", False),
        ("d9d_core.errors.D9dError", True),
        ("~d9d_core.errors.D9dErrors", False),
        ("d9d_core.no_such_module", False),
        ("resolves", True),
        ("line", False),
    ],
)
def test_dead_references_are_recognised(target: str, found: bool) -> None:
    source = f'"""A module.\n\nSee :class:`{target}`.\n"""\n'
    assert dead(source, importlib.import_module(__name__)) == ([] if found else [f"3: {target.lstrip('~')}"])


def test_a_reference_in_a_class_may_name_its_attributes() -> None:
    source = '"""M."""\nclass Reference:\n    """See :attr:`line` and :attr:`lane`."""\n'
    assert dead(source, importlib.import_module(__name__)) == ["3: lane"]
