"""State graphs: mappers bound to the names and shapes of a checkpoint, before any tensor is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

from d9d_core.types import TensorSpec
from torch import Tensor

from d9d_weights.graph.base import Mapper, Scope, raise_if
from d9d_weights.graph.expressions import Placed, Source, Value
from d9d_weights.graph.groups import Group, group_values

__all__ = ["StateGraph", "map_tensors", "specs_of"]


class StateGraph:
    """State graph: an expression for each output. Equal on all ranks, because its order does not depend on hashes.

    Attributes:
        sources: specs of the existing tensors, by name.
        outputs: expressions of the outputs in order, by name.
        fresh: names of outputs that have no source on purpose.
        duplicates: sources that are left out because other sources have the same values, which
            :func:`~d9d_weights.hugging_face.load.check_duplicates` compares.

    Args:
        mapper: mapper from the sources to the outputs.
        sources: shapes and dtypes of the existing tensors, by name.

    Raises:
        CheckpointError: names are missing, taken or made twice, left over, in a cycle, or shapes do not fit; the text
            lists them.
    """

    def __init__(self, mapper: Mapper, sources: Mapping[str, TensorSpec]) -> None:
        self.sources = dict(sources)
        problems: list[str] = []
        effect = mapper.apply(Scope(_source_values(self.sources), problems))
        if not problems:  # otherwise these problems cause most of the left-over names
            left = [name for name in self.sources if name not in effect.taken]
            problems += [f"no mapper takes '{name}'; name it in a Drop if it is not needed" for name in left]
        for name, value in effect.made.items():
            if name in effect.fresh:
                problems.append(f"'{name}' is made, and declared Fresh")
            if not _ends_placed(value):
                problems.append(f"'{name}': Distribute must come last")
        raise_if(problems, "the tensors of the checkpoint do not fit:")
        self.outputs: dict[str, Value] = effect.made
        self.fresh = frozenset(effect.fresh)
        self.duplicates = tuple(effect.duplicates)

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Shape and dtype of each output."""
        return {name: value.spec for name, value in self.outputs.items()}

    @cached_property
    def left_out(self) -> list[str]:
        """Sources that no output uses, in order.

        Duplicates are not among them, because none of their values is lost.
        """
        used = {name for value in self.outputs.values() for name in value.sources()}
        copies = {name for duplicate in self.duplicates for name in duplicate.copy.sources()}
        return [name for name in self.sources if name not in used | copies]

    @cached_property
    def groups(self) -> list[Group]:
        """Groups of outputs that share sources, in a fixed order."""
        return group_values(self.outputs)

    def check(self, expected: Mapping[str, TensorSpec], ours: str = "the model") -> None:
        """Compare the outputs' names and shapes with the expected names and shapes.

        Raises:
            CheckpointError: names or shapes differ; the text lists the differences.
        """
        problems = [
            f"{ours} needs '{name}', which the checkpoint does not give"
            for name in expected
            if name not in self.outputs and name not in self.fresh
        ]
        problems += [
            f"the checkpoint gives '{name}', which {ours} does not have" for name in self._made if name not in expected
        ]
        for name, value in self.outputs.items():
            if name in expected and expected[name].shape != value.spec.shape:
                have, want = list(value.spec.shape), list(expected[name].shape)
                problems.append(
                    f"'{name}' has the shape {have} in the checkpoint ({value.text()}), but {want} in {ours}"
                )
        raise_if(problems, f"the checkpoint does not fit {ours}:")

    @property
    def _made(self) -> list[str]:
        return [*self.outputs, *sorted(self.fresh)]

    def apply(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Compute all outputs from full source tensors, as views if possible. Collective if tensors are gathered.

        Raises:
            CheckpointError: a tensor's shape or dtype differs from its spec.
        """
        raise_if(list(_surprises(self.sources, tensors)), "the tensors differ from the specs of the graph:")
        return {name: value.tensor(tensors.__getitem__) for name, value in self.outputs.items()}


def specs_of(tensors: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
    """Shape and dtype of each tensor, by name."""
    return {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def map_tensors(mapper: Mapper, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Bind a mapper to tensors and compute all outputs at once."""
    return StateGraph(mapper, specs_of(tensors)).apply(tensors)


def _surprises(sources: Mapping[str, TensorSpec], tensors: Mapping[str, Tensor]) -> Iterable[str]:
    for name, spec in sources.items():
        if name not in tensors:
            yield f"'{name}' is missing"
        elif TensorSpec(tuple(tensors[name].shape), tensors[name].dtype) != spec:
            yield f"'{name}' is {tensors[name].dtype} {list(tensors[name].shape)}, not {spec.dtype} {list(spec.shape)}"


def _source_values(specs: Mapping[str, TensorSpec]) -> dict[str, Value]:
    """Values that stand for the tensors of a checkpoint, by name."""
    return {name: Source(name, spec) for name, spec in specs.items()}


def _ends_placed(value: Value) -> bool:
    """Whether sharding (:class:`Placed`) occurs nowhere in the expression but as its last operation."""
    inner: Sequence[Value] = value.parts
    return all(not isinstance(part, Placed) and _ends_placed(part) for part in inner)
