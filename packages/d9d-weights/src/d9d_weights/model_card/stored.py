"""Model card of a training checkpoint that is converted to a model directory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from d9d_core.errors import CheckpointError
from d9d_core.types import TensorSpec

from d9d_weights.checkpoint.manifest import are_losses
from d9d_weights.checkpoint.stored_model import job_of
from d9d_weights.checkpoint.tensors import CheckpointTensors
from d9d_weights.model_card.card import ModelCard


def card_of(
    tensors: CheckpointTensors,
    config_json: Mapping[str, Any],
    published: Mapping[str, TensorSpec],
    note: Callable[[str], None],
) -> ModelCard:
    """Model card of a checkpoint. The card lists all fields of the job, also defaults, but no facts about the data.

    Args:
        tensors: tensors of the checkpoint.
        config_json: contents of the model's ``config.json``.
        published: specs of the tensors in the model directory.
        note: function that prints a warning, because tensors may be valid even if other values are damaged.

    Raises:
        CheckpointError: the checkpoint was not saved by a job.
    """
    values: Mapping[str, Any] = {}
    try:
        values = _checked(tensors.values(), tensors.location)
    except CheckpointError as error:
        note(f"warning: the model card lacks tokens and losses: {error}")
    return ModelCard(
        job=job_of(tensors),
        config_json=config_json,
        parameters=sum(math.prod(spec.shape) for spec in published.values()),
        step=tensors.manifest["step"],
        tokens=values.get("tokens"),
        losses=values.get("losses", {}),
        versions=versions_of(tensors.manifest.get("plugins") or {}),
    )


def _checked(values: Mapping[str, Any], location: str) -> Mapping[str, Any]:
    """Values of a checkpoint, after a check of the types of the values in a model card."""
    tokens = values.get("tokens")
    wrong = [] if type(tokens) is int and tokens >= 0 else ["tokens"]
    # checkpoints of earlier releases have no losses
    wrong += [] if are_losses(values.get("losses", {})) else ["losses"]
    if wrong:
        raise CheckpointError(f"{location}: state.json has no usable {', '.join(wrong)}; copy the checkpoint again")
    return values


def versions_of(plugins: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Versions of the plugins in a manifest, by name, or else their digests; plugins that have neither are left out."""
    found = {name: facts["version"] or facts["sha256"][:12] for name, facts in plugins.items()}
    return {name: text for name, text in found.items() if text}
