"""Exceptions that nothing catches are printed without characters that control a terminal."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
from d9d_core.terminal.tracebacks import make_tracebacks_visible
from d9d_core.untrusted import visible

CONTROLS = "\x1b]0;x\x07\x9b31m\u202e"
#: Where an exception comes from that nothing catches -> the code that raises it.
RAISED = {
    "the main thread": "fail()",
    "a thread": "import threading; one = threading.Thread(target=fail, name=CONTROLS); one.start(); one.join()",
    "a destructor": "Odd = type(CONTROLS, (), {'__del__': lambda _: fail()}); Odd()",
}


@pytest.mark.parametrize("code", RAISED.values(), ids=RAISED)
def test_a_traceback_controls_no_terminal(code: str) -> None:
    source = f"""
from d9d_core.terminal.tracebacks import make_tracebacks_visible
CONTROLS = {CONTROLS!r}
def fail():
    error = type(CONTROLS, (ValueError,), {{}})(CONTROLS)
    error.add_note("a note " + CONTROLS)
    exec(compile("raise error", "a file " + CONTROLS, "exec"), {{"error": error}})
make_tracebacks_visible()
{code}
"""
    ended = subprocess.run([sys.executable, "-c", source], capture_output=True, check=False)
    said = ended.stderr.decode()
    assert visible(said) == said
    shown = visible(CONTROLS)
    assert f'File "a file {shown}", line 1' in said
    assert f"{shown}: {shown}\na note {shown}\n" in said


def test_a_thread_that_ends_by_itself_says_nothing() -> None:
    source = (
        "import sys, threading\nfrom d9d_core.terminal.tracebacks import make_tracebacks_visible\n"
        "make_tracebacks_visible()\none = threading.Thread(target=sys.exit)\none.start()\none.join()"
    )
    ended = subprocess.run([sys.executable, "-c", source], capture_output=True, check=True)
    assert not ended.stderr


def test_the_hook_of_another_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def hook(*_: object) -> None:
        pass

    for module, name in ((sys, "excepthook"), (sys, "unraisablehook"), (threading, "excepthook")):
        monkeypatch.setattr(module, name, hook)
    make_tracebacks_visible()
    assert {sys.excepthook, sys.unraisablehook, threading.excepthook} == {hook}
