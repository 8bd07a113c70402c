"""Command ``d9d new job``: writes a complete job file for a model and records."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from d9d_core.config import closest
from d9d_core.errors import JobError
from d9d_core.job import JobFile
from d9d_core.registry.loader import discover
from d9d_core.registry.policy import PluginPolicy
from d9d_core.terminal.console import console_for
from d9d_core.words import find

from d9d_data.new_job.kinds import KINDS, Kind

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
_NAMES = ", ".join(KINDS)
#: Dataset -> small data to try a job with: a source built into every Python, or the name of a file to write.
_SAMPLES = {
    "text": "python:topics", "labelled": "python:kinds", "chat": "conversations.jsonl",
    "preference": "preferences.jsonl", "pairs": "pairs.jsonl",
}  # fmt: skip


@app.command(no_args_is_help=True)
def new_job(
    kind: Annotated[str, typer.Argument(metavar="KIND", help=f"One of {_NAMES}.")],
    model: Annotated[str | None, typer.Option(metavar="DIRECTORY", help="Model to start from.")] = None,
    data: Annotated[
        list[str], typer.Option(metavar="FILE", help="Records to train on: a file or a glob; may be repeated.")
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
        if row := find(kind, ["kind of new job"]):
            hint = row.hint(kind)
        raise JobError(f"there is no kind of job {kind!r}; {hint}")
    _check_models(kind, model, teacher)
    file = output or Path(f"{kind}.yaml")
    if file.exists():
        raise JobError(f"{file} exists; choose another file: --output PATH")
    if not file.parent.is_dir():
        raise JobError(f"--output: the directory {file.parent} does not exist; create it, or choose another")
    with _only_whole(file) as written:
        _write(kind, KINDS[kind], model, data, teacher or "", file, written)


@contextmanager
def _only_whole(file: Path) -> Iterator[list[Path]]:
    """Remove the files and directories in the yielded list if the ``with`` block raises.

    Args:
        file: the job file, for errors about a path that the operating system does not name.

    Raises:
        JobError: a file cannot be written.
    """
    written: list[Path] = []
    try:
        yield written
    except BaseException as error:
        for path in written:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise _failure(error, written, file) from error
        raise


def _failure(error: OSError, written: list[Path], file: Path) -> JobError:
    """Error about a file that cannot be read or written."""
    reason = error.strerror or str(error)
    path = Path(os.fsdecode(error.filename)) if error.filename else written[-1] if written else file
    if any(path == own or own in path.parents for own in (*written, file)):
        return JobError(f"cannot write {path}: {reason}; free space, or choose another directory: --output PATH")
    return JobError(f"cannot read {path}: {reason}; make it readable")


def _write(
    name: str, kind: Kind, model: str | None, data: list[str], teacher: str, file: Path, written: list[Path]
) -> None:
    """Find facts about the model and the records, print the choices, and write the job file.

    Each file or directory is appended to ``written`` before it is written.
    """
    from d9d_data.new_job.found import check_records, gpus, look_at_model, look_at_records, proposed_length
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
        tokenizer = _new_tokenizer(file.parent / "tokenizer", written)
        own = str(tokenizer)
        say(f"tokenizer: {own}, trained on Python's language reference, with a ChatML template")
    sources = data or [_sample_data(kind, file.parent, written)]
    records = look_at_records(sources, kind, tokenizer)
    if data:
        fields = "".join(f", {field} = {theirs}" for field, theirs in records.fields.items())
        count = "1 record" if records.count == 1 else f"{records.count:,} records"
        if records.count < 0:
            plain = kind.dataset == "text" and not fields
            count = "plain text" if plain else "more records than are counted quickly"
        say(f"data: {count}{fields}")
        if records.unused:
            equal = "; every pair counts as positive" if kind.dataset == "pairs" else ""
            say(f"fields not used: {', '.join(map(str, records.unused))}{equal}")
    else:
        say(f"data: {sources[0]}, a small set to try the job with; give your own by --data FILE")
    if records.few:
        say("evaluation: none, as fewer than 20 records are too few to hold some out; the job file says how to add it")
    devices, device = gpus()
    say(f"device: {devices} x {device}" if devices else "device: no GPU here, so the job has no settings for one")
    length = 128 if known is None and records.longest is None else proposed_length(records, known)
    say(f"sequence_length: {length}")
    written.append(file)
    file.write_text(job_text(Plan(name, str(file), kind, known, records, length, devices, own, teacher)), "utf-8")
    job = JobFile.load(file)
    if data:
        check_records(job.data, tokenizer)
    processes = f" --nproc {devices}" if devices > 1 else ""
    quoted = shlex.quote(str(file))
    console.print(f"{file}, next:\n  d9d check {quoted}\n  d9d train {quoted}{processes}", highlight=False)


def _check_models(name: str, model: str | None, teacher: str | None) -> None:
    """Raise if a model that the kind of job needs is missing, or a teacher is given that the kind does not use."""
    if name == "distillation" and teacher is None and model is None:
        raise JobError(
            "distillation needs a trained model, which learns, and a larger one with the same vocabulary: --model "
            "DIRECTORY --teacher DIRECTORY"
        )
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


def _new_tokenizer(directory: Path, written: list[Path]) -> Path:
    """Directory of a tokenizer for a new model, which is trained unless it exists."""
    from d9d_data.new_job.samples import write_tokenizer

    if not directory.exists():
        written.append(directory)
        write_tokenizer(directory)
    return directory


def _sample_data(kind: Kind, directory: Path, written: list[Path]) -> str:
    """Source of small data; a file is written unless it exists."""
    from d9d_data.new_job.samples import write_samples

    source = _SAMPLES[kind.dataset]
    if source.startswith("python:"):
        return source
    file = directory / source
    if not file.exists():
        written.append(file)
        write_samples(kind, file)
    return str(file)
