"""The suites pass sound components and catch faulty ones; the table in the README lists both."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).parents[3] / "tools" / "suite_faults.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("suite_faults", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["suite_faults"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


#: Kinds whose faults show without many processes, and the faults of them that only two processes show.
QUICK = [kind for kind in load().KINDS if kind not in load().LONG]
IN_PROCESSES: Mapping[str, set[str]] = {
    "optimizers": {"takes a shard for the whole", "expects a row in each shard", "seeds by the hash of a name"},
    "fine-tuning methods": {"differs between ranks"},
    "subscribers with files": {"every rank writes", "writes the numbers of its rank"},
}
#: Faults that no test of a suite catches, as the README says.
MISSED = {
    "metrics": {"counts in float32"},
    "kernels": {"overflows for large inputs"},
    "subscribers": {"takes its time"},
}


@pytest.fixture
def tool() -> ModuleType:
    return load()


def check(*kinds: str) -> None:
    done = subprocess.run([sys.executable, str(TOOL), "--check", *kinds], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr}"


@pytest.mark.thorough
@pytest.mark.parametrize(
    "kind",
    # A subscriber that takes its time does so in the test.
    [pytest.param(kind, marks=pytest.mark.full if kind == "subscribers" else ()) for kind in QUICK],
)
def test_faults_are_caught_and_named_and_a_sound_implementation_passes(tool: ModuleType, kind: str) -> None:
    if kind in tool.NEEDS:
        pytest.importorskip(tool.NEEDS[kind])
    _, missed, problems = tool.judge([kind], tool.run([kind], "-k", " and ".join(f"not {part}" for part in tool.LAST)))
    assert problems == []
    assert {fault.name for fault in missed[kind]} - IN_PROCESSES.get(kind, set()) <= MISSED.get(kind, set())


@pytest.mark.full
def test_faults_are_caught_by_the_suites_of_their_kind(tool: ModuleType) -> None:
    """All that need not start many processes."""
    quick = [kind for kind in tool.KINDS if kind not in tool.LONG]
    assert len(quick) >= 12
    present = [kind for kind in quick if kind not in tool.NEEDS or importlib.util.find_spec(tool.NEEDS[kind])]
    assert len(present) >= 7  # those that need no plugin
    check(*present)


@pytest.mark.slow
def test_the_whole_table_is_that_of_the_readme(tool: ModuleType) -> None:
    for kind, package in tool.NEEDS.items():
        pytest.importorskip(package, reason=f"the suite of {kind} is tested with it")
    check()


@pytest.mark.thorough
def test_every_suite_has_faults(tool: ModuleType) -> None:
    suites = {suite.__mro__[1].__name__ for suite, _, _ in tool.faults(list(tool.KINDS)).values()}
    folder = Path(tool.ROOT) / "packages" / "d9d-testing" / "src" / "d9d_testing" / "suites"
    written = {
        line.removeprefix("class ").partition("(")[0].partition(":")[0]
        for file in (*folder.glob("*.py"), *folder.glob("moe/*.py"), *folder.glob("inference/*.py"))
        for line in file.read_text().splitlines()
        if line.startswith("class ") and line.rstrip(":").partition("(")[0].endswith("Suite")
    }
    assert written - suites == set()


@pytest.mark.thorough
def test_a_sound_implementation_that_fails_and_a_fault_that_passes_are_noticed(tool: ModuleType) -> None:
    recorder = tool.Recorder()
    recorder.failures["TestMetrics00"] = ("test_a", "E   wrong")
    everything, missed, problems = tool.judge(["metrics"], recorder)
    assert missed == everything
    assert problems == ["metrics: the sound one fails test_a:\nE   wrong"]
    assert "| metrics | 24 | 0 |" in tool.table(everything, missed)
