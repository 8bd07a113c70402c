"""Command ``d9d new job``: writes a complete job file for a model and records."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from d9d_core.config import closest
from d9d_core.errors import JobError
from d9d_core.job import JobFile
from d9d_core.registry.loader import discover
from d9d_core.registry.policy import PluginPolicy
from d9d_core.terminal.console import console_for

from d9d_data.new_job.kinds import KINDS, Kind

app = typer.Typer(name="job", pretty_exceptions_enable=False, add_completion=False)
_NAMES = ", ".join(KINDS)
#: Dataset -> source of small data to try a job with: a source of every Python, or a file that is written.
_SAMPLES = {
    "text": "python:topics", "labelled": "python:kinds", "chat": "conversations.jsonl",
    "preference": "preferences.jsonl", "pairs": "pairs.jsonl",
}  # fmt: skip


@app.command(no_args_is_help=True)
def new_job(
    kind: Annotated[str, typer.Argument(metavar="KIND", help=f"One of {_NAMES}.")],
    model: Annotated[str | None, typer.Option(metavar="DIRECTORY", help="Model to start from.")] = None,
    data: Annotated[
        list[str], typer.Option(metavar="FILE", help="Records to train on; a glob or several for more files.")
    ] = [],  # noqa: B006 - typer reads the default
    teacher: Annotated[str | None, typer.Option(metavar="DIRECTORY", help="Larger model, for distillation.")] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Job file to write; by default ./KIND.yaml.")
    ] = None,
) -> None:
    """Write a complete job file, with comments, and small data if none is given."""
    if kind not in KINDS:
        near = closest(kind, KINDS)
        hint = f"did you mean {near}?" if near else f"use one of {_NAMES}"
        raise JobError(f"there is no kind of job {kind!r}; {hint}")
    _check_models(kind, model, teacher)
    file = output or Path(f"{kind}.yaml")
    if file.exists():
        raise JobError(f"{file} exists; choose another file: --output PATH")
    _write(kind, KINDS[kind], model, data, teacher or "", file)


def _write(name: str, kind: Kind, model: str | None, data: list[str], teacher: str, file: Path) -> None:
    """Find facts about the model and the records, print the choices, and write the job file."""
    from d9d_data.new_job.found import gpus, look_at_model, look_at_records, proposed_length
    from d9d_data.new_job.text import Plan, job_text

    console = console_for()

    def say(text: str) -> None:
        console.print(f"  {text}")

    known = None if model is None else look_at_model(model, discover(PluginPolicy.from_environment(os.environ)))
    own, tokenizer = "", None if known is None else known.tokenizer
    if known is not None:
        say(f"model: {known.type or 'a checkpoint'} in {model}, read by '{known.selector}'")
        _check_template(kind, known.template, model)
    elif kind.dataset == "chat":
        tokenizer = _new_tokenizer(file.parent / "tokenizer")
        own = str(tokenizer)
        say(f"tokenizer: {own}, trained on Python's language reference, with a ChatML template")
    sources = data or [_sample_data(kind, file.parent)]
    records = look_at_records(sources, kind, tokenizer)
    if data:
        fields = "".join(f", {field} = {theirs}" for field, theirs in records.fields.items())
        say(f"data: {f'{records.count:,}' if records.count >= 0 else 'many'} records{fields}")
    else:
        say(f"data: {sources[0]}, a small set to try the job with; give your own by --data FILE")
    count, device = gpus()
    say(f"device: {count} x {device}" if count else "device: no GPU here, so the job has no settings for one")
    length = 128 if known is None and records.longest is None else proposed_length(records, known)
    say(f"sequence_length: {length}")
    file.write_text(job_text(Plan(name, str(file), kind, known, records, length, count, own, teacher)), "utf-8")
    try:
        JobFile.load(file)
    except BaseException:
        file.unlink()
        raise
    processes = f" --nproc {count}" if count > 1 else ""
    console.print(f"{file}, next:\n  d9d check {file}\n  d9d train {file}{processes}", highlight=False)


def _check_models(name: str, model: str | None, teacher: str | None) -> None:
    """Raise unless exactly the models that a kind needs are given."""
    if name == "distillation" and teacher is None:
        raise JobError("distillation needs a larger model with the same vocabulary: --teacher DIRECTORY")
    if name != "distillation" and teacher is not None:
        raise JobError(f"--teacher: {name} has no teacher; remove it, or write a distillation")
    if KINDS[name].tunes and model is None:
        raise JobError(
            f"{name} starts from a trained model: --model DIRECTORY. Download one (hf download Qwen/Qwen3-0.6B "
            "--local-dir ./Qwen3-0.6B), or make a small one first: d9d new job sft, then d9d train sft.yaml, then "
            "--model runs/sft/model"
        )


def _check_template(kind: Kind, template: bool, model: str | None) -> None:
    """Raise if a kind renders conversations, and the model has no chat template."""
    if kind.dataset == "chat" and not template:
        raise JobError(
            f"--model: {model} has no chat template, so it is probably a base model that was never tuned on "
            "conversations. Copy the chat_template.jinja of its chat model into it, or take the chat model"
        )


def _new_tokenizer(directory: Path) -> Path:
    """Directory of a tokenizer for a new model, which is trained unless it exists."""
    from d9d_data.new_job.samples import write_tokenizer

    if not directory.exists():
        write_tokenizer(directory)
    return directory


def _sample_data(kind: Kind, directory: Path) -> str:
    """Source of small data; a file is written unless it exists."""
    from d9d_data.new_job.samples import write_samples

    source = _SAMPLES[kind.dataset]
    if source.startswith("python:"):
        return source
    file = directory / source
    if not file.exists():
        write_samples(kind, file)
    return str(file)
