"""Plugins whose declarations raise, print, hang or exit: named, left out, and no harm to anything else."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from d9d_core.cli.main import main
from d9d_core.containment import exits_raised
from d9d_core.errors import PluginError, TrainingError
from d9d_core.failures import exits_are_errors
from d9d_core.registry.collect import RefusedError, contained
from d9d_core.registry.loader import discover
from d9d_core.registry.policy import PluginPolicy
from d9d_core.registry.registry import Registry

HEADER = "from d9d_core.plugin import *\nD9D_API = 2\n"
#: The process must survive: a fault would end it, or hang forever.
HOOK = "@hookimpl\ndef d9d_tasks():\n    {}\n    yield\n"


def problem(directory: Path, code: str) -> str:
    """Text about a plugin of this code."""
    path = directory / "hostile.py"
    path.write_text(HEADER + code)
    with pytest.raises(PluginError) as caught:
        discover(PluginPolicy(autoload=False, files=(path,)))
    assert str(caught.value).startswith(f"{path} ")
    return str(caught.value).removeprefix(f"{path} ")


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("raise KeyboardInterrupt", "failed to declare its records: KeyboardInterrupt()"),
        ("raise GeneratorExit", "failed to declare its records: GeneratorExit()"),
        ("class Odd(BaseException): ...\nraise Odd('no')", "failed to declare its records: Odd('no')"),
        (
            "del D9D_API\ndef __getattr__(name): raise RuntimeError(name)",
            "failed to declare its records: RuntimeError(",
        ),
        ("del D9D_API\ndef __getattr__(name): raise SystemExit(0)", "failed to declare its records: SystemExit(0)"),
        (HOOK.format("raise KeyboardInterrupt"), "failed to declare its records: KeyboardInterrupt()"),
        ("import os; os._exit(0)", "failed to import: SystemExit('os._exit(0)')"),
        (HOOK.format("import os; os._exit(3)"), "failed in d9d_tasks: SystemExit('os._exit(3)')"),
        ("def f(): f()\nf()", "failed to import: RecursionError("),
        ("D9D_API = '1'", "states D9D_API = '1', not an integer; write D9D_API = 2"),
        ("D9D_API = True", "states D9D_API = True, not an integer; write D9D_API = 2"),
        ("D9D_API = [1]", "states D9D_API = [1], not an integer; write D9D_API = 2"),
        ("raise ValueError('x' * 1_000_000)", "(1,000,014 characters)"),
        (r"raise ValueError('\ud800')", r"failed to import: ValueError('\ud800')"),
        (
            "class Mute(Exception):\n    def __repr__(self): return 1 / 0\nraise Mute",
            "failed to import: <Mute whose repr() raises ZeroDivisionError>",
        ),
    ],
)
def test_whatever_a_declaration_raises_is_a_problem_of_its_plugin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, text: str
) -> None:
    def guard(status: int) -> None:  # a real exit would end pytest, with status 0
        raise AssertionError(f"os._exit({status}) was not contained")

    monkeypatch.setattr(os, "_exit", guard)
    found = problem(tmp_path, code)
    assert text in found
    assert len(found) < 700
    assert os._exit is guard


def test_no_thread_of_a_plugin_ends_the_process_as_if_all_had_gone_well(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    raised: list[str] = []
    monkeypatch.setattr("d9d_core.containment._leave", left.append)

    def leave() -> None:
        for status in (0, 3):
            try:
                os._exit(status)
            except SystemExit as error:
                raised.append(str(error))

    with exits_raised():
        thread = threading.Thread(target=leave)
        thread.start()
        thread.join()
    assert (raised, left) == (["os._exit(0)"], [3])


@pytest.mark.thorough
@pytest.mark.parametrize("code", ["while True: pass", HOOK.format("while True: pass")])
def test_a_declaration_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.setenv("D9D_PLUGIN_SECONDS", "1")  # as long again to get out of it, else the process is killed
    assert "takes longer than 1 s (the environment variable D9D_PLUGIN_SECONDS sets this limit)" in problem(
        tmp_path, code
    )


@pytest.mark.parametrize("seconds", ["2m", "-1", "inf", "nan"])
def test_a_limit_that_is_none_is_no_fault_of_a_plugin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: str
) -> None:
    monkeypatch.setenv("D9D_PLUGIN_SECONDS", seconds)
    path = tmp_path / "plugin.py"
    path.write_text(HEADER)
    with pytest.raises(PluginError, match=f"^the environment variable D9D_PLUGIN_SECONDS is '{seconds}'; make it a"):
        discover(PluginPolicy(autoload=False, files=(path,)))


def test_0_is_no_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("D9D_PLUGIN_SECONDS", "0")
    assert "ValueError('late')" in problem(tmp_path, "import time\ntime.sleep(0.1)\nraise ValueError('late')")


@pytest.mark.thorough
def test_a_declaration_that_catches_its_end_ends_the_process_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "hostile.py"
    path.write_text(
        "import time\nwhile True:\n    try:\n        time.sleep(60)\n    except BaseException:\n        time.sleep(0)\n"
    )
    command = [sys.executable, "-m", "d9d_core", "plugins", "list", "--no-plugins", "--plugin", str(path)]
    environment = {**os.environ, "D9D_PLUGIN_SECONDS": "0.2"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert f"error: {path} takes longer than 0.2 s" in done.stderr
    assert "cannot be interrupted" in done.stderr


def test_the_end_of_a_child_process_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "forks.py"
    path.write_text(
        HEADER + "import os\nchild = os.fork()\nif not child: os._exit(0)\nassert os.waitpid(child, 0)[1] == 0\n"
    )
    assert isinstance(discover(PluginPolicy(autoload=False, files=(path,))), Registry)


def test_what_wants_to_end_the_process_is_named_as_the_plugin_that_was_called(
    install: Callable[..., None], site: Path
) -> None:
    install("acme-quits", "1.0", "def leave():\n    import acme_library\n    acme_library.fail()\n")
    (site / "acme_library.py").write_text("def fail():\n    raise SystemExit(3)\n")
    plugin = importlib.import_module("acme_quits_plugin")
    with pytest.raises(TrainingError, match="raised SystemExit") as caught, exits_are_errors():
        plugin.leave()
    assert re.match(r"acme-quits 1\.0 \(.*/acme_quits_plugin\.py:\d+, in leave\) ", str(caught.value))


def test_what_d9d_raises_to_end_the_process_is_no_plugins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["d9d", "plugins", "check", "no-such-plugin"])
    with pytest.raises(SystemExit), exits_are_errors():
        main()
    assert "no plugin 'no-such-plugin'" in capsys.readouterr().err


SHOWS = ["list", "check", "show x"]


@pytest.mark.thorough
@pytest.mark.parametrize("words", [*(f"plugins {show} --json" for show in SHOWS), "schema"])
def test_what_a_plugin_prints_spoils_no_json(
    install: Callable[..., None],
    site: Path,
    words: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from d9d_core.cli.main import main

    (site / "acme_config.py").write_text(
        "from typing import Literal\nfrom d9d_core.config import PluginConfig\nprint('{config')\n"
        "class Config(PluginConfig):\n    name: Literal['x'] = 'x'\n"
    )
    target = "Ref('acme_config:Config')"
    install(
        "acme-moe", "9.9",
        "print('{declaration')\n@hookimpl\ndef d9d_strategies():\n"
        f"    yield StrategySpec(name='x', summary='X', config={target}, build={target}, anchor='data')\n",
    )  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["d9d", *words.split()])
    monkeypatch.setenv("D9D_PLUGINS", "acme-moe")
    with pytest.raises(SystemExit) as end:
        main()
    out, err = capfd.readouterr()
    assert end.value.code in (0, None)
    assert json.loads(out)
    assert "{declaration" in err


def test_an_interrupt_before_the_handler_is_there_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def interrupted(*_: object) -> Iterator[None]:
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr("d9d_core.registry.collect._limited", interrupted)
    with pytest.raises(KeyboardInterrupt), contained("a plugin"):
        pass
    monkeypatch.undo()
    with pytest.raises(RefusedError, match=r"failed to declare its records: KeyboardInterrupt\(\)"), contained("it"):
        raise KeyboardInterrupt  # of the plugin itself
