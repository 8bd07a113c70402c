"""Inference task ``hidden_states``: outputs of chosen layers of a model.

Shapes: B samples, S positions, H features.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from d9d_core.errors import JobError
from d9d_core.inference import ROW, Columns
from d9d_core.model import PositionShare
from d9d_core.task import StageInputs
from d9d_core.types import Microbatch, State
from torch import Tensor

from d9d_nn.inference.config import HiddenStatesConfig
from d9d_nn.inference.rows import is_packed, places_of, row_places
from d9d_nn.microbatch import masks_of, own_positions, stage_inputs, with_blocks

#: Names of the layers of a model, see :class:`d9d_core.traits.HasBlocks`.
_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)")


class HiddenStates:
    """Inference task of hidden states: the residual stream after layers, before the final norm.

    Layer i of this task is ``hidden_states[i + 1]`` of transformers, whose first entry is the embedding. Only the last
    layer differs, since its entry in transformers is after the final norm. The model's heads run, but are not read.

    Args:
        config: layers, and pooling.
    """

    def __init__(self, config: HiddenStatesConfig) -> None:
        self.config = config
        self._packed = False
        self._modules: dict[str, str] = {}
        self._masks: tuple[str, ...] = ()

    @property
    def columns(self) -> Mapping[str, str]:
        kinds = {
            "last": "at the row's last position",
            "mean": "averaged over the row's positions",
            "none": "at each position",
        }
        kind = kinds[self.config.pooling]
        states = {_column(layer): f"output of layer {layer} {kind}" for layer in self.config.layers}
        return {ROW: "number of the row in the input, from 0", "tokens": "number of the row's positions", **states}

    def check(self, model: Any, facts: State) -> None:
        """Store whether samples of the data are packed, which :meth:`rows` needs, and the model's kind of mask."""
        self._packed = is_packed(facts)
        self._masks = masks_of(model)

    def modules(self, names: Sequence[str]) -> Sequence[str]:
        """Names of the chosen layers.

        Raises:
            JobError: the model has no such layer.
        """
        found = {int(match[1]): name for name in names if (match := _LAYER.fullmatch(name))}
        count = max(found, default=-1) + 1
        for layer in self.config.layers:
            if layer % max(count, 1) not in found or not -count <= layer < count:
                raise JobError(
                    f"task.layers: there is no layer {layer} in a model of {count} layers; give {-count} to {count - 1}"
                )
            self._modules[_column(layer)] = found[layer % count]
        return list(dict.fromkeys(self._modules.values()))

    def inputs(self, microbatch: Microbatch) -> StageInputs:
        """Inputs of a pipeline stage: tokens go to the first stage; all other inputs go to every stage.

        Raises:
            JobError: the model needs ``attention_blocks``, or targets that end prefixes, and the data gives none, or
                the data gives blocks that the model does not read.
        """
        return stage_inputs(with_blocks(microbatch, *self._masks))

    @property
    def of_positions(self) -> frozenset[str]:
        """Names of the tensors with a value for each position: the outputs of all chosen layers."""
        return frozenset(self._modules)

    def split_positions(self, microbatch: Microbatch, share: PositionShare) -> Microbatch:
        """This rank's positions of the microbatch, for which the layers return outputs.

        Raises:
            ValueError: the ranks cannot share the positions evenly.
            JobError: the same problems as in :meth:`inputs`.
        """
        return own_positions(with_blocks(microbatch, *self._masks), share)

    def process(self, outputs: Mapping[str, Tensor], microbatch: Microbatch) -> Mapping[str, Tensor]:
        """Outputs of the chosen layers [B, S, H] in float32, and the tensors that locate the rows in the microbatch."""
        states = {column: outputs[f"module/{name}"].float() for column, name in self._modules.items()}
        return {**states, **places_of(microbatch)}

    def rows(self, kept: Mapping[str, Tensor]) -> Columns:
        """Make the output rows of a microbatch from the tensors that :meth:`process` returned for it."""
        arrays: dict[str, Any] = {column: kept[column].numpy() for column in self._modules}
        places = list(row_places(kept, next(iter(arrays.values())).shape[1], self._packed))
        lengths = [place.positions.stop - place.positions.start for place in places]
        columns: dict[str, list[Any]] = {ROW: [place.row for place in places], "tokens": lengths}
        for column, array in arrays.items():
            columns[column] = [self._pooled(array[place.sample, place.positions]) for place in places]
        return columns

    def tally(self, rows: Columns) -> Mapping[str, float]:
        """Number of rows, and number of their positions."""
        return {"rows": float(len(rows[ROW])), "tokens": float(sum(rows["tokens"]))}

    def finalize(self, sums: Mapping[str, float]) -> Mapping[str, float]:
        """Number of rows, and number of their positions."""
        return dict(sums)

    def _pooled(self, states: Any) -> Any:
        if self.config.pooling == "none":
            return states
        return states[-1] if self.config.pooling == "last" else states.mean(axis=0, dtype=np.float64).astype(np.float32)


def _column(layer: int) -> str:
    return f"layer_{layer}" if layer >= 0 else f"layer_minus_{-layer}"
