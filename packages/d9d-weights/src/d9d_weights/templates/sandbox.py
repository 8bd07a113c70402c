"""Sandbox of chat templates: Jinja without the file system, with limits on steps and on the size of values.

The sandbox runs in a process with limits on time and memory, see :mod:`d9d_weights.templates.process`, because no list
of forbidden operations is complete. The limits of the sandbox apply earlier, are the same on every system, and give
the reason of a failure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer

#: Limit of the characters of a rendered conversation and of any intermediate value, and of the elements of a list.
MAX_SIZE = 1 << 24
#: Limit of the bits of a whole number.
_MAX_BITS = 1 << 12
#: Large widths in ``'%99999d' % x`` and ``'{:99999}'.format(x)``, and widths that are arguments.
_WIDTH = re.compile(r"\d{5,}|%[^%]*\*|\{[^{}]*\{")
_WIDTH_RULE = "the field width must be a constant of at most 9,999"


class Sandbox(ImmutableSandboxedEnvironment):
    """Sandboxed environment of a template; runs one rendering at a time.

    Args:
        max_steps: maximum number of steps of one rendering: loop iterations, calls and pieces of output.
        now: time returned by ``strftime_now``; by default, the time of the rendering.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, max_steps: int, now: datetime | None = None) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols])
        self.filters = {name: _bounded(function) for name, function in self.filters.items()}
        self.filters |= {"_counted": self._counted, "_sized": self._sized, "tojson": _tojson}
        self.globals |= {
            "namespace": _Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": self._strftime_now,
        }
        del self.globals["lipsum"]  # random text does not belong in training data
        #: Start of each generation block in characters, and its text.
        self.marks: list[tuple[int, str]] = []
        self.rendered = 0
        self._max_steps = max_steps
        self._steps = 0
        self._now = now

    def compile_bounded(self, tree: nodes.Template, name: str) -> jinja2.Template:
        """Compile a syntax tree, with limits on loops and concatenations. Changes the tree."""
        code = self.compile(_Bounds().visit(tree), name, name)
        return jinja2.Template.from_code(self, code, self.make_globals(None))

    def run(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        """Render a template of this environment, and record its generation blocks in ``marks``.

        Raises:
            SecurityError: a limit was exceeded.
            Exception: any exception that the template raises.
        """
        self.marks, self.rendered, self._steps = [], 0, 0
        pieces = []
        for piece in template.generate(variables):
            pieces.append(piece)
            self.rendered += len(piece)
            self.step()
            if self.rendered > MAX_SIZE:
                raise SecurityError(f"the template renders more than {MAX_SIZE:,} characters")
        return "".join(pieces)

    def step(self) -> None:
        """Count one step: a loop iteration, a call or a piece of output.

        Raises:
            SecurityError: the limit of steps is exceeded.
        """
        self._steps += 1
        if self._steps > self._max_steps:
            kinds = "loop iterations, calls and pieces of output"
            raise SecurityError(f"the template takes more than {self._max_steps:,} steps ({kinds})")

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call an object from a template. The parameters' unusual names cannot clash with keyword arguments."""
        __self.step()
        if __obj is not __self.globals["range"]:  # range has a limit of its own
            _check_arguments(args, kwargs)
            _check_method(__obj, (*args, *kwargs.values()))
        return _checked(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator whose result may be large, within limits."""
        _check_operation(operator, left, right)
        return _checked(super().call_binop(context, operator, left, right))

    @pass_context
    def _counted(self, _context: Context, values: Any) -> Iterator[Any]:
        """Count iterations of a loop. The context argument prevents jinja2 from evaluating the loop at compile time."""
        for value in values:
            self.step()
            yield value

    def _strftime_now(self, format: str) -> str:  # noqa: A002 - templates may pass it by name
        return (self._now or datetime.now()).strftime(format)

    @staticmethod
    @pass_context
    def _sized(_context: Context, value: Any) -> Any:
        return _checked(value)


class GenerationBlock(Extension):
    """Block ``{% generation %}`` ... ``{% endgeneration %}``: renders its body and records its position in the text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse a ``generation`` block of a template, after the name of the block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("record"), [], [], body).set_lineno(line)

    def record(self, caller: Callable[[], str]) -> str:
        """Render the body of a ``generation`` block, and record its position."""
        text = caller()
        environment = self.environment
        assert isinstance(environment, Sandbox)
        environment.marks.append((environment.rendered, text))
        return text


class _Bounds(NodeTransformer):
    """Transformer of a template's syntax tree: loops then count iterations, and concatenations check their size."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - name required by jinja2
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "_counted")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, "_sized")


class _Namespace(Namespace):
    """Jinja ``namespace`` object that refuses names that would give access to the interpreter."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        values = dict(*rest, **kwargs)
        Namespace.__init__(self, {})
        for name, value in values.items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"the template sets the name {name!r} in a namespace; names must start with a letter")
        super().__setitem__(name, value)


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    assert isinstance(node, nodes.Expr)
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter with limits on its arguments and its result."""

    @wraps(function)  # keeps jinja2's markers on filters that take the context
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _check_arguments(args[1:], kwargs)
        texts = [value for value in (*args, *kwargs.values()) if isinstance(value, str)]
        if texts and function.__name__ in ("do_format", "do_replace"):
            _check_method(getattr(texts[0], function.__name__.removeprefix("do_")), tuple(texts[1:]))
        return _checked(function(*args, **kwargs))

    return bounded


def _check_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse large numbers (widths, counts, repetitions), which could make large values."""
    if any(isinstance(value, int) and abs(value) > MAX_SIZE for value in (*args, *kwargs.values())):
        raise SecurityError(f"the template calls a function with a number above {MAX_SIZE:,}")


def _check_method(method: Any, args: tuple[Any, ...]) -> None:
    """Refuse methods of strings whose result would be far larger than their arguments."""
    method = getattr(method, "__wrapped__", method)  # jinja2 wraps str.format in a function of its own
    name, text = getattr(method, "__name__", ""), getattr(method, "__self__", None)
    if not isinstance(text, str):
        return
    texts = [value for value in args if isinstance(value, str)]
    size = len(text)
    if name == "replace" and len(texts) > 1:
        size += text.count(texts[0]) * len(texts[1])
    elif name == "join" and args and hasattr(args[0], "__len__"):
        size = len(text) * len(args[0])
    elif name == "expandtabs":
        size += text.count("\t") * next((value for value in args if isinstance(value, int)), 8)
    elif name in ("format", "format_map") and _WIDTH.search(text):
        raise SecurityError(f"the template formats with {text[:80]!r}; {_WIDTH_RULE}")
    _check_size(size)


def _check_operation(operator: str, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        bits = {"**": left.bit_length() * max(right, 1), "*": left.bit_length() + right.bit_length()}
        if operator in bits and bits[operator] > _MAX_BITS:
            raise SecurityError(f"the template computes a number of more than {_MAX_BITS:,} bits")
    elif operator == "*":
        values, count = (left, right) if isinstance(right, int) else (right, left)
        if hasattr(values, "__len__") and isinstance(count, int):
            _check_size(len(values) * count)
    elif operator == "%" and isinstance(left, str) and _WIDTH.search(left):
        raise SecurityError(f"the template formats with {left[:80]!r}; {_WIDTH_RULE}")


def _checked(value: Any) -> Any:
    if isinstance(value, str | list | tuple | dict):
        _check_size(len(value))
    return value


def _check_size(size: int) -> None:
    if size > MAX_SIZE:
        raise SecurityError(f"the template makes a value of more than {MAX_SIZE:,} characters or elements")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON of a value; unlike jinja2's filter, without HTML escapes and with keys in their order."""
    if isinstance(indent, int) and indent > 64:
        raise TemplateError("the template calls tojson with an indent above 64")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
