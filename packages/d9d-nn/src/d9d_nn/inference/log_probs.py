"""Inference tasks ``log_probs`` and ``perplexity``: probabilities that a language model gives to targets.

Shapes: B samples, S positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from d9d_core.inference import ROW, Columns
from d9d_core.model import PositionShare
from d9d_core.task import StageInputs
from d9d_core.types import Microbatch, State
from torch import Tensor

from d9d_nn.heads.choice import check_language_model, read_output
from d9d_nn.inference.config import LogProbsConfig, PerplexityRowsConfig
from d9d_nn.inference.rows import is_packed, places_of, row_places
from d9d_nn.microbatch import check_fields, masks_of, own_positions, stage_inputs, with_blocks
from d9d_nn.ops.linear_cross_entropy import IGNORE

_ROW = "number of the row in the input, from 0"
_COUNT = "number of targets: tokens after the first, with the end of text; in conversations, only trained tokens"


class TokenLikelihoods:
    """Base class of the inference tasks of log-probabilities and perplexity of targets.

    Microbatches are the same as for the task ``causal_lm``; targets of -100 are not counted.

    Args:
        config: config with the head's name.
    """

    #: Names of the kept tensors with a dimension of positions, to gather over ``cp``.
    of_positions = frozenset({"losses", "targets"})

    def __init__(self, config: LogProbsConfig | PerplexityRowsConfig) -> None:
        self.config = config
        self._packed = False
        self._masks: tuple[str, ...] = ()

    def check(self, model: Any, facts: State) -> None:
        """Find the head, and compare vocabulary and sequence length of model and data.

        Raises:
            JobError: the head cannot be found, or the data has token ids or positions that the model does not have.
        """
        check_language_model(model, "causal_lm", self.config.head, facts)
        self._packed = is_packed(facts)
        self._masks = masks_of(model)

    def inputs(self, microbatch: Microbatch) -> StageInputs:
        """Inputs of a pipeline stage: tokens go to the first stage; all other inputs go to every stage.

        Raises:
            JobError: the dataset gives no targets; or the model needs ``attention_blocks`` and the dataset gives none,
                or the reverse.
        """
        check_fields(microbatch, self.config.name, "targets")
        return stage_inputs(with_blocks(microbatch, *self._masks), "targets")

    def split_positions(self, microbatch: Microbatch, share: PositionShare) -> Microbatch:
        """This rank's positions, with a target for each token.

        Raises:
            ValueError: the ranks cannot share the positions evenly.
            JobError: the model needs ``attention_blocks`` and the dataset gives none, or the reverse.
        """
        return own_positions(with_blocks(microbatch, *self._masks), share)

    def process(self, outputs: Mapping[str, Tensor], microbatch: Microbatch) -> Mapping[str, Tensor]:
        """Losses float32 [B, S], targets int64 [B, S], and the tensors that locate the rows in the microbatch."""
        losses = read_output(outputs, "token_loss", self.config.head)
        return {"losses": losses.float(), "targets": microbatch["targets"], **places_of(microbatch)}

    def _each(self, kept: Mapping[str, Tensor]) -> list[tuple[int, Any, Any]]:
        """Return for each row its number, its targets and their float32 log-probabilities."""
        targets: Any = kept["targets"].numpy()
        losses: Any = kept["losses"].numpy()
        found = []
        for place in row_places(kept, targets.shape[1], self._packed):
            mine = targets[place.sample, place.positions]
            learned = mine != IGNORE
            found.append((place.row, mine[learned], -losses[place.sample, place.positions][learned]))
        return found


class LogProbs(TokenLikelihoods):
    """Inference task of log-probabilities: natural logarithms, summed over a row or for each target."""

    config: LogProbsConfig

    @property
    def columns(self) -> Mapping[str, str]:
        each = {"targets": "token ids of the targets", "log_probs": "log-probability of each target"}
        more = each if self.config.per == "token" else {}
        return {ROW: _ROW, "tokens": _COUNT, "log_prob": "log-probability of all targets together", **more}

    def rows(self, kept: Mapping[str, Tensor]) -> Columns:
        """Make the output rows of a microbatch from the tensors that :meth:`process` returned for it."""
        each = self._each(kept)
        columns: dict[str, list[Any]] = {
            ROW: [row for row, _, _ in each],
            "tokens": [len(targets) for _, targets, _ in each],
            "log_prob": [float(values.sum(dtype=np.float64)) for _, _, values in each],
        }
        if self.config.per == "token":
            columns |= {"targets": [targets for _, targets, _ in each], "log_probs": [values for _, _, values in each]}
        return columns

    def tally(self, rows: Columns) -> Mapping[str, float]:
        """Number of targets of these rows, and sum of their log-probabilities."""
        return {"tokens": float(sum(rows["tokens"])), "log_prob": float(sum(rows["log_prob"]))}

    def finalize(self, sums: Mapping[str, float]) -> Mapping[str, float]:
        """Summary of the pass: the number of targets, and their mean log-probability."""
        return {"tokens": sums["tokens"], "mean_log_prob": sums["log_prob"] / max(sums["tokens"], 1)}


class PerplexityRows(TokenLikelihoods):
    """Inference task of perplexity: ``exp`` of the mean negative log-probability of the targets; 1 without targets."""

    @property
    def columns(self) -> Mapping[str, str]:
        return {
            ROW: _ROW,
            "tokens": _COUNT,
            "loss": "mean negative log-probability of the targets, in nats",
            "perplexity": "exp of the loss",
        }

    def rows(self, kept: Mapping[str, Tensor]) -> Columns:
        """Make the output rows of a microbatch from the tensors that :meth:`process` returned for it."""
        each = [(row, len(targets), -float(values.sum(dtype=np.float64))) for row, targets, values in self._each(kept)]
        losses = [total / max(count, 1) for _, count, total in each]
        return {
            ROW: [row for row, _, _ in each],
            "tokens": [count for _, count, _ in each],
            "loss": losses,
            "perplexity": [_exp(loss) for loss in losses],
        }

    def tally(self, rows: Columns) -> Mapping[str, float]:
        """Number of targets of these rows, and sum of their losses."""
        weighted = [count * loss for count, loss in zip(rows["tokens"], rows["loss"], strict=True)]
        return {"tokens": float(sum(rows["tokens"])), "loss": float(sum(weighted))}

    def finalize(self, sums: Mapping[str, float]) -> Mapping[str, float]:
        """Summary of the pass: the number of targets, and the mean loss and the perplexity over all targets."""
        loss = sums["loss"] / max(sums["tokens"], 1)
        return {"tokens": sums["tokens"], "loss": loss, "perplexity": _exp(loss)}


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf  # larger results overflow a 64-bit float
