"""Model cards: facts about a run, facts that must stay out, and names that cannot break the page."""

from __future__ import annotations

import json
import shutil
import unicodedata
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from d9d_engine.job import Job
from d9d_testing.layouts import job_of, topology_here
from d9d_testing.toy.runs import metrics_of, quiet, toy_job, toy_registry
from d9d_weights.checkpoint.tensors import CheckpointTensors
from d9d_weights.model_card.card import ModelCard
from d9d_weights.model_card.markdown import inline, table, yaml_block
from d9d_weights.model_card.public_job import base_name, changed_fields, last_component, public_job
from d9d_weights.model_card.stored import card_of
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

MakeJob = Callable[..., Job]
#: Characters that mean something in Markdown, HTML or YAML, and invisible ones.
NASTY = st.text(st.sampled_from("`|\\<>&*_[]()!#~-=:$@.\n\r\t ab1'\"{}%\u202e\u200b\ud800é"), max_size=30) | st.text(
    max_size=30
)


@pytest.fixture
def job(tmp_path: Path) -> MakeJob:
    return partial(toy_job, tmp_path)


def parsed(text: str) -> list[Any]:
    return MarkdownIt("commonmark").enable("table").parse(text)


def read(card: bytes) -> tuple[dict[str, Any], dict[str, str], dict[str, Any]]:
    """The front matter, all rows of tables, and the job of a card."""
    _, front, body = card.decode().split("---\n", 2)
    tokens = parsed(body)
    cells = [token.content for place, token in enumerate(tokens) if tokens[place - 1].type in {"td_open", "th_open"}]
    (job,) = [yaml.safe_load(token.content) for token in tokens if token.type == "fence"]
    return yaml.safe_load(front), dict(zip(cells[::2], cells[1::2], strict=True)), job


@pytest.mark.thorough
@given(st.lists(st.tuples(NASTY, NASTY), min_size=1, max_size=4))
def test_any_text_stays_in_its_cell_as_it_is(rows: list[tuple[str, str]]) -> None:
    tokens = parsed((table(["name", "value"], rows) + "\n\nafter").encode().decode())
    assert [t.type for t in tokens].count("table_open") == 1
    bodies = [token for place, token in enumerate(tokens) if tokens[place - 1].type == "td_open"]
    assert len(bodies) == 2 * len(rows)
    for token, text in zip(bodies, [text for row in rows for text in row], strict=True):
        assert {child.type for child in token.children} <= {"text", "text_special"}
        shown = "".join(child.content for child in token.children)
        visible = "".join(c for c in text if unicodedata.category(c) not in {"Cc", "Cf", "Cs"})
        assert "".join(shown.split()) == "".join(visible.split())
    assert tokens[-2].content == "after"


@given(NASTY)
def test_any_text_stays_in_a_heading(text: str) -> None:
    types = [token.type for token in parsed(f"# {inline(text)}\n\nafter")]
    assert types == ["heading_open", "inline", "heading_close", "paragraph_open", "inline", "paragraph_close"]


@pytest.mark.thorough
@given(st.dictionaries(NASTY, NASTY | st.lists(NASTY, max_size=3), max_size=4))
def test_any_value_stays_in_its_block_of_code(value: dict[str, Any]) -> None:
    fence, *after = parsed((yaml_block(value) + "\n\nafter").encode().decode())
    assert (fence.type, len(after)) == ("fence", 3)
    if not any("\ud800" <= c <= "\udfff" for c in json.dumps(value, ensure_ascii=False)):
        assert yaml.safe_load(fence.content) == value


def test_invisible_characters_and_links_of_names_are_not_in_a_page() -> None:
    assert inline("a\u202eb\u200b\ud800\x00c") == "abc"
    assert inline("https://x.y and www.x.y") == "https&#58;//x.y and www&#46;x.y"
    assert "\u202e" not in yaml_block({"a": "b\u202ec"})
    assert len(inline("x" * 1000)) == 300


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("corpus.jsonl", "corpus.jsonl"),
        ("/home/me/my files/corpus.jsonl", "corpus.jsonl"),
        ("data/*.jsonl", "*.jsonl"),
        ("C:\\Users\\me\\corpus.txt", "corpus.txt"),
        ("\\\\server\\share\\corpus.txt", "corpus.txt"),
        ("~/corpora/", "corpora"),
        ("/", "/"),
        ("hf:/data/saved", "saved"),
        ("s3://bucket/some/corpus.jsonl", "corpus.jsonl"),
        ("https://me:secret@host/corpus.txt?signature=a/b", "corpus.txt"),
        ("simplecache::s3://bucket/all.jsonl", "all.jsonl"),
        ("https://host.example", "https://..."),
        ("https://host.example/?key=1", "https://..."),
        ("d9d-nn/causal_lm", "causal_lm"),
        ("layers\\.[0-9]+\\.weight", "layers\\.[0-9]+\\.weight"),
        ("Answer yes/no.", "(text of 14 characters)"),
        ("{% if a %}</s>{% endif %}", "(text of 25 characters)"),
    ],
)
def test_of_paths_and_addresses_the_last_component_is_told(text: str, shown: str) -> None:
    assert last_component(text) == shown


@pytest.mark.parametrize(
    ("location", "name"),
    [
        ("/data/Qwen3-8B/", "Qwen3-8B"),
        ("s3://bucket/models/Qwen3-8B", "Qwen3-8B"),
        ("/home/me/runs/first/model", "first"),
        ("runs/first/checkpoints/step-00000100", "first"),
        ("model", "model"),
        ("https://host.example", None),
        ("https://host.example/model", None),
        ("..", None),
        ("/", None),
    ],
)
def test_the_base_model_is_called_by_its_folder_or_run(location: str, name: str | None) -> None:
    assert base_name(location) == name


@pytest.mark.thorough
def test_a_card_says_what_was_trained_on_what_and_how_it_went(job: MakeJob) -> None:
    run = job("steps=4", "evaluation={every: 2, data: toy_data}", peft="toy_peft")
    quiet(run).train()
    front, rows, shown = read((run.run.directory / "model" / "README.md").read_bytes())
    assert front == {"library_name": "transformers", "tags": ["d9d"]}
    facts = {
        name: rows[name] for name in ("Parameters", "Trained parameters", "Steps", "Tokens or samples", "features")
    }
    assert facts == {
        "Parameters": "33",
        "Trained parameters": "16",
        "Steps": "4",
        "Tokens or samples": "32",
        "features": "4",
    }
    logged = {name: value for line in metrics_of(run) for name, value in line.items()}
    assert {rows[name] for name in ("loss", "eval/loss")} == {f"{logged[name]:.4g}" for name in ("loss", "eval/loss")}
    assert (shown["steps"], shown["peft"], shown["data"]["name"]) == (4, {"name": "toy_peft"}, "toy_data")
    assert rows["torch"]


@pytest.mark.thorough
def test_a_card_does_not_depend_on_the_layout_and_tells_no_directory(job: MakeJob, tmp_path: Path) -> None:
    run = job("steps=2", metrics=[], trackers=[])
    quiet(run).train()
    text = (run.run.directory / "model" / "README.md").read_text()
    assert str(tmp_path) not in text
    assert tmp_path.name not in text
    values = run.resolved() | {"mesh": {"dp_replicate": 2}, "parallel": ["replicate"], "device": "cuda"}
    values["batch"] = values["batch"] | {"microbatch": 1}
    assert public_job(values) == public_job(run.resolved())


@pytest.mark.thorough
def test_a_resumed_run_that_has_nothing_left_writes_the_same_card(job: MakeJob) -> None:
    run = job("steps=4", "evaluation={every: 2, data: toy_data}")
    quiet(run).train()
    card = run.run.directory / "model" / "README.md"
    first = card.read_bytes()
    shutil.rmtree(card.parent)
    quiet(run).train()
    assert card.read_bytes() == first


@pytest.mark.thorough
def test_the_card_of_a_published_model_is_not_taken_for_ours(job: MakeJob) -> None:
    base = job("run.name=base", "steps=1")
    quiet(base).train()
    published = base.run.directory / "model"
    (published / "README.md").write_text("their words")
    (published / "generation_config.json").write_text("{}")
    tuned = job("run.name=tuned", "steps=1", model={"name": "toy_model", "pretrained": str(published)})
    quiet(tuned).train()
    assert (tuned.run.directory / "model" / "generation_config.json").read_text() == "{}"
    text = (tuned.run.directory / "model" / "README.md").read_text()
    front, rows, _ = read(text.encode())
    assert "their words" not in text
    assert (front["base_model"], rows["Base model"]) == ("base", "base")
    drawn = changed_fields(tuned) | {"loading": {"weights": False}}
    front, rows, _ = read(ModelCard(drawn, {}, 1).text())
    assert ("base_model" in front, rows["Base model"]) == (False, "none")


@pytest.mark.thorough
def test_a_converted_checkpoint_has_the_card_of_its_step(job: MakeJob) -> None:
    run = job("steps=6", "logging.every=1")
    quiet(run).train()
    notes: list[str] = []
    with CheckpointTensors(str(run.run.directory / "checkpoints" / "step-00000004"), "model/") as tensors:
        card = card_of(tensors, {"architectures": ["ToyForCausalLM"]}, tensors.specs, notes.append)
        front, rows, shown = read(card.text())
        Path(tensors.location, "state.json").write_text("{}")
        front_without, rows_without, _ = read(card_of(tensors, {}, tensors.specs, notes.append).text())
    assert (front["pipeline_tag"], rows["Steps"], rows["Tokens or samples"]) == ("text-generation", "4", "32")
    assert rows["loss"] == f"{metrics_of(run)[3]['loss']:.4g}"
    assert shown["task"] == {"name": "toy_task", "decay": 0.01}
    assert ("pipeline_tag" in front_without, "loss" in rows_without, rows_without["Steps"]) == (False, False, "4")
    assert len(notes) == 1
    assert "the model card lacks tokens and losses" in notes[0]


def test_an_odd_job_of_a_checkpoint_still_makes_a_card() -> None:
    job = {"run": 3, "model": {"name": "m\n---\nx: y", "pretrained": "a\n---\nb: c"}, "task": ["|"], "```": "```\n"}
    front, rows, shown = read(ModelCard(job, {"architectures": ["| `x"]}, 1).text())
    assert front["base_model"] == "a --- b: c"
    assert rows["Model"] == "m --- x: y (&#124; &#96;x)"
    assert shown == public_job(job)


def test_defaults_are_not_told_and_names_of_kinds_are(job: MakeJob) -> None:
    run = job("steps=2", "optimizer={name: toy_optimizer}", "evaluation={every: 1, data: {name: toy_data}}")
    found = changed_fields(run)
    assert found["optimizer"] == {"name": "toy_optimizer"}
    assert found["evaluation"] == {"every": 1, "data": {"name": "toy_data"}}
    assert "seed" not in found
    assert Job.from_values(found, registry=toy_registry()).resolved() == run.resolved()


def test_lists_and_nested_facts_are_shown_in_rows() -> None:
    facts = {
        "labels": [str(number) for number in range(30)],
        "parts": [{"dataset": "/data/one", "weight": 0.25}, {"dataset": "two", "weight": 1}],
        "shuffled": True,
        "nothing": None,
    }
    _, rows, _ = read(ModelCard({"data": {"name": "mixture"}}, {}, 1, data=facts).text())
    assert rows["labels"].endswith("18, 19, and 10 more")
    assert (rows["parts 1: dataset"], rows["parts 1: weight"], rows["parts 2: weight"]) == ("one", "0.25", "1")
    assert (rows["shuffled"], rows["nothing"]) == ("yes", "none")


def trained_card(directory: str, **layout: Any) -> bytes:
    """The card of a short run in a layout."""
    values = {
        "run": {"name": "toy", "dir": directory},
        "steps": 3,
        "device": "cpu",
        "batch": {"size": 8},
        "model": "toy_model",
        "data": "toy_data",
        "task": "toy_task",
        "optimizer": "toy_optimizer",
        "trackers": [],
        **layout,
    }
    run = job_of(values, ("d9d_testing.toy.plugin", "d9d_parallel.plugin"))
    run.build(lambda _: None, topology_here(run) if layout else None).train()
    return (run.run.directory / "model" / "README.md").read_bytes()


def sharded_card(directory: str) -> bytes:
    return trained_card(directory, mesh={"dp_shard": 2}, parallel=["fsdp"])


@pytest.mark.full
def test_exports_of_two_layouts_have_the_same_card(world: Callable[..., Any], tmp_path: Path) -> None:
    alone = trained_card(str(tmp_path / "alone"))
    assert world(2).run(sharded_card, str(tmp_path / "sharded")) == [alone, alone]
