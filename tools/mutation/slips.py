"""Possible single-line faults (slips) of a source file, found in its syntax tree."""

from __future__ import annotations

import ast
import copy
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

#: Groups of members with their folders; slips are drawn evenly over groups. Small members of one kind share a group.
GROUPS = {
    "d9d-core": ("packages/d9d-core",),
    "d9d-engine": ("packages/d9d-engine",),
    "d9d-weights": ("packages/d9d-weights",),
    "d9d-nn": ("packages/d9d-nn",),
    "d9d-planner": ("packages/d9d-planner",),
    "d9d-inference": ("packages/d9d-inference",),
    "d9d-reports": ("packages/d9d-reports",),
    "d9d-verify": ("packages/d9d-verify",),
    "d9d-testing": ("packages/d9d-testing",),
    "d9d-data": ("plugins/d9d-data",),
    "d9d-local-sgd": ("plugins/d9d-local-sgd",),
    "d9d-metrics": ("plugins/d9d-metrics",),
    "d9d-moe": ("plugins/d9d-moe",),
    "d9d-optim": ("plugins/d9d-optim",),
    "d9d-parallel": ("plugins/d9d-parallel",),
    "d9d-peft": ("plugins/d9d-peft",),
    "d9d-pipeline": ("plugins/d9d-pipeline",),
    "d9d-torchft": ("plugins/d9d-torchft",),
    "d9d-triton": ("plugins/d9d-triton",),
    "launchers": (
        "packages/d9d-launch", "plugins/d9d-kubernetes", "plugins/d9d-ray", "plugins/d9d-skypilot", "plugins/d9d-slurm",
    ),
    "models": (
        "plugins/d9d-deepseek", "plugins/d9d-gemma", "plugins/d9d-gpt-oss", "plugins/d9d-llama", "plugins/d9d-qwen3",
        "plugins/d9d-qwen3-next",
        "plugins/d9d-transformers",
    ),
    "trackers": ("plugins/d9d-aim", "plugins/d9d-mlflow", "plugins/d9d-tensorboard", "plugins/d9d-wandb"),
    "kernel libraries": (
        "plugins/d9d-cce", "plugins/d9d-cublas", "plugins/d9d-deepep", "plugins/d9d-fla", "plugins/d9d-flash-attention",
        "plugins/d9d-fp8", "plugins/d9d-grouped-gemm", "plugins/d9d-liger", "plugins/d9d-quack",
    ),
}  # fmt: skip
#: Calls in which the order of two arguments is irrelevant, or is checked by types alone.
_UNORDERED = {
    "isinstance", "issubclass", "cast", "max", "min", "maximum", "minimum", "hasattr", "getattr", "setattr",
    "promote_types", "gcd", "lcm", "equal", "suppress", "field_validator", "mark_non_differentiable",
}  # fmt: skip
#: Keywords: zip(strict=...) is an assertion, so removing it changes nothing while it is true; another seed is as good.
_WITHOUT_EFFECT = {"strict", "seed"}
_FLIPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_OPPOSITE: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}  # fmt: skip
_AVERAGED = {
    "sum": "mean",
    "mean": "sum",
    "max": "min",
    "min": "max",
    "amax": "amin",
    "SUM": "MAX",
    "cumsum": "cumprod",
}
_Node = TypeVar("_Node", bound=ast.expr)
_MASKS = ("mask", "valid", "keep", "kept", "ignore", "padding")


@dataclass(frozen=True)
class Slip:
    """Slip: a replacement of one range in a source file.

    Attributes:
        file: path from the root of the repository.
        line: line of the range, from one.
        lines: first and last line of the enclosing statement, without nested statements.
        kind: kind of the slip.
        begin: start of the range, in bytes.
        end: end of the range, in bytes.
        text: replacement.
        old: replaced text.
        source: source line of the range.
        top: whether the statement runs at import, not in a function call.
    """

    file: str
    line: int
    lines: tuple[int, int]
    kind: str
    begin: int
    end: int
    text: str
    old: str
    source: str
    top: bool

    @property
    def member(self) -> str:
        """Member that contains the file."""
        return "/".join(self.file.split("/")[:2])

    @property
    def group(self) -> str:
        """Group of the member."""
        return next(group for group, members in GROUPS.items() if self.member in members)

    @property
    def key(self) -> str:
        """Key that stays valid if other lines of the file change: path, line text, and replacement."""
        return f"{self.file}: {self.source}: {self.change}"

    @property
    def change(self) -> str:
        """Old and new text."""
        return f"{_short(self.old)} -> {_short(self.text)}"

    def applied(self, source: bytes) -> bytes:
        """Source of the file with the slip applied."""
        return source[: self.begin] + self.text.encode() + source[self.end :]


def slips_of(root: Path, file: Path) -> list[Slip]:
    """All possible slips of a source file, in order."""
    source = file.read_bytes()
    finder = _Finder(str(file.relative_to(root)), source)
    finder.statements(ast.parse(source).body, top=True)
    return finder.found


def chosen(root: Path, count: int, seed: int) -> list[Slip]:
    """Slips drawn evenly over groups, in each group over kinds, then over files; deterministic for the same sources."""
    result: list[Slip] = []
    for number, (group, members) in enumerate(GROUPS.items()):
        share = count // len(GROUPS) + (number < count % len(GROUPS))
        draw = random.Random(f"{seed} {group}")  # noqa: S311 - not for cryptography
        left: dict[str, dict[str, list[Slip]]] = {}
        for file in sorted(file for member in members for file in (root / member / "src").rglob("*.py")):
            for slip in slips_of(root, file):
                left.setdefault(slip.kind, {}).setdefault(slip.file, []).append(slip)
        taken: set[tuple[str, int]] = set()
        while share and left:
            kinds = sorted(left)
            draw.shuffle(kinds)
            for kind in kinds[:share]:
                file_name = draw.choice(sorted(left[kind]))
                slips = left[kind][file_name]
                slip = slips.pop(draw.randrange(len(slips)))
                if not slips:
                    del left[kind][file_name]
                if not left[kind]:
                    del left[kind]
                # Two slips in one line tell little more than one.
                if (slip.file, slip.line) not in taken and _compiles(slip.applied((root / slip.file).read_bytes())):
                    taken.add((slip.file, slip.line))
                    result.append(slip)
                    share -= 1
    return result


class _Finder:
    def __init__(self, file: str, source: bytes) -> None:
        self.found: list[Slip] = []
        self._file, self._source = file, source
        starts = [0]
        for line in source.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        self._starts = starts
        self._lines, self._top = (0, 0), True

    def statements(self, body: Sequence[ast.stmt], top: bool) -> None:
        """Collect the slips of statements and their nested statements."""
        for statement in body:
            self._statement(statement, top)

    def _statement(self, statement: ast.stmt, top: bool) -> None:
        blocks = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody", "handlers", "cases")]
        inside = [part.lineno for block in blocks for part in block if hasattr(part, "lineno")]
        last = min(inside) - 1 if inside else statement.end_lineno or 0
        self._lines, self._top = (statement.lineno, max(statement.lineno, last)), top
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
            return
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            top = False
            for default in [*statement.args.defaults, *filter(None, statement.args.kw_defaults)]:
                self._lines, self._top = (default.lineno, default.lineno), True
                self._expressions(default)
        elif not isinstance(statement, ast.ClassDef | ast.Import | ast.ImportFrom):
            self._plain(statement)
        for part in (part for block in blocks for part in block):
            if isinstance(part, ast.stmt):
                self._statement(part, top)
            elif isinstance(part, ast.ExceptHandler | ast.match_case):
                self.statements(part.body, top)

    def _plain(self, statement: ast.stmt) -> None:
        self._drop(statement)
        # Few tests compare the message of an exception, which is right.
        if isinstance(statement, ast.Raise):
            return
        if isinstance(statement, ast.If | ast.While):
            self._take("negated condition", statement.test, ast.UnaryOp(ast.Not(), statement.test))
        for field, value in ast.iter_fields(statement):
            for node in value if isinstance(value, list) else [value]:
                expression = node.context_expr if isinstance(node, ast.withitem) else node
                if isinstance(expression, ast.expr) and field != "annotation":
                    self._expressions(expression)

    def _expressions(self, top: ast.expr) -> None:
        if isinstance(top, ast.Constant) and isinstance(top.value, str):
            return
        todo: list[ast.AST] = [top]
        while todo:
            node = todo.pop()
            if isinstance(node, ast.JoinedStr) or _seeds(node):
                continue
            if isinstance(node, ast.expr):
                for kind, other in _expression_slips(node):
                    self._take(kind, node, other)
            todo += [part for part in ast.iter_child_nodes(node) if getattr(part, "arg", "") not in _WITHOUT_EFFECT]

    def _drop(self, statement: ast.stmt) -> None:
        call = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call | ast.Await)
        store = isinstance(statement, ast.AugAssign) or (
            isinstance(statement, ast.Assign)
            and any(isinstance(target, ast.Attribute | ast.Subscript) for target in statement.targets)
        )
        if call or store or isinstance(statement, ast.Raise | ast.Continue):
            self._take("dropped line", statement, ast.Pass())

    def _take(self, kind: str, node: ast.expr | ast.stmt, other: ast.expr | ast.stmt) -> None:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        begin = self._starts[node.lineno - 1] + node.col_offset
        end = self._starts[node.end_lineno - 1] + node.end_col_offset
        old, text = self._source[begin:end].decode(), ast.unparse(other)
        if isinstance(other, ast.BinOp | ast.UnaryOp | ast.BoolOp | ast.Compare | ast.IfExp):
            text = f"({text})"
        line = self._source[self._starts[node.lineno - 1] : self._starts[node.lineno]].decode().strip()
        self.found.append(Slip(self._file, node.lineno, self._lines, kind, begin, end, text, old, line, self._top))


def _expression_slips(node: ast.expr) -> Iterator[tuple[str, ast.expr]]:  # noqa: PLR0912 - a table of kinds
    """Kinds of slip with the replaced expression."""
    match node:
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            yield "off by one", ast.Constant(value + 1)
        case ast.Constant(value=bool(value)):
            yield "negated condition", ast.Constant(not value)
        case ast.Compare(ops=[comparison]) if type(comparison) in _FLIPPED:
            flipped = _FLIPPED[type(comparison)]()
            yield "flipped comparison", _with(node, lambda new: new.ops.__setitem__(0, flipped))
        case ast.BinOp(op=operator) if type(operator) in _OPPOSITE and not _textual(node):
            other = _OPPOSITE[type(operator)]()
            yield "wrong sign", _with(node, lambda new: setattr(new, "op", other))
            if isinstance(operator, ast.Mult) and _names_mask(node.right):
                yield "ignored mask", node.left
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            yield "wrong sign", operand
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "negated condition", operand
        case ast.IfExp(test=test):
            yield "negated condition", _with(node, lambda new: setattr(new, "test", ast.UnaryOp(ast.Not(), test)))
        case ast.BoolOp(values=[*values]):
            yield "ignored mask", values[0] if len(values) == 2 else ast.BoolOp(node.op, values[:-1])
        case ast.ListComp(generators=[first]) | ast.GeneratorExp(generators=[first]) if first.ifs:
            yield "ignored mask", _with(node, lambda new: new.generators[0].ifs.clear())
        case ast.Attribute(attr=name) if name in _AVERAGED:
            yield "average for sum", _with(node, lambda new: setattr(new, "attr", _AVERAGED[name]))
        case ast.Name(id=("max" | "min") as name):
            yield "average for sum", ast.Name(_AVERAGED[name])
        case ast.Subscript(slice=ast.Slice(lower=lower, upper=upper)) if lower or upper:
            yield "off by one", _with(node, _moved_bound)
        case ast.Call():
            yield from _call_slips(node)


def _call_slips(node: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    plain = [argument for argument in node.args if not isinstance(argument, ast.Starred)]
    if len(plain) == len(node.args) >= 2 and name not in _UNORDERED:
        first, second = plain[:2]
        if ast.dump(first) != ast.dump(second):
            yield "swapped arguments", _with(node, lambda new: new.args.__setitem__(slice(0, 2), [second, first]))
    if name == "range" and not node.keywords:
        end = node.args[min(1, len(node.args) - 1)]
        shorter = ast.BinOp(end, ast.Sub(), ast.Constant(1))
        yield "off by one", _with(node, lambda new: new.args.__setitem__(min(1, len(node.args) - 1), shorter))
    if name in ("masked_fill", "masked_fill_") and isinstance(node.func, ast.Attribute):
        yield "ignored mask", node.func.value
    if name == "where" and len(node.args) == 3:
        yield "ignored mask", node.args[1]


def _moved_bound(new: ast.Subscript) -> None:
    assert isinstance(new.slice, ast.Slice)
    name = "lower" if new.slice.lower else "upper"
    setattr(new.slice, name, ast.BinOp(getattr(new.slice, name), ast.Add(), ast.Constant(1)))


def _with(node: _Node, change: Callable[[_Node], object]) -> _Node:
    new = copy.deepcopy(node)
    change(new)
    return new


def _seeds(node: ast.AST) -> bool:
    """Whether a call only seeds a generator: another seed is as good."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "manual_seed"


def _textual(node: ast.BinOp) -> bool:
    """Whether an operator concatenates or formats strings or lists."""
    parts = (node.left, node.right)
    texts = [part for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    return bool(texts) or any(isinstance(part, ast.JoinedStr | ast.List | ast.Tuple) for part in parts)


def _names_mask(node: ast.expr) -> bool:
    return any(word in ast.unparse(node).lower() for word in _MASKS)


def _compiles(source: bytes) -> bool:
    try:
        compile(source, "slip", "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return True


def _short(text: str) -> str:
    return " ".join(text.split())
