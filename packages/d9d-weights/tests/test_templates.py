"""Templates that were made to fill memory or to compute for ever: each ends soon, in a process of its own."""

from __future__ import annotations

import io
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
from d9d_testing.hostile.templates import ATTACKS
from d9d_weights.templates import worker
from d9d_weights.templates.process import TemplateError, TemplateLimits, TemplateProcess

MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
LIMITS = TemplateLimits(steps=1 << 20, seconds=0.3)


@pytest.mark.thorough
@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_ends_soon_and_takes_no_memory_here(attack: str) -> None:
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    with pytest.raises(TemplateError):
        TemplateProcess({"default": ATTACKS[attack]}, limits=LIMITS).render("default", {"messages": MESSAGES})
    assert time.monotonic() - began < 15
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 18, "256 MiB, in KiB"


def test_the_process_that_renders_has_a_limit_of_memory_and_imports_no_torch() -> None:
    made = TemplateProcess({"default": "{{ 'a' }}"})
    assert made._child is not None
    text = Path(f"/proc/{made._child.pid}/limits").read_text()
    assert f"{TemplateLimits().memory}" in next(line for line in text.splitlines() if "address space" in line)
    maps = Path(f"/proc/{made._child.pid}/maps").read_text()
    assert "torch" not in maps
    status = Path(f"/proc/{made._child.pid}/status").read_text()
    resident = int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])
    assert resident < 64 << 10, "KiB"


@pytest.mark.thorough
def test_a_process_that_was_ended_is_started_anew() -> None:
    text = "{% if messages | length > 2 %}{{ ([[0]] * 1000000) | sum(start=[]) | length }}{% endif %}done"
    made = TemplateProcess({"default": text}, limits=LIMITS)
    for _ in range(2):
        with pytest.raises(TemplateError, match=r"more than 0\.3 seconds"):
            made.render("default", {"messages": MESSAGES * 2})
        assert made.render("default", {"messages": MESSAGES}).text == "done"


@pytest.mark.thorough
def test_a_template_that_exceeds_its_limits_again_and_again_is_not_tried_any_more() -> None:
    made = TemplateProcess({"default": ATTACKS["sum of squares of time"]}, limits=LIMITS)
    for _ in range(3):
        with pytest.raises(TemplateError, match="seconds"):
            made.render("default", {})
    began = time.monotonic()
    with pytest.raises(TemplateError, match="3 times in a row"):
        made.render("default", {})
    assert time.monotonic() - began < 0.1


@pytest.mark.thorough
def test_the_process_ends_with_the_one_that_made_it_even_if_that_is_killed() -> None:
    code = (
        "import os, sys\nfrom d9d_weights.templates.process import TemplateProcess\n"
        "made = TemplateProcess({'default': 'x'})\nprint(made._child.pid, flush=True)\nos.kill(os.getpid(), 9)"
    )
    made = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=False)
    pid = int(made.stdout)
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists():
            return
        time.sleep(0.05)
    raise AssertionError("it still runs")


def test_the_process_ends_with_its_object() -> None:
    made = TemplateProcess({"default": "x"})
    assert made._child is not None
    pid = made._child.pid
    del made
    assert not Path(f"/proc/{pid}").exists()


def test_a_copy_of_a_process_renders_by_a_process_of_its_own() -> None:
    made = TemplateProcess({"default": "{{ x }}"})
    child = os.fork()
    if not child:
        status = 1
        try:
            status = int(made.render("default", {"x": "copy"}).text != "copy")
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert made.render("default", {"x": "first"}).text == "first"


def test_texts_and_values_arrive_as_they_are() -> None:
    made = TemplateProcess({"default": "{{ x }}|{{ y }}|{{ z is none }}|{{ t }}"})
    values = {"x": 'a\n"\u2028\ud800é\x00', "y": [1.5, True, {"a": None}], "z": None, "t": Path("a")}
    assert made.render("default", values).text == f"{values['x']}|[1.5, True, {{'a': None}}]|True|a"


def test_modules_of_the_working_directory_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("typing", "json", "jinja2", "d9d_weights"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    assert TemplateProcess({"default": "{{ 1 }}"}).render("default", {}).text == "1"
    assert not (tmp_path / "canary").exists()


def test_a_malformed_template_names_its_line() -> None:
    with pytest.raises(TemplateError, match="Unexpected end of template") as caught:
        TemplateProcess({"default": "x", "tool_use": "\n{% if x %}"})
    assert (caught.value.key, caught.value.line) == ("tool_use", 2)


def test_requests_and_answers_are_lines_of_json_with_any_text() -> None:
    stream = io.BytesIO()
    answer = {"text": "a\nb\u00e9\ud800", "marks": [[0, 1]]}
    worker._write(stream, answer)
    worker._write(stream, [])
    assert stream.getvalue().count(b"\n") == 2
    stream.seek(0)
    assert [worker._read(stream) for _ in range(3)] == [answer, [], None]
