"""Base of the decoders' Hugging Face formats: converts configs from and to ``config.json``, and tensor names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from d9d_core.errors import CheckpointError
from d9d_weights.hugging_face.family import Family
from pydantic import ValidationError

from d9d_nn.decoder.config import DecoderConfig
from d9d_nn.decoder.config_json import check_computable, common_fields, common_json, direction_json, kept_fields
from d9d_nn.heads.config import STORED

if TYPE_CHECKING:
    from d9d_weights.graph.base import Mapper

C = TypeVar("C", bound=DecoderConfig)


class DecoderFormat(ABC, Generic[C]):
    """Base of the Hugging Face formats of decoders: the model classes of one family in transformers.

    One head can be a head of transformers: a language model (``...ForCausalLM``), a classifier of last tokens
    (``...ForSequenceClassification``) or of tokens (``...ForTokenClassification``). Other heads are stored under
    d9d's own names, which transformers ignores.

    Attributes:
        family: names of the models in transformers; a model that transformers implements as several families overrides
            :meth:`family_of` and :meth:`family_in`.
        config: config class of the models.
    """

    family: ClassVar[Family]
    config: type[C]

    @abstractmethod
    def special_json(self, config: C) -> dict[str, Any]:
        """Write the ``config.json`` fields that only this family has."""

    @abstractmethod
    def special_fields(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Read from a ``config.json`` the fields of d9d's config that only this family has.

        Raises:
            CheckpointError: the file describes an unsupported variant.
            KeyError: a field is missing.
        """

    def family_of(self, config: C) -> Family:  # noqa: ARG002 - overridden by models of several families
        """Family in transformers to which the model of this config belongs."""
        return self.family

    def family_in(self, data: Mapping[str, Any]) -> Family:  # noqa: ARG002 - likewise
        """Family that a ``config.json`` belongs to; if it belongs to none, any family, which then refuses the file."""
        return self.family

    def own_fields(self, config: C) -> dict[str, Any]:  # noqa: ARG002 - overridden by some families
        """Config fields of this family that transformers does not have; ``config.json`` stores them unchanged."""
        return {}

    def direction_json(self, config: C) -> dict[str, Any]:
        """Write the fields by which transformers computes attention that is not causal.

        Raises:
            CheckpointError: transformers has no such model.
        """
        return direction_json(config)

    def config_json(self, config: C, dtype: str) -> dict[str, Any]:
        """Write the ``config.json`` that ``from_pretrained`` of transformers reads.

        Args:
            config: d9d's config of the model.
            dtype: dtype of the parameters: ``float32``, ``bfloat16`` or ``float16``.

        Raises:
            CheckpointError: Hugging Face layout has no such dtype, or cannot express the model.
        """
        common = common_json(config, self.family_of(config), dtype, self.own_fields(config))
        return common | self.direction_json(config) | self.special_json(config)

    def kept_fields(self, source: Mapping[str, Any], config: C) -> dict[str, Any]:
        """Fields about tokens, labels and generation, copied from the pretrained model's config."""
        return kept_fields(source, config, self.family_of(config))

    def config_from_json(self, data: Mapping[str, Any]) -> C:
        """Read d9d's config from a published ``config.json``, of transformers 4 or 5.

        Raises:
            CheckpointError: the file describes another architecture, an unsupported variant, or an invalid model.
        """
        family = self.family_in(data)
        name = family.model_type
        check_computable(data, family)
        try:
            values = self.special_fields(data) | common_fields(data, family)
        except KeyError as error:
            raise CheckpointError(
                f"config.json: {error.args[0]} is missing; take it from the config.json of the published model"
            ) from error
        except (TypeError, AttributeError) as error:
            raise CheckpointError(
                f"config.json: a value has a wrong type for a {name} model: {error}; correct it"
            ) from error
        try:
            config = self.config.model_validate(values, context=STORED)
        except ValidationError as error:
            problems = (
                f"{'.'.join(map(str, line['loc']))}: {line['msg'].removeprefix('Value error, ')}"
                for line in error.errors()
            )
            raise CheckpointError(
                f"config.json: values are invalid for a {name} model: {'; '.join(problems)}"
            ) from error
        self.direction_json(config)  # raises if a window has another meaning in transformers
        return config

    def layers(self, config: C, stored: C) -> list[Mapper]:  # noqa: ARG002 - some families compare the two
        """Mappers of the layers' tensors, from files of a model with config ``stored`` to a model with ``config``."""
        # Imported here, because reading a config must not import torch.
        from d9d_weights.hugging_face.names import layer_names

        return list(layer_names(self.family_of(config).layer, config.biased_projections()))

    def importer(self, config: C, stored: C) -> Mapper:
        """Mapper from files to the model, see :func:`d9d_weights.hugging_face.names.importer`."""
        from d9d_weights.hugging_face.names import importer

        return importer(config, stored, self.layers(config, stored))

    def exporter(self, config: C) -> Mapper:
        """Mapper from the model to files, see :func:`d9d_weights.hugging_face.names.exporter`."""
        from d9d_weights.hugging_face.names import exporter

        return exporter(config, self.layers(config, config))
