"""Files of strangers through the commands that read them: one line of error, soon, and nothing reaches the terminal."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from d9d_testing.hostile.strangers import ADAPTERS, CONFIGS, ESCAPE, TOKENIZERS, change_json, replace_file, weights

Run = Callable[..., tuple[int, str, str]]
WriteJob = Callable[..., Path]
# The library asks transformers for a name that has changed by now.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")
SECONDS = 30


@contextmanager
def soon() -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < SECONDS


@pytest.fixture(scope="module")
def model(published: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    return published(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    base = transformers.AutoModelForCausalLM.from_pretrained(model)
    made = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    directory = tmp_path_factory.mktemp("adapter")
    made.save_pretrained(directory)
    return directory


@pytest.mark.thorough
@pytest.mark.parametrize("sort", ADAPTERS)
def test_a_hostile_adapter_config_is_refused_before_a_library_sees_it(
    sort: str, adapter: Path, model: Path, tmp_path: Path, d9d: Run
) -> None:
    copy = tmp_path / "adapter"
    shutil.copytree(adapter, copy)
    file = copy / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | ADAPTERS[sort]))
    with soon():
        status, out, err = d9d("generate", str(copy), "--base", str(model), "--prompt", "x", "--device", "cpu")
    assert (status, out) == (2, "")
    assert "adapter_config.json" in err
    assert len(err.splitlines()) <= 2, err[:500]


def test_a_sound_adapter_is_used(adapter: Path, model: Path, d9d: Run) -> None:
    arguments = ("--prompt", "x", "--device", "cpu", "--max-new-tokens", "2", "--temperature", "0")
    status, _, err = d9d("generate", str(adapter), "--base", str(model), *arguments)
    assert status == 0, err


def test_a_pickle_of_an_adapter_is_not_read(adapter: Path, model: Path, tmp_path: Path, d9d: Run) -> None:
    copy = tmp_path / "adapter"
    shutil.copytree(adapter, copy)
    (copy / "adapter_model.safetensors").unlink()
    canary = tmp_path / "canary"
    (copy / "adapter_model.bin").write_bytes(f"cos\nsystem\n(S'touch {canary}'\ntR.".encode())
    status, _, err = d9d("generate", str(copy), "--base", str(model), "--prompt", "x", "--device", "cpu")
    assert status == 2
    assert "pickle" in err
    assert not canary.exists()


#: Those that leave a model that generates; all that is asked of them is that it ends.
HARMLESS = {
    "ends that are texts", "ends that are lists of lists", "forced tokens that are none", "positions that are a text",
    "architectures that are a number", "architectures that are numbers", "a config without a kind",
    "special tokens that are numbers", "a list in place of an object", "a tokenizer of an unknown class",
    "a number format that does not exist", "rotary settings that are a number", "quantization that does not exist",
    "a cache that does not exist", "a size of zero",
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("sort", CONFIGS)
def test_a_hostile_config_of_a_model_is_one_line(sort: str, model: Path, tmp_path: Path, d9d: Run) -> None:
    name, change = CONFIGS[sort]
    copy = tmp_path / "model"
    shutil.copytree(model, copy)
    before = json.loads((copy / name).read_text()) if (copy / name).is_file() else {}
    text = (
        change if isinstance(change, str) else json.dumps({**before, **change} if isinstance(change, dict) else change)
    )
    (copy / name).write_text(text)
    with soon():
        status, _, err = d9d("generate", str(copy), "--prompt", "x", "--device", "cpu", "--max-new-tokens", "2")
    assert status in ((0, 1, 2) if sort in HARMLESS else (1, 2)), err
    assert "Traceback" not in err
    if status:
        lines = [line for line in err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, err
        assert str(copy) in lines[0]


@pytest.mark.thorough
def test_settings_that_a_model_brings_can_be_set_otherwise(model: Path, tmp_path: Path, d9d: Run) -> None:
    copy = tmp_path / "model"
    shutil.copytree(model, copy)
    (copy / "generation_config.json").write_text(json.dumps({"num_beams": 20_000}))
    arguments = ("generate", str(copy), "--prompt", "x", "--device", "cpu", "--max-new-tokens", "2")
    status, _, err = d9d(*arguments)
    assert status != 0
    assert "--generation num_beams=1" in err
    assert d9d(*arguments, "--generation", "num_beams=1")[0] == 0
    status, _, err = d9d(*arguments, "--generation", "num_beam=1")
    assert status == 2
    assert "did you mean 'num_beams'?" in err


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json", "chat_template.jinja"])
def test_a_pipe_among_the_files_of_a_model_is_not_waited_for(name: str, model: Path, tmp_path: Path, d9d: Run) -> None:
    copy = tmp_path / "model"
    shutil.copytree(model, copy)
    (copy / name).unlink(missing_ok=True)
    os.mkfifo(copy / name)
    with soon():
        status, _, err = d9d("generate", str(copy), "--prompt", "x", "--device", "cpu")
    assert status == 2
    assert name in err


@pytest.mark.parametrize(
    "names", [("a.0.b", "a.150000000.b"), ("a.0.b", "a." + "9" * 5000 + ".b"), ("a.0.b", "a.-1.b", "a.999999999999.b")]
)
def test_indices_in_names_of_tensors_are_not_counted_up_to(names: tuple[str, ...], tmp_path: Path, d9d: Run) -> None:
    with soon():
        status, _, err = d9d("state", "show", str(weights(tmp_path / "m.safetensors", *names)))
    assert status == 0, err


FILES = (
    "metrics.jsonl",
    "plugins.json",
    "facts.json",
    "startup.json",
    "finished.json",
    "failed.json",
    "job.yaml",
    "checkpoints/.lock",
    "../failures.json",
)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["pipe", "device", "link"])
@pytest.mark.parametrize("name", FILES)
def test_files_of_a_run_that_never_end_are_not_read(name: str, kind: str, tmp_path: Path, d9d: Run) -> None:
    run = tmp_path / "runs" / "a"
    (run / "checkpoints" / "step-00000001").mkdir(parents=True)
    (run / "checkpoints" / "step-00000001" / "manifest.json").write_text("{}")
    (run / "job.yaml").write_text(yaml.safe_dump({"steps": 3, "run": {"name": "a"}}))
    file = run / name
    file.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to("/dev/zero" if kind == "device" else run / name.replace(".", "_"))
    for command in (("runs", "list", str(run.parent)), ("runs", "compare", str(run.parent)), ("report", str(run))):
        with soon():
            status, _, err = d9d(*command)
        assert status in (0, 2), err
        assert "Traceback" not in err


def logged(tmp_path: Path, text: str) -> Path:
    run = tmp_path / "runs" / "a"
    run.mkdir(parents=True)
    (run / "job.yaml").write_text(yaml.safe_dump({"steps": 3, "run": {"name": "a"}}))
    (run / "metrics.jsonl").write_text(text)
    return run


@pytest.mark.thorough
@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000 + "]" * 100_000,
        '{"step": 1, "loss": 1' + "0" * 400 + "}",
        json.dumps({"step": 1, **{f"series{number}": number for number in range(20_000)}}),
    ],
    ids=["nested", "digits", "many series"],
)
def test_an_odd_log_of_a_run_is_read_soon(text: str, tmp_path: Path, d9d: Run) -> None:
    run = logged(tmp_path, text + "\n" + json.dumps({"step": 2, "loss": 1.0}) + "\n")
    for command in (("runs", "list", str(run.parent)), ("runs", "compare", str(run.parent)), ("report", str(run))):
        began = time.monotonic()
        status, _, err = d9d(*command)
        assert status == 0, err
        assert time.monotonic() - began < 5


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_data_to_evaluate_on_is_a_regular_file(kind: str, model: Path, tmp_path: Path, d9d: Run) -> None:
    replace_file(tmp_path / "a.jsonl", kind, tmp_path)
    with soon():
        status, _, err = d9d("evaluate", str(model), "--data", str(tmp_path / "a.jsonl"))
    assert status == 2
    assert "a.jsonl" in err


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "generation_config.json", "chat_template.jinja", "vocab.txt"]
)
def test_a_huge_file_of_a_model_is_refused_before_a_library_reads_it(
    name: str, model: Path, tmp_path: Path, d9d: Run
) -> None:
    copy = tmp_path / "model"
    shutil.copytree(model, copy)
    with (copy / name).open("ab") as file:
        file.truncate(1 << 30)
    with soon():
        status, _, err = d9d("generate", str(copy), "--prompt", "x", "--device", "cpu")
    assert status == 2
    assert f"{name} cannot be read: the file has more than" in err


@pytest.mark.thorough
@pytest.mark.parametrize("sort", TOKENIZERS)
def test_a_hostile_tokenizer_of_a_model_is_one_line(sort: str, model: Path, tmp_path: Path, d9d: Run) -> None:
    copy = tmp_path / "model"
    shutil.copytree(model, copy)
    change_json(copy / "tokenizer.json", TOKENIZERS[sort])
    prompt = "the quick brown fox jumps over the lazy dog"
    with soon():
        status, _, err = d9d("generate", str(copy), "--prompt", prompt, "--device", "cpu", "--max-new-tokens", "1")
    assert status == 2
    assert [line for line in err.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in err


@pytest.mark.full
def test_what_a_library_logs_of_a_model_controls_no_terminal(model: Path, tmp_path: Path, d9d: Run) -> None:
    script = str(Path(sys.executable).with_name("d9d"))
    for name, change in (("config", {"model_type": ESCAPE}), ("tensors", None)):
        copy = tmp_path / name
        shutil.copytree(model, copy)
        if change is None:
            weights(copy / "model.safetensors", f"a{ESCAPE}b")
        else:
            change_json(copy / "config.json", change)
        command = [script, "generate", str(copy), "--prompt", "x", "--device", "cpu"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 2
        assert "owned" in done.stderr
        shown_safely(done.stdout, done.stderr)


@pytest.mark.thorough
def test_a_time_zone_that_nobody_knows_is_an_error_that_names_the_file(
    tmp_path: Path, d9d: Run, small_job: WriteJob
) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    times = pa.array([0], pa.timestamp("us", tz="Nowhere/Land"))
    pq.write_table(pa.table({"messages": ["x"], "at": times}), tmp_path / "a.parquet")
    job = small_job(data={"name": "pairs", "sources": [str(tmp_path / "a.parquet")], "sequence_length": 8})
    status, _, err = d9d("data", "show", str(job))
    assert status == 2
    assert "a.parquet" in err


def shown_safely(*texts: str) -> None:
    for text in texts:
        assert not any(character in text for character in ESCAPE if character < " " or character > "~"), repr(text)


@pytest.mark.thorough
def test_no_text_of_a_stranger_controls_the_terminal(tmp_path: Path, d9d: Run, small_job: WriteJob) -> None:
    told = [d9d("state", "show", str(weights(tmp_path / "m.safetensors", f"a{ESCAPE}b")))]
    for name, value in (("a", f"{ESCAPE}1"), ("b", f"{ESCAPE}2")):
        run = tmp_path / "runs" / name
        run.mkdir(parents=True)
        (run / "job.yaml").write_text(yaml.safe_dump({"steps": 3, "run": {"name": "a"}, "model": {"preset": value}}))
        (run / "metrics.jsonl").write_text(json.dumps({"step": 1, f"lo{ESCAPE}ss": 2.0}) + "\n")
    told += [d9d("runs", "list", str(tmp_path / "runs")), d9d("runs", "compare", str(tmp_path / "runs"))]
    told.append(d9d("runs", "compare", str(tmp_path / "runs"), "--series", "x"))
    texts = tmp_path / "texts.jsonl"
    texts.write_text(
        "".join(json.dumps({"text": f"a {ESCAPE}", "label": f"l{ESCAPE}{n % 2}"}) + "\n" for n in range(8))
    )
    data = {"name": "labelled", "sources": [str(texts)], "sequence_length": 64, "tokenizer": "bytes"}
    told.append(d9d("data", "show", str(small_job("labels", data=data))))
    told.append(d9d("check", str(small_job("wrong", task=f"x{ESCAPE}"))))
    told.append(d9d("evaluate", str(tmp_path / f"x{ESCAPE}")))
    for status, out, err in told:
        assert "owned" in out + err, (status, out, err)
        shown_safely(out, err)


def test_a_generated_text_controls_no_terminal(model: Path, d9d: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from d9d_inference.generation.language_model import LanguageModel

    seen = []

    def stream(self: Any, ids: Any, decoding: Any) -> list[int]:
        from d9d_inference.generation import language_model

        monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
        streamer = language_model._streamer(self._library, self.tokenizer)
        streamer.on_finalized_text(f"owned {ESCAPE}", stream_end=True)
        seen.append(True)
        return [1]

    monkeypatch.setattr(LanguageModel, "stream", stream)
    status, out, err = d9d("generate", str(model), "--prompt", "x", "--device", "cpu", "--max-new-tokens", "2")
    assert (status, seen) == (0, [True]), err
    assert "owned" in out
    shown_safely(out)
