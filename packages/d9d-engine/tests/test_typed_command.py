"""Command line that a run records."""

from __future__ import annotations

import pytest
from d9d_engine.launch.command import VARIABLE, typed_command


def test_a_command_is_recorded_as_typed() -> None:
    words = ["train", "job.yaml", "--set", "run.description=a first run", "--set", "optimizer.lr=1e-3"]
    assert typed_command(words, {}) == "d9d train job.yaml --set 'run.description=a first run' --set optimizer.lr=1e-3"


def test_a_launched_process_records_the_command_of_its_launcher_and_does_not_pass_it_on() -> None:
    environ = {VARIABLE: "d9d train job.yaml --nproc 2"}
    assert typed_command(["train", "job.yaml"], environ) == "d9d train job.yaml --nproc 2"
    assert environ == {}


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        (
            "trackers=[{name: wandb, api_key: abc123, mode: online}]",
            "trackers=[{name: wandb, api_key: ***, mode: online}]",
        ),
        ("run.hparams.hf_token=abc", "run.hparams.hf_token=***"),
        ('{"password": "abc", "lr": 1}', '{"password": ***, "lr": 1}'),
        ("data.sources=[s3://me:abc@host/file]", "data.sources=[s3://***@host/file]"),
    ],
)
def test_values_of_secrets_are_not_recorded(word: str, shown: str) -> None:
    found = typed_command(["train", "--set", word], {})
    assert "abc" not in found
    assert shown in found


@pytest.mark.parametrize("word", ["model.added_tokens=4", "data.special_tokens=text", "metrics=[token_accuracy]"])
def test_fields_about_tokens_of_text_are_no_secrets(word: str) -> None:
    assert word in typed_command(["train", "--set", word], {}).replace("'", "")
