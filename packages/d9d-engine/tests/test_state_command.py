"""``d9d state``: what people see of checkpoints, and what becomes of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_core.cli import main as cli
from d9d_core.errors import CheckpointError
from d9d_engine.job import Job
from d9d_testing.toy.runs import quiet, toy_registry
from d9d_weights.checkpoint.stored_model import model_of
from d9d_weights.state.tensors import parse_dtype, parse_size
from rich.console import Console
from safetensors.torch import load_file, save_file

MakeJob = Callable[..., Job]
Run = Callable[..., tuple[int, str]]


@pytest.fixture
def d9d(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command over the toy plugin; returns its exit status and output."""
    monkeypatch.setattr("d9d_core.registry.loader.discover", lambda *_: toy_registry())

    def run(*words: object) -> tuple[int, str]:
        capsys.readouterr()  # of what trained before
        monkeypatch.setattr(sys, "argv", ["d9d", "state", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out + said.err

    return run


@pytest.fixture
def run(job: MakeJob) -> Path:
    """The directory of a finished toy run."""
    trained = job("steps=4", "export=true")
    quiet(trained).train()
    return trained.run.directory


@pytest.mark.thorough
def test_tensors_are_listed_with_layers_together(d9d: Run, run: Path) -> None:
    status, text = d9d("show", run / "model")
    assert status == 0
    lines = text.splitlines()
    assert any(line.split() == ["toy.layers.{0..1}.weight", "[4,", "4]", "float32", "2"] for line in lines)
    assert lines[-1].strip() == "4 tensors, 34 numbers, 136 B"
    assert d9d("show", run / "model" / "model.safetensors")[1] == text
    _, text = d9d("show", run)
    assert "model/layers.{0..1}.weight" in text
    assert "optimizer/layers.{0..1}.weight/momentum" in text
    _, text = d9d("show", run / "model", "--json")
    assert json.loads(text)["toy.unused"] == {"shape": [1], "dtype": "float32"}


@pytest.mark.thorough
def test_on_a_narrow_terminal_the_names_of_tensors_are_kept_longest(
    d9d: Run, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("d9d_weights.state.tensors.console_for", lambda: Console(width=30, markup=False))
    status, text = d9d("show", run / "model")
    assert status == 0
    assert any(line.strip().startswith("toy.layers.{0..1}") for line in text.splitlines())


def test_a_jobs_correspondence_is_shown_and_drawn(d9d: Run, job: MakeJob, tmp_path: Path) -> None:
    job()
    picture = tmp_path / "graph.mmd"
    status, text = d9d("show", tmp_path / "job.json", "--picture", picture)
    assert status == 0
    assert "toy.layers.{0..1}.weight  [4, 4] float32\n    = layers.{n}.weight" in text
    assert picture.read_text().startswith("flowchart LR\n")
    status, text = d9d("show", tmp_path / "job.json", "--json")
    assert json.loads(text)["toy.scale"] == "scale"


def test_a_picture_of_a_directory_is_refused(d9d: Run, run: Path, tmp_path: Path) -> None:
    status, text = d9d("show", run / "model", "--picture", tmp_path / "x.mmd")
    assert status == 2
    assert "give a job file" in text


def test_a_checkpoint_becomes_the_model_that_the_run_exports(d9d: Run, run: Path, tmp_path: Path) -> None:
    status, text = d9d("convert", run, tmp_path / "converted")
    assert status == 0
    assert "4 tensors" in text
    found, expected = (load_file(d / "model.safetensors") for d in (tmp_path / "converted", run / "model"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    config = json.loads((tmp_path / "converted" / "config.json").read_text())
    assert config == json.loads((run / "model" / "config.json").read_text())
    assert d9d("diff", run / "model", tmp_path / "converted")[0] == 0
    cards = [(directory / "README.md").read_text() for directory in (tmp_path / "converted", run / "model")]
    losses = [[line for line in card.splitlines() if line.startswith("| loss")] for card in cards]
    assert losses[0] == losses[1] != []


def test_formats_and_file_sizes_change(d9d: Run, run: Path, tmp_path: Path) -> None:
    (run / "model" / "tokenizer.json").write_text("{}")
    status, _ = d9d("convert", run / "model", tmp_path / "small", "--dtype", "bfloat16", "--shard-size", "40B")
    assert status == 0
    files = sorted(file.name for file in (tmp_path / "small").iterdir())
    # No README.md: it is about the files that it was written for.
    assert files == [
        "config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
        "model.safetensors.index.json", "tokenizer.json",
    ]  # fmt: skip
    assert json.loads((tmp_path / "small" / "config.json").read_text())["dtype"] == "bfloat16"
    expected = load_file(run / "model" / "model.safetensors")
    for file in (tmp_path / "small").glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            assert torch.equal(tensor, expected[name].bfloat16())
    status, text = d9d("diff", run / "model", tmp_path / "small")
    assert status == 1
    assert "dtype" in text


def test_differences_are_told_apart(d9d: Run, tmp_path: Path) -> None:
    same = {"same": torch.ones(3), "nan": torch.tensor([float("nan"), 1.0])}
    left = same | {"value": torch.tensor([1.0, 2.0]), "shape": torch.ones(2), "gone": torch.ones(1)}
    right = same | {"value": torch.tensor([1.0, 2.5]), "shape": torch.ones(3), "new": torch.ones(1)}
    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_file(left, a)
    save_file(right, b)
    status, text = d9d("diff", a, b, "--json")
    assert status == 1
    found = {row["name"]: (row["difference"], row["largest"]) for row in json.loads(text)["different"]}
    assert found == {
        "value": ("numbers", 0.5),
        "shape": ("shape", None),
        "gone": ("only on the left", None),
        "new": ("only on the right", None),
    }
    status, text = d9d("diff", a, b)
    assert "6 tensors: 2 equal within 0, 4 different" in text
    save_file({"value": left["value"]}, a)
    save_file({"value": right["value"]}, b)
    assert d9d("diff", a, b, "--tolerance", "0.5")[0] == 0
    assert d9d("diff", a, b, "--tolerance", "0.4")[0] == 1


def test_a_value_against_nan_is_a_difference(d9d: Run, tmp_path: Path) -> None:
    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_file({"w": torch.tensor([1.0])}, a)
    save_file({"w": torch.tensor([float("nan")])}, b)
    assert d9d("diff", a, b, "--tolerance", "1000")[0] == 1


def test_integers_that_float64_cannot_tell_apart_are_a_difference(d9d: Run, tmp_path: Path) -> None:
    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_file({"w": torch.tensor([2**60, 5]), "u": torch.tensor([2**63], dtype=torch.uint64)}, a)
    save_file({"w": torch.tensor([2**60 + 1, 5]), "u": torch.tensor([2**63 + 1], dtype=torch.uint64)}, b)
    assert d9d("diff", a, a)[0] == 0
    status, text = d9d("diff", a, b, "--json")
    assert status == 1
    assert [row["largest"] for row in json.loads(text)["different"]] == [1.0, 1.0]


def test_large_tensors_are_compared_in_blocks(d9d: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("d9d_weights.hugging_face.convert._BLOCK", 7)
    tensor = torch.arange(5 * 3 * 4.0).reshape(5, 3, 4)
    other = tensor.clone()
    other[4, 2, 3] += 0.25
    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_file({"w": tensor}, a)
    save_file({"w": other}, b)
    assert json.loads(d9d("diff", a, b, "--json")[1])["different"][0]["largest"] == 0.25


@pytest.mark.parametrize(
    ("prepare", "text"),
    [
        (lambda d: (d / "model.safetensors").unlink(), "no "),
        (lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"), "pytorch_model.bin"),
        (lambda d: (d / "model.safetensors").write_bytes(b"\xff" * 16), "damaged"),
    ],
)
def test_bad_models_are_one_clear_line(d9d: Run, run: Path, prepare: Callable[[Path], Any], text: str) -> None:
    prepare(run / "model")
    status, said = d9d("show", run / "model")
    assert status == 2
    assert text in said
    assert "Traceback" not in said


def test_conversion_leaves_nothing_when_it_fails(d9d: Run, run: Path, tmp_path: Path) -> None:
    content = bytearray((run / "model" / "model.safetensors").read_bytes())
    (run / "model" / "model.safetensors").write_bytes(content[:-1])
    status, _ = d9d("convert", run / "model", tmp_path / "out")
    assert status == 2
    assert not (tmp_path / "out").exists()


def test_sizes_and_formats_are_read() -> None:
    assert [parse_size(text) for text in ("5GB", "2GiB", "512 MiB", "1.5kb", "7B")] == [
        5 * 10**9, 2 << 30, 512 << 20, 1500, 7,
    ]  # fmt: skip
    assert parse_dtype("bfloat16") == torch.bfloat16
    assert parse_dtype(None) is None
    for text in ("5", "GB", "-1GB", "1..5GB", "0GB", f"{'9' * 400}GB"):
        with pytest.raises(CheckpointError, match="is not a size"):
            parse_size(text)
    for text in ("int8", "nn", "float33"):
        with pytest.raises(CheckpointError, match="is not a floating-point format"):
            parse_dtype(text)


@pytest.mark.parametrize("what", ["the run", "the source", "a file"])
def test_conversion_replaces_nothing(d9d: Run, run: Path, what: str) -> None:
    target = {"the run": run, "the source": run / "model", "a file": run / "job.yaml"}[what]
    before = sorted(run.rglob("*"))
    status, text = d9d("convert", run / "model", target)
    assert (status, "exists: name a new directory" in text) == (2, True)
    assert sorted(run.rglob("*")) == before


def test_conversion_replaces_nothing_behind_an_address(d9d: Run, run: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    try:
        assert d9d("convert", run, "memory://convert/model")[0] == 0
        status, text = d9d("convert", "memory://convert/model", "memory://convert/model")
        assert (status, "exists: name a new directory" in text) == (2, True)
        assert d9d("diff", run / "model", "memory://convert/model")[0] == 0
    finally:
        fsspec.filesystem("memory").store.clear()


def test_a_place_that_cannot_be_written_is_one_clear_line(d9d: Run, run: Path) -> None:
    status, text = d9d("convert", run / "model", run / "job.yaml" / "out")
    assert (status, "cannot be written" in text) == (2, True)
    (run / "empty").mkdir()
    assert d9d("convert", run / "model", run / "empty")[0] == 0


def test_a_model_may_be_called_like_a_checkpoint(d9d: Run, run: Path, tmp_path: Path) -> None:
    (run / "model").rename(tmp_path / "step-2")
    run.rename(tmp_path / "step-3")
    assert "toy.scale" in d9d("show", tmp_path / "step-2")[1]
    assert "model/scale" in d9d("show", tmp_path / "step-3")[1]
    assert "lacks manifest.json" in d9d("show", tmp_path / "step-4")[1]


def test_a_checkpoint_without_its_manifest_is_passed_over(d9d: Run, run: Path) -> None:
    (run / "checkpoints" / "step-00000009").mkdir()
    assert "model/scale" in d9d("show", run)[1]


def test_a_damaged_checkpoint_is_named_with_its_place(d9d: Run, run: Path, tmp_path: Path) -> None:
    (file,) = (run / "checkpoints").glob("step-00000004/*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    assert f"{file} is damaged" in d9d("convert", run, tmp_path / "out")[1].replace("\n", "")
    file.unlink()
    file.mkdir()
    assert f"{file} cannot be read" in d9d("convert", run, tmp_path / "out")[1].replace("\n", "")


@pytest.mark.thorough
def test_a_run_that_must_be_merged_is_not_converted_as_it_is(d9d: Run, job: MakeJob, tmp_path: Path) -> None:
    tuned = job("steps=1", peft="toy_peft")
    quiet(tuned).train()
    status, text = d9d("convert", tuned.run.directory, tmp_path / "out")
    assert (status, "resume the run with export: true" in text) == (2, True)


def test_quantized_numbers_are_not_given_another_format(d9d: Run, run: Path, tmp_path: Path) -> None:
    config = json.loads((run / "model" / "config.json").read_text())
    (run / "model" / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    status, text = d9d("convert", run / "model", tmp_path / "out", "--dtype", "bfloat16")
    assert (status, "is quantized" in text) == (2, True)
    assert d9d("convert", run / "model", tmp_path / "out")[0] == 0


@pytest.mark.parametrize(
    ("job", "text"),
    [
        ({}, "its manifest names no model"),
        ({"model": 3}, "its manifest names no model"),
        ({"model": {"name": ["toy_model"]}}, "its manifest names no model"),
        ({"model": {"name": "toy_model", "features": "wide"}}, "the model in its manifest does not fit"),
    ],
)
def test_a_manifest_with_an_odd_job_is_an_error(job: dict[str, Any], text: str) -> None:
    tensors: Any = SimpleNamespace(manifest={"job": job}, location="step-00000002")
    with pytest.raises(CheckpointError, match=text):
        model_of(tensors, toy_registry())
