"""Words of other tools, typed into job files and the command line, get hints that name the words of d9d."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from d9d_core import words
from d9d_core.cli.app import app
from d9d_core.errors import D9dError
from d9d_core.job import JobFile
from d9d_core.job_file.document import location_of
from d9d_core.job_file.fields import fields_of
from d9d_core.job_file.lookup import load_config
from d9d_core.plugin import ConfiguredSpec
from d9d_core.registry.entries import Entry
from d9d_core.registry.hooks import KINDS, Kind
from d9d_core.registry.loader import discover
from d9d_core.registry.policy import PluginPolicy
from d9d_core.registry.registry import Registry
from d9d_data.new_job.kinds import KINDS as NEW_JOBS
from d9d_engine.job import Job
from d9d_inference.job import InferenceJob
from typer.testing import CliRunner

from tests.sound_jobs import SoundJobs

ROOT = Path(__file__).resolve().parents[1]
ENTRIES: list[dict[str, Any]] = json.loads((ROOT / "tests/words_from_elsewhere.json").read_text("utf-8"))
JOB = {
    "model": {"name": "qwen3", "preset": "0.6b"},
    "task": "causal_lm",
    "data": {"name": "chat", "sources": ["a.jsonl"], "sequence_length": 128},
    "optimizer": "adamw",
    "steps": 10,
}
#: Sections of the job file that are lists of components.
LISTS = ("parallel", "metrics", "trackers", "subscribers")
#: Lists of all known names at the end of a message, which are no hint.
_ALL_NAMES = re.compile(r"(;|\?)? ?(fields|installed|presets|ops with kernels): .*")
_SUGGESTED = re.compile(r"did you mean ((?:'[^']*'(?:, )?)+)", re.IGNORECASE)


@cache
def registry() -> Registry:
    return discover(PluginPolicy())


def job_of(entry: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Values of a job with the typed word, and the place of the word."""
    values = {**copy.deepcopy(JOB), **copy.deepcopy(entry.get("job", {}))}
    kind, _, place = str(entry["where"]).partition(" of ")
    if kind == "component":
        section = next(kind.section for kind in KINDS if kind.name == place)
        assert section is not None
        values[section] = [entry["typed"]] if section in LISTS else entry["typed"]
        return values, f"{section}[0]" if section in LISTS else section
    if kind == "value":
        _put(values, place, entry["typed"])
        return values, place
    section = str(entry["where"]).removeprefix("section ").removeprefix("job file top level")
    place = f"{section}.{entry['typed']}".removeprefix(".")
    _put(values, place, 1)
    return values, place


def _put(values: dict[str, Any], place: str, value: Any) -> None:
    *path, last = location_of(place)
    target: Any = values
    for part in path:
        if isinstance(target, dict):
            inner = target.get(part, {})
            target[part] = {"name": inner} if isinstance(inner, str) else inner
        target = target[part]
    target[last] = value


def refusal(entry: dict[str, Any], directory: Path) -> str:
    """Message about the typed word; empty if d9d accepts the word."""
    where, typed = str(entry["where"]), str(entry["typed"])
    place = where.partition(" ")[0]
    if place in ("option", "command"):
        arguments = where.removeprefix("option of d9d").split()[1 if place == "command" else 2 :]
        arguments += [typed] if place == "command" or not arguments else ["job.yaml", typed, "1"]
        done = CliRunner().invoke(app, arguments)
        text = str(done.exception) if isinstance(done.exception, D9dError) else done.stderr
        return " ".join(re.sub(r"[╭╮╰╯│─]", " ", text).split())
    values, place = job_of(entry)
    file = directory / "job.yaml"
    file.write_text(yaml.safe_dump(values, sort_keys=False), "utf-8")
    try:
        JobFile.load(file, registry=registry()).check(1)
    except D9dError as error:
        section = place.partition(".")[0]
        lines = [line for line in str(error).splitlines() if f" {section}" in line or typed in line]
        return "\n".join(line for line in lines if "missing; add" not in line)
    return ""


def suggested(entry: dict[str, Any], message: str) -> Iterator[str]:
    """Places that the words "did you mean" suggest."""
    section = str(entry["where"]).removeprefix("section ") if str(entry["where"]).startswith("section ") else ""
    for found in _SUGGESTED.findall(message):
        yield from (f"{section}.{name}".removeprefix(".") for name in re.findall("'([^']*)'", found))


def verdict(entry: dict[str, Any], message: str) -> str:
    """``right``, ``wrong``, or ``silent`` if the message has no hint."""
    hint = _ALL_NAMES.sub("", message)
    if entry["right"] == entry["typed"]:
        return "wrong" if message else "right"
    if entry["right"] is None:
        is_right = "there is none" in hint
    else:
        end = r"(?![\w-])" if re.search(r"\w$", entry["right"]) else ""
        named = re.search(rf"(?<![\w.]){re.escape(entry['right'])}{end}", hint)
        is_right = bool(named) or entry["right"] in suggested(entry, hint)
    if is_right:
        return "right"
    return "wrong" if list(suggested(entry, hint)) or "d9d calls it" in hint or "belongs to" in hint else "silent"


@pytest.mark.thorough
def test_every_word_from_elsewhere_gets_the_right_hint(tmp_path: Path) -> None:
    verdicts = {index: verdict(entry, refusal(entry, tmp_path)) for index, entry in enumerate(ENTRIES)}
    assert len(verdicts) > 300
    assert [ENTRIES[index] for index, found in verdicts.items() if found != "right"] == []


@pytest.mark.parametrize(
    ("where", "typed", "said"),
    [
        (
            "job file top level",
            "learning_rate",
            "learning_rate: not a field of the job file; d9d calls it optimizer.lr",
        ),
        ("job file top level", "packing", "not a field of the job file; it belongs to data: data.packing"),
        ("section optimizer", "steps", "it belongs to the top level of the job file: steps"),
        ("section batch", "lr", "not a field of this section; it belongs to optimizer: optimizer.lr"),
        ("job file top level", "fp16", "there is none in d9d: float16 needs a scaled loss; write precision: {autocast"),
        ("component of strategy", "ddp", "unknown strategy 'ddp'; d9d calls it 'replicate' (d9d-parallel "),
        ("component of task", "ppo", "unknown task 'ppo'; there is none in d9d: "),
        (
            "value of precision",
            "bfloat16",
            "should be a mapping of fields, got 'bfloat16'; write precision: {autocast: ",
        ),
        ("value of parallel", "fsdp", "got 'fsdp'; write parallel: [fsdp]"),
        ("component of model", "./Qwen3", "for a directory of weights write model: {pretrained: DIRECTORY}"),
        ("component of dataset", "train.jsonl", "unknown dataset 'train.jsonl'; for files write data: {name: text, "),
        ("command", "export", "No such command 'export'; use d9d state convert RUN DIRECTORY"),
        ("command state", "export", "No such command 'export'; use d9d state convert RUN DIRECTORY"),
        ("command new", "sft", "No such command 'sft'; use d9d new job KIND"),
        ("command data", "tokenize", "No such command 'tokenize'; use d9d data show JOB"),
        ("command new job", "grpo", "no kind of job 'grpo'; there is none in d9d: d9d has no task of reinforcement"),
        (
            "option of train",
            "optimizer.lr=1e-3",
            "extra argument(s) (optimizer.lr=1e-3 1); write --set optimizer.lr=1e-3",
        ),
        ("option of generate", "--max_length", "No such option: --max_length; use --max-new-tokens N"),
        ("option of train", "--max_length", "set the field of the job: --set data.sequence_length=VALUE"),
        ("option of d9d", "-h", "No such option: -h; use --help"),
        ("command state", "convrt", "No such command 'convrt'. Did you mean 'convert'?"),
        ("command state", "paint", "No such command 'paint'; d9d state has: show, convert, "),
        ("command", "serve", "there is none in d9d: d9d serves no requests"),
        ("job file top level", "optimiser", "did you mean 'optimizer'?"),
        ("section optimizer", "lrr", "did you mean 'lr'?"),
        ("section batch", "rank", "not a field of this section; fields: size, microbatch, prefetch"),
        ("section data", "size", "not a field of 'chat'"),
    ],
)
def test_a_refusal_gives_the_word_of_d9d(where: str, typed: str, said: str, tmp_path: Path) -> None:
    message = refusal({"where": where, "typed": typed}, tmp_path)
    assert said in message
    if said.startswith("not a field of '"):  # the same word means something else in another section
        assert "belongs to" not in message
        assert "calls it" not in message


def test_an_overridden_field_gets_the_same_hint(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(JOB), "utf-8")
    with pytest.raises(D9dError, match=r"^--set max_steps: .*; d9d calls it steps$"):
        JobFile.load(file, registry=registry(), overrides=["max_steps=5"])


def test_an_inference_job_gets_no_hint_about_fields_that_only_training_has(tmp_path: Path) -> None:
    values = {**JOB, "task": "perplexity", "max_steps": 5, "max_seq_length": 8}
    del values["optimizer"], values["steps"]
    with pytest.raises(D9dError) as failed:
        InferenceJob.from_values(values, registry=registry())
    assert "max_steps: not a field of the job file; fields: " in str(failed.value)
    assert "max_seq_length: not a field of the job file; d9d calls it data.sequence_length" in str(failed.value)


@pytest.mark.parametrize("arguments", [["train"], ["check"], ["train", "absent.yaml"]])
def test_a_command_without_a_job_file_says_how_to_write_one(arguments: list[str]) -> None:
    done = CliRunner().invoke(app, arguments)
    said = str(done.exception) if isinstance(done.exception, D9dError) else done.stderr
    assert "d9d new job --help" in said
    assert CliRunner().invoke(app, ["new", "job", "--help"]).exit_code == 0


def test_the_help_names_pages_of_the_documentation_that_exist() -> None:
    help_text = CliRunner().invoke(app, ["--help"]).stdout
    pages = re.findall(r"docs/\w+\.md", help_text)
    assert pages == ["docs/index.md", "docs/words.md"]
    assert all((ROOT / page).is_file() for page in pages)


@pytest.mark.thorough
def test_a_valid_job_never_reads_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each installed component, with all of its fields written out, is part of a job."""
    jobs = SoundJobs(seed=3)
    drawn = [jobs.draw(kind, name) for kind, names in jobs.kinds().items() for name in names]
    reads: list[str] = []
    monkeypatch.setattr(words, "_index", lambda: reads.append("read") or {})
    for job in drawn:
        file = tmp_path / "job.json"
        file.write_text(json.dumps(job.resolved()), "utf-8")
        JobFile.load(file, registry=jobs.registry).check()
    assert len(drawn) > 50
    assert reads == []


def wrong_value(kind: Kind, entry: Entry, field: str) -> str:
    """Message about a job whose component has a wrong value in a field; empty if d9d accepts the value."""
    part: Any = {"name": entry.spec.key, field: {"\x00": {}}}
    section = str(kind.section)
    job: dict[str, Any] = {**JOB, section: [part] if section in LISTS else part}
    infers = kind.name in ("inference task", "writer")
    try:
        if infers:
            del job["optimizer"], job["steps"]
            InferenceJob.from_values(job, registry=registry())
        else:
            JobFile.from_values(job, registry=registry())
    except D9dError as error:
        return str(error)
    return ""


@pytest.mark.thorough
def test_a_right_field_with_a_wrong_value_gets_no_hint_about_its_name() -> None:
    """Each field of each component that a job file can name."""
    messages = {
        f"{kind.name} {entry.spec.key}: {field}": wrong_value(kind, entry, field)
        for kind in KINDS
        for entry in (registry().entries(kind.name) if kind.section else ())
        if isinstance(entry.spec, ConfiguredSpec)
        for field in load_config(entry).model_fields
        if field != "name"
    }
    assert len(messages) > 400
    renamed = re.compile(r"not a field of (?!this section)|d9d calls it|belongs to (?!another kind)")
    assert {where: text for where, text in messages.items() if renamed.search(text)} == {}


def fields_known() -> set[str]:
    """Places of the job file: sections, their fields, and fields of components."""
    known = {line.name for job in (Job, InferenceJob) for line in fields_of(job)}
    for kind in KINDS:
        for entry in registry().entries(kind.name) if kind.section else ():
            if isinstance(entry.spec, ConfiguredSpec):
                prefix = f"{kind.section}[]." if kind.section in LISTS else f"{kind.section}."
                known |= {f"{prefix}name", *(line.name for line in fields_of(load_config(entry), prefix))}
    return known | {f"kernels.{op.partition('.')[0]}" for op in registry().known_homes("kernel")}


def test_each_word_of_d9d_in_the_table_exists() -> None:
    known = fields_known()
    for _, rows in words.topics():
        for row in rows:
            kinds = [kind for kind in KINDS if kind.name == row.at]
            if row.ours is None:
                assert row.note, row
            elif row.ours.startswith(("d9d ", "--")):
                assert row.ours.startswith("--") or CliRunner().invoke(app, _command(row.ours)).exit_code == 0, row
            elif re.search(r"[\[{ ]", row.ours.replace("[]", "")):
                assert row.ours.partition(":")[0] in known, row
            elif kinds and kinds[0].name == "kernel":
                names = {name.partition(".")[2] for name in registry().known_homes("kernel")}
                assert row.ours in {*names, "reference"}, row
            elif kinds:
                assert row.ours in registry().known_homes(kinds[0].name), row
            else:
                assert row.ours in known or row.at == "field of a component", row


def _command(text: str) -> list[str]:
    """Words of a command up to its arguments, with ``--help``."""
    names = re.match(r"d9d ((?:[a-z]+ ?)*)", text)
    assert names is not None
    return [*names[1].split(), "--help"]


def test_no_spelling_of_the_table_is_a_right_spelling_at_its_place() -> None:
    known = fields_known()
    commands = {name.partition(" ")[0] for name in registry().known_homes("command")} | {"check", "schema", "doctor"}
    for _, rows in words.topics():
        for row in rows:
            place, _, of = row.at.partition(" of ")
            for word in row.words:
                if row.at == "field":
                    assert word not in known, word
                elif place == "field":
                    assert f"{of}.{word}" not in known, row
                elif row.at == "command":
                    assert word not in commands, word
                elif row.at == "kind of new job":
                    assert word not in NEW_JOBS, word
                elif row.at.partition(" ")[0] not in ("option", "command", "kernel") and place != "value":
                    assert word == row.ours or word not in registry().known_homes(row.at), row


def test_no_word_has_two_rows_at_one_place() -> None:
    rows = [row for _, some in words.topics() for row in some]
    found = [(spelling, row.at) for row in rows for spelling in dict.fromkeys(map(words.normalised, row.words))]
    assert len(rows) >= 100
    assert [one for one, count in Counter(found).items() if count > 1] == []


def test_the_page_of_words_is_up_to_date() -> None:
    command = [sys.executable, "tools/word_page.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
