"""Exports of a trained model, and of what a fine-tuning method added to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from d9d_core.config.job import JobConfig
from d9d_core.config.resolve import Selection
from d9d_core.errors import SaveError
from d9d_core.plugin.manifest import Manifest
from d9d_core.plugin.records import ModelSpec
from d9d_core.protocols.data import DataStream
from d9d_core.types import State
from d9d_weights.graph.graph import StateGraph, specs_of
from d9d_weights.hugging_face.export import ModelFiles, export_model
from d9d_weights.hugging_face.writer import ModelWriter
from d9d_weights.sharding.model_tensors import model_tensors

from d9d_engine.build.adapter import save_adapter
from d9d_engine.build.assemble import Assembly
from d9d_engine.build.merging import merged
from d9d_engine.build.model_card.card import MODEL_CARD, ModelCard
from d9d_engine.build.model_card.public_job import changed_fields
from d9d_engine.build.model_card.versions import versions_now
from d9d_engine.build.weights import Published
from d9d_engine.distributed.mesh import Topology
from d9d_engine.run.checkpointer import Progress


def exporter(
    job: JobConfig,
    selection: Selection,
    assembly: Assembly,
    topology: Topology,
    stream: DataStream,
    published: Published,
    manifest: Manifest,
    note: Callable[[str], None],
) -> Callable[[Progress], None] | None:
    """Function that writes what the job asks for; collective over all ranks. ``None`` if it asks for nothing.

    Args:
        job: validated.
        selection: the job's records.
        assembly: the model.
        topology: the ranks.
        stream: writes the tokenizer's files.
        published: parts of the model that training started from that hold for the trained model, too.
        manifest: the plugins, for the model card.
        note: prints a warning.
    """
    spec = selection.model.spec
    if not job.export or not isinstance(spec, ModelSpec):
        return None
    assert spec.hugging_face is not None  # check_parts made sure
    layout = spec.hugging_face.load()()
    config = {**layout.config_json(job.model, job.precision.parameters), **published.fields}
    config |= _names_of_classes(config, stream.facts) | _end_of_text(config, stream.facts)

    def write_model(directory: Path, card: ModelCard) -> None:
        with merged(assembly.peft, assembly.full_model):
            tensors = model_tensors(assembly.model)
            graph = StateGraph(layout.exporter(job.model), specs_of(model_tensors(assembly.full_model)))
            files = ModelFiles(config, {**published.files, MODEL_CARD: card.text()}, stream.save_assets)
            writer = ModelWriter(directory, graph.specs)
            export_model(writer, graph, tensors, files, topology.world, assembly.stage_holders(topology))

    writes: dict[str, Callable[[Path, ModelCard], None]] = {} if job.export == "adapter" else {"model": write_model}
    if adapter := save_adapter(job, selection, assembly, topology, note):
        writes["adapter"] = adapter

    def export(progress: Progress) -> None:
        card = ModelCard(
            job=changed_fields(job),
            config_json=config,
            parameters=sum(p.numel() for n, p in assembly.full_model.named_parameters() if n not in assembly.injected),
            trained=sum(parameter.numel() for parameter in assembly.trained().values()),
            data=stream.facts,
            step=progress.step,
            tokens=progress.tokens,
            losses=progress.losses(),
            versions=versions_now(manifest),
        )
        for kind, write in writes.items():
            directory = job.run.directory / kind
            try:
                write(directory, card)
            except SaveError as error:
                raise SaveError(
                    f"the {kind} {directory} could not be written: {error}; "
                    "the last checkpoint is complete, so start again to write it from there"
                ) from error

    return export


def _end_of_text(config: Mapping[str, Any], facts: State) -> dict[str, Any]:
    """Field of ``config.json`` for the token with which texts end, if the model had none before."""
    end = facts.get("eos_token_id")
    return {"eos_token_id": end} if isinstance(end, int) and config.get("eos_token_id") is None else {}


def _names_of_classes(config: Mapping[str, Any], facts: State) -> dict[str, Any]:
    """Fields of ``config.json`` for the classes that the data names, if the model has just as many."""
    names, classes = facts.get("labels"), config.get("id2label")
    if not isinstance(names, list) or not isinstance(classes, Mapping) or len(names) != len(classes):
        return {}
    return {
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {str(name): number for number, name in enumerate(names)},
    }
