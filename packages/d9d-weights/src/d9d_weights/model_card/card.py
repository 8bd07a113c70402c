"""Model card of an export: the model, its data, its job, and its results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from d9d_weights.model_card.markdown import inline, table, yaml_block, yaml_text
from d9d_weights.model_card.public_job import base_name, public_job, without_paths

MODEL_CARD = "README.md"
#: Suffix of transformers' class names -> the Hub's name of the model's purpose.
_PIPELINES = {
    "ForCausalLM": "text-generation",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "Model": "feature-extraction",
}
#: Largest number of items that a table shows of a list.
_SHOWN = 20


@dataclass(frozen=True, slots=True)
class ModelCard:
    """Facts of a model card. They do not depend on parallel layout or time, so exports of a run are identical.

    Attributes:
        job: fields of the job, as JSON values.
        config_json: contents of the model's ``config.json``.
        parameters: number of parameters of the model.
        trained: number of trained parameters, adapters included; ``None`` if unknown.
        data: facts of the data stream; ``None`` if unknown.
        step: number of optimizer steps done.
        chosen: reason why these weights of the run were exported; ``None`` for the weights of the last step.
        tokens: tokens (or samples) consumed; ``None`` if unknown.
        losses: last logged value of each loss or evaluation series.
        versions: versions of the packages that trained the model, by package.
    """

    job: Mapping[str, Any]
    config_json: Mapping[str, Any]
    parameters: int
    trained: int | None = None
    data: Mapping[str, Any] | None = None
    step: int = 0
    tokens: int | None = None
    losses: Mapping[str, float] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    chosen: str | None = None

    def text(self, library: Literal["transformers", "peft"] = "transformers") -> bytes:
        """Contents of ``README.md``.

        Args:
            library: library that loads the export; ``peft`` for an adapter.
        """
        return ("\n\n".join(self._parts(library)) + "\n").encode()

    def _parts(self, library: Literal["transformers", "peft"]) -> Iterator[str]:
        yield f"---\n{yaml_text(self._front_matter(library))}---"
        yield f"# {inline(_of(self.job, 'run', 'name') or 'run')}"
        kind = "This adapter" if library == "peft" else "This model"
        yield f"{kind} was trained with d9d."
        yield table(["", ""], self._training())
        yield "## Data"
        yield f"Dataset: {inline(_of(self.job, 'data', 'name') or 'unknown')}."
        if self.data:
            yield table(["fact", "value"], fact_rows(without_paths(self.data)))
        if self.losses:
            yield "## Results"
            yield "Last logged values."
            yield table(["series", "value"], [(name, f"{value:.4g}") for name, value in sorted(self.losses.items())])
        yield "## Job"
        yield "Fields about where and how the job ran are left out; paths are cut to their last component."
        yield yaml_block(public_job(self.job))
        if self.versions:
            yield "## Versions"
            yield table(["package", "version"], sorted(self.versions.items()))
        # An HTML comment: readers of the file see it, readers of the rendered page do not.
        yield "<!-- To publish this directory on the Hugging Face Hub: d9d state push DIRECTORY OWNER/NAME -->"

    def _front_matter(self, library: str) -> dict[str, Any]:
        pipeline = next((name for end, name in _PIPELINES.items() if self._architecture().endswith(end)), None)
        base = self._base()
        return {
            "library_name": library,
            **({"base_model": base} if base else {}),
            "tags": ["d9d"],
            **({"pipeline_tag": pipeline} if pipeline else {}),
        }

    def _training(self) -> Iterator[tuple[str, object]]:
        model, architecture = _of(self.job, "model", "name"), self._architecture()
        yield "Model", f"{model} ({architecture})" if architecture else model
        yield "Base model", self._base() or "none"
        yield "Parameters", f"{self.parameters:,}"
        if self.trained is not None:
            yield "Trained parameters", f"{self.trained:,}"
        yield "Task", _of(self.job, "task", "name")
        yield "Fine-tuning method", _of(self.job, "peft", "name") or "none"
        yield "Steps", f"{self.step:,}"
        if self.chosen is not None:
            yield "Exported checkpoint", self.chosen
        if self.tokens is not None:
            yield "Tokens or samples", f"{self.tokens:,}"

    def _architecture(self) -> str:
        names = self.config_json.get("architectures")
        return str(names[0]) if isinstance(names, list) and names else ""

    def _base(self) -> str | None:
        loading, location = self.job.get("loading"), _of(self.job, "model", "pretrained")
        # only sizes and tokenizer come from the pretrained model
        drawn = isinstance(loading, Mapping) and loading.get("weights") is False
        return base_name(location) if location and not drawn else None


def _of(job: Mapping[str, Any], section: str, name: str) -> str:
    """Text of a field without line breaks; empty if the field is absent. Fields of a stored job may have any values."""
    values = job.get(section)
    value = values.get(name) if isinstance(values, Mapping) else None
    return " ".join(value.split()) if isinstance(value, str) else ""


def fact_rows(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield name and text of each fact of a data stream.

    The name of a nested fact begins with the name of its mapping, or of the list and the mapping's number in it.
    """
    for name, value in facts.items():
        words = f"{prefix}{name.replace('_', ' ')}"
        if isinstance(value, Mapping):
            yield from fact_rows(value, f"{words}: ")
        elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            for number, item in enumerate(value, 1):
                yield from fact_rows(item if isinstance(item, Mapping) else {"": item}, f"{words} {number}: ")
        elif isinstance(value, list):
            more = [f"and {len(value) - _SHOWN:,} more"] if len(value) > _SHOWN else []
            yield words, ", ".join([*map(_cell, value[:_SHOWN]), *more])
        else:
            yield words, _cell(value)


def _cell(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else str(value)
