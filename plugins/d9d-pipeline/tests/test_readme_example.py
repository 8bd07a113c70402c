"""The schedule that the README publishes passes its own tests and trains."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from d9d_testing.layouts import job_of, topology_here
from d9d_testing.world import World

README = (Path(__file__).parents[1] / "README.md").read_text()
PLUGINS = ["d9d_testing.toy.plugin"]


def block(name: str) -> str:
    (text,) = re.findall(rf"^```python\n(# {re.escape(name)}\n.*?)^```$", README, re.DOTALL | re.MULTILINE)
    assert isinstance(text, str)
    return text


@pytest.fixture
def plugin(tmp_path: Path) -> str:
    """The file of the README."""
    (tmp_path / "gpipe_v.py").write_text(block("gpipe_v.py"))
    return str(tmp_path / "gpipe_v.py")


def test_it_passes_the_suite_as_the_readme_runs_it(
    plugin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(block("test_gpipe_v.py"), names)  # as pytest would import it
    suite = names["TestGPipeV"]()
    tests = dict(inspect.getmembers(suite, lambda value: inspect.ismethod(value) and value.__name__[:5] == "test_"))
    tests.pop("test_it_is_made_without_torch")  # skips single files
    assert len(tests) >= 7
    for test in tests.values():
        test()


def losses(jobs: list[dict[str, Any]], plugins: list[str]) -> list[list[float]]:
    """Of each step of each job; runs on every rank of a world."""
    found = []
    for values in jobs:
        trained = job_of(values, plugins)
        trainer = trained.build(lambda _note: None, topology_here(trained))
        found.append([trainer.step(step, trainer.prefetcher.next()).loss.item() for step in range(2)])
    return found


@pytest.mark.thorough
def test_it_trains_as_one_process_does(plugin: str, tmp_path: Path) -> None:
    job = {
        "run": {"dir": str(tmp_path)},
        "steps": 2,
        "device": "cpu",
        "batch": {"size": 6, "microbatch": 2},
        "model": {"name": "toy_model", "blocks": 4, "dropout": 0.0},
        "data": "toy_data",
        "task": "toy_task",
        "optimizer": "toy_optimizer",
        "trackers": [],
    }
    (whole,) = World(1, timeout=60.0).run(losses, [job], PLUGINS)
    staged = World(2, timeout=60.0).run(losses, [{**job, "mesh": {"pp": 2}, "pipeline": "gpipe_v"}], [*PLUGINS, plugin])
    assert whole[0][0] != whole[0][1]
    for rank in staged:
        assert rank[0] == pytest.approx(whole[0], rel=1e-6)
