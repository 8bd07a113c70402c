"""Fields whose type depends on a plugin's name: ``Annotated[PluginConfig, Named("optimizer")]``.

A fixed union becomes stale when plugins are installed or removed, and a field annotated with the base class loses the
subclass's fields on dump. This marker looks up the name in the registry of the validation context, and dumps each
config by its own class.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from d9d_core.config import PluginConfig
from d9d_core.containment import FOREIGN_FAILURES
from d9d_core.errors import D9dError, JobError
from d9d_core.job_file.lookup import load_config
from d9d_core.registry.entries import Entry, shown
from d9d_core.registry.hooks import KINDS
from d9d_core.registry.registry import Registry
from d9d_core.words import find

__all__ = ["Named"]

#: Key of an open field in the JSON schema, which :mod:`d9d_core.job_file.schema` replaces.
PLACEHOLDER = "x-d9d-kind"


class Named:
    """Open union of configs: a bare name, or a mapping with ``name``, becomes the config of the record with that name.

    Args:
        kind: extension point, for example ``optimizer``.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __get_pydantic_core_schema__(self, _source: Any, _handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_plain_validator_function(
            self._validate,
            serialization=core_schema.plain_serializer_function_ser_schema(_dump, info_arg=True),
        )

    def __get_pydantic_json_schema__(self, _schema: CoreSchema, _handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {PLACEHOLDER: self.kind}

    def _validate(self, value: Any, info: ValidationInfo) -> PluginConfig:
        if isinstance(value, PluginConfig):
            return value
        registry: Registry | None = (info.context or {}).get("registry")
        if registry is None:
            text = f"names are resolved by Job.load only; in Python, give the config object of the {self.kind}"
            raise PydanticCustomError("no_registry", "{text}", {"text": text})
        fields = {"name": value} if isinstance(value, str) else value
        context = info.context or {}
        try:
            if self.kind == "model" and isinstance(fields, Mapping) and _names_only_weights(fields):
                return self._found(fields, registry, context)
            if not isinstance(fields, Mapping) or not isinstance(fields.get("name"), str):
                text = f"expected the name of a {self.kind}, or a mapping with 'name', not {value!r}"
                text += self._hint(fields)
                raise PydanticCustomError("not_named", "{text}", {"text": text})
            return self._resolve(fields, registry, context)
        except D9dError as error:
            context.setdefault("origins", []).append(error.origin)
            raise PydanticCustomError("plugin", "{text}", {"text": str(error)}) from error

    def _hint(self, fields: object) -> str:
        """Hint for the first field that is a word of another tool; empty if there is none."""
        section = next((kind.section for kind in KINDS if kind.name == self.kind), None)
        for word in fields if isinstance(fields, Mapping) else ():
            if row := find(word, [f"field of {section}", "field of a component", "field"], nested=True):
                return f"; '{word}': {row.hint(word)}"
        return ""

    def _found(self, fields: Mapping[str, Any], registry: Registry, context: dict[str, Any]) -> PluginConfig:
        from d9d_core.job_file.found_model import find_model

        location = str(fields["pretrained"])
        try:
            selector, _ = find_model(location, registry)
        except D9dError as error:
            raise JobError(f"pretrained: no model can be chosen for {location}: {error}") from error
        return self._resolve({**fields, "name": selector}, registry, context)

    def _resolve(self, fields: Mapping[str, Any], registry: Registry, context: dict[str, Any]) -> PluginConfig:
        selector = fields["name"]
        entry = registry.find(self.kind, selector)
        config_class = load_config(entry)
        if self.kind == "model" and fields.get("pretrained") is not None:
            from d9d_core.job_file.pretrained import with_stored_sizes

            fields = with_stored_sizes(entry, fields)
        inner = {**context, "label": str(entry)}
        config = config_class.model_validate({**fields, "name": entry.spec.key}, context=inner)
        _check_storable(config, entry, context)
        if "/" in selector:
            config.__pydantic_private__ = {
                **(config.__pydantic_private__ or {}),
                "_distribution": entry.origin.distribution,
            }
        return config


def _names_only_weights(fields: Mapping[str, Any]) -> bool:
    """Whether the fields of ``model`` set ``pretrained`` but no ``name``."""
    return fields.get("name") is None and isinstance(fields.get("pretrained"), str | Path)


def _check_storable(config: PluginConfig, entry: Entry, context: dict[str, Any]) -> None:
    """Refuse a config that JSON cannot hold, for example because a default is an arbitrary object."""
    try:
        config.model_dump(mode="json", warnings=False)
    except FOREIGN_FAILURES as error:
        context.setdefault("origins", []).append(error.__cause__)
        text = f"the config of {entry} has a value that JSON cannot hold: {shown(error)}"
        raise PydanticCustomError("plugin", "{text}", {"text": text}) from error


def _dump(config: PluginConfig, info: core_schema.SerializationInfo) -> dict[str, Any]:
    values = config.model_dump(mode=info.mode, exclude_defaults=info.exclude_defaults)
    return {"name": config.selector, **{key: value for key, value in values.items() if key != "name"}}
