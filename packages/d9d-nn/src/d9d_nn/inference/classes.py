"""Inference tasks ``classes``, ``token_classes`` and ``rewards``: outputs of classification heads.

Shapes: B samples, S positions, C classes, at most N rows per packed sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from d9d_core.data import TextInputs
from d9d_core.errors import JobError
from d9d_core.inference import ROW, Columns
from d9d_core.model import PositionShare
from d9d_core.task import StageInputs
from d9d_core.types import Microbatch, State
from torch import Tensor

from d9d_nn.heads.choice import choose_head, exceeded, read_output
from d9d_nn.inference.config import ClassesConfig, RewardsConfig, TokenClassesConfig
from d9d_nn.inference.rows import is_packed, places_of, row_places
from d9d_nn.microbatch import check_prefixes, masks_of, own_positions, stage_inputs, with_blocks

_ROW = "number of the row in the input, from 0"


class HeadReader:
    """Base class of the inference tasks of classes, token classes, rewards and embeddings: they read one head.

    Args:
        config: config with the head's name.
    """

    #: Kind of the head that the task reads, and the name of its output.
    kind = "classification"
    output = "class_logits"
    #: Names of the kept tensors with a dimension of positions, to gather over ``cp``; none if the head pools.
    of_positions: frozenset[str] = frozenset()
    #: Texts get no end-of-text token, because the heads are trained with labelled texts, which have none.
    text_inputs: TextInputs = "as_encoded"
    #: Names of further inputs of the model.
    further_inputs: tuple[str, ...] = ("ends", "pooling_mask")

    def __init__(self, config: Any) -> None:
        self.config = config
        self._packed = False
        self._masks: tuple[str, ...] = ()

    def check(self, model: Any, facts: State) -> None:
        """Find the head, and compare vocabulary and sequence length of model and data.

        Raises:
            JobError: the head cannot be found or does not fit the task, the data has token ids or positions that the
                model does not have, or the model has prefix attention, which needs targets.
        """
        head = choose_head(model, self.kind, self.config.head)
        check_prefixes(model, self.config.name)
        if problems := [*exceeded(model, facts), *self._problems(head, facts)]:
            raise JobError("\n".join(problems))
        self._packed = is_packed(facts)
        self._masks = masks_of(model)

    def inputs(self, microbatch: Microbatch) -> StageInputs:
        """Inputs of a pipeline stage: tokens go to the first stage; all other inputs go to every stage.

        Raises:
            JobError: the model needs ``attention_blocks`` and the data gives none, or the reverse.
        """
        return stage_inputs(with_blocks(microbatch, *self._masks), *self.further_inputs)

    def split_positions(self, microbatch: Microbatch, share: PositionShare) -> Microbatch:
        """This rank's positions of the microbatch.

        Raises:
            ValueError: the ranks cannot share the positions evenly.
        """
        return own_positions(microbatch, share)

    def process(self, outputs: Mapping[str, Tensor], microbatch: Microbatch) -> Mapping[str, Tensor]:
        """Output of the head, and the tensors that locate the rows in the microbatch."""
        return {"values": read_output(outputs, self.output, self.config.head).float(), **places_of(microbatch)}

    def tally(self, rows: Columns) -> Mapping[str, float]:
        return {"rows": float(len(rows[ROW]))}

    def finalize(self, sums: Mapping[str, float]) -> Mapping[str, float]:
        """Summary of the pass: the number of rows."""
        return {"rows": sums["rows"]}

    def _problems(self, head: Any, facts: State) -> list[str]:  # noqa: ARG002 - subclasses use them
        return []

    def _each(self, kept: Mapping[str, Tensor]) -> tuple[list[int], Tensor]:
        """Numbers of the rows, and the head's output for each, [rows, ...]."""
        values = kept["values"]
        if not self._packed:
            return kept["rows"].tolist(), values
        places = list(row_places(kept, kept["documents"].shape[1], packed=True))
        samples = torch.tensor([place.sample for place in places])
        return [place.row for place in places], values[samples, torch.tensor([place.index for place in places])]


class Classes(HeadReader):
    """Inference task of classes: the most likely class of each row, and the probabilities of all classes."""

    config: ClassesConfig

    def __init__(self, config: ClassesConfig) -> None:
        super().__init__(config)
        self._labels = config.labels

    @property
    def columns(self) -> Mapping[str, str]:
        return {
            ROW: _ROW,
            "class": "number of the most likely class",
            "label": "name of this class, or its number if the classes have no names",
            "probabilities": "probability of each class, in order",
        }

    def rows(self, kept: Mapping[str, Tensor]) -> Columns:
        """Make the output rows of a microbatch from the tensors that :meth:`process` returned for it."""
        numbers, logits = self._each(kept)
        chosen = logits.argmax(-1).tolist()
        return {
            ROW: numbers,
            "class": chosen,
            "label": [label_of(one, self._labels) for one in chosen],
            "probabilities": list(logits.softmax(-1).numpy()),
        }

    def _problems(self, head: Any, facts: State) -> list[str]:
        self._labels = labels_of(self.config.labels, facts)
        return label_problems(self._labels, head)


class TokenClasses(HeadReader):
    """Inference task of token classes: the most likely class of each token of a row."""

    kind = "token_classification"
    of_positions = frozenset({"values"})
    further_inputs = ()
    config: TokenClassesConfig

    def __init__(self, config: TokenClassesConfig) -> None:
        super().__init__(config)
        self._labels = config.labels

    @property
    def columns(self) -> Mapping[str, str]:
        return {ROW: _ROW, "tokens": "number of the row's tokens", "labels": "most likely class of each token"}

    def rows(self, kept: Mapping[str, Tensor]) -> Columns:
        """Make the output rows of a microbatch from the tensors that :meth:`process` returned for it."""
        chosen = kept["values"].argmax(-1)
        each = [
            (place.row, [label_of(one, self._labels) for one in chosen[place.sample, place.positions].tolist()])
            for place in row_places(kept, chosen.shape[1], self._packed)
        ]
        return {
            ROW: [row for row, _ in each],
            "tokens": [len(labels) for _, labels in each],
            "labels": [labels for _, labels in each],
        }

    def _problems(self, head: Any, facts: State) -> list[str]:
        self._labels = labels_of(self.config.labels, facts)
        return label_problems(self._labels, head)


class Rewards(HeadReader):
    """Inference task of rewards: the score of each row, from a head of one class."""

    config: RewardsConfig
    #: Texts lose their end token: in training with preferences, the last token is a target and never an input.
    text_inputs = "without_end"

    @property
    def columns(self) -> Mapping[str, str]:
        return {ROW: _ROW, "reward": "score of the row"}

    def rows(self, kept: Mapping[str, Tensor]) -> Columns:
        """Make the output rows of a microbatch from the tensors that :meth:`process` returned for it."""
        numbers, logits = self._each(kept)
        return {ROW: numbers, "reward": logits[..., 0].tolist()}

    def tally(self, rows: Columns) -> Mapping[str, float]:
        """Number of rows, and sum of their scores."""
        return {"rows": float(len(rows[ROW])), "reward": float(sum(rows["reward"]))}

    def finalize(self, sums: Mapping[str, float]) -> Mapping[str, float]:
        """Summary of the pass: the number of rows, and their mean score."""
        return {"rows": sums["rows"], "mean_reward": sums["reward"] / max(sums["rows"], 1)}

    def _problems(self, head: Any, facts: State) -> list[str]:  # noqa: ARG002 - only the head is checked
        classes = getattr(head, "num_classes", 1)
        if classes == 1:
            return []
        return [f"task: rewards need a classification head of one class, this one has {classes}; use task 'classes'"]


def label_of(number: int, labels: tuple[str, ...] | None) -> str:
    """Name of a class, or its number as a string."""
    return str(number) if labels is None else labels[number]


def labels_of(given: tuple[str, ...] | None, facts: State) -> tuple[str, ...] | None:
    """Names of the classes: from the job file, else from the data's facts, else ``None``."""
    stated = facts.get("labels")
    if given is not None or not isinstance(stated, list):
        return given
    return tuple(str(label) for label in stated)


def label_problems(labels: tuple[str, ...] | None, head: Any) -> list[str]:
    """List with one message if the number of names is not the head's number of classes; otherwise an empty list."""
    classes = getattr(head, "num_classes", None)
    if labels is None or classes is None or len(labels) == classes:
        return []
    return [f"task.labels: {len(labels)} names for a head of {classes} classes; give one name for each class, or none"]
