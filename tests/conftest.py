from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from d9d_testing.published import write_published

if TYPE_CHECKING:
    from d9d_core.registry.registry import Registry

TEXT = "the quick brown fox jumps over the lazy dog, and then it sleeps. " * 8


@pytest.fixture
def small_job(tmp_path: Path) -> Callable[..., Path]:
    """Write a job that trains a tiny Qwen3 on a few kilobytes of text; keyword arguments replace sections."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(12):
        (corpus / f"{number}.txt").write_text(f"{number}: {TEXT}")

    def write(name: str = "small", **sections: Any) -> Path:
        values: dict[str, Any] = {
            "run": {"name": name, "dir": str(tmp_path / "runs")},
            "device": "cpu",
            "steps": 6,
            "batch": {"size": 4, "microbatch": 2},
            "model": {
                "name": "qwen3", "vocab_size": 257, "hidden_size": 32, "intermediate_size": 64, "num_layers": 2,
                "num_attention_heads": 4, "num_key_value_heads": 2, "max_positions": 64,
            },
            "task": "causal_lm",
            "data": {"name": "text", "sources": [str(corpus)], "sequence_length": 32},
            "optimizer": {"name": "adamw", "lr": 0.01},
            "lr_schedule": {"name": "cosine", "warmup_steps": 2},
            "metrics": ["perplexity"],
            "logging": {"every": 2},
            "checkpoint": {"every": 2},
            **sections,
        }  # fmt: skip
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(values))
        return path

    return write


@pytest.fixture(scope="session")
def published() -> Callable[..., Path]:
    """Write a tiny Qwen3 with random weights, its tokenizer and its chat template, as transformers saves them."""
    pytest.importorskip("transformers")
    return write_published


@pytest.fixture(scope="session")
def tool() -> Callable[[str], ModuleType]:
    """Load a module of the folder ``tools``, so that the processes of a world find its functions too."""

    def load(name: str) -> ModuleType:
        if name not in sys.modules:
            file = Path(__file__).parents[1] / "tools" / f"{name}.py"
            if str(file.parent) not in sys.path:  # tools share modules
                sys.path.append(str(file.parent))
            spec = importlib.util.spec_from_file_location(name, file)
            assert spec is not None
            assert spec.loader is not None
            sys.modules[name] = module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        return sys.modules[name]

    return load


@pytest.fixture(scope="session")
def table(tool: Callable[[str], ModuleType]) -> ModuleType:
    """The tool that runs one job in many layouts."""
    return tool("layout_table")


@pytest.fixture
def d9d(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the command line in this process: exit status, standard output, standard error."""
    from d9d_core.cli.main import main

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["d9d", *arguments])
        capsys.readouterr()
        try:
            main()
            status = 0
        except SystemExit as stop:
            status = int(stop.code or 0)
        out, err = capsys.readouterr()
        return status, out, err

    return run


@pytest.fixture
def room(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Modules of ``tools/bench`` that a test module has in ``NAMES``, each found by its bare name."""
    names = request.module.NAMES
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "tools" / "bench"))
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture
def _hello_and_nothing_that_stays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The example plugin is no member of the workspace, so it is not installed."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "examples/d9d-hello/src"))
    monkeypatch.delenv("D9D_PLUGINS", raising=False)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("d9d_hello", "acme_zloss") or name.startswith("d9d_file_"):
            del sys.modules[name]


@pytest.fixture(scope="module")
def installed() -> Registry:
    from d9d_core.registry.loader import discover
    from d9d_core.registry.policy import PluginPolicy

    return discover(PluginPolicy())
