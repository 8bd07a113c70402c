"""Reading a job file into plain values that remember their line.

YAML is read with a loader that builds plain values only: a tag that would build objects is an error, and so are
duplicate keys.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from d9d_core.errors import JobError

Location = tuple[int | str, ...]


def dotted(location: Sequence[int | str]) -> str:
    """``('parallel', 0, 'degree')`` as ``parallel[0].degree``."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return text.removeprefix(".")


@dataclass(frozen=True)
class Document:
    """The values of a job file, and where they stand.

    Attributes:
        values: mappings, lists and scalars.
        source: how messages call the file.
        lines: location -> line, as far as known.
        overrides: locations that ``--set`` gave.
    """

    values: dict[str, Any]
    source: str = "job"
    lines: Mapping[Location, int] = field(default_factory=dict)
    overrides: frozenset[Location] = frozenset()

    @classmethod
    def read(cls, path: Path) -> Document:
        """Read YAML, TOML or JSON, by the file's suffix.

        Raises:
            JobError: the file cannot be read or is malformed.
        """
        try:
            text = path.read_text("utf-8")
        except FileNotFoundError:
            raise JobError(f"{path}: no such job file") from None
        except (OSError, UnicodeDecodeError) as error:
            raise JobError(f"{path}: cannot be read: {error}") from error
        readers = {".yaml": _read_yaml, ".yml": _read_yaml, ".toml": _read_toml, ".json": _read_json}
        reader = readers.get(path.suffix.lower())
        if reader is None:
            raise JobError(f"{path}: a job file ends in {', '.join(readers)}")
        values, lines = reader(text, str(path))
        if not isinstance(values, dict):
            kind = {list: "a list", type(None): "empty"}.get(type(values), "a single value")
            raise JobError(f"{path}: a job file is a mapping of sections (model: ..., data: ...), this one is {kind}")
        return cls(values, str(path), lines)

    def override(self, assignments: Sequence[str]) -> Document:
        """Apply ``section.field=value`` assignments; values are YAML.

        Raises:
            JobError: an assignment has no ``=``, or leads through something that is no mapping or list.
        """
        values = json.loads(json.dumps(self.values, default=str)) if assignments else self.values
        given = set(self.overrides)
        for assignment in assignments:
            path, equals, text = assignment.partition("=")
            parts: Location = tuple(int(p) if p.isdigit() else p for p in re.split(r"\.|\[|\]\.?", path.strip()) if p)
            if not equals or not parts:
                raise JobError(f"--set {assignment}: write section.field=value, for example --set optimizer.lr=3e-4")
            try:
                value = _read_yaml(text, f"--set {path}")[0]
                _assign(values, parts, value)
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise JobError(f"--set {assignment}: there is no {dotted(parts)} to set ({error})") from error
            given.add(parts)
        return Document(values, self.source, self.lines, frozenset(given))

    def where(self, location: Location) -> str:
        """``file:line`` of the value, or of the nearest one around it."""
        for length in range(len(location), 0, -1):
            if location[:length] in self.overrides:
                return f"--set {dotted(location[:length])}"
            if location[:length] in self.lines:
                return f"{self.source}:{self.lines[location[:length]]}"
        return self.source


def _assign(values: dict[str, Any], parts: Location, value: Any) -> None:
    target: Any = values
    for part, following in pairwise(parts):
        if isinstance(target, list) and isinstance(part, int):
            if isinstance(target[part], str):
                target[part] = {"name": target[part]}
        elif isinstance(target, dict):
            if isinstance(target.get(part), str) and isinstance(following, str):
                target[part] = {"name": target[part]}  # `optimizer: adamw` and --set optimizer.lr=...
            elif target.get(part) is None:
                target[part] = {}
        target = target[part]
    if isinstance(target, list):
        target[int(parts[-1])] = value
    elif isinstance(target, dict):
        target[parts[-1]] = value
    else:
        raise TypeError(f"{target!r} has no fields")


def _read_toml(text: str, source: str) -> tuple[Any, dict[Location, int]]:
    try:
        return tomllib.loads(text), {}
    except tomllib.TOMLDecodeError as error:
        raise JobError(f"{source}: {error}") from error


def _read_json(text: str, source: str) -> tuple[Any, dict[Location, int]]:
    try:
        return json.loads(text), {}
    except json.JSONDecodeError as error:
        raise JobError(f"{source}:{error.lineno}: {error.msg}") from error


class _Loader(yaml.SafeLoader):
    """SafeLoader that also reads 3e-4 as a number, as YAML 1.2 does."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+"), list("-+.0123456789")
)


def _read_yaml(text: str, source: str) -> tuple[Any, dict[Location, int]]:
    loader = _Loader(text)
    lines: dict[Location, int] = {}
    try:
        node = loader.get_single_node()
        return (None if node is None else _construct(loader, node, (), lines, source)), lines
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{source}:{mark.line + 1}" if mark else source
        raise JobError(f"{place}: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise JobError(f"{source}: {error}") from error
    finally:
        loader.dispose()


def _construct(loader: _Loader, node: yaml.Node, location: Location, lines: dict[Location, int], source: str) -> Any:
    place = f"{source}:{node.start_mark.line + 1}"
    lines.setdefault(location, node.start_mark.line + 1)
    if not node.tag.startswith("tag:yaml.org,2002:") or node.tag.startswith("tag:yaml.org,2002:python"):
        raise JobError(f"{place}: the tag {node.tag} would build an object; job files hold plain values only")
    if isinstance(node, yaml.SequenceNode):
        return [_construct(loader, n, (*location, i), lines, source) for i, n in enumerate(node.value)]
    if not isinstance(node, yaml.MappingNode):
        return loader.construct_object(node)
    loader.flatten_mapping(node)
    values: dict[Hashable, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node)
        line = key_node.start_mark.line + 1
        if not isinstance(key, str | int):
            raise JobError(f"{source}:{line}: a key is a word, not {key!r}")
        if key in values:
            raise JobError(f"{source}:{line}: '{dotted((*location, key))}' appears twice")
        lines[*location, key] = line
        values[key] = _construct(loader, value_node, (*location, key), lines, source)
    return values
