"""Runs every conformance suite on implementations with one fault each, and writes the table of caught faults.

    uv run python tools/suite_faults.py                  write packages/d9d-testing/README.md
    uv run python tools/suite_faults.py --check          compare with it
    uv run python tools/suite_faults.py metrics tasks    only these kinds; shows them, or compares with --check

The faults are in packages/d9d-testing/tests/faults. A fault is caught if a test of the suite fails; if the fault names
a text, the failure message must contain it. Exit status 1: a sound implementation fails, too few faults are caught, or
the table in the README differs.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "packages" / "d9d-testing" / "README.md"
FAULTS = ROOT / "packages" / "d9d-testing" / "tests" / "faults"
MARKS = "<!-- suite faults: begin -->", "<!-- suite faults: end -->"
#: Fraction of the faults that must be caught.
LEAST = 0.95
#: Kind -> file in the fault directory, its sound suite, and its table of faults.
KINDS: Mapping[str, tuple[str, str, str]] = {
    "optimizers": ("optimizers", "Sound", "FAULTS"),
    "learning-rate schedules": ("lr_schedules", "Sound", "FAULTS"),
    "metrics": ("metrics", "Sound", "FAULTS"),
    "datasets": ("datasets", "Sound", "FAULTS"),
    "tasks": ("tasks", "Sound", "FAULTS"),
    "tasks of groups": ("task_groups", "Sound", "FAULTS"),
    "inference tasks": ("inference_tasks", "Sound", "FAULTS"),
    "writers": ("writers", "Sound", "FAULTS"),
    "trackers": ("trackers", "Sound", "FAULTS"),
    "kernels": ("kernels", "Sound", "FAULTS"),
    "subscribers": ("subscribers", "Sound", "FAULTS"),
    "subscribers with files": ("file_subscribers", "Sound", "FAULTS"),
    "fine-tuning methods": ("peft_methods", "Sound", "FAULTS"),
    "models": ("models", "Sound", "FAULTS"),
    "strategies": ("earlier_suites", "SoundStrategy", "STRATEGIES"),
    "pipeline schedules": ("earlier_suites", "SoundSchedule", "SCHEDULES"),
    "dispatchers": ("moe_suites", "SoundDispatcher", "DISPATCHERS"),
    "routers": ("moe_suites", "SoundRouter", "ROUTERS"),
    "launchers": ("launchers", "Sound", "FAULTS"),
    "plugins": ("plugins", "Sound", "FAULTS"),
}
#: Kinds whose faults take long, because most of them show only with several processes.
LONG = ("strategies", "dispatchers")
#: Kind -> package that its tests need.
NEEDS = {
    "kernels": "d9d_nn",
    "launchers": "d9d_launch",
    "models": "d9d_qwen3",
    "fine-tuning methods": "d9d_parallel",
    "pipeline schedules": "d9d_pipeline",
    "dispatchers": "d9d_moe",
    "routers": "d9d_moe",
}
#: Tests that start processes run after all others.
LAST = (
    "of_one_process",
    "in_one_process",
    "had_happened",
    "layout",
    "sharded",
    "tokens_meet",
    "any_routing",
    "same_bits",
)
#: Test module for pytest: one class per fault, made by :func:`suites`.
COLLECTED = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("suite_faults", {tool!r})
tool = sys.modules.get("suite_faults")
if tool is None:
    tool = importlib.util.module_from_spec(spec)
    sys.modules["suite_faults"] = tool
    spec.loader.exec_module(tool)
globals().update(tool.suites({kinds!r}))
"""


@dataclass(frozen=True)
class Fault:
    """Fault of a kind; an empty name stands for the sound implementation.

    Attributes:
        says: text that the failure message must contain.
    """

    kind: str
    name: str
    says: str = ""


def faults(kinds: Sequence[str]) -> dict[str, tuple[type, Fault, dict[str, Any]]]:
    """Class name -> sound suite, fault, and overridden attributes."""
    found: dict[str, tuple[type, Fault, dict[str, Any]]] = {}
    for kind in kinds:
        file, sound, table = KINDS[kind]
        module = _load(FAULTS / f"{file}.py")
        suite = getattr(module, sound)
        entries = {"": ({}, ""), **getattr(module, table)}
        for index, (name, (values, says)) in enumerate(entries.items()):
            label = "".join(word.title() for word in kind.replace("-", " ").split())
            found[f"Test{label}{index:02}"] = (suite, Fault(kind, name, says), dict(values))
    return found


def suites(kinds: Sequence[str]) -> dict[str, type]:
    """Test classes for pytest, by name."""
    return {name: type(name, (suite,), values) for name, (suite, _, values) in faults(kinds).items()}


@dataclass
class Recorder:
    """Pytest plugin that records the first failure of each class, and skips the rest of the class.

    Attributes:
        failures: class name -> test name and message.
        ran: class name -> number of tests that were not skipped.
    """

    failures: dict[str, tuple[str, str]] = field(default_factory=dict)
    ran: dict[str, int] = field(default_factory=dict)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Move slow tests to the end of each class."""
        items.sort(key=lambda item: (_class_of(item.nodeid), any(part in item.name for part in LAST)))

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Skip the remaining tests of a class after its first failure."""
        if _class_of(item.nodeid) in self.failures:
            pytest.skip("caught already")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the first failure of a class."""
        name = _class_of(report.nodeid)
        if report.when == "call" and not report.skipped:
            self.ran[name] = self.ran.get(name, 0) + 1
        if report.failed:
            self.failures.setdefault(name, (report.nodeid.rpartition("::")[2], report.longreprtext))


def run(kinds: Sequence[str], *options: str) -> Recorder:
    """Run the suites on all faults of the given kinds, with further options of pytest."""
    recorder = Recorder()
    with tempfile.TemporaryDirectory(prefix="d9d-suite-faults-") as directory:
        # A name of its own, because a module with a known name is not imported again.
        file = Path(directory) / f"test_{Path(directory).name.replace('-', '_')}.py"
        file.write_text(COLLECTED.format(tool=str(Path(__file__).resolve()), kinds=list(kinds)))
        config = Path(directory) / "pytest.ini"
        config.write_text("[pytest]\nmarkers =\n    smoke\n")
        fixed = ["-q", "-q", "--no-header", "--no-summary", "--import-mode=importlib", "-W", "ignore"]
        plugins = ["-p", "no:cacheprovider", "-p", "no:xdist"]
        pytest.main([str(file), "-c", str(config), *fixed, *plugins, *options], plugins=[recorder])
    return recorder


def judge(kinds: Sequence[str], recorder: Recorder) -> tuple[dict[str, list[Fault]], dict[str, list[Fault]], list[str]]:
    """Kind -> all its faults, kind -> missed faults, and problems of the run itself."""
    everything: dict[str, list[Fault]] = {kind: [] for kind in kinds}
    missed: dict[str, list[Fault]] = {kind: [] for kind in kinds}
    problems = []
    for name, (_, fault, _) in faults(kinds).items():
        failure = recorder.failures.get(name)
        if not fault.name:
            if failure is not None:
                problems.append(f"{fault.kind}: the sound one fails {failure[0]}:\n{failure[1]}")
            elif not recorder.ran.get(name):
                problems.append(f"{fault.kind}: no test ran")
            continue
        everything[fault.kind].append(fault)
        if failure is None:
            missed[fault.kind].append(fault)
        elif fault.says not in failure[1]:
            last = failure[1].strip().splitlines()[-12:]
            text = "\n".join(last)
            problems.append(f"{fault.kind}: '{fault.name}' fails {failure[0]} without saying '{fault.says}':\n{text}")
    return everything, missed, problems


def rows(everything: Mapping[str, Sequence[Fault]], missed: Mapping[str, Sequence[Fault]]) -> list[str]:
    """Rows of the table."""
    lines = []
    for kind, of_kind in everything.items():
        names = ", ".join(fault.name for fault in missed[kind]) or "none"
        lines.append(f"| {kind} | {len(of_kind)} | {len(of_kind) - len(missed[kind])} | {names} |")
    return lines


def table(everything: Mapping[str, Sequence[Fault]], missed: Mapping[str, Sequence[Fault]]) -> str:
    """Table for the README."""
    total, lost = sum(map(len, everything.values())), sum(map(len, missed.values()))
    head = ["| suite of | faults | caught | missed |", "|---|---|---|---|"]
    return "\n".join([*head, *rows(everything, missed), f"| **all** | **{total}** | **{total - lost}** | **{lost}** |"])


def main(arguments: Sequence[str]) -> int:
    """Run the suites, and write, check or print the table."""
    check = "--check" in arguments
    named = [argument for argument in arguments if not argument.startswith("-")]
    unknown = sorted(set(named) - KINDS.keys())
    if unknown:
        print(f"unknown kinds: {', '.join(unknown)}; there are: {', '.join(KINDS)}", file=sys.stderr)
        return 1
    kinds = named or list(KINDS)
    everything, missed, problems = judge(kinds, run(kinds))
    made = table(everything, missed)
    print(made)
    total, lost = sum(map(len, everything.values())), sum(map(len, missed.values()))
    if total - lost < LEAST * total:
        problems.append(f"{lost} of {total} faults are missed; at least {LEAST:.0%} must be caught")
    before, _, rest = PAGE.read_text().partition(MARKS[0])
    present, _, after = rest.partition(MARKS[1])
    same = present.strip() == made if not named else set(rows(everything, missed)) <= set(present.splitlines())
    if check and not same:
        problems.append(f"the table in {PAGE.relative_to(ROOT)} is another; run: uv run python tools/suite_faults.py")
    if not check and not named and not problems:
        PAGE.write_text(f"{before}{MARKS[0]}\n{made}\n{MARKS[1]}{after}")
    print("\n\n".join(problems), file=sys.stderr)
    return 1 if problems else 0


def _class_of(nodeid: str) -> str:
    return nodeid.split("::")[1]


def _load(path: Path) -> ModuleType:
    name = f"suite_faults_{path.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
