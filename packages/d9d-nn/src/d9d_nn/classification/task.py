"""Tasks ``classification`` and ``token_classification``: predict the label of each sample, or of each token.

Shapes: B samples, S positions, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from d9d_core.errors import JobError
from d9d_core.model import PositionShare
from d9d_core.types import Microbatch, State
from torch import Tensor
from torch.nn import functional

from d9d_nn.classification.config import ClassificationConfig, TokenClassificationConfig
from d9d_nn.heads.choice import choose_head, exceeded, observed_states, read_output
from d9d_nn.microbatch import (
    check_fields,
    check_prefixes,
    counts_samples,
    masks_of,
    own_positions,
    own_positions_of_samples,
)
from d9d_nn.ops.linear_cross_entropy import IGNORE
from d9d_nn.text_task import TextTask

_TERM = "cross_entropy"


class Classification(TextTask):
    """Task of classification with one loss term, ``cross_entropy``: the mean negative log-likelihood of the labels.

    Microbatches have ``tokens`` int64 [B, S], right-padded, and ``labels`` int64 [B], -100 to ignore a sample.
    Optional: ``lengths`` int64 [B], and ``positions``, ``documents`` and ``pooling_mask``, int64 [B, S]; a sample is
    one text. The model's last stage returns ``class_logits`` [B, C], named ``<head>/class_logits`` if the model has
    several heads.

    Args:
        config: config with the name of the head.
    """

    term = _TERM
    head_kind = "classification"
    further_inputs = ("pooling_mask",)
    reads_targets = False
    #: Shape of the labels.
    label_shape: tuple[str, ...] = ("B",)

    def __init__(self, config: ClassificationConfig | TokenClassificationConfig) -> None:
        self.config = config

    def check(self, model: Any, facts: State) -> None:
        """Find the head, and check that the model covers the data's classes, vocabulary and sequence length, if known.

        Raises:
            JobError: the head is not found or has one class, the data has classes, token ids or positions that the
                model lacks, or the model has prefix attention, which needs targets.
        """
        head = choose_head(model, self.head_kind, self.config.head)
        check_prefixes(model, self.config.name)
        self._masks = masks_of(model)
        problems = exceeded(model, facts)
        if getattr(head, "num_classes", None) == 1:
            problems.append("model.heads: a head with one class cannot learn from labels; give it 2 or more")
        have, need = getattr(head, "num_classes", None), facts.get("num_classes")
        if isinstance(have, int) and isinstance(need, int) and need > have:
            problems.append(
                f"model.heads: the head has {have} classes, the data has {need}; set its num_classes to {need} or more"
            )
        if problems:
            raise JobError("\n".join(problems))

    def weights(self, microbatch: Microbatch) -> Mapping[str, Tensor]:
        """Weight of the loss term in a microbatch: the number of labels that are not ignored.

        Raises:
            JobError: the dataset gives no labels; or labels of texts to a task that needs labels of tokens, or the
                reverse.
        """
        check_fields(microbatch, self.config.name, "labels")
        labels = microbatch["labels"]
        if labels.ndim != len(self.label_shape):
            raise JobError(
                f"data: task '{self.config.name}' reads labels [{', '.join(self.label_shape)}], but the dataset gives "
                f"labels of shape {list(labels.shape)}; use a dataset for this task, or another task"
            )
        return {_TERM: (labels != IGNORE).sum(dtype=torch.float32)}

    def split_positions(self, microbatch: Microbatch, share: PositionShare) -> Microbatch:
        """This rank's positions of the microbatch; the head pools over all ranks, so only one rank counts the labels.

        Raises:
            ValueError: the positions cannot be divided evenly over the ranks.
            JobError: the model needs ``attention_blocks`` and the data gives none, or the reverse.
        """
        own = own_positions_of_samples(self._with_blocks(microbatch), share)
        return own if counts_samples(own) else {**own, "labels": torch.full_like(own["labels"], IGNORE)}

    def losses(self, outputs: Mapping[str, Tensor], microbatch: Microbatch) -> Mapping[str, Tensor]:
        """Sum of the losses of all labels, computed in float32 or wider; ignored labels have loss zero.

        Raises:
            JobError: the model did not return ``class_logits``.
        """
        logits = read_output(outputs, "class_logits", self.config.head)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        labels = microbatch["labels"].flatten()
        loss = functional.cross_entropy(wide.flatten(0, -2), labels, ignore_index=IGNORE, reduction="sum")
        return {_TERM: loss}

    def observations(self, outputs: Mapping[str, Tensor], microbatch: Microbatch) -> Mapping[str, Tensor]:
        """Observations ``class_logits`` and ``labels``, and ``hidden_states``, if the model has such a head."""
        logits = read_output(outputs, "class_logits", self.config.head)
        return {"class_logits": logits.detach(), "labels": microbatch["labels"], **observed_states(outputs)}


class TokenClassification(Classification):
    """Task of token classification with one loss term, ``cross_entropy``: the mean over all labels of all samples.

    Like :class:`Classification`, but ``labels`` are int64 [B, S], -100 to ignore a token, and the model returns
    ``class_logits`` [B, S, C].

    Args:
        config: config with the name of the head.
    """

    head_kind = "token_classification"
    label_shape = ("B", "S")

    def split_positions(self, microbatch: Microbatch, share: PositionShare) -> Microbatch:
        """This rank's positions of the microbatch with their labels; each rank sums the losses of its own labels.

        Raises:
            ValueError: the positions cannot be divided evenly over the ranks.
            JobError: the model needs ``attention_blocks`` and the data gives none, or the reverse.
        """
        return own_positions(self._with_blocks(microbatch), share)
