"""Parsers of job files by format: YAML, TOML, JSON."""

from __future__ import annotations

import json
import tomllib
from typing import Any

from d9d_core.config.base import Location
from d9d_core.config.yaml_reader import MAX_DEPTH, check_scalar, read_yaml
from d9d_core.errors import JobError


def _read_toml(text: str, source: str) -> tuple[Any, dict[Location, int]]:
    try:
        return _shallow(tomllib.loads(text), source), {}
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


#: Suffix -> ``(text, source) -> (values, line of each value as far as known)``; each raises JobError.
READERS = {".yaml": read_yaml, ".yml": read_yaml, ".toml": _read_toml, ".json": _read_json}
