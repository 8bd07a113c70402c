"""Fields whose type is decided by a plugin's name: ``Annotated[PluginConfig, Named("optimizer")]``.

A union built once goes stale when plugins come and go, and a field annotated with the base class loses the subclass's
fields on dump. This marker asks the registry during validation (through the validation context) and dumps by instance.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from d9d_core.config.base import PluginConfig
from d9d_core.config.lookup import load_config
from d9d_core.errors import D9dError, PluginError
from d9d_core.plugin.registry import Registry

#: Where the JSON schema of an open field is filled in, see :mod:`d9d_core.config.schema`.
PLACEHOLDER = "x-d9d-kind"


class Named:
    """Open union of configs: a bare name, or a mapping with ``name``, becomes the config of the record of that name.

    Args:
        kind: the extension point, for example ``optimizer``.
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
            text = f"names are resolved by Job.load; in Python, give the {self.kind}'s config object"
            raise PydanticCustomError("no_registry", "{text}", {"text": text})
        fields = {"name": value} if isinstance(value, str) else value
        if not isinstance(fields, Mapping) or not isinstance(fields.get("name"), str):
            text = f"expected the name of a {self.kind}, or a mapping with 'name', not {value!r}"
            raise PydanticCustomError("not_named", "{text}", {"text": text})
        return self._resolve(fields, registry, info.context or {})

    def _resolve(self, fields: Mapping[str, Any], registry: Registry, context: dict[str, Any]) -> PluginConfig:
        selector = fields["name"]
        try:
            entry = registry.find(self.kind, selector)
            config_class = load_config(entry)
        except PluginError as error:
            context.setdefault("origins", []).append(error.origin)
            raise PydanticCustomError("plugin", "{text}", {"text": str(error)}) from error
        if self.kind == "model" and fields.get("pretrained") is not None:
            from d9d_core.config.pretrained import with_stored_sizes

            try:
                fields = with_stored_sizes(entry, fields)
            except D9dError as error:
                context.setdefault("origins", []).append(error.origin)
                raise PydanticCustomError("plugin", "{text}", {"text": str(error)}) from error
        inner = {**context, "label": str(entry)}
        config = config_class.model_validate({**fields, "name": entry.spec.key}, context=inner)
        if "/" in selector:
            config.__pydantic_private__ = {
                **(config.__pydantic_private__ or {}),
                "_distribution": entry.origin.distribution,
            }
        return config


def open_fields(config: type[PluginConfig]) -> dict[str, str]:
    """Open fields of a config class: name of the field -> kind of the components that it selects."""
    found = {}
    for name, field in config.model_fields.items():
        kinds = [one.kind for one in (*field.metadata, *_parts(field.annotation)) if isinstance(one, Named)]
        if kinds:
            found[name] = kinds[0]
    return found


def inner_configs(config: PluginConfig) -> list[tuple[str, str, PluginConfig]]:
    """Configs in the open fields of a config, in order: field or entry (``methods[0]``), kind, config."""
    found = []
    for name, kind in open_fields(type(config)).items():
        value = getattr(config, name)
        entries = [(f"{name}[{n}]", one) for n, one in enumerate(value)] if isinstance(value, list | tuple) else []
        found += [(where, kind, one) for where, one in entries or [(name, value)] if isinstance(one, PluginConfig)]
    return found


def _parts(annotation: Any) -> Iterator[Any]:
    for part in get_args(annotation):
        yield part
        yield from _parts(part)


def _dump(config: PluginConfig, info: core_schema.SerializationInfo) -> dict[str, Any]:
    values = config.model_dump(mode=info.mode, exclude_defaults=info.exclude_defaults)
    return {"name": config.selector, **{key: value for key, value in values.items() if key != "name"}}
