"""Command ``d9d new job``: writes a complete job file for a model and records."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from d9d_core.errors import JobError
from d9d_core.job import JobFile
from d9d_core.registry.loader import discover
from d9d_core.registry.policy import PluginPolicy
from d9d_core.terminal.console import console_for

from d9d_data.new_job.kinds import KINDS, Kind

app = typer.Typer(name="job", pretty_exceptions_enable=False, add_completion=False)
_NAMES = ", ".join(KINDS)


@app.command(no_args_is_help=True)
def new_job(
    kind: Annotated[str, typer.Argument(metavar="KIND", help=f"One of {_NAMES}.")],
    model: Annotated[
        str | None, typer.Option(metavar="DIRECTORY", help="Directory of the model to start from.")
    ] = None,
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
        from d9d_core.config import closest

        near = closest(kind, KINDS)
        raise JobError(
            f"there is no kind of job {kind!r}; {f'did you mean {near}?' if near else f'use one of {_NAMES}'}"
        )
    _check_given(kind, model, teacher)
    file = output or Path(f"{kind}.yaml")
    if file.exists():
        raise JobError(f"{file} exists; choose another file: --output PATH")
    from d9d_data.new_job.found import gpus, look_at_model, look_at_records, proposed_length
    from d9d_data.new_job.text import Plan, job_text

    console = console_for()
    say = lambda text: console.print(f"  {text}", highlight=False, soft_wrap=True)  # noqa: E731 - a name for one line
    known = None if model is None else look_at_model(model, discover(PluginPolicy.from_environment(os.environ)))
    if known is not None:
        say(f"model: {known.type or 'a checkpoint'} in {model}, read by '{known.selector}'")
        _check_template(KINDS[kind], known.template, model)
    sources, tokenizer = list(data), None if known is None else known.tokenizer
    own = ""
    if known is None and KINDS[kind].dataset == "chat":
        own = _new_tokenizer(file)
        tokenizer = Path(own)
        say(f"tokenizer: {own}, trained on Python's language reference, with a ChatML template")
    if not sources:
        sources = [_sample_data(kind, file)]
        say(f"data: {sources[0]}, a small set to try the job with; give your own by --data FILE")
    records = look_at_records(sources, KINDS[kind], tokenizer)
    if data and records.count >= 0:
        say(
            f"data: {records.count:,} records"
            + "".join(f", {name} = {theirs}" for name, theirs in records.fields.items())
        )
    count, name = gpus()
    say(f"device: {count} x {name}" if count else "device: no GPU here, so the job has no settings for one")
    length = 128 if known is None and records.longest is None else proposed_length(records, known)
    plan = Plan(
        kind, str(file), KINDS[kind], known, records, length, count, own, teacher or "",
    )  # fmt: skip
    text = job_text(plan)
    file.write_text(text, "utf-8")
    try:
        JobFile.load(file)
    except BaseException:
        file.unlink()
        raise
    say(f"sequence_length: {length}")
    console.print(f"{file}, next:", highlight=False)
    for command in (f"d9d check {file}", f"d9d train {file}{f' --nproc {count}' if count > 1 else ''}"):
        console.print(f"  {command}", highlight=False)


def _check_given(name: str, model: str | None, teacher: str | None) -> None:
    """Raise unless the models that a kind needs are given."""
    if name == "distillation" and teacher is None:
        raise JobError("distillation needs a larger model with the same vocabulary: --teacher DIRECTORY")
    if name != "distillation" and teacher is not None:
        raise JobError(f"--teacher: {name} has no teacher; remove it, or write a distillation")
    if KINDS[name].tunes and model is None:
        raise JobError(
            f"{name} starts from a trained model: --model DIRECTORY. Download one (hf download Qwen/Qwen3-0.6B --local-dir "
            "./Qwen3-0.6B), or make a small one first: d9d new job sft, then d9d train sft.yaml, then --model runs/sft/model"
        )


def _check_template(kind: Kind, template: bool, model: str | None) -> None:
    """Raise if a kind renders conversations and the model cannot."""
    if kind.dataset == "chat" and not template:
        raise JobError(
            f"--model: {model} has no chat template, so it is probably a base model that was never tuned on conversations. "
            "Copy the chat_template.jinja of its chat model into it, or take the chat model"
        )


def _new_tokenizer(file: Path) -> str:
    from d9d_data.new_job.samples import write_tokenizer

    directory = file.parent / "tokenizer"
    if not directory.exists():
        write_tokenizer(directory)
    return str(directory)


def _sample_data(name: str, file: Path) -> str:
    """Source of small data; a file next to the job file unless every Python has it."""
    from d9d_data.new_job.samples import write_samples

    kind = KINDS[name]
    known = {"text": "python:topics", "labelled": "python:kinds"}
    if kind.dataset in known:
        return known[kind.dataset]
    path = (
        file.parent
        / {"chat": "conversations.jsonl", "preference": "preferences.jsonl", "pairs": "pairs.jsonl"}[kind.dataset]
    )
    if not path.exists():
        write_samples(kind, path)
    return str(path)
