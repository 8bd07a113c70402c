"""Sandbox of chat templates in this process: rendered text, generation blocks, and each limit at its boundary."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from d9d_weights.templates import sandbox
from d9d_weights.templates.sandbox import Sandbox
from jinja2.exceptions import SecurityError, TemplateError

NOW = datetime(2024, 3, 5, 7, 9)

LARGE = "the template makes a value of more than 100 characters or elements"


def rendered(text: str, *, steps: int = 1 << 20, **variables: Any) -> str:
    box = Sandbox(steps, NOW)
    return box.run(box.compile_bounded(box.parse(text), "t"), variables)


@pytest.fixture
def hundred(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the limit on sizes to 100."""
    monkeypatch.setattr(sandbox, "MAX_SIZE", 100)


def test_places_of_generation_blocks_start_anew_with_each_rendering() -> None:
    box = Sandbox(1 << 10)
    text = "{% for m in ms %}<{{ m.r }}>{% generation %}{{ m.c }}!{% endgeneration %}{% endfor %}"
    template = box.compile_bounded(box.parse(text), "t")
    assert box.run(template, {"ms": [{"r": "ab", "c": "x"}, {"r": "", "c": "yz"}]}) == "<ab>x!<>yz!"
    assert (box.marks, box.rendered) == ([(4, "x!"), (8, "yz!")], 11)
    assert box.run(template, {"ms": [{"r": "a", "c": "q"}]}) == "<a>q!"
    assert (box.marks, box.rendered) == ([(3, "q!")], 5)


def test_a_malformed_generation_block_is_told_with_its_line() -> None:
    with pytest.raises(TemplateError) as caught:
        Sandbox(9).compile_bounded(Sandbox(9).parse("\n\n{% generation %}{{ 1 | no_such }}{% endgeneration %}"), "t")
    assert getattr(caught.value, "lineno", None) == 3


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{% for x in '123' %}{% if x == '1' %}{% continue %}{% endif %}{{ x }}{% break %}{% endfor %}", "2"),
        ("{{ lipsum is defined }} {{ range is defined }}", "False True"),
        ("{{ strftime_now('%d.%m.%Y') }} {{ strftime_now(format='%H:%M') }}", "05.03.2024 07:09"),
        ("{% set n = namespace({'b': 2}, a=1) %}{% set n.a = n.a + n.b %}{{ n.a }}{{ n.b }}", "32"),
        ("{{ {'b': 'é<', 'a': [1, none]} | tojson }}", '{"b": "é<", "a": [1, null]}'),
        ("{{ {'b': 'é', 'a': 1} | tojson(ensure_ascii=true, sort_keys=true) }}", '{"a": 1, "b": "\\u00e9"}'),
        ("{{ [1] | tojson(indent=3) }}", "[\n   1\n]"),
        ("{{ [1, {'a': 2}] | tojson(separators=(',', ':')) }}", '[1,{"a":2}]'),
        ("{{ [1] | tojson(indent=64) | length }}", "69"),
        ("{{ '%5d|%s' % (3, 'a') }}{{ '{:4}|{}'.format(1, 2) }}{{ '%3s' | format('x') }}", "    3|a   1|2  x"),
        ("{{ '%9999d' % 3 | int }}", " " * 9998 + "3"),
        ("{{ 7 % 4 }} {{ 3 - 5 }} {{ 2 ** 3 }} {{ 2 ** -1 }}", "3 -2 8 0.5"),
        ("{{ '-'.join(['a', 'b']) }} {{ 'aXa'.replace('X', '-') }} {{ 'a\tb'.expandtabs(3) }}", "a-b a-a a  b"),
    ],
)  # fmt: skip
def test_templates_render_as_published_models_expect(text: str, expected: str) -> None:
    assert rendered(text) == expected


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("{% for x in [1, 2, 3] %}a{% endfor %}", 6),  # iterations and pieces
        ("{% for x in range(2) %}a{% endfor %}", 5),  # and a call
        ("{% for x in [1, 2] %}{% for y in [1, 2] %}{% endfor %}{% endfor %}", 6),
        ("{{ raise_exception is defined }}", 1),
    ],
)
def test_iterations_calls_and_pieces_are_steps(text: str, steps: int) -> None:
    rendered(text, steps=steps)
    with pytest.raises(SecurityError, match=f"^the template takes more than {steps - 1:,} steps "):
        rendered(text, steps=steps - 1)


@pytest.mark.usefixtures("hundred")
@pytest.mark.parametrize(
    ("text", "allowed", "refused", "error"),
    [
        ("{{ 'a' * n }}", 100, 101, LARGE),
        ("{{ n * 'a' }}", 100, 101, LARGE),
        ("{{ ([1, 2] * n) | length }}", 50, 51, LARGE),
        ("{{ (s(60) + s(n)) | length }}", 40, 41, LARGE),
        ("{{ (s(60) ~ s(n)) | length }}", 40, 41, LARGE),
        ("{{ s(n) }}", 100, 101, "the template calls a function with a number above 100"),
        ("{{ s(n=n) }}", 100, 101, "the template calls a function with a number above 100"),
        ("{{ s(n=-n) }}", 100, 101, "the template calls a function with a number above 100"),
        ("{{ 'a' | center(n) }}", 100, 101, "the template calls a function with a number above 100"),
        ("{{ 'a' | center(width=n) }}", 100, 101, "the template calls a function with a number above 100"),
        ("{{ range(n) | list | length }}", 100, 101, LARGE),
        ("{{ s(60) }}{{ s(n) }}", 40, 41, "the template renders more than 100 characters"),
        # Estimates before the value is made: each of these results has at most 100 characters.
        ("{{ 'aaaa'.replace('a', s(n)) }}", 24, 25, LARGE),
        ("{{ 'aaaa' | replace('a', s(n)) }}", 24, 25, LARGE),
        ("{{ s(10).join([''] * n) }}", 10, 11, LARGE),
        ("{{ (tab * n).expandtabs() }}", 11, 12, LARGE),
        ("{{ (tab * 10).expandtabs(n) }}", 9, 10, LARGE),
        ("{{ (tab * 10).expandtabs(tabsize=n) }}", 9, 10, LARGE),
    ],
)  # fmt: skip
def test_a_limit_allows_its_number_and_no_more(text: str, allowed: int, refused: int, error: str) -> None:
    def letters(n: int) -> str:
        return "b" * abs(n)

    rendered(text, n=allowed, s=letters, tab="\t")
    with pytest.raises(SecurityError) as caught:
        rendered(text, n=refused, s=letters, tab="\t")
    assert caught.value.message == error


@pytest.mark.usefixtures("hundred")
def test_a_value_from_a_function_is_limited_and_a_range_only_by_what_is_made_of_it() -> None:
    for value in ("x" * 101, [0] * 101, (0,) * 101, dict.fromkeys(range(101))):
        with pytest.raises(SecurityError, match="the template makes a value of more than 100"):
            rendered("{{ f() | length }}", f=lambda value=value: value)
    assert rendered("{{ f() | length }}", f=lambda: [0] * 100) == "100"
    assert rendered("{% for x in range(101) %}{% endfor %}.") == "."


def test_the_limits_of_numbers_and_sizes() -> None:
    for n in ((1 << 24) + 1, 1 << 50):
        with pytest.raises(SecurityError, match="more than 16,777,216 characters"):
            rendered("{{ ('a' * n) | length }}", n=n)
    rendered("{{ 2 ** 2048 }}{{ x * x }}", x=1 << 2047)  # 4096 bits
    for text in ("{{ 2 ** 2049 }}", "{{ x * (x + x) }}"):
        with pytest.raises(SecurityError, match="the template computes a number of more than 4,096 bits"):
            rendered(text, x=1 << 2047)


@pytest.mark.parametrize(
    "text",
    [
        "{{ '%10000d' % 1 }}", "{{ '%*d' % (5, 1) }}", "{{ '{:10000}'.format(1) }}", "{{ '{:{}}'.format(1, 5) }}",
        "{{ '{a:10000}'.format_map({'a': 1}) }}", "{{ '%10000d' | format(1) }}",
    ],
)  # fmt: skip
def test_formats_with_large_or_variable_widths_are_refused(text: str) -> None:
    with pytest.raises(SecurityError, match=r"the field width must be a constant of at most 9,999"):
        rendered(text)


def test_refusals_name_their_cause() -> None:
    with pytest.raises(TemplateError, match="^the template calls tojson with an indent above 64$"):
        rendered("{{ [1] | tojson(indent=65) }}")
    with pytest.raises(TemplateError, match="^only two roles$"):
        rendered("{{ raise_exception('only two roles') }}")
    for text in ("{{ namespace(_a=1) }}", "{% set n = namespace() %}{% set n._a = 1 %}"):
        with pytest.raises(
            SecurityError, match="the template sets the name '_a' in a namespace; names must start with a letter"
        ):
            rendered(text)
    with pytest.raises(SecurityError):
        rendered("{{ [].append(1) }}")
