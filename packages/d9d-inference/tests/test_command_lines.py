"""Commands ``infer``, ``generate`` and ``evaluate``: their options, and what they print."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from d9d_core.errors import JobError
from d9d_inference.commands import evaluate, generate, infer
from d9d_inference.evaluation.paired import Difference
from d9d_inference.evaluation.result import Evaluated, Report
from typer.testing import CliRunner

Invoked = Callable[..., tuple[list[Any], Any]]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give one of --prompt TEXT, --chat and --file FILE"),
        (["--prompt", "a", "--chat"], "give one of --prompt TEXT, --chat and --file FILE"),
        (["--file", "a"], "--file FILE and --output FILE must be given together"),
        (["--prompt", "a", "--output", "b"], "--file FILE and --output FILE must be given together"),
        (["--chat", "--raw"], "--raw: a conversation needs the chat template"),
    ],
)
def test_options_of_generate_that_contradict_are_refused(words: list[str], said: str) -> None:
    result = CliRunner().invoke(generate.app, ["model", *words])
    assert isinstance(result.exception, JobError)
    assert said in str(result.exception)


@pytest.fixture
def invoked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Invoked:
    """Runs a command that starts processes, with stand-ins for the launcher."""

    def run(module: Any, *words: str, launcher: str | None = None, outcome: Any = None) -> tuple[list[Any], Any]:
        happened: list[Any] = []

        def launch(_job: object, command: list[str], restarts: int, _interrupts: object) -> int:
            happened.append((command, restarts))
            return 7

        def processes(load: Any, nproc: str | None) -> str:
            happened.append(("processes", nproc))
            load(3, False)
            return "job"

        def find(target: object, request: Any, _registry: object) -> Any:
            happened.append((target, request.world_size, request.limit if hasattr(request, "limit") else None))
            return SimpleNamespace(job="job")

        class Running:
            def __enter__(self) -> str:
                return "process"

            def __exit__(self, *_: object) -> None:
                happened.append("ended")

        monkeypatch.setattr(
            module, "process_of_launcher", lambda _environ, alone: SimpleNamespace(launcher=launcher, alone=alone)
        )
        monkeypatch.setattr(module, "for_processes", processes)
        monkeypatch.setattr(module, "launch", launch)
        monkeypatch.setattr(module, "running", lambda *_: Running())
        if module is infer:
            monkeypatch.setattr(infer, "output_is_incidental", lambda: happened.append("incidental"))
            monkeypatch.setattr(infer, "load_job", lambda *given: happened.append(given[2:]))
            monkeypatch.setattr(infer, "_infer", lambda process, *_: happened.append(process))
        else:
            monkeypatch.setattr(evaluate, "find_subject", find)
            monkeypatch.setattr(evaluate, "same_data", lambda second, _first: second)
            monkeypatch.setattr(evaluate, "discover_plugins", lambda *_: None)
            monkeypatch.setattr(evaluate, "policy_of", lambda *_: None)
            monkeypatch.setattr(evaluate, "_evaluate", lambda *given: happened.append(given[3]) or outcome)
            monkeypatch.setattr(evaluate, "_publish", lambda report, file: happened.append((report, file)))
        path = tmp_path / "job.yaml"
        path.write_text("")
        return happened, CliRunner().invoke(module.app, [str(path), *words])

    return run


def test_infer_runs_here_or_in_processes_of_its_own(invoked: Invoked, tmp_path: Path) -> None:
    job = str(tmp_path / "job.yaml")
    happened, result = invoked(infer)
    assert (happened, result.exit_code) == (["incidental", "process", "ended"], 0)
    happened, result = invoked(infer, "--nproc", "2", "--set", "seed=1", "--strict-plugins")
    assert happened[:3] == ["incidental", ("processes", "2"), (["seed=1"], [], False, True, False, 3)]
    assert happened[3] == (["infer", job, "--set", "seed=1", "--strict-plugins"], 0)
    assert result.exit_code == 7
    _, result = invoked(infer, "--nproc", "2", launcher="torchrun")
    assert "torchrun has started this process" in str(result.exception)


def test_evaluate_runs_here_or_in_processes_of_its_own(invoked: Invoked, tmp_path: Path) -> None:
    job = str(tmp_path / "job.yaml")
    assert invoked(evaluate, "--limit", "3")[0] == [3, "ended"]  # another rank has the report
    assert invoked(evaluate, "--json", "-", outcome="report")[0] == [None, "ended", ("report", "-")]
    happened, result = invoked(evaluate, "--nproc", "2", "--compare", "other", "--no-plugins", "--data", "a.txt")
    assert happened[0] == ("processes", "2")
    assert happened[1:3] == [(job, 3, None), ("other", 3, None)]
    words = ["evaluate", "--compare", "other", "--data", "a.txt", "--", job, "--no-plugins"]
    assert (happened[3][0], happened[3][1], result.exit_code) == (words, 0, 7)
    # As many processes as the mesh of the run needs keep its mesh.
    assert invoked(evaluate, "--nproc", "auto")[0][1] == (job, None, None)
    _, result = invoked(evaluate, "--nproc", "2", launcher="torchrun")
    assert "torchrun has started this process" in str(result.exception)


def test_words_of_launched_processes_repeat_what_was_given() -> None:
    words = evaluate._words("run", [Path("a"), Path("b")], Path("j"), "best", 3, "other", "-", ["x=1"], [Path("p")])
    assert words == [
        "--like", "j", "--checkpoint", "best", "--limit", "3", "--compare", "other", "--json", "-", "--data", "a",
        "--data", "b", "--set", "x=1", "--plugin", "p", "--", "run",
    ]  # fmt: skip
    assert evaluate._words("run", [], None, None, None, None, None, [], []) == ["--", "run"]


def report(compared: bool) -> Report:
    first = Evaluated("mine", 1200, {"a": {"loss": 2.5, "accuracy": math.nan}, "b": {"loss": 1.0}}, {"a": 9000, "b": 2})
    if not compared:
        return Report(first)
    other = Evaluated("other", None, {"a": {"loss": 3.0}}, {"a": 9000})
    return Report(first, other, {"a": Difference(-0.5, 0.1, -0.7, -0.3, 0.95, 9000)})


def test_results_are_tables_and_json_without_numbers_that_json_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate._publish(report(compared=True), str(tmp_path / "out.json"))
    said = capsys.readouterr().out
    assert "mine, step 1,200" in said
    assert "other, step" not in said
    lines = {words[0]: words[1:] for line in said.splitlines() if (words := line.replace("│", " ").split())}
    assert lines["b"] == ["2", "1"]
    assert (
        "a: loss -0.500000, 95% confidence interval [-0.700000, -0.300000] over 9,000 samples: mine is better" in said
    )
    values = json.loads((tmp_path / "out.json").read_text())
    assert values["sets"]["a"] == {"samples": 9000, "loss": 2.5, "accuracy": None}
    evaluate._publish(report(compared=False), "-")
    assert json.loads(capsys.readouterr().out)["sets"]["b"]["loss"] == 1.0
    evaluate._publish(report(compared=False), None)
    assert "mine, step 1,200" in capsys.readouterr().out
    with pytest.raises(JobError, match="--json: .* cannot be written: No such file"):
        evaluate._publish(report(compared=False), str(tmp_path / "none" / "out.json"))
