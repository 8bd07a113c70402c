"""Task ``distillation``: learn the next-token distribution of a teacher, in the same job.

Shapes: B samples, S positions, V vocabulary size, K token ids kept of the teacher's distribution (``top_k``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from d9d_core.errors import JobError
from d9d_core.first_pass import DataRanks, FirstPass
from d9d_core.task import StageInputs
from d9d_core.types import Microbatch, State
from torch import Tensor

from d9d_nn.distillation.config import DistillationConfig
from d9d_nn.distillation.divergence import divergence
from d9d_nn.distillation.vocabularies import check_vocabularies
from d9d_nn.heads.choice import check_next_tokens_only, choose_head, exceeded, read_output
from d9d_nn.microbatch import check_fields, counted_targets, masks_of
from d9d_nn.ops.linear_cross_entropy import IGNORE
from d9d_nn.text_task import TextTask

_SOFT, _HARD = "divergence", "cross_entropy"
#: Names of the tensors that the first pass adds to a microbatch: the teacher's logits and, with ``top_k``, the ids of
#: their tokens.
_LOGITS, _WORDS = "teacher_logits", "teacher_words"


class Distillation(TextTask):
    """Task of distillation with the loss term ``divergence``, a mean over targets, and optionally ``cross_entropy``.

    Microbatches are the same as for ``causal_lm``, including weights: positions without a target do not count. The last
    stages of both models return ``logits`` [B, S, V].

    Args:
        config: config with the teacher, the temperature and the weights of the losses.
    """

    def __init__(self, config: DistillationConfig) -> None:
        self.config = config
        self._words: int | None = None

    @property
    def coefficients(self) -> Mapping[str, float]:
        """Coefficients of the loss terms."""
        config = self.config
        return {_SOFT: config.soft_weight} | ({_HARD: config.hard_weight} if config.hard_weight else {})

    def check(self, model: Any, facts: State) -> None:
        """Find the heads, and compare the sizes of model, teacher and data, and the tokenizers of the two models.

        Raises:
            JobError: a head cannot be found, the data has token ids or positions that a model does not have, the
                teacher has another vocabulary, other inputs or no weights, ``top_k`` is larger than the teacher's
                vocabulary, or the model predicts further tokens.
        """
        config = self.config
        self._words = getattr(model, "vocab_size", None)
        check_next_tokens_only(model, config.name)
        choose_head(model, "causal_lm", config.head)
        problems = exceeded(model, facts)
        choose_head(config.teacher, "causal_lm", config.teacher_head, "task.teacher_head")
        problems += exceeded(config.teacher, facts, "task.teacher")
        problems += check_vocabularies(model, config.teacher)
        if getattr(config.teacher, "pretrained", None) is None:
            problems.append("task.teacher: the teacher has no trained weights to learn from; set pretrained")
        words = getattr(config.teacher, "vocab_size", None)
        if config.top_k is not None and isinstance(words, int) and config.top_k > words:
            problems.append(f"task.top_k: {config.top_k} exceeds the teacher's {words} token ids; use null for all")
        masks = [getattr(one, "attention_mask", "causal") for one in (model, config.teacher)]
        self._masks = masks_of(model, config.teacher)
        if len({mask in ("prefix", "blocks") for mask in masks}) > 1:
            problems.append(
                f"task.teacher: its attention_mask is {masks[1]} and the model's is {masks[0]}, but both get the "
                "same inputs; choose equal ones"
            )
        if problems:
            raise JobError("\n".join(problems))

    def weights(self, microbatch: Microbatch) -> Mapping[str, Tensor]:
        """Weight of each loss term in a microbatch: the number of targets, or the sum of their weights."""
        return dict.fromkeys(self.coefficients, counted_targets(microbatch))

    @property
    def first_pass(self) -> FirstPass:
        return FirstPass("other", self.config.teacher, where="task.teacher")

    def first_inputs(self, microbatch: Microbatch) -> StageInputs:
        """Inputs of the teacher, the same as the model's.

        Raises:
            JobError: the dataset gives no targets.
        """
        check_fields(microbatch, self.config.name, "targets")
        return self.inputs(microbatch)

    def first_outputs(self, outputs: Mapping[str, Tensor], microbatch: Microbatch) -> Mapping[str, Tensor]:  # noqa: ARG002
        """Logits of the teacher [B, S, V]; with ``top_k``, the K largest [B, S, K] and their token ids."""
        # The teacher's logits beyond the model's vocabulary are of padding, see check().
        logits = read_output(outputs, "logits", self.config.teacher_head).detach()[..., : self._words]
        if self.config.top_k is None:
            return {_LOGITS: logits}
        top = logits.topk(self.config.top_k, dim=-1, sorted=False)
        return {_LOGITS: top.values, _WORDS: top.indices}

    def complete(self, kept: Sequence[Mapping[str, Tensor]], ranks: DataRanks) -> Sequence[Mapping[str, Tensor]]:  # noqa: ARG002
        """Return the teacher's logits unchanged, because the loss of a sample does not depend on other samples."""
        return kept

    def losses(self, outputs: Mapping[str, Tensor], microbatch: Microbatch) -> Mapping[str, Tensor]:
        """Sum of each loss term over the targets; the loss of a target is multiplied by its weight.

        Raises:
            JobError: the model did not return ``logits``.
        """
        logits = read_output(outputs, "logits", self.config.head).flatten(0, 1)  # [B * S, V]
        targets = microbatch["targets"].flatten()
        counted = targets != IGNORE
        teacher = microbatch[_LOGITS].flatten(0, 1)
        words = microbatch[_WORDS].flatten(0, 1) if _WORDS in microbatch else None
        soft = divergence(logits, teacher, words, counted, self.config.temperature)
        weights = microbatch["weights"].flatten() if "weights" in microbatch else 1.0
        sums = {_SOFT: (soft * weights).sum()}
        if self.config.hard_weight:
            # one logit for one token id: the target has probability 1
            one = torch.zeros(len(targets), 1, device=logits.device)
            hard = divergence(logits, one, targets.clamp(min=0).unsqueeze(1), counted)
            sums[_HARD] = (hard * weights).sum()
        return sums

    def observations(self, outputs: Mapping[str, Tensor], microbatch: Microbatch) -> Mapping[str, Tensor]:  # noqa: ARG002
        """Observations for metrics: the targets only, because copying the logits would take as long as the loss."""
        return {"targets": microbatch["targets"]}
