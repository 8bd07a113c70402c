"""Pretraining on JSON lines of several sources, as a user does it: with the job file of the examples."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from d9d_core.cli.output import length_of
from d9d_engine.job import Job
from d9d_testing.logs import read_log
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "pretraining" / "jsonl.yaml"
SMALL = [
    "device=cpu", "batch={size: 8, microbatch: 4}", "optimizer.lr=0.01", "lr_schedule.warmup_steps=2",
    "model.vocab_size=257", "model.hidden_size=32", "model.intermediate_size=64", "model.num_layers=1",
    "model.num_attention_heads=2", "model.num_key_value_heads=1", "model.max_positions=64",
    "data.parts[0].data.sequence_length=32", "data.parts[1].data.sequence_length=32",
    "evaluation.data.sequence_length=32", "evaluation.data.held_out=0.1", "data.parts[0].data.held_out=0.1",
    "evaluation.packs=1", "logging.every=1", "trackers=[{name: jsonl, picture: false}]", "export=false",
]  # fmt: skip


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>"])
    backend.save("tokenizer.json")
    for name, count in (("web", 60), ("books", 40)):
        (tmp_path / name).mkdir()
        lines = "".join(json.dumps({"text": f"{name} number {n} says what {name} say"}) + "\n" for n in range(count))
        with gzip.open(tmp_path / name / "part.jsonl.gz", "wt") as file:
            file.write(lines)
    return tmp_path


@pytest.mark.full
def test_the_example_reads_its_sources_as_often_as_it_says(sources: Path) -> None:
    job = Job.load(EXAMPLE, overrides=SMALL)
    assert length_of(job).startswith("epochs: 1; the number of steps follows from the data")
    notes: list[str] = []
    trainer = job.build(notes.append)
    (said,) = [note for note in notes if note.startswith("epochs: ")]
    web, books = (part["samples"] for part in trainer.prefetcher.stream.facts["parts"])  # type: ignore[index, union-attr]
    samples = web + 2 * books
    assert said == f"epochs: 1 of {samples} samples each are {-(-samples // 8)} steps of 8"
    outcome = trainer.train()
    assert (outcome.status, outcome.step) == ("finished", -(-samples // 8))
    lines = read_log(sources / "runs" / "pretraining")
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < 0.8 * losses[0]
    assert lines[-1]["eval/loss"] < losses[0]


def test_the_example_is_in_the_index() -> None:
    assert str(EXAMPLE.relative_to(ROOT)) in (ROOT / "docs" / "index.md").read_text()
