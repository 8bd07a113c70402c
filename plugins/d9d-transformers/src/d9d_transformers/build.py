"""Construction of a model of transformers from its config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from d9d_core.errors import BuildError
from d9d_core.model import Stage
from d9d_moe.balancing.balancers import build_balancers

from d9d_transformers.attention import register
from d9d_transformers.config import TransformersConfig
from d9d_transformers.containers import check_container
from d9d_transformers.library import activations, native_config, native_model
from d9d_transformers.mixing import parts_of
from d9d_transformers.model import TransformersModel

#: Types of rotary positions whose angles depend on the longest sample of a batch.
_OF_BATCHES = frozenset({"dynamic", "longrope"})
#: Names of config fields that hold the name of an activation function.
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")
#: Texts in the names of config fields that switch on random numbers in training.
_RANDOM = ("dropout", "pdrop", "jitter")


def build(config: TransformersConfig, stage: Stage) -> TransformersModel:
    """Build a pipeline stage on the meta device.

    Raises:
        BuildError: transformers has no such model, or d9d cannot train it.
        CheckpointError: transformers refuses the config.
    """
    register()
    known = native_config(config.config)
    _check_fields(known)
    native = native_model(known)
    if config.container is not None:
        check_container(config.container, native)
    if config.balancing is None and getattr(native.config, "output_router_logits", False):
        raise BuildError(
            "model.config: output_router_logits asks transformers for its auxiliary loss, which d9d replaces by its "
            "own; set model.balancing, such as [{name: auxiliary_loss, coefficient: 0.001}], or [] for no such loss"
        )
    balancing = None if config.balancing is None else build_balancers(config.balancing)
    return TransformersModel(native, parts_of(config), stage, balancing)


def _check_fields(known: Any) -> None:
    """Check that a config asks for no computation that depends on how a batch is divided over microbatches and ranks.

    Raises:
        BuildError: the config has such rotary positions, dropout that draws random numbers, or an activation function
            that transformers lacks.
    """
    for name in _ACTIVATIONS:
        activation = getattr(known, name, None)
        if isinstance(activation, str) and activation not in activations():
            near = get_close_matches(activation, activations(), n=3, cutoff=0.4) or sorted(activations())[:8]
            raise BuildError(
                f"model.config: {name} is {activation!r}, which transformers does not have; use one such as "
                f"{', '.join(near)}"
            )
    if found := sorted(_OF_BATCHES.intersection(_rope_types(getattr(known, "rope_parameters", None)))):
        raise BuildError(
            f"model.config: rope_parameters has the type {found[0]!r}, whose angles depend on the longest sample of a "
            "batch, so samples and ranks would change each other's results; d9d cannot train it exactly"
        )
    for name, value in known.to_dict().items():
        if any(part in name for part in _RANDOM) and isinstance(value, float | int) and value > 0:
            raise BuildError(
                f"model.config: {name} is {value}; transformers draws its random numbers by microbatch, so results "
                f"would depend on the layout; set {name} to 0 in config.json, or in model.config"
            )


def _rope_types(value: Any) -> Iterator[Any]:
    """Types of rotary positions in ``rope_parameters``, which may contain one mapping for each type of layer."""
    if isinstance(value, Mapping):
        yield value.get("rope_type")
        for inner in value.values():
            yield from _rope_types(inner)
