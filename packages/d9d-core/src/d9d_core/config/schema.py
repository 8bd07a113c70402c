"""The JSON schema of a job file over what is installed, for editors."""

from __future__ import annotations

from typing import Any

from d9d_core.config.job import JobConfig
from d9d_core.config.open_union import PLACEHOLDER
from d9d_core.plugin.records import ConfiguredSpec
from d9d_core.plugin.registry import Registry


def job_schema(registry: Registry) -> dict[str, Any]:
    """JSON schema with a discriminated union per extension point.

    Loads the config class of every installed plugin.
    """
    schema = JobConfig.model_json_schema()
    definitions = schema.setdefault("$defs", {})
    choices = {kind: _choices(kind, registry, definitions) for kind in _placeholders(schema)}
    filled = _fill(schema, choices)
    assert isinstance(filled, dict)
    filled["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    filled["title"] = "d9d job file"
    return filled


def _choices(kind: str, registry: Registry, definitions: dict[str, Any]) -> dict[str, Any]:
    references = []
    names = []
    for entry in registry.entries(kind):
        assert isinstance(entry.spec, ConfiguredSpec)
        config = entry.spec.config.load()
        template = "#/$defs/{model}"
        own = config.model_json_schema(ref_template=template)
        definitions.update(own.pop("$defs", {}))
        own["description"] = f"{entry.spec.summary} ({entry.origin})"
        own["required"] = sorted({*own.get("required", []), "name"})
        key = f"{kind}:{entry.origin.distribution}:{entry.spec.name}".replace("/", "|").replace(" ", "_")
        definitions[key] = own
        references.append({"$ref": f"#/$defs/{key}"})
        names.append(entry.spec.name)
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
