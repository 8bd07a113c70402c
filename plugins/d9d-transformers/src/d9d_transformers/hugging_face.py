"""Hugging Face format of transformers' models: tensors keep their names, except for transformers' own conversions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from d9d_core.errors import CheckpointError
from pydantic import ValidationError

from d9d_transformers.config import VOLATILE, TransformersConfig, example

if TYPE_CHECKING:
    from d9d_weights.graph.base import Mapper


def _check_release(data: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
    """Check that the installed release knows all fields about the model, if a newer release wrote the file.

    Args:
        data: contents of ``config.json``.
        fields: the part of ``data`` about the language model.

    Raises:
        CheckpointError: the installed release does not know a field.
    """
    from d9d_transformers.library import library, native_config, unknown_fields, written_by_newer

    written = written_by_newer(data)
    if written and (unknown := unknown_fields(native_config(fields), fields)):
        raise CheckpointError(
            f"config.json: transformers {written} wrote {', '.join(unknown)}, which the installed release "
            f"{library().__version__} does not know; install transformers>={written}, or remove fields that have no "
            "effect on the model"
        )


class TransformersFormat:
    """Format of the files that transformers reads and writes."""

    def config_json(self, config: TransformersConfig, dtype: str) -> dict[str, Any]:
        """Contents of ``config.json``: the fields of the config, and the dtype."""
        return {**config.config, "dtype": dtype}

    def kept_fields(self, source: Mapping[str, Any], config: TransformersConfig) -> dict[str, Any]:  # noqa: ARG002
        """Fields of the source's ``config.json`` to keep besides the config's: none, because the config has all."""
        return {}

    def config_from_json(self, data: Mapping[str, Any]) -> TransformersConfig:
        """Config with all fields of a ``config.json`` except the fields about files and programs.

        Raises:
            CheckpointError: the file describes no decoder that could be trained.
        """
        from d9d_transformers.library import language_fields

        stated = data.get("model_type")
        if not isinstance(stated, str):
            raise CheckpointError(
                f"config.json: model_type is {stated!r}; it must be the name of a type, such as llama"
            )
        inside = language_fields(data)
        _check_release(data, inside or data)
        fields = {name: value for name, value in (inside or data).items() if name not in VOLATILE}
        try:
            return TransformersConfig.model_validate(
                {"config": fields, "container": None if inside is None else stated}
            )
        except ValidationError as error:
            problems = "; ".join(line["msg"].removeprefix("Value error, ") for line in error.errors())
            raise CheckpointError(f"config.json: {problems}") from error

    def example(self, model_type: str) -> TransformersConfig:
        """Small config of a type; see :func:`d9d_transformers.config.example`."""
        return example(model_type)

    def adapter_names(self, config: TransformersConfig) -> Mapper:
        """Mapper from the model's names to the names in the model that transformers builds for the base directory."""
        from d9d_transformers.conversion import adapter_names

        return adapter_names(config)

    def importer(self, config: TransformersConfig, stored: TransformersConfig) -> Mapper:
        """Mapper from files to the model's names; see :mod:`d9d_transformers.conversion`."""
        from d9d_transformers.conversion import importer

        return importer(config, stored)

    def exporter(self, config: TransformersConfig) -> Mapper:
        """Mapper from the model's names to files."""
        from d9d_transformers.conversion import exporter

        return exporter(config)
