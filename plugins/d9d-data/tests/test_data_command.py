"""``d9d data show`` prints the samples of a job and marks the learned tokens."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from d9d_core.errors import DataError
from d9d_data.cli.commands import show
from d9d_data.cli.samples import Sample, _lost_of, marked, samples_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

PLUGIN = """
from typing import Literal
from d9d_core.config import PluginConfig
from d9d_core.plugin import DatasetSpec, ModelSpec, OptimizerSpec, Ref, TaskSpec, hookimpl
from d9d_data.cli.samples import _lost_of

class Config(PluginConfig):
    name: Literal["mine"] = "mine"

class Stream:
    facts = {}
    def __init__(self, config, context): ...
    def next_pack(self): ...
    def state(self): ...
    def load_state(self, state): ...
    def save_assets(self, directory): ...

HERE = Ref(f"{__name__}:Config")

@hookimpl
def d9d_models():
    yield ModelSpec(name="mine", summary="s", config=HERE, build=HERE, tiny=HERE)

@hookimpl
def d9d_tasks():
    yield TaskSpec(name="mine", summary="s", config=HERE, build=HERE)

@hookimpl
def d9d_optimizers():
    yield OptimizerSpec(name="mine", summary="s", config=HERE, build=HERE)

@hookimpl
def d9d_datasets():
    yield DatasetSpec(name="mine", summary="s", config=HERE, build=Ref(f"{__name__}:Stream"))
"""
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def tokenizer() -> Tokenizer:
    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>", "<|im_end|>"])
    return backend


@pytest.fixture
def job(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    records = [{"prompt": f"q{number}", "completion": "é!"} for number in range(4)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "plugin.py").write_text(PLUGIN)
    data = {"name": "chat", "sources": [str(tmp_path / "chats.jsonl")], "sequence_length": 64, "shuffle": False}
    data["tokenizer"] = str(tmp_path)
    path = tmp_path / "job.json"
    path.write_text(json.dumps({
        "run": {"name": "r", "dir": str(tmp_path / "runs")}, "steps": 1, "batch": {"size": 2}, "task": "mine",
        "model": "mine", "optimizer": "mine", "data": data,
    }))  # fmt: skip
    return path


@pytest.mark.thorough
def test_samples_are_shown_as_the_job_packs_them(job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show(job, count=3, plugin=[tmp_path / "plugin.py"], overrides=[])
    lines = capsys.readouterr().out.splitlines()
    expected = []
    for number in range(3):
        expected += [
            f"=== sample {number + 1}: 23 tokens, 4 learned",
            f"[user]q{number}<|im_end|>[assistant]«é!<|im_end|>»",
        ]
    assert lines == expected
    show(job, count=1, plugin=[tmp_path / "plugin.py"], overrides=["data.packing=best_fit"])
    assert "documents" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("records", "fields", "expected"),
    [
        ([{"text": "ab", "label": "x"}, {"text": "c", "label": "y"}], "name: labelled",
         ["=== sample 1: 2 tokens, label x", "ab"]),
        ([{"tokens": ["ab", "c"], "labels": [0, 1]}, {"tokens": ["d"], "labels": [1]}], "name: labelled, per: word",
         ["=== sample 1: 4 tokens, 2 labelled", "«a»b «c»"]),
        ([{"query": "a?", "positive": "b"}, {"query": "c?", "positive": "d"}], "name: pairs",
         ["=== sample 1 query: 3 tokens", "a?<|endoftext|>", "=== sample 1 positive: 2 tokens", "b<|endoftext|>"]),
    ],
)  # fmt: skip
def test_labels_and_texts_of_a_sample_are_named(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], records: Any, fields: str, expected: list[str]
) -> None:
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    data = f"{{{fields}, sources: [{tmp_path}/records.jsonl], sequence_length: 8, shuffle: false, bucket_window: 1}}"
    show(job, count=2, plugin=[tmp_path / "plugin.py"], overrides=["batch.size=1", f"data={data}"])
    assert capsys.readouterr().out.splitlines()[: len(expected)] == expected


@pytest.mark.thorough
def test_samples_that_lost_tokens_are_marked(job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [{"prompt": f"q{number}", "completion": "x" * (3 + 9 * number)} for number in range(2)]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    common = ["batch.size=1", f"data.sources=[{tmp_path}/long.jsonl]", "data.sequence_length=24"]
    show(job, count=2, plugin=[tmp_path / "plugin.py"], overrides=[*common, "data.bucket_window=1"])
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "=== sample 1: 23 tokens, 4 learned",
        "[user]q0<|im_end|>[assistant]«xxx<|im_end|>»",
        "=== sample 2: 24 tokens, 5 learned, cut: 8 tokens are lost",
        "[user]q1<|im_end|>[assistant]«xxxxx»",
    ]
    assert "cut 1 of 2 conversations to 25 tokens, longest 33; in 1 the last answer is incomplete" in err
    show(job, count=1, plugin=[tmp_path / "plugin.py"], overrides=[*common, "data.packing=concat"])
    out = capsys.readouterr().out
    assert "=== sample 1: 24 tokens, 2 documents" not in out or "--- document, cut: 8 tokens are lost ---" in out


@pytest.mark.thorough
def test_text_that_spells_a_special_token_is_told_from_the_token(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = {"prompt": "a<|im_end|>b", "completion": "c"}
    (tmp_path / "quoting.jsonl").write_text(json.dumps(record))
    common = ["batch.size=1", f"data.sources=[{tmp_path}/quoting.jsonl]"]
    for choice, shown in (("text", "a⟨<|im_end|>⟩b"), ("token", "a<|im_end|>b")):
        show(job, count=1, plugin=[tmp_path / "plugin.py"], overrides=[*common, f"data.special_tokens={choice}"])
        out, err = capsys.readouterr()
        assert out.splitlines()[1] == f"[user]{shown}<|im_end|>[assistant]«c<|im_end|>»"
        assert "1 of 1 conversations spell special tokens, such as <|im_end|>" in err
        assert "stop token learned in 1 of 1 conversations: <|im_end|>" in err


def test_a_dataset_without_text_is_refused(job: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the dataset 'mine' has no tokenizer to show samples as text"):
        show(job, count=1, plugin=[tmp_path / "plugin.py"], overrides=["data={name: mine}"])


def test_samples_without_tokens_are_refused() -> None:
    stream: Any = SimpleNamespace(facts={}, state=dict, next_pack=lambda: [{"x": np.zeros(2)}])
    with pytest.raises(DataError, match="samples have no tokens to show; they have x"):
        next(samples_of(stream))


def test_colours_and_lines_tell_learned_tokens_and_documents_apart(tokenizer: Tokenizer) -> None:
    ids = np.asarray(tokenizer.encode("abcdef").ids)
    targets = np.asarray([-100, ids[2], -100, ids[4], ids[5], 7])
    sample = Sample(ids, targets, np.asarray([0, 0, 0, 1, 1, 1]))
    text = marked(sample, tokenizer)
    assert text.plain == f"abc\n--- document ---\ndef{tokenizer.decode([7])}"
    spans = [(text.plain[span.start : span.end].strip("\n"), str(span.style)) for span in text.spans]
    assert spans == [
        ("ab", "dim"), ("c", "bold green"), ("--- document ---", "bold red"), ("d", "dim"),
        (f"ef{tokenizer.decode([7])}", "bold green"),
    ]  # fmt: skip


def test_the_last_target_of_each_document_is_shown_with_its_document(tokenizer: Tokenizer) -> None:
    ids = np.asarray(tokenizer.encode("abcd").ids)
    sample = Sample(ids, np.asarray([ids[1], 7, -100, 7]), np.asarray([0, 0, 1, 1]))
    last = tokenizer.decode([7])
    shown = marked(sample, tokenizer, brackets=True).plain
    assert shown == f"a«b{last}»\n--- document ---\ncd«{last}»"


@pytest.mark.parametrize(("consumed", "lost"), [(3, ["lost at 3"]), (None, []), ("x", [])])
def test_losses_to_truncation_are_known_of_streams_that_count_what_they_read(consumed: object, lost: list[str]) -> None:
    class Source:
        def lost_at(self, consumed: int) -> list[str]:
            return [f"lost at {consumed}"]

    stream: Any = SimpleNamespace(source=Source(), state=lambda: {"consumed": consumed})
    assert list(_lost_of(stream)) == lost
    other: Any = SimpleNamespace(state=lambda: {"consumed": 3})
    assert list(_lost_of(other)) == []
