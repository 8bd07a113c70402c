"""JSON schema of a job file that uses the installed plugins, for editors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from d9d_core.errors import PluginError
from d9d_core.job_file.job import JobConfig
from d9d_core.job_file.lookup import config_schema
from d9d_core.job_file.open_union import PLACEHOLDER
from d9d_core.registry.registry import Registry

__all__ = ["job_schema"]


#: Schema of a section ``model`` without a name; the ``model_type`` of its pretrained weights selects the model.
_UNNAMED_MODEL = {
    "type": "object",
    "required": ["pretrained"],
    "not": {"required": ["name"]},
    "description": "A model that is found by its pretrained weights.",
}


def job_schema(registry: Registry, skipped: Callable[[PluginError], None] | None = None) -> dict[str, Any]:
    """JSON schema of a job file, with a discriminated union per extension point.

    Loads the config class of every installed plugin.

    Args:
        registry: records of the installed plugins.
        skipped: called for each record without a usable config, which is then left out.

    Raises:
        PluginError: a record has no usable config, and ``skipped`` is not given.
    """
    schema = JobConfig.model_json_schema()
    definitions = schema.setdefault("$defs", {})
    choices = {kind: _choices(kind, registry, definitions, skipped) for kind in _placeholders(schema)}
    filled = _fill(schema, choices)
    assert isinstance(filled, dict)
    files = {"type": "array", "items": {"type": "string"}, "description": "Single-file plugins."}
    filled["properties"]["plugins"] = {"anyOf": [filled["properties"]["plugins"], files]}
    filled["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    filled["title"] = "d9d job file"
    return filled


def _choices(
    kind: str, registry: Registry, definitions: dict[str, Any], skipped: Callable[[PluginError], None] | None
) -> dict[str, Any]:
    references = []
    names = []
    for entry in registry.entries(kind):
        try:
            own = config_schema(entry)
        except PluginError as error:
            if skipped is None:
                raise
            skipped(error)
            continue
        key = f"{kind}:{entry.origin.distribution}:{entry.spec.key}".replace("/", "|").replace(" ", "_")
        # Two plugins may have nested sections of the same name, so each gets its own definitions.
        inner = own.pop("$defs", {})
        moved = {f"#/$defs/{name}": f"#/$defs/{key}.{name}" for name in inner}
        definitions |= {f"{key}.{name}": _point(definition, moved) for name, definition in inner.items()}
        selectors = [entry.spec.key]
        if entry.origin.version:  # a single-file plugin has no distribution name to select it by
            selectors.append(f"{entry.origin.distribution}/{entry.spec.key}")
        own = _point(own, moved)
        own["description"] = f"{entry.spec.summary} ({entry.origin})"
        own["required"] = sorted({*own.get("required", []), "name"})
        own["properties"]["name"] = {"enum": selectors, "description": "Selects the plugin."}
        definitions[key] = own
        references.append({"$ref": f"#/$defs/{key}"})
        names += selectors
    if not names:
        return {"not": {}}
    found = [_UNNAMED_MODEL] if kind == "model" else []
    return {"anyOf": [{"enum": sorted(set(names))}, {"anyOf": references}, *found]}


def _point(node: Any, moved: dict[str, str]) -> Any:
    """Copy of a JSON schema in which references to moved definitions, also in discriminators, are updated."""
    if isinstance(node, dict):
        return {k: moved.get(v, v) if isinstance(v, str) else _point(v, moved) for k, v in node.items()}
    return [_point(item, moved) for item in node] if isinstance(node, list) else node


def _placeholders(node: Any) -> set[str]:
    if isinstance(node, dict):
        own = {node[PLACEHOLDER]} if PLACEHOLDER in node else set()
        return own.union(*map(_placeholders, node.values()))
    if isinstance(node, list):
        return set().union(*map(_placeholders, node))
    return set()


def _fill(node: Any, choices: dict[str, Any]) -> Any:
    if isinstance(node, dict):
        rest = {key: _fill(value, choices) for key, value in node.items() if key != PLACEHOLDER}
        return rest | choices[node[PLACEHOLDER]] if PLACEHOLDER in node else rest
    if isinstance(node, list):
        return [_fill(item, choices) for item in node]
    return node
