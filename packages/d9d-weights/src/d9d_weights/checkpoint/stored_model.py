"""Model of a training checkpoint, as its manifest describes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from d9d_core.components.instantiate import instantiate
from d9d_core.config import PluginConfig
from d9d_core.errors import CheckpointError
from d9d_core.job_file.inner import choose
from d9d_core.job_file.lookup import load_config
from d9d_core.plugin import ModelSpec
from d9d_core.registry.registry import Registry
from pydantic import ValidationError

from d9d_weights.checkpoint.tensors import CheckpointTensors
from d9d_weights.graph.base import Mapper
from d9d_weights.graph.mappers import Identity
from d9d_weights.hugging_face.adapter import MergesTensors
from d9d_weights.hugging_face.format import HuggingFaceFormat


def job_of(tensors: CheckpointTensors) -> Mapping[str, Any]:
    """Values of the job that saved a checkpoint.

    Raises:
        CheckpointError: no job did.
    """
    job: Any = tensors.manifest.get("job")
    if not isinstance(job, dict):
        raise CheckpointError(f"{tensors.location} does not say which model it is of: no job saved it")
    return job


def merger_of(tensors: CheckpointTensors, registry: Registry) -> Mapper:
    """Mapper that merges into a checkpoint's stored model what the run's fine-tuning method added.

    Raises:
        CheckpointError: the checkpoint lacks frozen weights, or the method merges in memory only.
    """
    fields = job_of(tensors).get("peft")
    if tensors.manifest.get("left_out"):
        raise CheckpointError(
            f"{tensors.location} is of a fine-tuning run and holds no full model (checkpoint.trainable_only): "
            "resume the run with export: true, which merges and writes it"
        )
    if not fields:
        return Identity()
    if not isinstance(fields, dict) or not isinstance(fields.get("name"), str):
        raise CheckpointError(f"{tensors.location}: its manifest names no fine-tuning method; was it written by d9d?")
    entry = registry.find("peft method", fields["name"])
    try:
        given = {**fields, "name": entry.spec.key}
        config = load_config(entry).model_validate(given, context={"registry": registry})
    except ValidationError as error:
        raise CheckpointError(
            f"{tensors.location}: the method of its manifest is none that {entry} knows: {error}"
        ) from error
    method = instantiate(choose(registry, "peft method", "peft", config), config)
    if not isinstance(method, MergesTensors):
        raise CheckpointError(
            f"{tensors.location} is of a run with peft method {entry}, which merges only in memory: "
            "resume the run with export: true, which merges and writes it"
        )
    return method.merger(tensors.specs.keys())


def model_of(tensors: CheckpointTensors, registry: Registry) -> tuple[HuggingFaceFormat, PluginConfig]:
    """Stored model of a checkpoint: its Hugging Face format and its config.

    Raises:
        CheckpointError: it names none that is installed and has such a format.
    """
    fields, location = job_of(tensors).get("model"), tensors.location
    if not isinstance(fields, dict) or not isinstance(fields.get("name"), str):
        raise CheckpointError(f"{location}: its manifest names no model; was it written by d9d train?")
    # The checkpoint has the weights, and the job all sizes.
    fields = {name: value for name, value in fields.items() if name != "pretrained"}
    entry = registry.find("model", fields["name"])
    spec = entry.spec
    if not isinstance(spec, ModelSpec) or spec.hugging_face is None:
        raise CheckpointError(f"{location} is of model {entry}, which has no Hugging Face layout")
    try:
        config = load_config(entry).model_validate({**fields, "name": entry.spec.key})
    except ValidationError as error:
        raise CheckpointError(f"{location}: the model of its manifest is none that {entry} knows: {error}") from error
    layout: HuggingFaceFormat = spec.hugging_face.load()()
    return layout, config
