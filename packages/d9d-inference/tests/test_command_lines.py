"""Commands ``infer``, ``generate`` and ``evaluate``: their options, and what they print."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from d9d_core.errors import JobError
from d9d_core.job_file.job import Mesh
from d9d_engine.distributed import devices
from d9d_engine.run.interrupt import STOPPED, Interrupts, Terminated
from d9d_inference.commands import evaluate, generate, infer, model_files
from d9d_inference.evaluation import compose
from d9d_inference.evaluation.paired import Difference
from d9d_inference.evaluation.result import Evaluated, Report
from d9d_inference.evaluation.subject import Request
from d9d_inference.generation import chat, file_job, language_model, library
from d9d_inference.generation.prompts import Prompt
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
def generated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[list[Any], Any]]:
    """Runs ``generate`` with a stand-in of the model, which encodes a text as its letters."""
    happened: list[Any] = []

    class Model:
        has_template = True

        def __init__(self, *given: object) -> None:
            happened.append(("model", *given))

        def encode(self, prompt: Prompt, *given: object) -> list[str]:
            happened.append(("encode", prompt, *given))
            return list(prompt.text or "")

        def check_length(self, *given: object) -> None:
            happened.append(("length", *given))

        def stream(self, *given: object) -> None:
            happened.append(("stream", *given))

    class Job:
        def __init__(self, *given: object) -> None:
            happened.append(("job", *given))

        def check(self) -> None:
            happened.append("checked")

        def run(self, model: Model, ids: object, *_: object) -> None:
            happened.append(("run", isinstance(model, Model), ids))

    @contextmanager
    def found(model: str, _registry: object, _note: object, base: str | None) -> Iterator[Any]:
        happened.append(("found", model, base))
        yield SimpleNamespace(directory=tmp_path, adapter="the adapter", origin="the origin")

    logging = SimpleNamespace(disable_progress_bar=lambda: happened.append("no bar"))
    transformers = SimpleNamespace(utils=SimpleNamespace(logging=logging))
    monkeypatch.setattr(library, "load_library", lambda name, user: transformers)
    monkeypatch.setattr(devices, "choose_device", lambda name: f"device {name}")
    monkeypatch.setattr(model_files, "found_model", found)
    monkeypatch.setattr(language_model, "LanguageModel", Model)
    monkeypatch.setattr(language_model, "generation_settings", lambda given, _library: {"given": given})
    monkeypatch.setattr(file_job, "FileJob", Job)
    monkeypatch.setattr(chat, "chat", lambda model, *given: happened.append(("chat", isinstance(model, Model), *given)))

    def run(*words: str, template: bool = True) -> tuple[list[Any], Any]:
        happened.clear()
        monkeypatch.setattr(Model, "has_template", template)
        result = CliRunner().invoke(generate.app, ["there", "--no-plugins", *words])
        return list(happened), result

    return run


Generated = Callable[..., tuple[list[Any], Any]]


def test_generate_continues_a_text_with_the_given_settings(generated: Generated, tmp_path: Path) -> None:
    (tmp_path / "tools.json").write_text('[{"type": "function"}]')
    happened, result = generated(
        "--prompt", "ab", "--raw", "--max-new-tokens", "3", "--temperature", "0.5", "--top-p", "0.25", "--seed", "7",
        "--generation", "num_beams=1", "--device", "cpu", "--dtype", "bfloat16", "--base", "b", "--system", "be kind",
        "--tools", str(tmp_path / "tools.json"), "--tokenizer", "t",
    )  # fmt: skip
    decoding = language_model.Decoding(3, 0.5, 0.25, 7, {"given": ["num_beams=1"]})
    assert result.exit_code == 0, result.exception
    assert happened == [
        "no bar",
        ("found", "there", "b"),
        ("model", tmp_path, Path("t"), "the adapter", "device cpu", torch.bfloat16),
        ("encode", Prompt("--prompt", {}, "ab"), [{"type": "function"}], "be kind", True),
        ("length", ["a", "b"], 3, "--prompt"),
        ("stream", ["a", "b"], decoding),
    ]
    assert str(generated("--prompt", "")[1].exception) == "--prompt: the text is empty"


def test_generate_completes_a_file_with_settings_that_decide_its_lines(generated: Generated, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n{"prompt": "bc"}\n')
    words = ["--file", str(tmp_path / "prompts.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    happened, result = generated(*words, "--tokenizer", str(tmp_path / "x" / ".." / "t"))
    assert result.exit_code == 0, result.exception
    (_, prompts, output, batch, overwrite, settings) = next(one for one in happened if one[0] == "job")
    assert ([prompt.text for prompt in prompts], output, batch, overwrite) == (
        ["a", "bc"], tmp_path / "out.jsonl", 8, False,
    )  # fmt: skip
    assert settings == {
        "model": hashlib.sha256(b"the origin").hexdigest(), "tokenizer": str((tmp_path / "t").resolve()),
        "max_new_tokens": 256, "temperature": None, "top_p": None, "seed": 0, "further": {"given": []},
        "dtype": None, "system": None, "tools": None, "raw": False,
    }  # fmt: skip
    assert [one for one in happened if one[0] == "length"] == [
        ("length", ["a"], 256, f"{tmp_path / 'prompts.jsonl'}:1"),
        ("length", ["b", "c"], 256, f"{tmp_path / 'prompts.jsonl'}:2"),
    ]
    # Whether the output can be written is checked before the model is loaded.
    assert [one if isinstance(one, str) else one[0] for one in happened][2:5] == ["job", "checked", "model"]
    assert happened[-1] == ("run", True, [["a"], ["b", "c"]])
    happened, _ = generated(*words, "--batch", "3", "--overwrite", "--raw")
    (_, _, _, batch, overwrite, settings) = next(one for one in happened if one[0] == "job")
    assert (batch, overwrite, settings["raw"], settings["tokenizer"]) == (3, True, True, None)


def test_generate_talks_if_the_model_has_a_template(generated: Generated, tmp_path: Path) -> None:
    happened, result = generated("--chat", "--system", "be kind")
    assert result.exit_code == 0, result.exception
    decoding = language_model.Decoding(256, None, None, 0, {"given": []})
    assert happened[2:] == [
        ("model", tmp_path, tmp_path, "the adapter", "device auto", None),
        ("chat", True, decoding, None, "be kind", generate.say),
    ]
    _, result = generated("--chat", template=False)
    assert str(result.exception) == "--chat: there has no chat template; continue a text instead: --prompt TEXT"


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

        def running(env: Any, environ: object, interrupts: object) -> Running:
            assert (env.launcher, environ is os.environ, type(interrupts)) == (None, True, Interrupts)
            return Running()

        monkeypatch.setattr(
            module, "process_of_launcher", lambda _environ, alone: SimpleNamespace(launcher=launcher, alone=alone)
        )
        monkeypatch.setattr(module, "for_processes", processes)
        monkeypatch.setattr(module, "launch", launch)
        monkeypatch.setattr(module, "running", running)
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


def test_a_model_and_its_other_are_found_with_the_options_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def find(target: str, request: Request, registry: str) -> Any:
        asked.append((target, request, registry))
        return SimpleNamespace(job=f"job of {target}")

    def measured(process: object, _interrupts: object, load: Any, limit: int) -> None:
        asked.append((process, load(5), limit))

    for name, value in {
        "find_subject": find, "same_data": lambda other, first: (other.job, first.job), "_evaluate": measured,
        "policy_of": lambda *given: ("policy", *given), "discover_plugins": lambda *given: ("plugins", *given),
        "process_of_launcher": lambda *_: SimpleNamespace(launcher=None), "running": lambda *_: nullcontext("process"),
    }.items():  # fmt: skip
        monkeypatch.setattr(evaluate, name, value)
    options = [
        "m", "--data", "a", "--data", "b", "--like", "j", "--checkpoint", "best", "--set", "x=1", "--plugin", "p",
        "--strict-plugins", "--limit", "3", "--compare", "other",
    ]  # fmt: skip
    assert CliRunner().invoke(evaluate.app, options, catch_exceptions=False).exit_code == 0
    policy: Any = ("policy", [Path("p")], False, True)
    plugins = ("plugins", [Path("p")], False, True)
    first, second, (process, (found, other), limit) = asked
    assert first == ("m", Request([Path("a"), Path("b")], Path("j"), "best", ["x=1"], policy, 5), plugins)
    like: Any = "job of m"
    assert second == ("other", Request(like=like, policy=policy, world_size=5), plugins)
    assert (process, found.job, other, limit) == ("process", "job of m", ("job of other", "job of m"), 3)


@pytest.mark.parametrize(
    ("module", "said"),
    [(infer, "stopped during start-up; nothing was computed"), (evaluate, "stopped; nothing was measured")],
)
def test_a_command_that_is_stopped_says_so(module: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object) -> None:
        raise Terminated("SIGTERM")

    monkeypatch.setattr(module, "process_of_launcher", stopped)
    result = CliRunner().invoke(module.app, ["job.yaml"])
    assert (result.exit_code, result.stdout, result.stderr) == (STOPPED, "", f"SIGTERM: {said}\n")


@pytest.mark.parametrize(
    ("launcher", "rank", "repeats", "notes"), [(None, 0, False, ["a note"]), ("d9d", 0, True, []), ("d9d", 1, True, [])]
)
def test_a_process_evaluates_and_the_main_one_has_the_report(
    launcher: str | None, rank: int, repeats: bool, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[Any] = []
    topology = SimpleNamespace(is_main=rank == 0)

    @contextmanager
    def joined(env: Any, reporter: object) -> Iterator[Any]:
        happened.append(("joined", env.rank, reporter))
        yield topology

    @contextmanager
    def start_up(*given: object) -> Iterator[None]:
        happened.append(("start-up", *given))
        yield

    def subject(name: str) -> Any:
        job = SimpleNamespace(check=lambda size: happened.append((name, size)), joined=joined, mesh=Mesh(dp_shard=2))
        return SimpleNamespace(job=job, note="a note", name=name)

    def measure(first: Any, given: object, note: object, limit: object, other: Any) -> str:
        assert given is topology
        happened.append((first.name, note, limit, other.name))
        return "report"

    said: list[str] = []
    monkeypatch.setattr(evaluate, "start_up", start_up)
    monkeypatch.setattr(evaluate, "say", said.append)
    monkeypatch.setattr(compose, "evaluate", measure)
    process: Any = SimpleNamespace(
        env=SimpleNamespace(launcher=launcher, rank=rank, world_size=2), repeats=repeats, reporter=lambda who: who
    )
    interrupts = SimpleNamespace(raised=nullcontext)
    asked: list[Any] = []

    def load(size: int | None) -> Any:
        asked.append(size)
        return subject("first"), subject("other")

    found = evaluate._evaluate(process, cast("Any", interrupts), load, 9)
    assert (found, asked, said) == (None if rank else "report", [2], notes)
    reporter = None if launcher is None else f"rank {rank} (dp_shard={rank})"
    assert happened == [
        ("start-up", interrupts, launcher is None), ("first", 2), ("start-up",), ("joined", rank, reporter),
        ("first", evaluate.silent if rank else said.append, 9, "other"),
    ]  # fmt: skip


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
