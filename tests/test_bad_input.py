"""What goes wrong at a user's desk: each is one clear message and exit status 2, without a traceback."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

D9d = Callable[..., tuple[int, str, str]]
Write = Callable[..., Path]


def complaint(d9d: D9d, path: Path, *overrides: str) -> str:
    arguments = [word for override in overrides for word in ("--set", override)]
    status, _, err = d9d("train", str(path), *arguments)
    assert status == 2, err
    assert "Traceback" not in err
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == len(set(errors)), f"said twice: {err}"
    return "\n".join(errors)


@pytest.mark.thorough
def test_a_missing_data_path(d9d: D9d, small_job: Write, tmp_path: Path) -> None:
    text = complaint(d9d, small_job(), f"data.sources=[{tmp_path}/nowhere]")
    assert f"{tmp_path}/nowhere" in text


def test_an_empty_corpus(d9d: D9d, small_job: Write, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    assert "empty" in complaint(d9d, small_job(), f"data.sources=[{tmp_path}/empty.txt]")


def test_a_tokenizer_file_that_is_no_tokenizer(d9d: D9d, small_job: Write, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"this": "is none"}')
    text = complaint(d9d, small_job(), f"data.tokenizer={tmp_path}/tokenizer.json")
    assert f"{tmp_path}/tokenizer.json" in text


def test_a_vocabulary_larger_than_the_models(d9d: D9d, small_job: Write) -> None:
    text = complaint(d9d, small_job(), "model.vocab_size=100")
    assert "257" in text
    assert "100" in text
    assert "model.vocab_size" in text


def test_a_sequence_longer_than_the_data(d9d: D9d, small_job: Write) -> None:
    text = complaint(d9d, small_job(), "data.sequence_length=1000000", "model.max_positions=1000000")
    assert "1000000" in text.replace(",", "")


def test_a_sequence_longer_than_the_model_allows(d9d: D9d, small_job: Write) -> None:
    assert "max_positions" in complaint(d9d, small_job(), "data.sequence_length=128")


def test_a_run_directory_that_cannot_be_written(d9d: D9d, small_job: Write, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    text = complaint(d9d, small_job(), f"run.dir={tmp_path}/file")
    assert "cannot be written" in text
    assert "run.dir" in text


@pytest.mark.thorough
def test_a_checkpoint_of_another_model(d9d: D9d, small_job: Write) -> None:
    assert d9d("train", str(small_job()))[0] == 0
    text = complaint(d9d, small_job(), "model.hidden_size=64")
    assert "is of another model: " in text
    assert "model.hidden_size: 32 there, 64 here" in text


@pytest.mark.thorough
def test_a_checkpoint_of_other_data(d9d: D9d, small_job: Write) -> None:
    assert d9d("train", str(small_job()))[0] == 0
    assert "data" in complaint(d9d, small_job(), "data.sequence_length=16", "steps=8")


@pytest.mark.thorough
@pytest.mark.parametrize("damage", ["truncate", "flip"])
def test_a_damaged_newest_checkpoint_is_passed_over(d9d: D9d, small_job: Write, tmp_path: Path, damage: str) -> None:
    assert d9d("train", str(small_job()))[0] == 0
    file = tmp_path / "runs" / "small" / "checkpoints" / "step-00000006" / "tensors-00000.safetensors"
    content = bytearray(file.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 4
    file.write_bytes(content[: len(content) // 2] if damage == "truncate" else content)
    status, out, _ = d9d("train", str(small_job()))
    assert status == 0
    assert "step-00000006: " in out
    assert "trying the one before" in out
    assert "resumed at step 4 of 6" in out


@pytest.mark.thorough
def test_when_every_checkpoint_is_damaged_nothing_is_overwritten(d9d: D9d, small_job: Write, tmp_path: Path) -> None:
    assert d9d("train", str(small_job()))[0] == 0
    for manifest in (tmp_path / "runs" / "small" / "checkpoints").glob("*/manifest.json"):
        manifest.write_text("{")
    before = (tmp_path / "runs" / "small" / "metrics.jsonl").read_bytes()
    assert "no usable checkpoint" in complaint(d9d, small_job())
    assert (tmp_path / "runs" / "small" / "metrics.jsonl").read_bytes() == before


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optimizer.name=adamww", "unknown optimizer 'adamww'; did you mean 'adamw' (d9d-optim"),
        (
            "task=embeddings",
            "unknown task 'embeddings': the name belongs to another kind, inference task; run jobs with it by",
        ),
        ("optimizer.learning_rate=1", "not a field of 'adamw' (d9d-optim"),
        ("optimizer.lr=-1", "optimizer.lr: "),
        ("optimizer.groups=[{match: nothing.like.this, lr_scale: 2}]", "nothing.like.this"),
        ("lr_schedule={name: piecewise, phases: [{steps: 99, to: 1.0}]}", "99"),
        ("model.num_key_value_heads=3", "3 does not divide num_attention_heads = 4"),
        ("parallel=[{name: activation_checkpointing, match: [nothing.*]}]", "nothing.*"),
        ("parallel=[{name: activation_checkpointing, save: [atention]}]", "did you mean 'attention'"),
        (
            "parallel=[{name: activation_checkpointing, save: [rms_norm]}]",
            "'rms_norm' in 'save': its kernel 'reference' has no operators whose outputs could be stored",
        ),
        ("kernels={attention: flash9}", "unknown kernel 'attention.flash9'"),
        ("kernels={rms_norm: torch}", "kernels.rms_norm: 'torch' (d9d-nn 0.1.0) cannot run here: "),
        ("mesh.dp_shard=2", "mesh: dp_shard=2 = 2 ranks, but the job was started with 1"),
        ("precision={parameters: bfloat16, autocast: bfloat16}", "autocast is for float32 parameters"),
        ("device=toaster", "device"),
        ("trackers=[wandbb]", "unknown tracker 'wandbb'"),
        ("plugins.require=[acme]", "acme is not installed; install it with: pip install acme"),
    ],
)
def test_a_value_that_cannot_be(d9d: D9d, small_job: Write, override: str, expected: str) -> None:
    assert expected in complaint(d9d, small_job(), override)


@pytest.mark.thorough
@pytest.mark.parametrize("override", ["optimizer.lrr=1", "optimizer.name=adamww", "mesh.dp_shard=2", "steps=none"])
def test_what_needs_no_torch_is_refused_before_torch_is_imported(small_job: Write, override: str) -> None:
    code = (
        "import sys\nfrom d9d_core.cli.main import main\ntry: main()\n"
        "except SystemExit as stop: print(stop.code, 'torch' in sys.modules)"
    )
    command: list[Any] = [sys.executable, "-c", code, "train", small_job(), "--set", override]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert out.strip() == "2 False"
