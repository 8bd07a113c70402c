"""Pretrained weights of a job: a model directory or a training checkpoint, and their mapping to the model's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from d9d_core.components.instantiate import instantiate
from d9d_core.config import ModelConfig
from d9d_core.errors import CheckpointError
from d9d_core.job_file.job import JobConfig
from d9d_core.job_file.resolve import select
from d9d_core.model import Stage
from d9d_core.plugin import ModelSpec
from d9d_core.registry.registry import Registry
from d9d_core.types import TensorSpec
from d9d_core.untrusted import Place

from d9d_weights.checkpoint.stored_model import merger_of, model_of
from d9d_weights.checkpoint.tensors import CheckpointTensors, is_checkpoint
from d9d_weights.graph.base import Mapper
from d9d_weights.graph.graph import StateGraph, specs_of
from d9d_weights.hugging_face.directory import ModelDirectory
from d9d_weights.hugging_face.format import HuggingFaceFormat
from d9d_weights.hugging_face.load import check_duplicates
from d9d_weights.sharding.model_tensors import model_tensors


@dataclass(frozen=True)
class Source:
    """Opened pretrained weights, and the mapper to the model's tensors.

    Attributes:
        tensors: opened files.
        mapper: mapper from the files' tensor names and layouts to the model's names and layouts.
        directory: model directory whose tokenizer and other files an export copies; ``None`` without such a directory.
    """

    tensors: CheckpointTensors | ModelDirectory
    mapper: Mapper
    directory: ModelDirectory | None

    def graph(self, expected: Mapping[str, TensorSpec], duplicates: bool = True) -> StateGraph:
        """State graph from the files to the model's tensors.

        Args:
            expected: specs of the model's tensors.
            duplicates: whether to verify that copies of a tensor in the files are equal.

        Raises:
            CheckpointError: the weights do not fit the model.
        """
        try:
            graph = StateGraph(self.mapper, self.tensors.specs)
            graph.check(expected)
            if duplicates:
                check_duplicates(graph, self.tensors)
        except CheckpointError as error:
            raise CheckpointError(f"model.pretrained: {self.tensors.location}: {error}") from error
        return graph


def open_source(
    model: ModelConfig, layout: HuggingFaceFormat, registry: Registry, opened: ExitStack, *, weights: bool = True
) -> Source:
    """Open the weights at ``model.pretrained``; a training checkpoint gives the same weights as an export of its run.

    Args:
        model: config of the model, with ``pretrained``.
        layout: Hugging Face format of the model.
        registry: registry that has the fine-tuning method of a checkpoint.
        opened: stack that closes the files.
        weights: whether the weights are needed; else a model directory may have only its ``config.json``.

    Raises:
        CheckpointError: the weights are damaged or absent.
    """
    location = model.pretrained
    assert location is not None
    if is_checkpoint(location):
        tensors = opened.enter_context(CheckpointTensors(location, "model/"))
        of_run, stored = model_of(tensors, registry)
        published = merger_of(tensors, registry) >> of_run.exporter(stored)
        exported = _export_of(location)
        beside = None if exported is None else opened.enter_context(ModelDirectory.open(exported))
        return Source(tensors, published >> layout.importer(model, stored), beside)
    directory = opened.enter_context(ModelDirectory.open(location, weights=weights))
    mapper = layout.importer(model, layout.config_from_json(directory.config()))
    return Source(directory, mapper, directory)


def job_state_graph(job: JobConfig, registry: Registry) -> StateGraph:
    """State graph from a job's pretrained weights to its model; if the job loads none, from its model to an export.

    Raises:
        CheckpointError: the weights do not fit, or the model has no Hugging Face format.
    """
    selection = select(job, registry)
    spec = selection.model.spec
    if not isinstance(spec, ModelSpec) or spec.hugging_face is None:
        raise CheckpointError(
            f"model {selection.model.entry} has no Hugging Face layout, so no state graph maps its tensors"
        )
    with torch.device("meta"):
        stage = instantiate(selection.model, job.model, Stage())
    layout: HuggingFaceFormat = spec.hugging_face.load()()
    tensors = specs_of(model_tensors(stage))
    if not isinstance(job.model, ModelConfig) or job.model.pretrained is None or not job.loading.weights:
        return StateGraph(layout.exporter(job.model), tensors)
    with ExitStack() as opened:
        return open_source(job.model, layout, registry, opened).graph(tensors)


def _export_of(location: str) -> Path | None:
    """Directory with the exported model of a checkpoint's run, and its tokenizer; ``None`` if there is no export."""
    run = Place.of(location).run
    return run / "model" if run is not None and (run / "model" / "config.json").is_file() else None
