"""The JSON schema of a job file over what is installed, for editors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from d9d_core.config.job import JobConfig
from d9d_core.config.lookup import config_schema
from d9d_core.config.open_union import PLACEHOLDER
from d9d_core.errors import PluginError
from d9d_core.plugin.registry import Registry


def job_schema(registry: Registry, skipped: Callable[[PluginError], None] | None = None) -> dict[str, Any]:
    """JSON schema with a discriminated union per extension point.

    Loads the config class of every installed plugin.

    Args:
        registry: what is installed.
        skipped: called for each record without a usable config, which is then left out.

    Raises:
        PluginError: there is such a record, and no ``skipped``.
    """
    schema = JobConfig.model_json_schema()
    definitions = schema.setdefault("$defs", {})
    choices = {kind: _choices(kind, registry, definitions, skipped) for kind in _placeholders(schema)}
    filled = _fill(schema, choices)
    assert isinstance(filled, dict)
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
        definitions.update(own.pop("$defs", {}))
        own["description"] = f"{entry.spec.summary} ({entry.origin})"
        own["required"] = sorted({*own.get("required", []), "name"})
        key = f"{kind}:{entry.origin.distribution}:{entry.spec.key}".replace("/", "|").replace(" ", "_")
        definitions[key] = own
        references.append({"$ref": f"#/$defs/{key}"})
        names.append(entry.spec.key)
    return {"anyOf": [{"enum": sorted(set(names))}, {"oneOf": references}]} if names else {"enum": []}


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
