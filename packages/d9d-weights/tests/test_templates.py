"""Templates that were made to fill memory or to compute for ever: each ends soon, in a process of its own."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
from d9d_weights import TemplateError, TemplateLimits, TemplateProcess

MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
LIMITS = TemplateLimits(steps=1 << 20, seconds=0.3)


def grown(change: str, times: int = 60, first: str = "['a']") -> str:
    """Start of a template that changes ``ns.s`` again and again."""
    begin = f"{{% set ns = namespace(s={first}) %}}{{% for i in range({times}) %}}"
    return f"{begin}{{% set ns.s = {change} %}}{{% endfor %}}"


def doubled(macro: str, call: str, times: int) -> str:
    """Template whose macro renders its body twice, in calls inside each other."""
    return f"{{% macro m() %}}{macro}{{% endmacro %}}" + "{% call m() %}" * times + call + "{% endcall %}" * times


#: Lists that share their items: 2 ** 60 leaves for whatever walks over all of them.
NESTED = grown("[ns.s, ns.s]")
OTHER = NESTED.replace("ns.s", "other.s").replace("set ns =", "set other =")
#: A text of 16 million characters, which is the longest that the sandbox's own bounds allow.
LONG = "{% set long = 'ab ' * 5592405 %}"
ATTACKS = {
    "nested lists as JSON": NESTED + "{{ ns.s | tojson }}",
    "nested lists compared": NESTED + OTHER + "{{ ns.s == other.s }}",
    "nested lists ordered": NESTED + OTHER + "{{ ns.s < other.s }}",
    "nested lists as text": NESTED + "{{ ns.s }}",
    "nested lists joined": NESTED + "{{ ns.s | join(',') }}",
    "nested lists concatenated": NESTED + "{{ 'a' ~ ns.s }}",
    "nested lists formatted": NESTED + "{{ '%s' % ns.s }}",
    "nested lists formatted by a method": NESTED + "{{ '{}'.format(ns.s) }}",
    "nested lists searched": NESTED + OTHER + "{{ 'b' in [ns.s] or other.s in [ns.s] }}",
    "nested lists pretty-printed": NESTED + "{{ ns.s | pprint }}",
    "nested lists as a string": NESTED + "{{ ns.s | string }}",
    "nested lists escaped": NESTED + "{{ ns.s | escape }}",
    "nested lists sorted": NESTED + OTHER + "{{ [ns.s, other.s] | sort }}",
    "nested lists made unique": NESTED + OTHER + "{{ [ns.s, other.s] | unique | list }}",
    "nested lists grouped": NESTED + OTHER + "{{ [{'a': ns.s}, {'a': other.s}] | groupby('a') }}",
    "nested lists encoded for an address": NESTED + "{{ {'a': ns.s} | urlencode }}",
    "nested lists as XML": NESTED + "{{ {'a': ns.s} | xmlattr }}",
    "nested lists as sums of lists": grown("[ns.s, ns.s] | sum(start=[])"),
    "nested mappings as JSON": NESTED.replace("[ns.s, ns.s]", "{'a': ns.s, 'b': ns.s}") + "{{ ns.s | tojson }}",
    "translate": LONG + "{{ long.translate({97: 'x' * 1000000}) }}",
    "translate, again and again": grown("ns.s.translate({97: 'a' * 999})", 9, "'a'"),
    "indent": LONG.replace("ab ", "a\\n") + "{{ long | indent(1000000, true) }}",
    "indent with a long text": LONG.replace("ab ", "a\\n") + "{{ long | indent('x' * 1000000) }}",
    "join by a long text": LONG + "{{ range(99999) | join(long) }}",
    "join of many long texts": LONG + "{{ ([long] * 100000) | join }}",
    "join by a method": LONG + "{{ long.join('a' * 1000000) }}",
    "block sets": LONG + "{% set a %}{{ long }}{{ long }}{% endset %}" + "".join(
        "{% set a %}{% for i in range(9) %}{{ a }}{% endfor %}{% endset %}" for _ in range(9)
    ) + "{{ a | length }}",
    "macros": LONG
    + "{% macro m(n) %}{{ long }}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) | length }}",
    "call blocks": LONG + doubled("{{ caller() }}{{ caller() }}", "{{ long }}", 12),
    "filter blocks": LONG + "{% filter replace('a', 'x' * 1000000) %}{{ long }}{% endfilter %}",
    "many widths of strftime": "{{ strftime_now('%99999d' * 100000) }}",
    "many words of strftime": "{{ strftime_now('%c' * 8000000) }}",
    "wordwrap": LONG + "{{ long | wordwrap(1) }}",
    "wordwrap by a long text": LONG + "{{ long | wordwrap(1, true, 'x' * 1000000) }}",
    "urlize": "{{ ('http://a.b ' * 1400000) | urlize(rel='x' * 100000) }}",
    "urlize of a long word": "{{ ('(' * 8000000) | urlize }}",
    "sum of lists": "{{ ([[0] * 1000000] * 100000) | sum(start=[]) | length }}",
    "sum of squares of time": "{{ ([[0]] * 1000000) | sum(start=[]) | length }}",
    "splits": LONG + grown("ns.s + [long.split()]", 500, "[]"),
    "slices": "{{ range(99999) | slice(16777215) | list | length }}",
    "powers of a number": "{{ 2 ** 4095 ** 2 }}",
    "digits of a number": grown("ns.s + ns.s", 99999, "1") + "{{ ns.s }}",
    "titles of a long text": LONG + "{% for i in range(1000) %}{% set x = long | title %}{% endfor %}",
    "counts of a long text": LONG + "{% for i in range(99999) %}{% set x = long.count('b a') %}{% endfor %}",
    "truncation": LONG + "{% for i in range(99999) %}{% set x = long | truncate(16000000, leeway=0) %}{% endfor %}",
    "searches in a long text": LONG + "{% for i in range(99999) %}{% set x = long.find('zz') %}{% endfor %}",
    "a cycle of long texts": LONG
    + "{% set c = cycler(long, long) %}{% for i in range(99999) %}{{ c.next() }}{% endfor %}",
    "bytes of a long text": LONG + grown("ns.s + [long.encode()]", 500, "[]"),
}  # fmt: skip


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


def test_a_process_that_was_ended_is_started_anew() -> None:
    text = "{% if messages | length > 2 %}{{ ([[0]] * 1000000) | sum(start=[]) | length }}{% endif %}done"
    made = TemplateProcess({"default": text}, limits=LIMITS)
    for _ in range(2):
        with pytest.raises(TemplateError, match=r"more than 0\.3 seconds"):
            made.render("default", {"messages": MESSAGES * 2})
        assert made.render("default", {"messages": MESSAGES}).text == "done"


def test_a_template_that_exceeds_its_limits_again_and_again_is_not_tried_any_more() -> None:
    made = TemplateProcess({"default": ATTACKS["sum of squares of time"]}, limits=LIMITS)
    for _ in range(3):
        with pytest.raises(TemplateError, match="seconds"):
            made.render("default", {})
    began = time.monotonic()
    with pytest.raises(TemplateError, match="3 times in a row"):
        made.render("default", {})
    assert time.monotonic() - began < 0.1


def test_the_process_ends_with_the_one_that_made_it_even_if_that_is_killed() -> None:
    code = (
        "import os, sys\nfrom d9d_weights import TemplateProcess\n"
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


def test_a_malformed_template_names_its_line() -> None:
    with pytest.raises(TemplateError, match="Unexpected end of template") as caught:
        TemplateProcess({"default": "x", "tool_use": "\n{% if x %}"})
    assert (caught.value.key, caught.value.line) == ("tool_use", 2)
