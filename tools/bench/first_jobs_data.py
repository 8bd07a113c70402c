"""Data of the jobs that ``first_jobs.py`` measures: texts, conversations, preferences and labelled texts of Python."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from d9d_data.sources.python import kinds, kinds_in, topics

#: Every twentieth record is held out.
HELD_OUT = 20
CLASSES = ("class", "function", "module")


def prepare(place: Path, d9d: Path, pretraining: Path) -> None:
    """Write tokenizer, records and a base model into an empty directory.

    Args:
        place: directory of the data.
        d9d: path of the command ``d9d``, which writes the conversations and the tokenizer, and trains the base model.
        pretraining: job file that trains the base model on the texts.
    """
    place.mkdir(parents=True, exist_ok=True)
    subprocess.run([d9d, "new", "job", "sft"], cwd=place, check=True)
    _split(place / "texts", ({"text": text} for text in topics()))
    _split(place / "kinds", _labelled())
    conversations = [json.loads(line) for line in (place / "conversations.jsonl").read_text().splitlines()]
    _split(place / "conversations", conversations)
    _split(place / "preferences", _preferences(conversations))
    shutil.copy(pretraining, place)
    subprocess.run([d9d, "train", pretraining.name], cwd=place, check=True)
    (place / "runs" / "pretrain" / "model").rename(place / "base")
    shutil.rmtree(place / "runs")


def _labelled() -> Iterable[Mapping[str, Any]]:
    for file in kinds():
        for kind, _, text in kinds_in(Path(file.address).read_bytes(), file.address):
            yield {"text": text, "label": CLASSES.index(kind)}


def _preferences(conversations: list[Any]) -> Iterable[Mapping[str, Any]]:
    """Pairs of answers: the conversation's is chosen, the previous conversation's is rejected."""
    for previous, conversation in zip([conversations[-1], *conversations], conversations, strict=False):
        question, answer = conversation["messages"]
        rejected = previous["messages"][1]
        if rejected != answer:
            yield {"prompt": [question], "chosen": [answer], "rejected": [rejected]}


def _split(stem: Path, records: Iterable[Mapping[str, Any]]) -> None:
    lines = [json.dumps(record) + "\n" for record in records]
    held_out = lines[::HELD_OUT]
    del lines[::HELD_OUT]
    stem.with_name(f"{stem.name}.train.jsonl").write_text("".join(lines), encoding="utf-8")
    stem.with_name(f"{stem.name}.held_out.jsonl").write_text("".join(held_out), encoding="utf-8")
