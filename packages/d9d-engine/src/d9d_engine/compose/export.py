"""Exports of a trained model, or of its adapter, as files in Hugging Face layout."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from d9d_core.data import DataStream
from d9d_core.errors import BuildError, CheckpointError, SaveError
from d9d_core.job_file.job import JobConfig
from d9d_core.job_file.resolve import Selection
from d9d_core.plugin import ModelSpec
from d9d_core.registry.manifest import Manifest
from d9d_core.types import State
from d9d_core.untrusted import parse_json
from d9d_weights.graph.graph import StateGraph, specs_of
from d9d_weights.hugging_face.export import ModelFiles, export_model
from d9d_weights.hugging_face.plan import spec_bytes
from d9d_weights.hugging_face.writer import ModelWriter
from d9d_weights.model_card.card import MODEL_CARD, ModelCard
from d9d_weights.model_card.public_job import changed_fields
from d9d_weights.model_card.stored import versions_of
from d9d_weights.sharding.agreement import on_main
from d9d_weights.sharding.model_tensors import model_tensors

from d9d_engine.compose.adapter import save_adapter
from d9d_engine.compose.assemble import Assembly
from d9d_engine.compose.merging import merged
from d9d_engine.compose.weights import Published
from d9d_engine.distributed.mesh import Topology
from d9d_engine.run.checkpointer import Progress

Kind = Literal["model", "adapter"]
#: Function called with the number of bytes written so far and the number of all bytes to write.
Tell = Callable[[int, int], None]
GENERATION_CONFIG = "generation_config.json"
#: Key in the facts of a data stream: ids of the tokens that end replies in the training data.
STOPS = "stop_token_ids"
#: Packages listed in a model card in addition to the plugins of the manifest.
_FOUNDATION = ("d9d-core", "d9d-engine", "d9d-weights")


class Exporter:
    """Writes the trained model, or its adapter, in Hugging Face layout.

    Args:
        job: validated job.
        selection: plugin records of the job.
        assembly: assembled model.
        topology: rank, device, meshes and process groups of this process.
        stream: data stream, which writes the tokenizer's files.
        published: files and ``config.json`` fields of the pretrained model that an export keeps.
        manifest: loaded plugins, for the model card.
        note: prints a warning.

    Raises:
        BuildError: the job asks for the model, whose Hugging Face layout does not fit its tensors.
        JobError: the job asks for the adapter, and its method has no adapter format.
        CheckpointError: the job asks for the adapter, and the adapter format has no name for one of its tensors.
    """

    def __init__(
        self,
        job: JobConfig,
        selection: Selection,
        assembly: Assembly,
        topology: Topology,
        stream: DataStream,
        published: Published,
        manifest: Manifest,
        note: Callable[[str], None],
    ) -> None:
        self._job = job
        self._model_entry = str(selection.model.entry)
        self._assembly = assembly
        self._topology = topology
        self._stream = stream
        self._published = published
        self._manifest = manifest
        spec = selection.model.spec
        self._spec = spec.hugging_face if isinstance(spec, ModelSpec) else None
        if job.export in (True, "best"):
            check_names(job, selection, assembly)
        self._find_adapter = partial(save_adapter, job, selection, assembly, topology, note, self._stops_of_adapter())
        self._save_adapter = self._find_adapter() if job.export and self._spec is not None else None

    def __call__(
        self,
        progress: Progress,
        kind: Kind | None = None,
        directory: Path | None = None,
        keep: bool = False,
        tell: Tell = lambda _done, _total: None,
    ) -> list[Path]:
        """Write the model in its current state. Collective over all ranks.

        Args:
            progress: progress of the run, for the model card.
            kind: model or adapter; by default, all that the job asks for.
            directory: target directory, replaced if it exists; by default the run's directory for this kind.
            keep: leave directories that exist as they are.
            tell: called with the bytes of the model that this rank has written so far, and with all bytes that it will
                write.

        Returns:
            The directories that were written.

        Raises:
            BuildError: this job cannot export this kind.
            SaveError: a file cannot be written.
        """
        targets = {one: directory or self._job.run.directory / one for one in self._kinds(kind)}
        kept = on_main(lambda: [one for one, path in targets.items() if keep and path.exists()], self._topology.world)
        return [self._write(one, path, progress, tell) for one, path in targets.items() if one not in kept]

    def _kinds(self, kind: Kind | None) -> list[Kind]:
        if kind == "model" and self._spec is None:
            raise BuildError(
                f"export(): model {self._model_entry} has no Hugging Face layout, so it cannot be exported"
            )
        if kind == "adapter" and self._save_adapter is None and self._spec is not None:
            self._save_adapter = self._find_adapter()
        if kind == "adapter" and self._save_adapter is None:
            raise BuildError(
                "export(): the job has no 'peft' method that writes adapter files; export the kind 'model'"
            )
        if kind is not None:
            return [kind]
        asked: list[Kind] = ["model"] if self._job.export in (True, "best") and self._spec is not None else []
        return asked if self._save_adapter is None else [*asked, "adapter"]

    def _write(self, kind: Kind, directory: Path, progress: Progress, tell: Tell) -> Path:
        config = self._config_json()
        card = self._card(config, progress)
        try:
            if kind == "model":
                self._write_model(directory, card, config, tell)
            else:
                assert self._save_adapter is not None
                self._save_adapter(directory, card)
        except SaveError as error:
            raise SaveError(
                f"the {kind} {directory} could not be written: {error}; "
                "the last checkpoint is complete; start the job again to export from it"
            ) from error
        return directory

    def _config_json(self) -> dict[str, Any]:
        """Contents of ``config.json``; empty if the model has no Hugging Face layout."""
        if self._spec is None:
            return {}
        job = self._job
        config = {**self._spec.load()().config_json(job.model, job.precision.parameters), **self._published.fields}
        return config | _names_of_classes(config, self._stream.facts) | end_of_text(config, self._stream.facts)

    def _stops_of_adapter(self) -> dict[str, bytes]:
        """Contents of the adapter's ``generation_config.json`` if the data has its own stop tokens; else no file."""
        files = self._published.files
        base = _object(files.get(GENERATION_CONFIG, b"")) or self._published.fields
        if not self._stream.facts.get(STOPS):
            return {}
        return {GENERATION_CONFIG: _text(end_of_text({"eos_token_id": base.get("eos_token_id")}, self._stream.facts))}

    def _kept_files(self) -> dict[str, bytes]:
        """Files copied from the pretrained model; stop tokens of the data are added to ``generation_config.json``."""
        files = dict(self._published.files)
        settings = _object(files.get(GENERATION_CONFIG, b""))
        if settings is not None and (end := end_of_text(settings, self._stream.facts)):
            files[GENERATION_CONFIG] = _text(settings | end)
        return files

    def _card(self, config: Mapping[str, Any], progress: Progress) -> ModelCard:
        assembly = self._assembly
        return ModelCard(
            job=changed_fields(self._job) if progress.trained_by is None else progress.trained_by,
            config_json=config,
            parameters=sum(p.numel() for n, p in assembly.full_model.named_parameters() if n not in assembly.injected),
            trained=sum(parameter.numel() for parameter in assembly.trained().values()),
            data=self._stream.facts,
            step=progress.step,
            chosen=progress.chosen,
            tokens=progress.tokens,
            losses=progress.losses(),
            versions=_current_versions(self._manifest),
        )

    def _write_model(self, directory: Path, card: ModelCard, config: Mapping[str, Any], tell: Tell) -> None:
        assert self._spec is not None
        assembly, layout = self._assembly, self._spec.load()()
        with merged(assembly.peft, assembly.full_model):
            tensors = model_tensors(assembly.model)
            graph = StateGraph(layout.exporter(self._job.model), specs_of(model_tensors(assembly.full_model)))
            files = ModelFiles(config, {**self._kept_files(), MODEL_CARD: card.text()}, self._stream.save_assets)
            done = 0

            def count(written: int) -> None:
                nonlocal done
                done += written
                tell(done, total)

            writer = ModelWriter(directory, graph.specs, on_bytes=count)
            topology = self._topology
            mine = writer.files[topology.rank :: topology.world_size]  # the share that export_model gives to this rank
            total = sum(spec_bytes(spec) for file in mine for spec in writer.tensors_of(file).values())
            export_model(writer, graph, tensors, files, self._topology.world, assembly.stage_holders(self._topology))


def check_names(job: JobConfig, selection: Selection, assembly: Assembly) -> None:
    """Check before training that the model's Hugging Face layout, if there is one, fits the model.

    Raises:
        BuildError: the layout cannot describe the model, lacks tensors of the model, or names tensors that the model
            does not have.
    """
    spec = selection.model.spec
    if not isinstance(spec, ModelSpec) or spec.hugging_face is None:
        return
    form = spec.hugging_face.load()()
    tensors = model_tensors(assembly.full_model)
    own = {name: tensor for name, tensor in tensors.items() if name not in assembly.injected}
    try:
        form.config_json(job.model, job.precision.parameters)
    except CheckpointError as error:
        raise BuildError(
            f"export: model {selection.model.entry} has no Hugging Face layout: {error}; or set 'export: false'"
        ) from error
    try:
        StateGraph(form.exporter(job.model), specs_of(own))
    except CheckpointError as error:
        raise BuildError(
            f"export: the Hugging Face layout {spec.hugging_face} of model {selection.model.entry} does not fit the "
            f"model's tensors: {error}; correct the layout, or set 'export: false'"
        ) from error


def end_of_text(config: Mapping[str, Any], facts: State) -> dict[str, Any]:
    """New ``eos_token_id`` for an exported ``config.json`` or ``generation_config.json``; empty if unchanged.

    Stop tokens of the training data are appended to the model's own, or to the data's end-of-text token if the model
    has none.
    """
    before = config.get("eos_token_id")
    known = facts.get("eos_token_id") if before is None else before
    learned = facts.get(STOPS)
    ids = [*(known if isinstance(known, list) else [known]), *(learned if isinstance(learned, list) else [])]
    distinct = list(dict.fromkeys(one for one in ids if isinstance(one, int)))
    after = distinct[0] if len(distinct) == 1 else distinct
    return {"eos_token_id": after} if distinct and after != before else {}


def _object(content: bytes) -> dict[str, Any] | None:
    """Parse a file of the pretrained model; ``None`` if it is not a JSON object."""
    try:
        values = parse_json(content)
    except ValueError:
        return None
    return values if isinstance(values, dict) else None


def _text(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()


def _names_of_classes(config: Mapping[str, Any], facts: State) -> dict[str, Any]:
    """Fields ``id2label`` and ``label2id`` from the data's labels, if the model has the same number of classes."""
    names, classes = facts.get("labels"), config.get("id2label")
    if not isinstance(names, list) or not isinstance(classes, Mapping) or len(names) != len(classes):
        return {}
    return {
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {str(name): number for number, name in enumerate(names)},
    }


def _current_versions(manifest: Manifest) -> dict[str, str]:
    """Versions by package: torch, d9d and the loaded plugins; a plugin from a file has the file's digest."""
    own = {name: version(name) for name in _FOUNDATION}
    return {**own, "torch": torch.__version__, **versions_of(manifest.plugins)}
