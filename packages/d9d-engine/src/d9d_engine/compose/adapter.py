"""Adapter files: tensors that a fine-tuning method added to a model, saved and loaded without the base model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from d9d_core.config import ModelConfig
from d9d_core.errors import CheckpointError, JobError
from d9d_core.job_file.job import BaseJob, JobConfig
from d9d_core.job_file.pretrained import with_stored_sizes
from d9d_core.job_file.resolve import Parts, Selection
from d9d_core.peft import StartsFromWeights
from d9d_core.plugin import ModelSpec
from d9d_core.types import TensorSpec
from d9d_weights.graph.graph import StateGraph, specs_of
from d9d_weights.hugging_face.adapter import ADAPTER_FILES, AdapterFormat, published_names
from d9d_weights.hugging_face.directory import ModelDirectory
from d9d_weights.hugging_face.export import ModelFiles, export_model
from d9d_weights.hugging_face.format import NamesAdapters
from d9d_weights.hugging_face.index import read_object
from d9d_weights.hugging_face.layout import some
from d9d_weights.hugging_face.load import load_tensors
from d9d_weights.hugging_face.writer import ModelWriter
from d9d_weights.model_card.card import MODEL_CARD, ModelCard
from d9d_weights.sharding.agreement import on_all
from d9d_weights.sharding.model_tensors import model_tensors

from d9d_engine.compose.assemble import Assembly
from d9d_engine.distributed.mesh import Topology

#: Shard size limit in bytes: readers of adapters support a single file only.
_ONE_FILE = 2**62
#: Fields of ``config.json`` that may differ from the base model's without a warning: they follow from an adapter's own
#: tensors and classes, or transformers ignores them.
_IN_ADAPTERS = {"architectures", "d9d", "dtype", "id2label", "label2id", "num_labels", "problem_type", "vocab_size"}
#: Suffix of base weights that the `peft` library saves with adapters of embeddings; the base model has them already.
_OF_THE_MODEL = ".base_layer.weight"


def save_adapter(
    job: JobConfig,
    selection: Selection,
    assembly: Assembly,
    topology: Topology,
    note: Callable[[str], None],
    others: Mapping[str, bytes],
) -> Callable[[Path, ModelCard], None] | None:
    """Make the function that writes the adapter and its model card into a directory; ``None`` if there is no adapter.

    The function is collective over all ranks. ``others`` maps names of further files to their contents.

    Raises:
        JobError: the job asks for adapter files, and has no fine-tuning method with an adapter format.
        CheckpointError: the job asks for adapter files, but the model has no Hugging Face layout, or the adapter format
            has no name for a tensor of the adapter.
    """
    method: object = assembly.peft
    if not isinstance(method, AdapterFormat):
        if job.export == "adapter":
            chosen = f"peft method {selection.peft.entry} has" if selection.peft else "a job without peft has"
            raise JobError(f"export is 'adapter', but {chosen} no adapter files; set export to true")
        return None
    try:
        published = _published(job, selection, assembly)
        base = job.model.pretrained if isinstance(job.model, ModelConfig) else None
        name = _class_of(job, selection)
        if _is_bare(name):
            published = _without_prefix(published)
        config = {
            "base_model_name_or_path": base or "",
            **_class_fields(name),
            **method.adapter_config(assembly.full_model, published),
        }
        graph = StateGraph(method.adapter_exporter(assembly.full_model, published), _tuned(assembly))
    except CheckpointError as error:
        if job.export == "adapter":
            raise
        note(f"warning: no adapter is going to be written: {error}")
        return None
    if changed := _changed_fields(job, selection):
        note(
            f"warning: the model differs from its base model in {', '.join(changed)} of config.json; adapter files do "
            "not contain these fields, so load the adapter onto a base model with these values, or use the whole model"
        )

    def save(directory: Path, card: ModelCard) -> None:
        tensors = model_tensors(assembly.model)
        files = ModelFiles(config, {**others, MODEL_CARD: card.text("peft")})
        writer = ModelWriter(directory, graph.specs, _ONE_FILE, names=ADAPTER_FILES)
        export_model(writer, graph, tensors, files, topology.world, assembly.stage_holders(topology))

    return save


def _changed_fields(job: JobConfig, selection: Selection) -> list[str]:
    """List the fields of ``config.json``, with values, that make the model compute differently from its base model."""
    model, spec = job.model, selection.model.spec
    if not isinstance(model, ModelConfig) or not isinstance(spec, ModelSpec) or spec.hugging_face is None:
        return []
    if model.pretrained is None:
        return []
    stored = with_stored_sizes(selection.model.entry, {"name": model.name, "pretrained": model.pretrained})
    form, dtype = spec.hugging_face.load()(), job.precision.parameters
    before, now = (form.config_json(one, dtype) for one in (type(model).model_validate(stored), model))
    names = sorted((now.keys() | before.keys()) - _IN_ADAPTERS)
    return [f"{name} ({now.get(name)!r:.80})" for name in names if now.get(name) != before.get(name)]


def start_method(
    job: BaseJob, selection: Parts, assembly: Assembly, topology: Topology, note: Callable[[str], None]
) -> None:
    """Initialise a fine-tuning method's tensors from the model's weights or from the adapter of ``peft.init_from``.

    Collective over all ranks.

    Raises:
        CheckpointError: the adapter is missing or does not fit the method or the model, on any rank.
    """
    method: object = assembly.peft
    if isinstance(method, StartsFromWeights):
        method.start(assembly.model)
    if not isinstance(method, AdapterFormat) or method.init_from is None or not job.loading.weights:
        return
    location = method.init_from

    def open_and_compare() -> tuple[ModelDirectory, StateGraph]:
        file = location.rstrip("/")
        if not file.endswith(ADAPTER_FILES.weights):
            file = f"{file}/{ADAPTER_FILES.weights}"
        with ExitStack() as closing:
            try:
                directory = closing.enter_context(ModelDirectory.open(file))
                text = directory.read_file(ADAPTER_FILES.config)
                config = read_object(f"{directory.location}/{ADAPTER_FILES.config}", text)
                published = _published(job, selection, assembly)
                there = {name: spec for name, spec in directory.specs.items() if not name.endswith(_OF_THE_MODEL)}
                # The adapter of a class without head has other tensor names, and also fits a model with a head.
                if not there.keys() & _names_in_files(method, assembly, published):
                    bare = _without_prefix(published)
                    published = bare if there.keys() & _names_in_files(method, assembly, bare) else published
                method.check_adapter(assembly.full_model, published, config, directory.specs.keys())
                exporter = method.adapter_exporter(assembly.full_model, published)
                _compare_names(there.keys(), StateGraph(exporter, _tuned(assembly)).specs.keys())
                graph = StateGraph(exporter.inverse(), there)
                graph.check(_tuned(assembly), "the job's adapter")
            except CheckpointError as error:
                raise CheckpointError(f"peft.init_from: {location}: {error}") from error
            opened.push(closing.pop_all())
        return directory, graph

    with ExitStack() as opened:
        directory, graph = on_all(open_and_compare, topology.world)
        targets = {name: t for name, t in model_tensors(assembly.model).items() if name in graph.outputs}
        load_tensors(graph, directory, targets, threads=job.loading.threads, group=topology.world)
    note(f"adapter: {len(targets)} tensors from {location}")


def _compare_names(there: Collection[str], here: Collection[str]) -> None:
    lacking, left = ([name for name in one if name not in other] for one, other in ((here, there), (there, here)))
    if lacking:
        raise CheckpointError(
            f"the adapter file has no tensor {some(lacking)}; select only modules of the adapter in peft, or give "
            "another adapter"
        )
    if left:
        raise CheckpointError(
            f"the adapter file has {some(left)}, but peft selects no such module; add it to peft.targets (or "
            "peft.modules_to_save, if the adapter has the module's whole weight)"
        )


def _published(job: BaseJob, selection: Parts, assembly: Assembly) -> Mapping[str, str]:
    spec = selection.model.spec
    if not isinstance(spec, ModelSpec) or spec.hugging_face is None:
        raise CheckpointError(
            f"model {selection.model.entry} has no Hugging Face layout, so adapter files have no names for its tensors"
        )
    own = {n: s for n, s in specs_of(model_tensors(assembly.full_model)).items() if n not in assembly.injected}
    layout = spec.hugging_face.load()()
    named = layout.adapter_names if isinstance(layout, NamesAdapters) else layout.exporter
    return published_names(named(job.model), own)


def _class_of(job: JobConfig, selection: Selection) -> str:
    spec = selection.model.spec
    assert isinstance(spec, ModelSpec)
    assert spec.hugging_face is not None
    names = spec.hugging_face.load()().config_json(job.model, job.precision.parameters).get("architectures") or [""]
    return str(names[0])


def _is_bare(name: str) -> bool:
    """Whether a class of transformers is a model without head, such as ``Qwen3Model``."""
    return name.endswith("Model") and not name.endswith("LMHeadModel")


def _class_fields(name: str) -> dict[str, Any]:
    """Fields ``task_type`` and ``auto_mapping``, from which the ``peft`` library finds the class of the base model.

    Task types of classifiers are not used: with them the library looks for a trained head in the adapter.
    """
    if name.endswith("ForCausalLM"):
        return {"task_type": "CAUSAL_LM", "auto_mapping": None}
    return {"task_type": None, "auto_mapping": {"base_model_class": name, "parent_library": "transformers"}}


def _without_prefix(published: Mapping[str, str]) -> dict[str, str]:
    """Names of tensors in a class without head, such as ``Qwen3Model``: without the prefix ``model.``.

    When transformers reads a model, it adapts the prefix to the class; the peft library does not.
    """
    return {ours: there.removeprefix("model.") for ours, there in published.items()}


def _names_in_files(method: AdapterFormat, assembly: Assembly, published: Mapping[str, str]) -> Collection[str]:
    return StateGraph(method.adapter_exporter(assembly.full_model, published), _tuned(assembly)).specs.keys()


def _tuned(assembly: Assembly) -> dict[str, TensorSpec]:
    return {n: s for n, s in specs_of(model_tensors(assembly.full_model)).items() if n in assembly.tuned}
