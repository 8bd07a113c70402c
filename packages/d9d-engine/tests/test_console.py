"""Console output of a run: one stream, short lines, true values, and a word when it is interrupted."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import d9d_testing.toy.plugin as toy
import pytest
from d9d_core.tracker import RunInfo
from d9d_engine.job import Job
from d9d_engine.run.progress import ProgressBar
from d9d_engine.trackers.config import ConsoleConfig
from d9d_engine.trackers.console import ConsoleTracker
from d9d_testing.toy.runs import quiet

MOE = {
    "loss": 7.141,
    "grad_norm": 1.309,
    "loss/cross_entropy": 7.087,
    "loss/router_balance": 5.46,
    "perplexity": 1305.0,
    "router/entropy": 2.635,
    "router/max_violation": 2.537,
    "router/mean_violation": 1.816,
    "tokens": 8192.0,
    "lr": 2e-4,
    "tokens_per_second": 8658.0,
}


def printed(capsys: pytest.CaptureFixture[str], *written: dict[str, float], **settings: Any) -> list[str]:
    run = ConsoleTracker(ConsoleConfig(**settings)).open(RunInfo("test", Path(), "", {}, 300, 0), None)
    for step, values in enumerate(written):
        run.write(step + 1, values)
    captured = capsys.readouterr()
    assert not captured.err
    return captured.out.splitlines()


def test_a_line_of_a_model_with_experts_is_short_and_what_it_leaves_out_is_said_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, hint, second = printed(capsys, MOE, MOE)
    assert first == "step   1/300  loss 7.141  grad_norm 1.309  perplexity 1,305  lr 2.00e-04  8,658 tokens/s"
    assert second == first.replace("  1/", "  2/")
    assert "loss/cross_entropy, loss/router_balance, router/entropy" in hint
    assert "{name: console, series: ['*']}" in hint


def test_the_series_of_a_line_may_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, MOE, MOE, series=["loss*", "tokens"])[1] == (
        "step   2/300  loss 7.141  loss/cross_entropy 7.087  loss/router_balance 5.46  tokens 8,192"
    )
    assert all(name in printed(capsys, MOE, series=["*"])[0] for name in MOE if name != "tokens_per_second")


def test_an_evaluation_is_shown_and_a_line_without_anything_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, {"eval/loss": 1.5}) == ["step   1/300  eval/loss 1.5"]
    assert printed(capsys, {"eval/loss": 1.5}, series=["loss"]) == []


def test_a_line_is_broken_between_series_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr("builtins.print", lambda text, **_: lines.extend(text.split("\n")))
    monkeypatch.setattr("sys.stdout", SimpleNamespace(isatty=lambda: True))
    run = ConsoleTracker(ConsoleConfig()).open(RunInfo("test", Path(), "", {}, 300, 0), None)
    for columns in ("80", "120"):
        monkeypatch.setenv("COLUMNS", columns)
        run.write(1, {"loss": 7.1, "grad_norm": 1.3, "perplexity": 1305.0, "lr": 2e-4, "tokens_per_second": 8658.0})
    assert lines == [
        "step   1/300  loss 7.1  grad_norm 1.3  perplexity 1,305  lr 2.00e-04",
        "              8,658 tokens/s",
        "step   1/300  loss 7.1  grad_norm 1.3  perplexity 1,305  lr 2.00e-04  8,658 tokens/s",
    ]


def test_the_bar_shows_the_learning_rate_of_the_step_whose_loss_it_shows() -> None:
    bar = ProgressBar(10, 0, shown=False)
    bar.logged({"tokens_per_second": 5.0})
    bar.issued(1, lr=0.1)
    bar.issued(2, lr=0.2)
    bar.update(1, 4.0)
    assert bar.text == "loss 4.000  lr 1.0e-01  5 tokens/s"
    bar.update(2, 3.0)
    assert bar.text == "loss 3.000  lr 2.0e-01  5 tokens/s"


@pytest.mark.thorough
def test_the_loop_tells_the_bar_every_steps_learning_rate(
    job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []

    def update(self: ProgressBar, step: int, loss: float) -> None:
        original(self, step, loss)
        shown.append(self.text.split("  ")[1])

    original = ProgressBar.update
    monkeypatch.setattr(ProgressBar, "update", update)
    trainer = quiet(job("steps=4", "logging.every=100"))
    trainer.step.lr_schedule = lambda step: 1 / (step + 1)
    trainer.train()
    assert shown == ["lr 5.0e-02", "lr 2.5e-02", "lr 1.7e-02", "lr 1.3e-02"]


def test_the_loop_tells_the_bar_of_checkpoints_and_of_what_is_logged(
    job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[int] = []
    logged: dict[str, float] = {}
    monkeypatch.setattr(ProgressBar, "saved", lambda _, step: saved.append(step))
    monkeypatch.setattr(ProgressBar, "logged", lambda _, values: logged.update(values))
    quiet(job("steps=4", "checkpoint.every=2", "logging.every=2")).train()
    assert saved == [2, 4]
    assert {"loss", "tokens_per_second"} <= logged.keys()


def test_the_loop_names_evaluations_saves_and_exports_with_their_bytes(
    job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    named: list[str] = []
    told: list[tuple[str, int, int]] = []

    @contextmanager
    def doing(_: ProgressBar, what: str) -> Iterator[None]:
        named.append(what)
        yield

    monkeypatch.setattr(ProgressBar, "told", lambda _, *given: told.append(given))
    monkeypatch.setattr(ProgressBar, "doing", doing)
    evaluation = {"every": 2, "packs": 1, "data": "toy_data"}
    quiet(job("steps=2", "checkpoint.every=2", "export=true", evaluation=evaluation)).train()
    assert [name for name, _ in groupby(named)] == ["evaluating", "saving", "exporting"]
    assert [name for name, _ in groupby(told, lambda one: one[0])] == ["saving", "exporting"]
    for _, amounts in groupby(told, lambda one: one[0]):
        _, done, total = list(amounts)[-1]
        assert done == total > 0


def test_notes_and_steps_share_a_stream(job: Callable[..., Job], capsys: pytest.CaptureFixture[str]) -> None:
    job("logging.every=2").build().train()
    captured = capsys.readouterr()
    starts = [line.split()[0].rstrip(":") for line in captured.out.splitlines()]
    assert captured.err == ""
    assert starts[:3] == ["data", "model", "step"]
    assert starts.index("checkpoint") < len(starts) - 1 - starts[::-1].index("step")


def interrupted(tmp_path: Path, where: str) -> subprocess.CompletedProcess[str]:
    """`d9d train`, which gets SIGINT in a method of a component."""
    (tmp_path / "job.yaml").write_text(
        f"run: {{name: toy, dir: {tmp_path}/runs}}\nsteps: 3\ndevice: cpu\nmodel: toy_model\ndata: toy_data\n"
        "task: toy_task\noptimizer: toy_optimizer\n"
    )
    code = (
        "import signal\n"
        "from d9d_core.cli.main import main\n"
        "from d9d_testing.toy.optimizer import ToyOptimizer\n"
        f"original = ToyOptimizer.{where}\n"
        "def strike(self, *a, **k):\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "    return original(self, *a, **k)\n"
        f"ToyOptimizer.{where} = strike\n"
        "main()\n"
    )
    command = [sys.executable, "-c", code, "train", "job.yaml", "--no-plugins", "--plugin", toy.__file__]
    return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)


@pytest.mark.full
def test_ctrl_c_during_start_up_says_so(tmp_path: Path) -> None:
    result = interrupted(tmp_path, "init_state")
    assert result.returncode == 130
    assert result.stderr == "interrupted: during start-up; nothing was trained\n"


@pytest.mark.full
def test_a_second_ctrl_c_says_what_it_costs(tmp_path: Path) -> None:
    result = interrupted(tmp_path, "step")
    assert result.returncode == 130
    assert (
        result.stderr
        == "interrupted: Ctrl-C while stopping: ended at once; steps after the newest checkpoint are lost\n"
    )


def test_a_description_is_printed_first_and_each_line_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[Any] = []
    monkeypatch.setattr("builtins.print", lambda *given, **more: lines.append((*given, more)))
    run = ConsoleTracker(ConsoleConfig()).open(RunInfo("test", Path(), "the purpose", {}, 300, 0), None)
    run.write(7, {"loss": 999.96, "a": 1000.4, "b": -1000.0, "lr": 2e-4, "tokens_per_second": 1234.0, "tokens": 8.0})
    assert lines == [
        ("test: the purpose", {"flush": True}),
        ("step   7/300  loss 1000  a 1,000  b -1,000  lr 2.00e-04  1,234 tokens/s", {"flush": True}),
    ]
