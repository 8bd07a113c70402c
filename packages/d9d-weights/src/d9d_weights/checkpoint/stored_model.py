"""Model of a training checkpoint, from the job in its manifest."""

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
        CheckpointError: the checkpoint was not saved by a job.
    """
    job: Any = tensors.manifest.get("job")
    if not isinstance(job, dict):
        raise CheckpointError(
            f"{tensors.location} does not name its model, so d9d train did not save it; use a checkpoint of a run"
        )
    return job


def merger_of(tensors: CheckpointTensors, registry: Registry) -> Mapper:
    """Mapper that merges the adapter of a checkpoint's fine-tuning method into the stored model.

    Raises:
        CheckpointError: the checkpoint lacks frozen weights or valid settings of its method, or the method can merge
            only in memory.
    """
    fields = job_of(tensors).get("peft")
    if tensors.manifest.get("left_out"):
        raise CheckpointError(
            f"{tensors.location} belongs to a fine-tuning run and lacks frozen weights (checkpoint.trainable_only): "
            "resume the run with export: true, which merges and writes the full model"
        )
    if not fields:
        return Identity()
    if not isinstance(fields, dict) or not isinstance(fields.get("name"), str):
        raise CheckpointError(
            f"{tensors.location}: peft in its manifest has no name; use a checkpoint that d9d train wrote"
        )
    entry = registry.find("peft method", fields["name"])
    try:
        given = {**fields, "name": entry.spec.key}
        config = load_config(entry).model_validate(given, context={"registry": registry})
    except ValidationError as error:
        raise CheckpointError(
            f"{tensors.location}: {entry} refuses the settings of peft in the checkpoint's manifest: {error}"
        ) from error
    method = instantiate(choose(registry, "peft method", "peft", config), config)
    if not isinstance(method, MergesTensors):
        raise CheckpointError(
            f"{tensors.location} belongs to a run with peft method {entry}, which can merge only in memory: "
            "resume the run with export: true, which merges and writes the full model"
        )
    return method.merger(tensors.specs.keys())


def model_of(tensors: CheckpointTensors, registry: Registry) -> tuple[HuggingFaceFormat, PluginConfig]:
    """Hugging Face format and config of a checkpoint's model.

    Raises:
        CheckpointError: the manifest names no installed model that has a Hugging Face format.
    """
    fields, location = job_of(tensors).get("model"), tensors.location
    if not isinstance(fields, dict) or not isinstance(fields.get("name"), str):
        raise CheckpointError(f"{location}: its manifest names no model; use a checkpoint that d9d train wrote")
    # The checkpoint has the weights, and the stored job has all sizes: pretrained weights are not needed.
    fields = {name: value for name, value in fields.items() if name != "pretrained"}
    entry = registry.find("model", fields["name"])
    spec = entry.spec
    if not isinstance(spec, ModelSpec) or spec.hugging_face is None:
        raise CheckpointError(f"{location} contains model {entry}, which has no Hugging Face layout to export")
    try:
        config = load_config(entry).model_validate({**fields, "name": entry.spec.key})
    except ValidationError as error:
        raise CheckpointError(f"{location}: the model in its manifest does not fit {entry}: {error}") from error
    layout: HuggingFaceFormat = spec.hugging_face.load()()
    return layout, config
