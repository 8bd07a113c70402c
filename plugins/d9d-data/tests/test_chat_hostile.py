"""Chat templates that were made to harm: an error that names them, soon, in little memory."""

from __future__ import annotations

import pickle
import time
from pathlib import Path

import pytest
from d9d_core.errors import DataError
from d9d_data.chat.template import MAX_TEMPLATE, ChatTemplate
from d9d_weights.templates.process import TemplateLimits

MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = "{% set ns = namespace(s='a') %}{% for i in range(99) %}{% set ns.s = {} %}{% endfor %}"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{% for i in range(10**9) %}x{% endfor %}", "Range too big"),
        (LOOPS, "steps"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recurses without end"),
        ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}", "steps"),
        ("{% for x in [[[]]] recursive %}{{ loop([x, x]) }}{% endfor %}", "steps|recurses"),
        ("{{ 'a' * 10**10 }}", "more than"),
        ("{{ [0] * 10**10 }}", "more than"),
        ("{{ 10**10 * 'a' }}", "more than"),
        ("{{ 9 ** (9 ** 9) }}", "the template computes a number of more than"),
        (
            "{% set ns = namespace(n=3) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
            "more than 4,096 bits",
        ),
        (DOUBLING.replace("{}", "ns.s + ns.s"), "more than"),
        (DOUBLING.replace("{}", "ns.s ~ ns.s"), "more than"),
        (DOUBLING.replace("{}", "ns.s.replace('a', 'aa')"), "more than"),
        (DOUBLING.replace("{}", "ns.s | replace('a', 'aa')"), "more than"),
        (DOUBLING.replace("{}", "[ns.s, ns.s] | join"), "more than"),
        (DOUBLING.replace("{}", "'{0}{0}'.format(ns.s)"), "more than"),
        ("{{ 'a'.center(10**10) }}", "the template calls a function with a number above"),
        ("{{ 'a' | center(10**10) }}", "the template calls a function with a number above"),
        ("{{ 'a' | indent(10**10) }}", "the template calls a function with a number above"),
        ("{{ messages | tojson(indent=10**6) }}", "an indent above 64"),
        ("{{ '\t'.expandtabs(16777216) * 2 }}", "more than"),
        ("{{ '%9999999999d' % 1 }}", "the field width must be a constant"),
        ("{{ '%*d' % (9999999999, 1) }}", "the field width must be a constant"),
        ("{{ '%9999999999d' | format(1) }}", "the field width must be a constant"),
        ("{{ '{:9999999999}'.format(1) }}", "the field width must be a constant"),
        ("{{ '{:{}}'.format(1, '9999999999') }}", "the field width must be a constant"),
        ("{{ '{0:{w}}'.format_map({'w': 9999999999}) }}", "the field width must be a constant"),
        ("{% for i in range(2000) %}{{ 'abcdefgh' * 4096 }}{% endfor %}", "renders more than"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ ''['__class__'].__mro__ }}", "unsafe"),
        ("{{ ('' | attr('__class__')).__mro__ }}", "unsafe"),
        ("{{ '{0.__class__.__mro__}'.format('') }}", "unsafe"),
        ("{{ raise_exception.__globals__ }}{{ raise_exception.__globals__.x }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ namespace(**{'__class__': 1}) }}", "names must start with a letter"),
        ("{{ open('/etc/passwd') }}", "'open' is undefined"),
        ("{% include '/etc/passwd' %}", "cannot render"),
        ("{% import 'os' as os %}", "cannot render"),
        ("{% extends 'base' %}", "cannot render"),
        ("{{ lipsum() }}", "'lipsum' is undefined"),
        ("{{ self.__init__.__globals__ }}{{ self.__init__.__globals__.os }}", "unsafe"),
        ("{{ cycler.__init__.__globals__.os }}", "unsafe"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[0].content.encode('x') }}", "LookupError"),
    ],
)
def test_a_hostile_template_is_refused_soon(text: str, says: str) -> None:
    limits = TemplateLimits(steps=1 << 17)
    begin = time.monotonic()
    with pytest.raises(DataError, match=says) as caught:
        ChatTemplate(text, name="t.jinja", limits=limits).render(MESSAGES, where="a.jsonl:1")
    assert time.monotonic() - begin < 10
    assert "t.jinja" in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_a_slow_template_is_stopped() -> None:
    with pytest.raises(DataError, match="the template takes more than 0.2 seconds"):
        ChatTemplate(LOOPS, limits=TemplateLimits(seconds=0.2)).render(MESSAGES)


@pytest.mark.parametrize(
    "text", ["{{ " + "(" * 50_000 + ")" * 50_000 + " }}", "{% if 1 %}" * 5000, "{{ 1" + "0" * 5000 + " }}"]
)
def test_a_template_that_cannot_be_parsed_is_an_error(text: str) -> None:
    with pytest.raises(DataError, match="t.jinja.*malformed"):
        ChatTemplate(text, name="t.jinja")


def test_a_huge_template_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="more than 1,048,576 bytes"):
        ChatTemplate("a" * (MAX_TEMPLATE + 1))
    with (tmp_path / "chat_template.jinja").open("wb") as opened:
        opened.truncate(1 << 40)
    with pytest.raises(DataError, match=r"chat_template.jinja.*the limit for such files"):
        ChatTemplate.load(tmp_path)


def test_a_template_can_be_used_after_a_failure_and_by_another_process() -> None:
    text = "{% if messages | length > 2 %}{{ raise_exception('long') }}{% endif %}{% generation %}x{% endgeneration %}"
    made = ChatTemplate(text, {"eos_token": "</s>"}, name="t.jinja")
    with pytest.raises(DataError, match="long"):
        made.render(MESSAGES * 2)
    copy = pickle.loads(pickle.dumps(made))
    assert copy.render(MESSAGES) == made.render(MESSAGES)
    assert made.render(MESSAGES).marks == ((0, 1),)
    assert copy.identity == made.identity


def test_loops_know_their_length_though_they_are_counted() -> None:
    text = (
        "{% for x in 'abc' %}{{ loop.index }}{{ loop.revindex }}{{ loop.length }}{{ loop.last }}{{ loop.nextitem }} "
        "{% endfor %}{% for k, v in {'a': 1}.items() if v %}{{ k }}{{ loop.length }}{% else %}none{% endfor %}"
        "{% for x in missing %}{% else %}!{% endfor %}"
    )
    assert ChatTemplate(text).render(MESSAGES).text == "133Falseb 223Falsec 313True a1!"
