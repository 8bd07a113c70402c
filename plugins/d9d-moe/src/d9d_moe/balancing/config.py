"""Config field ``balancing`` of models with experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from d9d_core.config import PluginConfig, closest
from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class BalancingConfig(PluginConfig):
    """Base of the configs of balancers."""

    @classmethod
    def _owner(cls, info: ValidationInfo) -> str:  # noqa: ARG003 - errors name the balancing, not the model
        return f"'{cls.model_fields['name'].default}'"


class AuxiliaryLossConfig(BalancingConfig):
    """Auxiliary loss on uneven use of experts."""

    name: Literal["auxiliary_loss"] = "auxiliary_loss"
    """Selects this balancing."""
    scope: Literal["sequence", "batch"] = "sequence"
    """``sequence``: balance the experts within each sample. ``batch``: within each rank's microbatch, so results depend
    on the layout."""
    coefficient: _Positive
    """Factor of this loss term; each layer contributes 1 to the term if its experts are used equally."""


class ZLossConfig(BalancingConfig):
    """Auxiliary loss on large router logits."""

    name: Literal["z_loss"] = "z_loss"
    """Selects this balancing."""
    coefficient: _Positive = 1e-3
    """Factor of this loss term."""


class BiasUpdateConfig(BalancingConfig):
    """Update of the selection bias by the load of the experts, without a loss."""

    name: Literal["bias_update"] = "bias_update"
    """Selects this balancing."""
    rate: _Positive = 1e-3
    """Step by which the bias of an expert changes per optimizer step."""


_NAMES = tuple(kind.model_fields["name"].default for kind in (AuxiliaryLossConfig, ZLossConfig, BiasUpdateConfig))


def _named(value: Any) -> Any:
    """Convert a name without settings to a mapping; an unknown name raises an error that lists the known names."""
    if isinstance(value, PluginConfig):
        return value
    fields = {"name": value} if isinstance(value, str) else value
    name = fields.get("name") if isinstance(fields, Mapping) else None
    if not isinstance(name, str):
        text = f"expected the name of a balancing method, or a mapping with 'name', not {value!r}"
        raise ValueError(text)  # noqa: TRY004 - pydantic collects only ValueErrors
    if name not in _NAMES:
        near = closest(name, _NAMES)
        hint = f"did you mean '{near}'? " if near else ""
        raise ValueError(f"unknown balancing method '{name}'; {hint}there are: {', '.join(_NAMES)}")
    return fields


_Choice = Annotated[AuxiliaryLossConfig | ZLossConfig | BiasUpdateConfig, Field(discriminator="name")]
#: Balancing method of a model's config. A bare name takes the defaults.
Balancing = Annotated[
    _Choice, BeforeValidator(_named, json_schema_input_type=Literal["z_loss", "bias_update"] | _Choice)
]


def _one_of_a_kind(value: tuple[Balancing, ...]) -> tuple[Balancing, ...]:
    names = [balancing.name for balancing in value]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{twice[0]} appears twice; keep one")
    return value


#: Type of the field ``balancing`` in a model's config: balancing methods, each at most once.
Balancers = Annotated[tuple[Balancing, ...], AfterValidator(_one_of_a_kind)]
