"""Directories of strangers: whatever their job.yaml says, no command that finds it there runs code for it."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import fsspec
import pytest
import yaml
from d9d_core import plugin as records
from d9d_core.config import Section
from d9d_core.job_file.lookup import load_config
from d9d_core.job_file.saved_job import code_mark
from d9d_core.registry.registry import Registry
from d9d_testing.hostile.strangers import CALL, CANARY, JOBS

Run = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).resolve().parents[1]
# The library asks transformers for a name that has changed by now.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")
#: Sections that no command reads from a directory: the run is used without them.
HARMLESS: Mapping[str, Mapping[str, Any]] = {
    "a schedule that imports": {
        "lr_schedule": {"name": "piecewise", "phases": [{"to": 1.0, "curve": "stranger:curve"}]}
    },
    "a scheduler that imports": {"lr_schedule": {"name": "torch", "target": "stranger:Schedule"}},
    "a tracker at an address": {"trackers": [{"name": "mlflow", "tracking_uri": "canary://server"}]},
    "an address in the description": {"run": {"description": "see https://example.org"}},
    "an optimizer of torch": {"optimizer": {"name": "torch", "target": "torch.optim.RAdam", "lr": 0.1}},
}


class CanarySystem(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """File system of the addresses that nothing may open."""

    protocol = "canary"
    opened: list[str] = []

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.opened.append("canary://")
        super().__init__(*args, **kwargs)


@pytest.fixture(autouse=True)
def _sounds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Fail if the canary file exists or an address was opened."""
    fsspec.register_implementation("canary", CanarySystem, clobber=True)
    CanarySystem.opened.clear()
    importable = tmp_path / "importable"
    importable.mkdir()
    (importable / "stranger.py").write_text(f"open({str(tmp_path / CANARY)!r}, 'w')")
    monkeypatch.syspath_prepend(str(importable))
    monkeypatch.chdir(tmp_path)
    yield
    assert not (tmp_path / CANARY).exists(), "code of a stranger has run"
    assert not CanarySystem.opened, "an address of a stranger was opened"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run with checkpoints and an export."""
    from d9d_engine.job import Job

    root = tmp_path_factory.mktemp("sound")
    (root / "corpus.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    values = {
        "run": {"name": "run", "dir": str(root)}, "device": "cpu", "steps": 2, "batch": {"size": 4},
        "model": {
            "name": "qwen3", "vocab_size": 257, "hidden_size": 32, "intermediate_size": 64, "num_layers": 1,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_positions": 64,
        },
        "task": "causal_lm", "data": {"name": "text", "sources": [str(root / "corpus.txt")], "sequence_length": 32},
        "optimizer": "adamw", "peft": {"name": "lora", "r": 2}, "checkpoint": {"every": 1},
    }  # fmt: skip
    file = root / "job.json"
    file.write_text(json.dumps(values))
    Job.load(file).build(note=lambda _: None).train()
    return root / "run"


def poisoned(sound: Path, target: Path, sections: Mapping[str, Any]) -> Path:
    """Copy of a run whose job.yaml a stranger has edited, with a plugin file next to it."""
    shutil.copytree(sound, target)
    (target / "stranger.py").write_text(f"open({str(target.parent / CANARY)!r}, 'w')")
    values = yaml.safe_load((target / "job.yaml").read_text())
    given = json.loads(json.dumps(sections).replace(f'"{CANARY}"', json.dumps(str(target.parent / CANARY))))
    for name, section in given.items():
        merged = name in ("checkpoint", "run") or (name == "data" and "name" not in section)
        values[name] = {**values[name], **section} if merged else section
    (target / "job.yaml").write_text(yaml.safe_dump(values))
    return target


def _model_with_job(run: Path) -> Path:
    for name in ("job.yaml", "plugins.json", "stranger.py"):
        shutil.copy(run / name, run / "model")
    return run / "model"


LAYOUTS: Mapping[str, Callable[[Path], Path]] = {
    "a run": lambda run: run,
    "a step's folder": lambda run: sorted((run / "checkpoints").iterdir())[-1],
    "a run without checkpoints": lambda run: shutil.rmtree(run / "checkpoints") or run,  # type: ignore[func-returns-value]
    "a run with an empty folder of checkpoints": lambda run: (
        shutil.rmtree(run / "checkpoints") or (run / "checkpoints").mkdir() or run  # type: ignore[func-returns-value]
    ),
    "a model's directory": _model_with_job,
    "a model's directory with an empty folder of checkpoints": lambda run: (
        (_model_with_job(run) / "checkpoints").mkdir() or run / "model"  # type: ignore[func-returns-value]
    ),
}
QUICK = ("a step's folder", "data that calls a function")


@pytest.mark.thorough
@pytest.mark.parametrize("sort", JOBS)
def test_evaluate_refuses_what_a_run_would_run_and_names_the_command_that_trusts_it(
    sort: str, sound: Path, tmp_path: Path, d9d: Run
) -> None:
    run = poisoned(sound, tmp_path / "run", JOBS[sort])
    status, _, err = d9d("evaluate", str(run))
    assert status == 2
    assert f"d9d evaluate {run}/job.yaml" in err
    assert "Traceback" not in err


@pytest.mark.thorough
@pytest.mark.parametrize("sort", HARMLESS)
def test_evaluate_uses_a_run_without_the_sections_that_only_training_reads(
    sort: str, sound: Path, tmp_path: Path, d9d: Run
) -> None:
    status, out, err = d9d("evaluate", str(poisoned(sound, tmp_path / "run", HARMLESS[sort])))
    assert status == 0, err
    assert "loss" in out


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("layout", "sort"),
    [
        pytest.param(layout, sort, marks=[] if (layout, sort) == QUICK else pytest.mark.full)
        for layout in LAYOUTS
        for sort in ("a plugin file", "data that calls a function", "sources at an address")
    ],
)
def test_no_command_runs_code_of_a_directory(layout: str, sort: str, sound: Path, tmp_path: Path, d9d: Run) -> None:
    place = LAYOUTS[layout](poisoned(sound, tmp_path / "run", JOBS[sort]))
    text = tmp_path / "texts.jsonl"
    text.write_text('{"text": "the quick brown fox"}\n')
    other = {"name": "text", "sources": [str(text)], "field": "text", "sequence_length": 8, "tokenizer": "bytes"}
    start = {
        "run": {"name": "started", "dir": str(tmp_path / "other")}, "device": "cpu", "task": "causal_lm", "data": other,
        "model": {"name": "qwen3", "pretrained": str(place)}, "optimizer": "adamw", "steps": 1, "batch": {"size": 1},
    }  # fmt: skip
    tuned = {**start, "peft": {"name": "lora", "r": 2, "init_from": str(tmp_path / "run" / "adapter")}}
    infer = {name: start[name] for name in ("run", "device", "data", "model", "batch")} | {
        "task": "log_probs",
        "writer": "jsonl",
    }
    files = {}
    for name, values in {"start": start, "tuned": tuned, "infer": infer}.items():
        files[name] = str(tmp_path / f"{name}.json")
        Path(files[name]).write_text(json.dumps(values))
    commands = [
        ("evaluate", str(place)),
        ("evaluate", str(place), "--data", str(text)),
        ("evaluate", str(sound), "--compare", str(place)),
        ("generate", str(place), "--prompt", "the", "--device", "cpu", "--max-new-tokens", "1"),
        ("generate", str(tmp_path / "run" / "adapter"), "--base", str(place), "--prompt", "the", "--device", "cpu"),
        ("state", "show", str(place)),
        ("state", "convert", str(place), str(tmp_path / "converted")),
        ("state", "diff", str(place), str(sound)),
        ("runs", "list", str(tmp_path)),
        ("runs", "compare", str(tmp_path / "run"), str(sound)),
        ("report", str(tmp_path / "run"), "--output", str(tmp_path / "page.html")),
        ("check", files["start"]),
        ("train", files["start"]),
        ("train", files["tuned"]),
        ("infer", files["infer"]),
        ("verify", files["start"]),
    ]
    for command in commands:
        status, _, err = d9d(*command)
        assert "Traceback" not in err, command
        assert not (tmp_path / CANARY).exists(), command
        assert not CanarySystem.opened, command
        assert status in (0, 1, 2), command


@pytest.fixture
def own(sound: Path, tmp_path: Path) -> Path:
    """Run of the user that uses a plugin file of their own."""
    run = poisoned(sound, tmp_path / "own", {})
    (run.parent / "mine.py").write_text(
        "from d9d_core.plugin import hookimpl\n\n\n@hookimpl\ndef d9d_metrics():\n    return []\n"
    )
    values = yaml.safe_load((run / "job.yaml").read_text())
    values["plugins"]["files"] = [str(run.parent / "mine.py")]
    (run / "job.yaml").write_text(yaml.safe_dump(values))
    return run


@pytest.mark.thorough
def test_the_users_own_run_with_a_plugin_file_is_evaluated_by_the_command_that_the_refusal_names(
    own: Path, d9d: Run, tmp_path: Path
) -> None:
    status, _, err = d9d("evaluate", str(own))
    assert status == 2
    named = f"d9d evaluate {own}/job.yaml"
    assert named in err
    for arguments in ((f"{own}/job.yaml",), (str(own), "--plugin", str(tmp_path / "mine.py"))):
        status, out, err = d9d("evaluate", *arguments)
        assert status == 0, err
        assert "step 2" in " ".join(out.split())
    step = own / "checkpoints" / "step-00000001"
    status, _, err = d9d("evaluate", str(step))
    assert status == 2
    assert f"{named} --checkpoint 1" in err
    status, out, err = d9d("evaluate", f"{own}/job.yaml", "--checkpoint", "1")
    assert status == 0, err
    assert "step 1" in " ".join(out.split())
    # The other commands need no job to use a run.
    status, _, err = d9d("generate", str(own), "--prompt", "the", "--device", "cpu", "--max-new-tokens", "1")
    assert status == 0, err


@pytest.mark.thorough
def test_values_of_the_command_line_are_trusted(sound: Path, tmp_path: Path, d9d: Run) -> None:
    run = poisoned(sound, tmp_path / "run", JOBS["sources at an address"])
    (tmp_path / "a.txt").write_text("the quick brown fox " * 20)
    status, _, err = d9d("evaluate", str(run), "--set", f"data.sources=[{tmp_path / 'a.txt'}]")
    assert status == 0, err


@pytest.mark.thorough
def test_a_checkpoint_is_used_with_the_tokenizer_files_of_its_run_and_not_with_its_data(
    sound: Path, tmp_path: Path, d9d: Run
) -> None:
    run = poisoned(sound, tmp_path / "run", {"data": CALL})
    shutil.rmtree(run / "model")
    shutil.rmtree(run / "adapter")
    arguments = ("--prompt", "the", "--device", "cpu", "--max-new-tokens", "1")
    status, _, err = d9d("generate", str(run), *arguments)
    assert status == 0, err
    shutil.rmtree(run / "tokenizer")
    status, _, err = d9d("generate", str(run), *arguments)
    assert status == 2
    assert "--tokenizer" in err


def sections_of(config: type[Section]) -> Iterator[type[Section]]:
    """A config's class and the classes of the sections inside it."""
    pending, seen = [config], set()
    while pending:
        one = pending.pop()
        if one in seen:
            continue
        seen.add(one)
        yield one
        for field in one.model_fields.values():
            pending += [
                part for part in _parts(field.annotation) if isinstance(part, type) and issubclass(part, Section)
            ]


def _parts(annotation: Any) -> Iterator[Any]:
    yield annotation
    for part in getattr(annotation, "__args__", ()):
        yield from _parts(part)


def test_every_field_whose_description_speaks_of_code_is_marked(installed: Registry) -> None:
    configs = [load_config(entry) for entry in installed.entries() if isinstance(entry.spec, records.ConfiguredSpec)]
    assert len(configs) > 60
    unmarked, marked = [], []
    for config in configs:
        for section in sections_of(config):
            for name, field in section.model_fields.items():
                text = field.description or ""
                if code_mark((*field.metadata, field.annotation)) is not None:
                    marked.append(f"{section.__name__}.{name}")
                elif any(word in text.lower() for word in ("import path", "package.module", "module:", "imported")):
                    unmarked.append(f"{section.__name__}.{name}")
    assert unmarked == []
    assert len(set(marked)) >= 6


MODULES = ("typing", "json", "torch", "jinja2", "socket", "selectors", "d9d_core", "d9d_data", "d9d_engine")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("words", "options"),
    [
        (("data", "show"), {}),
        *(
            pytest.param(words, options, marks=pytest.mark.full)
            for words, options in (
                (("train", "--nproc", "1"), {}),
                (("train",), {"data": {"workers": 1}}),
                (("sweep", "--grid", "seed=1"), {}),
                (("verify",), {}),
            )
        ),
    ],
)
def test_modules_in_the_working_directory_are_not_imported(
    words: tuple[str, ...], options: Mapping[str, Any], published: Callable[[Path], Path], tmp_path: Path
) -> None:
    place = published(tmp_path / "model")
    for name in MODULES:
        (place / f"{name}.py").write_text(f"open({str(tmp_path / CANARY)!r}, 'w')")
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps({'messages': turns})}\n" * 4)
    data = {"name": "chat", "sources": [str(tmp_path / "chats.jsonl")], "sequence_length": 64}
    values = {
        "run": {"name": "run", "dir": str(tmp_path)}, "device": "cpu", "steps": 1, "batch": {"size": 2},
        "model": {"name": "qwen3", "pretrained": "."}, "task": "causal_lm", "optimizer": "adamw",
        "data": data | options.get("data", {}), "checkpoint": {"every": None}, "export": False,
    }  # fmt: skip
    (tmp_path / "job.json").write_text(json.dumps(values))
    command = [str(Path(sys.executable).with_name("d9d")), *words, str(tmp_path / "job.json")]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=120, check=False)
    assert not (tmp_path / CANARY).exists(), "a module of the working directory was imported"
    assert done.returncode == 0, done.stdout + done.stderr


#: Modules that import by a name that is no constant; whatever a job file names there is a field that is marked.
IMPORTERS = {
    "packages/d9d-core/src/d9d_core/deprecation.py",
    "packages/d9d-core/src/d9d_core/registry/loader.py",
    "packages/d9d-core/src/d9d_core/plugin.py",
    "packages/d9d-core/src/d9d_core/registry/registry.py",
    "packages/d9d-core/src/d9d_core/registry/single_file.py",
    "packages/d9d-inference/src/d9d_inference/generation/library.py",
    "plugins/d9d-data/src/d9d_data/dataset/items.py",
    "plugins/d9d-data/src/d9d_data/new_job/samples.py",
    "plugins/d9d-data/src/d9d_data/sources/opening.py",
    "plugins/d9d-flash-attention/src/d9d_flash_attention/backend.py",
    "plugins/d9d-metrics/src/d9d_metrics/confusion/statistics.py",
    "plugins/d9d-optim/src/d9d_optim/imports.py",
}


@pytest.mark.thorough
def test_only_known_modules_import_by_a_value() -> None:
    found = set()
    for root in ("packages", "plugins"):
        for file in (ROOT / root).glob("*/src/**/*.py"):
            if (file.name == "plugin.py" and "d9d-core" not in str(file)) or "d9d-testing" in str(file):
                continue
            for node in ast.walk(ast.parse(file.read_text("utf-8"))):
                if isinstance(node, ast.Call) and node.args and not isinstance(node.args[0], ast.Constant):
                    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                    if name in (
                        "import_module",
                        "__import__",
                        "Ref",
                        "spec_from_file_location",
                        "module_from_spec",
                        "exec",
                        "eval",
                    ):
                        found.add(str(file.relative_to(ROOT)))
    assert found == IMPORTERS
