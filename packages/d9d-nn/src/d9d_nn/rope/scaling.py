"""Scaling of rotary positions to sequences longer than in pretraining, for job files and config.json.

Does not import torch; :mod:`d9d_nn.rope.scaling_frequencies` computes the frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from d9d_core.config import Section
from d9d_core.errors import CheckpointError
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, ValidationInfo, field_validator


class _Scaling(Section):
    factor: float = Field(ge=1, allow_inf_nan=False)
    """Longest sequence divided by the longest sequence of pretraining."""


class LinearScaling(_Scaling):
    """Position interpolation: every angle divided by ``factor`` (Chen et al. 2023, arXiv 2306.15595, section 2.3)."""

    type: Literal["linear"] = "linear"
    """Selects the method."""


class NtkScaling(_Scaling):
    """Static NTK: theta times ``factor ** (R / (R - 2))`` for R rotated features, at every length.

    The slowest pair becomes slower by ``factor``, the fastest does not change (Peng et al. 2023, arXiv 2309.00071,
    section 3.1). A ``config.json`` states the larger theta, since transformers has no such type.
    """

    type: Literal["ntk"] = "ntk"
    """Selects the method."""


class DynamicScaling(_Scaling):
    """Dynamic NTK: sequences longer than the original maximum get a larger theta, which depends on their length.

    The length counts the whole sample without padding, so packing changes the rotation of a document, and padding does
    not. (transformers uses the longest sample of a batch for all samples.)
    """

    type: Literal["dynamic"] = "dynamic"
    """Selects the method."""

    original_max_positions: int = Field(gt=0)
    """Longest sequence of pretraining; shorter sequences do not change. Hugging Face: ``max_position_embeddings``."""


class YarnScaling(_Scaling):
    """YaRN: interpolates slowly rotating pairs of features, but not fast ones (Peng et al. 2023, arXiv 2309.00071)."""

    model_config = ConfigDict(validate_default=True)  # otherwise mscale without mscale_all_dim would be accepted

    type: Literal["yarn"] = "yarn"
    """Selects the method."""

    original_max_positions: int = Field(gt=0)
    """Longest sequence of pretraining."""

    beta_fast: float = Field(default=32.0, gt=0, allow_inf_nan=False)
    """Pairs that turn more often than this within the original maximum do not change."""

    beta_slow: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Pairs that turn less often than this are interpolated; smaller than ``beta_fast``."""

    attention_factor: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Multiplies cosine and sine, so its square multiplies the scores; null uses the formula fitted in the paper."""

    mscale: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """With ``mscale_all_dim``, the attention factor is ``m(mscale) / m(mscale_all_dim)`` with
    ``m(x) = 0.1 x ln(factor) + 1`` (DeepSeek-V2)."""

    mscale_all_dim: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """See ``mscale``; one without the other is refused."""

    truncate: bool = True
    """Round the bounds between fast and slow pairs to whole pairs."""

    @field_validator("beta_slow")
    @classmethod
    def _slower_than_fast(cls, value: float, info: ValidationInfo) -> float:
        fast = info.data.get("beta_fast")
        if fast is not None and value >= fast:
            raise ValueError(f"{value:g} is not smaller than beta_fast = {fast:g}; lower beta_slow")
        return value

    @field_validator("mscale_all_dim")
    @classmethod
    def _both_or_none(cls, value: float | None, info: ValidationInfo) -> float | None:
        if (value is None) != (info.data.get("mscale") is None):
            raise ValueError("mscale and mscale_all_dim have an effect only together; give both or neither")
        if value is not None and info.data.get("attention_factor") is not None:
            raise ValueError("attention_factor excludes mscale and mscale_all_dim; remove it, or remove both of them")
        return value


class Llama3Scaling(_Scaling):
    """Llama 3.1: like YaRN with bounds on wavelengths and no attention factor (Grattafiori et al. 2024)."""

    type: Literal["llama3"] = "llama3"
    """Selects the method."""

    original_max_positions: int = Field(gt=0)
    """Longest sequence of pretraining."""

    low_freq_factor: float = Field(gt=0, allow_inf_nan=False)
    """Wavelengths above ``original_max_positions / low_freq_factor`` are stretched by ``factor``."""

    high_freq_factor: float = Field(gt=0, allow_inf_nan=False)
    """Wavelengths below ``original_max_positions / high_freq_factor`` do not change."""

    @field_validator("high_freq_factor")
    @classmethod
    def _higher_than_low(cls, value: float, info: ValidationInfo) -> float:
        low = info.data.get("low_freq_factor")
        if low is not None and value <= low:
            raise ValueError(f"{value:g} is not greater than low_freq_factor = {low:g}; raise high_freq_factor")
        return value


_AnyScaling = LinearScaling | NtkScaling | DynamicScaling | YarnScaling | Llama3Scaling
RopeScaling = Annotated[_AnyScaling, Field(discriminator="type")]


class Rope(NamedTuple):
    """Settings of the rotary positions of a layer.

    Attributes:
        theta: base of the frequencies.
        scaling: scaling beyond the lengths of pretraining; ``None`` for no scaling.
        magnitude: factor by which rotated queries and keys are multiplied.
        features: number of features at the start of a head that rotate; ``None`` for all.
    """

    theta: float
    scaling: RopeScaling | None = None
    magnitude: float = 1.0
    features: int | None = None


_SCALING: TypeAdapter[_AnyScaling] = TypeAdapter(RopeScaling)

#: Fields of ``rope_parameters`` that are not fields of a scaling here: other settings, and two spellings of its type.
_BESIDE = frozenset({"rope_theta", "rope_type", "type", "partial_rotary_factor"})
_ORIGINAL = "original_max_position_embeddings"


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """Attention factor of equation 15 of the YaRN paper, whose mscale is 1: ``0.1 mscale ln(factor) + 1``."""
    return 0.1 * mscale * math.log(factor) + 1.0


def latent_score_factor(scaling: _AnyScaling | None) -> float:
    """Factor of the scores of latent attention: the square of YaRN's magnitude for ``mscale_all_dim``; 1 without it.

    DeepSeek-V2 and V3 multiply the scores of all features by it, where other models multiply cosines and sines only.
    """
    if not isinstance(scaling, YarnScaling) or scaling.mscale_all_dim is None:
        return 1.0
    return yarn_magnitude(scaling.factor, scaling.mscale_all_dim) ** 2


def stretched_theta(theta: float, stretch: float, features: int) -> float:
    """Base with which the slowest of ``features / 2`` pairs rotates ``stretch`` times slower than with ``theta``."""
    return theta * math.pow(stretch, features / (features - 2))


def scaling_from_hugging_face(parameters: Mapping[str, Any], max_positions: int) -> _AnyScaling | None:
    """Read the rope scaling from ``rope_parameters`` (before transformers 5: ``rope_scaling``) of a config.json.

    Args:
        parameters: contents of this field, empty if the file has none. The caller reads its ``rope_theta``.
        max_positions: ``max_position_embeddings`` of the same file.

    Returns:
        ``None`` for type ``default``.

    Raises:
        CheckpointError: the method is unknown or has impossible settings, or only a part of each head rotates.
    """
    where = "config.json: rope_parameters"
    part = parameters.get("partial_rotary_factor")
    if part not in (None, 1):
        raise CheckpointError(
            f"{where}.partial_rotary_factor is {part!r}; d9d rotates whole heads of this model only: take another model"
        )
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default":
        return None
    # A null in a config.json means the default of the field.
    values = {key: value for key, value in parameters.items() if key not in _BESIDE and value is not None}
    original = values.pop(_ORIGINAL, max_positions)
    if kind not in ("linear", "ntk"):
        values["original_max_positions"] = max_positions if kind == "dynamic" else original
    if kind == "yarn":
        values.setdefault("factor", max_positions / original)
        # transformers reads mscale and mscale_all_dim only together, and only if no attention factor is given.
        if "attention_factor" in values or not (values.get("mscale") and values.get("mscale_all_dim")):
            values = {key: value for key, value in values.items() if not key.startswith("mscale")}
    try:
        return _SCALING.validate_python({"type": kind, **values})
    except ValidationError as error:
        if error.errors()[0]["type"] == "union_tag_invalid":
            raise CheckpointError(
                f"{where} of rope_type {kind!r} are unknown to d9d; it supports 'default', "
                f"{error.errors()[0]['ctx']['expected_tags']}: take another model"
            ) from error
        problems = (": ".join((*map(str, line["loc"][1:]), line["msg"])) for line in error.errors())
        raise CheckpointError(f"{where} of rope_type {kind!r} cannot be used: {'; '.join(problems)}") from error


def scaling_to_hugging_face(scaling: _AnyScaling | None) -> dict[str, Any]:
    """Write the fields of ``rope_parameters`` of a config.json other than ``rope_theta``.

    With ``dynamic`` scaling, ``max_position_embeddings`` of the file must equal the ``original_max_positions`` of the
    scaling, because the file has no separate field for it. With ``ntk``, ``rope_theta`` of the file must be the result
    of :func:`stretched_theta`.
    """
    if scaling is None or scaling.type == "ntk":
        return {"rope_type": "default"}
    values = scaling.model_dump(exclude_none=True)
    original = values.pop("original_max_positions", None)
    if original is not None and scaling.type != "dynamic":
        values[_ORIGINAL] = original
    return {"rope_type": values.pop("type"), **values}
