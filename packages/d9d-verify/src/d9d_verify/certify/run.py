"""Certifies a model: shrinks its config and runs it in every layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from d9d_core.config import Resizable
from d9d_core.errors import D9dError, JobError
from d9d_core.job_file.found_model import model_for_type
from d9d_core.job_file.resolve import select
from d9d_core.plugin import ModelSpec
from d9d_core.registry.registry import Registry
from d9d_core.traits import HasExperts
from d9d_core.untrusted import Place
from d9d_engine.job import Job

from d9d_verify.certify.certificate import Cell, Certificate, fingerprint, installed_versions
from d9d_verify.certify.features import export, has_trait, packing, parity
from d9d_verify.certify.forks import forking_launch
from d9d_verify.compare import Verdict
from d9d_verify.layouts import REFERENCE_LAYOUT, Layout, layout_values, scaled_model, scaled_values
from d9d_verify.run import Launch, verify

_STEPS = 2
#: Largest vocabulary of a certified model, and seconds in which at least one more process of a layout must end.
_WORDS, _PATIENCE = 128, 120.0
#: Name of the check of LoRA, and LoRA ranks to try in this order, because a rank may be larger than a matrix.
_LORA, _LORA_RANKS = "lora", (4, 1)
#: Layouts and strategies of a certificate.
LAYOUTS = (
    Layout("replicate 2", {"dp_replicate": 2}, ("replicate",)),
    Layout("fsdp 2", {"dp_shard": 2}, ("fsdp",)),
    Layout("hsdp 2 x 2", {"dp_replicate": 2, "dp_shard": 2}, ("hsdp",)),
    Layout("pp 2", {"pp": 2}, (), pipeline={"name": "1f1b"}),
    Layout("tp 2", {"tp": 2}, ("tensor_parallel",)),
    Layout("cp 2", {"cp": 2}, ({"name": "context_parallel", "method": "ring"},)),
    Layout("ep 2", {"dp_shard": 2, "ep": 2}, ("fsdp", "expert_parallel")),
    Layout("tp 2 x pp 2", {"tp": 2, "pp": 2}, ("tensor_parallel",), pipeline={"name": "1f1b"}),
    Layout("checkpointing", {}, ("activation_checkpointing",)),
    Layout("compile", {}, ("compile",)),
)
#: Strategies to try if the ones of a layout are refused.
_OTHERWISE = {"cp 2": ({"name": "context_parallel", "method": "ulysses"},)}
Note = Callable[[str], None]


def certify(
    target: str, registry: Registry, note: Note, layouts: Sequence[Layout] = LAYOUTS, lora: bool = True
) -> Certificate:
    """Check a model in every layout, and its documents, adapters and files.

    Args:
        target: directory or address of a model, name of a model plugin, or a ``model_type``.
        registry: registry with the plugins.
        note: called with a line for each step of the work.
        layouts: layouts and strategies to run.
        lora: whether to run LoRA, too.

    Raises:
        D9dError: no model is found, or it cannot be built at all.
    """
    whole = job_of(target, registry).model
    job = job_of(target, registry, _with_few_words(whole))
    values = scaled_values(job, [REFERENCE_LAYOUT], _STEPS)
    spec = select(job, registry).model.spec
    assert isinstance(spec, ModelSpec)
    small = type(job.model).model_validate(values["model"])
    experts = has_trait(scaled_model(job, values), HasExperts)
    cells = [parity(scaled_model(job, values), spec, small), packing(scaled_model(job, values))]
    skipped = [layout.name for layout in layouts if "ep" in layout.mesh and not experts]
    launch = forking_launch(_PATIENCE)
    cells += _in_layouts(job, [layout for layout in layouts if layout.name not in skipped], note, launch)
    cells += [Cell(name, "not applicable", "d9d finds no experts in the model") for name in skipped]
    if lora:
        cells.append(_with_lora(job, note, launch))
    cells.append(export(scaled_model(job, values), spec, small))
    form = None if spec.hugging_face is None else spec.hugging_face.load()()
    model_type = None if form is None else str(form.config_json(whole, "float32")["model_type"])
    return Certificate(whole.selector, model_type, fingerprint(whole), installed_versions(), cells)


def _with_few_words(model: Any) -> dict[str, Any]:
    """Values of a config without weights and with a small vocabulary, because unused tokens cost the most time."""
    if isinstance(model, Resizable):
        model = model.resized({name: _WORDS for name in model.sizes() if name == "vocab_size"})
    values: dict[str, Any] = model.model_dump(mode="json", exclude={"pretrained"})
    if isinstance(size := values.get("vocab_size"), int):
        values["vocab_size"] = min(size, _WORDS)
    return values


def job_of(target: str, registry: Registry, model: Mapping[str, Any] | None = None) -> Job:
    """Job that trains a model on random tokens.

    Args:
        target: directory or address of a model, name of a model plugin, or a ``model_type``.
        registry: registry with the plugins.
        model: values of the model; ``None`` for the target's.

    Raises:
        D9dError: there is no such model, or no optimizer is installed.
    """
    return Job.from_values(
        {
            "model": _model(target, registry) if model is None else model,
            "task": "causal_lm",
            "data": "certificate_tokens",
            "optimizer": {"name": "adamw", "lr": 0.01},
            "batch": {"size": 8, "microbatch": 2},
            "steps": _STEPS,
            "device": "cpu",
            "trackers": [],
            "export": False,
        },
        registry=registry,
    )


def _model(target: str, registry: Registry) -> Mapping[str, Any]:
    if Place.of(target).kind != "nothing":
        return {"pretrained": target}
    names = {entry.spec.key: entry.spec for entry in registry.entries("model")}
    spec = names.get(target)
    if spec is None:
        selector, _ = model_for_type({"model_type": target}, registry)
        spec = registry.find("model", selector).spec
        assert isinstance(spec, ModelSpec)
        assert spec.hugging_face is not None
        form = spec.hugging_face.load()()
        config = form.example(target) if hasattr(form, "example") else form.config_from_json({"model_type": target})
        return dict(config.model_dump(mode="json"))
    assert isinstance(spec, ModelSpec)
    if spec.tiny is None:
        raise JobError(f"model '{target}' has no tiny config; give the directory of a model instead")
    return dict(spec.tiny.load()().model_dump(mode="json"))


def _in_layouts(job: Job, layouts: Sequence[Layout], note: Note, launch: Launch) -> list[Cell]:
    """Results, one cell for each layout; layouts that a check refuses are not run."""
    chosen = [_choose(job, layout) for layout in layouts]
    run = [layout for layout, refusal, _ in chosen if refusal is None]
    verdicts = {verdict.layout: verdict for verdict in (verify(job, run, _STEPS, note, launch) if run else ())}
    return [
        _cell(verdicts[layout.name], remark) if refusal is None else Cell(layout.name, "refused", refusal)
        for layout, refusal, remark in chosen
    ]


def _cell(verdict: Verdict, remark: str) -> Cell:
    if verdict.diverged is not None:
        return Cell(verdict.layout, "differs", f"step {verdict.diverged[0] + 1}: {verdict.diverged[1]}")
    return Cell(verdict.layout, "exact", f"gradients: 1-cos {verdict.angle[0]:.1e}{remark}")


def _choose(job: Job, layout: Layout) -> tuple[Layout, str | None, str]:
    """Choose the layout to run; also return why it is refused, if so, and a remark if its strategy was replaced."""
    refusal = _refusal(job, layout)
    if refusal is not None and layout.name in _OTHERWISE:
        other = replace(layout, parallel=_OTHERWISE[layout.name])
        if _refusal(job, other) is None:
            return other, None, f" by method {other.parallel[0]['method']}, because: {refusal}"
    return layout, refusal, ""


def _refusal(job: Job, layout: Layout) -> str | None:
    """First line of the error if a check refuses the layout before training; ``None`` if the layout is accepted."""
    try:
        values = layout_values(scaled_values(job, [layout], _STEPS), layout, ())
        Job.from_values(values, registry=job.registry).plan()
    except D9dError as error:
        return str(error).splitlines()[0]
    return None


def _with_lora(job: Job, note: Note, launch: Launch) -> Cell:
    """Result for LoRA, with the first of several LoRA ranks that the model does not refuse."""
    cell: Cell | None = None
    for rank in _LORA_RANKS:
        try:
            tuned = Job.from_values({**job.resolved(), "peft": {"name": "lora", "r": rank}}, registry=job.registry)
            (cell,) = _in_layouts(tuned, [Layout(_LORA, {"dp_shard": 2}, ("fsdp",))], note, launch)
        except D9dError as error:
            cell = Cell(_LORA, "refused", str(error).splitlines()[0])
        if cell.standing != "refused":
            break
    assert cell is not None
    return cell
