"""Pictures of state graphs, as text and Mermaid charts. Layers with the same structure share a line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from d9d_core.types import TensorSpec

from d9d_weights.graph.expressions import Source, Value
from d9d_weights.graph.graph import StateGraph

#: Type of a value -> its operation in pictures.
_VERBS = {
    "Permuted": "transpose",
    "Unsqueezed": "unsqueeze",
    "Squeezed": "squeeze",
    "Sliced": "slice",
    "Strided": "slice",
    "Joined": "concatenate",
    "Interleaved": "interleave",
    "Dequantised": "dequantise",
    "Converted": "cast",
    "Whole": "gather",
    "Placed": "distribute",
    "Computed": "compute",
}
#: Longest index, in digits, that is read as a number; a name may have any number of digits.
_MAX_DIGITS = 9
_INDEX = re.compile(r"(?<=\.)\d+(?=\.|\b)")


@dataclass
class Line:
    """Line of the text of a state graph, for all outputs that differ only in indices.

    Attributes:
        value: value of the first output.
        spec: shape and dtype of the outputs.
        names: names of all outputs.
        formula: formula of the outputs; ``None`` for plain tensors.
    """

    value: Value | None
    spec: TensorSpec
    names: list[str]
    formula: str | None = None

    @property
    def name(self) -> str:
        """Common name of the outputs, such as ``layers.{0..27}.norm.weight``."""
        return _collapsed(self.names)


def graph_lines(graph: StateGraph) -> list[Line]:
    """Lines of a graph's outputs, in order; outputs that differ only in indices share a line."""
    found: dict[tuple[object, ...], Line] = {}
    for name, value in graph.outputs.items():
        formula = value.text()
        key = (_skeleton(name), _skeleton(formula), value.spec)
        line = found.setdefault(key, Line(value, value.spec, [], _skeleton(formula)))
        line.names.append(name)
    return list(found.values())


def tensor_lines(specs: Mapping[str, TensorSpec]) -> list[Line]:
    """Lines of tensors, in order; tensors that differ only in indices share a line."""
    found: dict[tuple[object, ...], Line] = {}
    for name, spec in specs.items():
        found.setdefault((_skeleton(name), spec), Line(None, spec, [])).names.append(name)
    return list(found.values())


def graph_text(graph: StateGraph) -> str:
    """Text of a graph, one entry for each kind of output: name, shape, dtype, and formula."""
    rows = [
        f"{line.name}  {list(line.spec.shape)} {str(line.spec.dtype).removeprefix('torch.')}\n    = {line.formula}"
        for line in graph_lines(graph)
    ]
    rows += [f"{name}\n    keeps its initial values" for name in sorted(graph.fresh)]
    return "\n".join(rows)


def graph_mermaid(graph: StateGraph) -> str:
    """Picture of a graph as a Mermaid flow chart, from the checkpoint's tensors to the model's."""
    nodes: dict[str, str] = {}
    edges: dict[str, None] = {}

    def node(key: str, label: str, shape: str = "[]") -> str:
        name = nodes.setdefault(key, f"n{len(nodes)}")
        edges.setdefault(f'    {name}{shape[0]}"{_escaped(label)}"{shape[1]}', None)
        return name

    def visit(value: Value) -> str:
        if isinstance(value, Source):
            return node(f"source {_skeleton(value.name)}", _skeleton(value.name))
        here = node(f"value {_skeleton(value.text())}", _VERBS[type(value).__name__], "()")
        for part in value.parts:
            edges.setdefault(f"    {visit(part)} --> {here}", None)
        return here

    for line in graph_lines(graph):
        assert line.value is not None
        target = node(f"target {_skeleton(line.names[0])} {line.formula}", line.name)
        edges.setdefault(f"    {visit(line.value)} --> {target}", None)
    return "\n".join(["flowchart LR", *edges]) + "\n"


def _skeleton(text: str) -> str:
    return _INDEX.sub("{n}", text)


def _collapsed(names: list[str]) -> str:
    """Common name with each varying index as a range, or as ``{n}`` if the indices have gaps."""
    if len(names) == 1:
        return names[0]
    columns = list(zip(*(_INDEX.findall(name) for name in names), strict=True))
    parts = _INDEX.split(names[0])
    return "".join(part + word for part, word in zip(parts, [*_places(columns), ""], strict=True))


def _places(columns: list[tuple[str, ...]]) -> Iterator[str]:
    for column in columns:
        if max(map(len, column)) > _MAX_DIGITS:
            yield column[0] if len(set(column)) == 1 else "{n}"
            continue
        numbers = sorted({int(number) for number in column})
        if len(numbers) == 1:
            yield str(numbers[0])
        elif numbers[-1] - numbers[0] == len(numbers) - 1:
            yield f"{{{numbers[0]}..{numbers[-1]}}}"
        else:
            yield "{n}"


def _escaped(text: str) -> str:
    return text.replace('"', "#quot;")
