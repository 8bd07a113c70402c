"""Fields of a config with types, defaults and meanings, for ``d9d plugins show`` and the page of fields."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from d9d_core.config import PluginConfig, Section, speakable
from d9d_core.job_file.open_union import Named

_WORDS = {
    bool: "true or false", int: "whole number", float: "number", str: "text", Path: "path", types.NoneType: "null",
    dict: "mapping", list: "list", Any: "any value",
}  # fmt: skip
_BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


class ConfigField(NamedTuple):
    """Field of a config.

    Attributes:
        name: path of the field; ``NAME`` stands for a key of a map, ``[]`` for an entry of a list. If the field belongs
            to one of several sections, the value that selects the section follows in brackets.
        kind: accepted values, in words.
        default: default value as YAML; ``None`` if the field is required.
        meaning: description of the field.
    """

    name: str
    kind: str
    default: str | None
    meaning: str


def fields_of(section: type[Section], prefix: str = "") -> Iterator[ConfigField]:
    """Fields of a config, each followed by the fields of its sections."""
    for name, field in section.model_fields.items():
        if name == "name" and issubclass(section, PluginConfig):
            continue
        default = None if field.is_required() else _yaml(field.get_default(call_default_factory=True))
        kind = kind_of(field.annotation, field.metadata)
        yield ConfigField(f"{prefix}{name}", kind, default, " ".join((field.description or "").split()))
        inside = list(sections_of(field.annotation))
        for path, part in inside:
            chosen = f" ({_choice(part)})" if len(inside) > 1 else ""
            for inner in fields_of(part, f"{prefix}{name}{path}."):
                yield inner._replace(name=f"{inner.name}{chosen}")


def kind_of(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """Accepted values of a type in words, such as ``whole number > 0 or null``."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return kind_of(arguments[0], [*arguments[1:], *metadata])
    if named := [one.kind for one in metadata if isinstance(one, Named)]:
        return str(named[0])
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(kind_of, arguments)))
    if origin is Literal:
        return " or ".join(map(_yaml, arguments))
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return " or ".join(_yaml(one.value) for one in annotation)
    if arguments:
        is_map = isinstance(origin, type) and issubclass(origin, Mapping)
        items = dict.fromkeys(map(kind_of, arguments[1:] if is_map else [one for one in arguments if one is not ...]))
        return f"{'map' if is_map else 'list'} of {' or '.join(items)}"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "mapping"
    word = str(_WORDS.get(annotation) or getattr(annotation, "__name__", annotation))
    flat = [part for one in metadata for part in (one, *getattr(one, "metadata", ()))]
    bounds = [(sign, getattr(one, name, None)) for one in flat for name, sign in _BOUNDS.items()]
    return word + ",".join(f" {sign} {bound}" for sign, bound in bounds if bound is not None)


def sections_of(annotation: Any, path: str = "") -> Iterator[tuple[str, type[Section]]]:
    """Sections inside a field's type, without configs of components, each with its path from the field."""
    if isinstance(annotation, type) and issubclass(annotation, Section) and not issubclass(annotation, PluginConfig):
        yield path, annotation
    origin = get_origin(annotation)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        path += ".NAME"
    elif origin in (list, tuple, set, frozenset):
        path += "[]"
    for part in get_args(annotation):
        yield from sections_of(part, path)


def _choice(section: type[Section]) -> str:
    """Field and value by which a section is selected in a union, such as ``kind: classification``."""
    for name, field in section.model_fields.items():
        if typing.get_origin(field.annotation) is Literal:
            return f"{name}: {get_args(field.annotation)[0]}"
    return section.__name__


def _yaml(value: Any) -> str:
    plain = _plain(value)
    return plain if isinstance(plain, str) and plain else json.dumps(speakable(plain), default=str)


def _plain(value: Any) -> Any:
    if isinstance(value, Section):
        return value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list | set | frozenset):
        return [_plain(item) for item in value]
    return value.value if isinstance(value, Enum) else value
