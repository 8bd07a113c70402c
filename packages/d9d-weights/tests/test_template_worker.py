"""Worker of templates in this process: facts about templates, answers, and limits that it sets on its process."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest
from d9d_weights.templates import process, worker
from d9d_weights.templates.process import TemplateError, TemplateProcess


def templates(now: str | None = None, **texts: str) -> worker._Templates:
    return worker._Templates({"now": now, "steps": 1000, "texts": texts})


def test_facts_tell_which_templates_read_the_date_and_which_have_generation_blocks() -> None:
    plain = templates(a="{% set strftime_now = 1 %}x", b="{% generation %}x{% endgeneration %}")
    assert (plain.malformed, plain.dated, plain.marked) == (None, False, {"a": False, "b": True})
    macro = "{% macro f() %}{{ caller() }}{% endmacro %}{% call f() %}x{% endcall %}"
    dated = templates("2024-03-05T07:09:00", a="{{ strftime_now('%d %H') }}", b=macro)
    assert (dated.malformed, dated.dated, dated.marked) == (None, True, {"a": False, "b": False})
    assert dated.render("a", {})["text"] == "05 07"


def test_an_answer_has_the_text_and_the_places_of_blocks_that_are_not_empty() -> None:
    block = "ab{% generation %}{{ x }}{% endgeneration %}c{% generation %}de{% endgeneration %}"
    made = templates(a=block, b="{% set y %}{% generation %}a{% endgeneration %}{% endset %}b{{ y }}")
    assert made.render("a", {"x": "xyz"}) == {"text": "abxyzcde", "marks": [(2, 5), (6, 8)], "misplaced": False}
    assert made.render("a", {"x": ""}) == {"text": "abcde", "marks": [(3, 5)], "misplaced": False}
    assert made.render("b", {}) == {"text": "ba", "marks": [(0, 1)], "misplaced": True}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{{ raise_exception('') }}", "TemplateError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "it recurses without end"),
        ("{{ 1 // 0 }}", "ZeroDivisionError: integer division or modulo by zero"),
        ("{{ f() }}", "ValueError: " + "x" * 1000),
        (
            "{% for x in range(1000) %}{% endfor %}",
            "the template takes more than 1,000 steps (loop iterations, calls and pieces of output)",
        ),
    ],
)
def test_an_error_of_a_template_is_its_answer(text: str, error: str) -> None:
    def fail() -> None:
        raise ValueError("x" * 1001)

    assert templates(a=text).render("a", {"f": fail}) == {"error": error}


def test_memory_that_runs_out_is_left_to_the_caller() -> None:
    def fail() -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        templates(a="{{ f() }}").render("a", {"f": fail})


@pytest.mark.parametrize(
    ("text", "line", "cause"),
    [
        ("\n{% if x %}", 2, "Unexpected end of template"),
        ("{% for a in x %}" * 25 + "{% endfor %}" * 25, None, "too many statically nested blocks"),
        ("{{ " + "(" * 3000 + ")" * 3000 + " }}", None, "it is nested too deeply or has an invalid literal ("),
        ("{{ " + "1" * 5000 + " }}", None, "it is nested too deeply or has an invalid literal (Exceeds the limit"),
    ],
)
def test_the_first_malformed_template_is_told_with_its_line(text: str, line: int | None, cause: str) -> None:
    made = templates(good="x", bad=text, later="{% if %}")
    assert made.malformed is not None
    key, found, message = made.malformed
    assert key == "bad"
    if line is not None:
        assert found == line
    assert message.startswith(cause)
    assert made.marked.get("good") is False
    assert "later" not in made.marked


class Process:
    """This process in the place of a worker's: records limits instead of setting them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *requests: object) -> None:
        import resource

        self.did: list[tuple[Any, ...]] = []
        self.output = io.BytesIO()
        lines = io.BytesIO(b"".join(json.dumps(request).encode() + b"\n" for request in requests))
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=lines))
        monkeypatch.setattr(sys, "stdout", SimpleNamespace(buffer=self.output))
        monkeypatch.setattr(signal, "signal", lambda *given: self.did.append(("signal", *given)))
        monkeypatch.setattr(signal, "setitimer", lambda *given: self.did.append(("timer", *given)))
        monkeypatch.setattr(resource, "setrlimit", self._limit)

    def _limit(self, kind: int, limits: tuple[int, int]) -> None:
        self.did.append(("limit", kind, limits))
        raise ValueError("a lower limit is in force")

    def answers(self) -> list[Any]:
        return [json.loads(line) for line in self.output.getvalue().splitlines()]


FIRST = {"texts": {"a": "{{ x }}!"}, "now": None, "steps": 100, "seconds": 2.5, "memory": 1 << 20}


def test_a_worker_limits_its_process_and_answers_each_request_in_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    there = Process(monkeypatch, FIRST, {"key": "a", "variables": {"x": 1}}, {"key": "a", "variables": {"x": "é"}})
    worker.main()
    assert there.did == [
        ("signal", signal.SIGINT, signal.SIG_IGN),
        ("limit", resource.RLIMIT_AS, (1 << 20, 1 << 20)),
        ("limit", resource.RLIMIT_CORE, (0, 0)),
        ("limit", resource.RLIMIT_FSIZE, (0, 0)),
        *[("timer", signal.ITIMER_PROF, 2.5), ("timer", signal.ITIMER_PROF, 0)] * 3,
    ]
    assert there.answers() == [
        {"malformed": None, "dated": False, "marked": {"a": False}},
        {"text": "1!", "marks": [], "misplaced": False},
        {"text": "é!", "marks": [], "misplaced": False},
    ]


def test_a_worker_without_requests_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Process(monkeypatch)
    worker.main()
    assert there.did == [("signal", signal.SIGINT, signal.SIG_IGN)]
    assert there.answers() == []


def test_a_worker_ends_after_its_memory_ran_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def render(_self: object, _key: str, _variables: object) -> None:
        raise MemoryError

    monkeypatch.setattr(worker._Templates, "render", render)
    there = Process(monkeypatch, FIRST, *[{"key": "a", "variables": {}}] * 2)
    worker.main()
    assert there.answers()[1:] == [{"error": "it exceeds the memory limit of templates", "ended": True}]


def test_values_that_json_does_not_have_are_refused_before_they_are_sent() -> None:
    made = TemplateProcess({"default": "x"})
    circular: list[Any] = []
    circular.append(circular)
    with pytest.raises(
        TemplateError, match="^the record's values cannot be passed to the template: Circular reference"
    ):
        made.render("default", {"x": circular})
    assert made.render("default", {}).text == "x"
    assert made._reason(None, True) == "the template renders more than 134,217,728 bytes"
    assert made._reason(-signal.SIGPROF, False) == "the template takes more than 10 seconds"
    memory = "the template's process ended with status -9, perhaps for lack of memory (536,870,912 bytes)"
    assert made._reason(-9, False) == memory


def test_a_process_that_closed_its_output_has_a_second_to_end() -> None:
    waited: list[float] = []

    def wait(seconds: float) -> int:
        waited.append(seconds)
        if len(waited) == 1:
            return 7
        raise subprocess.TimeoutExpired("x", seconds)

    child = cast("subprocess.Popen[bytes]", SimpleNamespace(wait=wait))
    assert (process._status(child), process._status(child), waited) == (7, None, [1, 1])


def test_the_date_matters_unless_it_is_given() -> None:
    from datetime import datetime

    text = {"default": "{{ strftime_now('%Y') }}", "marked": "{% generation %}{% endgeneration %}"}
    assert TemplateProcess(text).depends_on_date
    fixed = TemplateProcess(text, datetime(1999, 1, 2))
    assert not fixed.depends_on_date
    assert fixed.marked == {"default": False, "marked": True}
    assert fixed.render("default", {}).text == "1999"
