"""Malicious chat templates that exhaust memory or never end."""

from __future__ import annotations


def grown(change: str, times: int = 60, first: str = "['a']") -> str:
    """Beginning of a template that starts with ``ns.s = first`` and sets it to ``change``, ``times`` times."""
    begin = f"{{% set ns = namespace(s={first}) %}}{{% for i in range({times}) %}}"
    return f"{begin}{{% set ns.s = {change} %}}{{% endfor %}}"


def doubled(macro: str, call: str, times: int) -> str:
    """Template with ``call`` inside ``times`` nested call blocks of a macro with the body ``macro``."""
    return f"{{% macro m() %}}{macro}{{% endmacro %}}" + "{% call m() %}" * times + call + "{% endcall %}" * times


#: Lists that share their items: a walk over all of them visits 2 ** 60 leaves.
NESTED = grown("[ns.s, ns.s]")
OTHER = NESTED.replace("ns.s", "other.s").replace("set ns =", "set other =")
#: Text of 16 million characters, the longest that the sandbox allows.
LONG = "{% set long = 'ab ' * 5592405 %}"
#: Description -> malicious template.
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
