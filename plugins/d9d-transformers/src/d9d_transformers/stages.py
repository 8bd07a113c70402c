"""Pipeline stages of a model of transformers: modules of other stages become modules that do nothing.

Shapes: B samples, S positions, H features.
"""

from __future__ import annotations

from typing import Any

from d9d_core.model import Stage
from d9d_nn.stages import stage_layers
from torch import Tensor, nn

from d9d_transformers.head import Head
from d9d_transformers.structure import Structure

#: Cost of an embedding in a step divided by the cost of a head; see :mod:`d9d_nn.decoder.stages`.
_EMBEDDING_PER_HEAD = 1 / 16


class AbsentLayer(nn.Module):
    """Stand-in for a layer of another pipeline stage: returns its input, or the tensor given to :meth:`hand`.

    It has the layer's attributes that are texts or numbers, because models choose masks and rotations by them.

    Args:
        layer: layer of another stage.
        outputs: number of values that the layer returns in a tuple; ``None`` for a tensor.
    """

    def __init__(self, layer: nn.Module, outputs: int | None) -> None:
        super().__init__()
        self._outputs = outputs
        for name, value in vars(layer).items():
            if isinstance(value, str | int | float) and name not in vars(self):
                setattr(self, name, value)
        self._handed: Tensor | None = None
        self._seen: Tensor | None = None

    def hand(self, hidden: Tensor) -> None:
        """Set the hidden states [B, S, H] that the next call returns."""
        self._handed = hidden

    def take(self) -> Tensor:
        """Return the input [B, S, H] of the last call, and forget it."""
        assert self._seen is not None
        seen, self._seen = self._seen, None
        return seen

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor | tuple[Tensor | None, ...]:
        """Return the input [B, S, H], or the tensor given to :meth:`hand`, in the form of the layer's output."""
        if self._handed is not None:
            hidden_states, self._handed = self._handed, None
        self._seen = hidden_states
        return hidden_states if self._outputs is None else (hidden_states, *(None,) * (self._outputs - 1))


class Absent(nn.Module):
    """Stand-in for a module of another pipeline stage that is no layer: returns its first argument."""

    def forward(self, value: Any, *_: Any, **__: Any) -> Any:
        """Return the first argument unchanged."""
        return value


def layers_of(count: int, numbers: int, head: Head, stage: Stage) -> range:
    """Layers of a stage, chosen so that all stages cost about the same, including head and embedding.

    Args:
        count: number of layers of the whole model.
        numbers: number of parameter elements, summed over all layers, that one token uses.
        head: facts about the head.
        stage: pipeline stage.

    Raises:
        BuildError: the layers cannot be split over the stages.
    """
    cost = head.features * head.vocabulary / (numbers / count)
    return stage_layers(count, stage, first=_EMBEDDING_PER_HEAD * cost, last=cost)


def keep_stage(
    base: Any, structure: Structure, layers: range, *, first: bool, last: bool, embedding: bool
) -> tuple[AbsentLayer | None, AbsentLayer | None]:
    """Remove modules of other stages, in place.

    Args:
        base: model without its head.
        structure: structure of the model.
        layers: layers of the stage.
        first: whether the stage is the first stage.
        last: whether the stage is the last stage.
        embedding: whether the stage keeps the embedding although it is not the first stage.

    Returns:
        The absent layer before the stage's own layers, which returns the received hidden states, and the absent
        layer after them, which takes the hidden states to send; each ``None`` if there is no such layer.
    """
    listed = base.get_submodule(structure.layers)
    for index in range(structure.count):
        if index not in layers:
            listed[index] = AbsentLayer(listed[index], structure.outputs)
    kept = structure.before[:1] if embedding else ()
    absent = [name for name in structure.before if not first and name not in kept]
    absent += [] if last else structure.after
    for name in absent:
        base.set_submodule(name, Absent())
    return (
        None if first else listed[layers.start - 1],
        None if last else listed[layers.stop],
    )
