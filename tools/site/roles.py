"""Conversion of docstrings for the site: roles become code, literal blocks code blocks, ``#:`` comments docstrings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|meth|attr|mod|data|exc):`(~?)([^`<>]+)`")
_LITERAL = re.compile(r"::\n(?=\n {4})")


class Roles(griffe.Extension):
    """Griffe extension that rewrites reStructuredText roles, which Markdown would show literally."""

    def on_object(self, *, obj: griffe.Object, **_options: Any) -> None:
        """Rewrite the docstring of an object; for an attribute without one, use its comment."""
        if obj.docstring is None and isinstance(obj, griffe.Attribute) and (comment := comment_of(obj)):
            obj.docstring = griffe.Docstring(comment, parent=obj)
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def comment_of(attribute: griffe.Attribute) -> str:
    """Text of the ``#:`` comment above an attribute; empty if there is none."""
    if attribute.lineno is None or not isinstance(attribute.filepath, Path):
        return ""
    lines: list[str] = []
    for line in reversed(attribute.filepath.read_text("utf-8").splitlines()[: attribute.lineno - 1]):
        if not line.lstrip().startswith("#: "):
            break
        lines.insert(0, line.lstrip().removeprefix("#: "))
    return "\n".join(lines)


def as_markdown(text: str) -> str:
    """A docstring with roles as code: the last component of ``~a.b.C``, else the full name."""
    text = _ROLE.sub(lambda match: f"`{match[2].rpartition('.')[2] if match[1] else match[2]}`", text)
    return _LITERAL.sub(":\n", text)
