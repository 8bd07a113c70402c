"""Parsers of job files: YAML, with the line of each value, TOML and JSON.

Only plain YAML is accepted: mappings with text keys, lists, strings, numbers, true, false and null. Tags that build
other objects, duplicate keys and recursive aliases are errors.
"""

from __future__ import annotations

import datetime as dt
import json
import re
import tomllib
from typing import Any

import yaml

from d9d_core.config import Location, dotted
from d9d_core.errors import JobError

#: Largest number of values in a file, and deepest nesting. Aliases of YAML repeat values, so without a limit a short
#: file could expand beyond any memory.
MAX_VALUES = 100_000
MAX_DEPTH = 100
#: Largest number of bits of a whole number; a larger number would overflow as a float.
_MAX_BITS = 1000

_TAG = "tag:yaml.org,2002:"
_MERGE = _TAG + "merge"
_PLAIN = {
    yaml.ScalarNode: {_TAG + kind for kind in ("null", "bool", "int", "float", "str")},
    yaml.SequenceNode: {_TAG + "seq"},
    yaml.MappingNode: {_TAG + "map"},
}
_UNWANTED = (_TAG + "timestamp", _TAG + "value")


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads 3e-4 as a number, as YAML 1.2 does, and leaves dates as text."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _UNWANTED]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_TAG + "float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789"))


def read_yaml(text: str, source: str) -> tuple[Any, dict[Location, int]]:
    """Read YAML text of a job file: its values, and the line of each.

    Args:
        text: one YAML document.
        source: name of the file in messages.

    Raises:
        JobError: the text is malformed, too deeply nested, too large, or has a value that is not plain.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None, {}
        builder = _Builder(loader, source)
        return builder.build(node, ()), builder.lines
    except yaml.MarkedYAMLError as error:
        mark, begin = error.problem_mark or error.context_mark, error.context_mark
        if begin and mark and mark.index >= len(text.rstrip()):
            mark = begin  # the file ends inside a value, so the value's begin is the place to look at
        where = f"{source}:{mark.line + 1}" if mark else source
        since = f" ({error.context} of line {begin.line + 1})" if begin and mark and begin.line < mark.line else ""
        raise JobError(f"{where}: {_explained(error)}{since}") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise JobError(f"{source}:{line}: the character U+{error.character:04X} is not allowed") from error
    except RecursionError:
        raise JobError(f"{source}:{loader.line + 1}: nested more than {MAX_DEPTH} levels deep") from None


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes strings which the loader would read as numbers, such as 3e-4."""


_Dumper.yaml_implicit_resolvers = {
    first: [*resolvers, *(pair for pair in _Loader.yaml_implicit_resolvers.get(first, ()) if pair not in resolvers)]
    for first, resolvers in yaml.SafeDumper.yaml_implicit_resolvers.items()
}


def write_yaml(values: Any, **style: Any) -> str:
    """YAML text that :func:`read_yaml` reads as these values.

    Args:
        values: mappings, lists and scalars.
        style: options of ``yaml.dump``, such as ``width``.
    """
    return str(yaml.dump(values, Dumper=_Dumper, sort_keys=False, **style))


def check_scalar(value: Any) -> None:
    """Refuse a scalar that later code cannot print or compute with.

    Raises:
        ValueError: the text is not valid Unicode, or the whole number has more than 1000 bits.
    """
    if isinstance(value, str):
        value.encode()  # half of a surrogate pair cannot be encoded
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise ValueError(f"a number may have at most {_MAX_BITS} bits; lower it, or quote it to make it a text")


def _explained(error: yaml.MarkedYAMLError) -> str:
    if isinstance(error, yaml.composer.ComposerError):  # context and problem form one sentence
        return ", ".join(part for part in (error.context, error.problem) if part)
    return error.problem or error.context or "malformed"


class _Builder:
    """Converts YAML nodes to Python values, and counts them, because aliases may repeat a node many times."""

    def __init__(self, loader: _Loader, source: str) -> None:
        self.lines: dict[Location, int] = {}
        self._loader = loader
        self._source = source
        self._values = 0
        self._open: set[int] = set()

    def build(self, node: yaml.Node, location: Location) -> Any:
        self.lines.setdefault(location, node.start_mark.line + 1)
        self._values += 1
        if self._values > MAX_VALUES:
            raise self._error(node, f"more than {MAX_VALUES:,} values, repetitions by aliases included")
        if id(node) in self._open:
            raise self._error(node, "an alias (*name) refers to a mapping or list that contains the alias; remove it")
        if len(location) > MAX_DEPTH:
            raise self._error(node, f"nested more than {MAX_DEPTH} levels deep")
        if node.tag not in _PLAIN[type(node)]:
            raise self._error(node, f"the tag {node.tag} would build an object; job files may hold plain values only")
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        self._open.add(id(node))
        if isinstance(node, yaml.MappingNode):
            values: Any = self._mapping(node, location)
        else:
            values = [self.build(item, (*location, index)) for index, item in enumerate(node.value)]
        self._open.remove(id(node))
        return values

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        try:
            value = self._loader.construct_object(node)
        except (ValueError, AttributeError, LookupError, yaml.YAMLError) as error:
            kind = node.tag.removeprefix(_TAG)
            text = f"YAML reads {node.value[:80]!r} as the type {kind}, but it is no usable value of this type"
            raise self._error(node, f"{text}; correct it, or put it in quotes if it is meant as text") from error
        try:
            check_scalar(value)
        except ValueError as error:
            raise self._error(node, f"{ascii(node.value)[:80]}: {error}") from error
        return value

    def _mapping(self, node: yaml.MappingNode, location: Location) -> dict[str, Any]:
        values: dict[str, Any] = {}
        merged: list[yaml.Node] = []
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE:
                merged += value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
                continue
            key = self._key(key_node)
            if key in values:
                raise self._error(key_node, f"'{dotted((*location, key))}' appears twice")
            self.lines.setdefault((*location, key), key_node.start_mark.line + 1)
            values[key] = self.build(value_node, (*location, key))
        for source in merged:
            if not isinstance(source, yaml.MappingNode):
                raise self._error(source, "'<<' takes a mapping, or a list of mappings")
            values = self.build(source, location) | values
        return values

    def _key(self, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode):
            raise self._error(
                node, "a key must be text, but this key is a list or a mapping; write a text, such as lr: 3e-4"
            )
        if node.tag != _TAG + "str":
            kind = {"int": "a number", "float": "a number"}.get(node.tag.removeprefix(_TAG), "not text")
            hint = "put it in quotes if it is meant as text (also on, off, yes, no, true, false and null)"
            raise self._error(node, f"a key must be text, and {node.value} is {kind}; {hint}")
        try:
            check_scalar(node.value)
        except ValueError as error:
            raise self._error(node, f"the key {node.value[:80]!r} is not valid Unicode text; rename it") from error
        return str(node.value)

    def _error(self, node: yaml.Node, text: str) -> JobError:
        return JobError(f"{self._source}:{node.start_mark.line + 1}: {text}")


def _read_toml(text: str, source: str) -> tuple[Any, dict[Location, int]]:
    try:
        return _undated(_shallow(tomllib.loads(text), source)), {}
    except RecursionError:
        raise _too_deep(source) from None
    except ValueError as error:
        raise JobError(f"{source}: {error}") from error


def _read_json(text: str, source: str) -> tuple[Any, dict[Location, int]]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in pairs:
            if key in values:
                raise JobError(f"{source}: '{key}' appears twice in one mapping")
            values[key] = value
        return values

    try:
        return _shallow(json.loads(text, object_pairs_hook=unique), source), {}
    except RecursionError:
        raise _too_deep(source) from None
    except json.JSONDecodeError as error:
        raise JobError(f"{source}:{error.lineno}: {error.msg}") from error
    except ValueError as error:
        raise JobError(f"{source}: {error}") from error


def _undated(values: Any) -> Any:
    """Values of a TOML file with dates and times converted to strings, as in YAML and JSON files."""
    if isinstance(values, dict):
        return {key: _undated(value) for key, value in values.items()}
    if isinstance(values, list):
        return [_undated(value) for value in values]
    return values.isoformat() if isinstance(values, dt.date | dt.time) else values


def _shallow(values: Any, source: str) -> Any:
    level = [values]
    for _ in range(MAX_DEPTH + 1):
        level = [item for value in level for item in _items(value)]
        for value in level:
            if not isinstance(value, dict | list):
                _check(value, source)
        if not level:
            return values
    raise _too_deep(source)


def _check(value: Any, source: str) -> None:
    try:
        check_scalar(value)
    except ValueError as error:
        raise JobError(f"{source}: {ascii(value)[:80] if isinstance(value, str) else 'a number'}: {error}") from error


def _items(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    return value if isinstance(value, list) else []


def _too_deep(source: str) -> JobError:
    return JobError(f"{source}: nested more than {MAX_DEPTH} levels deep")


#: Suffix -> parser ``(text, source) -> (values, line of each value as far as known)``; parsers raise JobError.
READERS = {".yaml": read_yaml, ".yml": read_yaml, ".toml": _read_toml, ".json": _read_json}
