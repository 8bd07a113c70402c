"""Base class of tasks on texts: a task reads one head and by default has one loss term.

Shapes: B samples, S positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from d9d_core.model import PositionShare
from d9d_core.task import StageInputs
from d9d_core.types import Microbatch, State
from torch import Tensor

from d9d_nn.heads.choice import check_language_model, check_next_tokens_only
from d9d_nn.microbatch import check_prefixes, count_positions, masks_of, own_positions, stage_inputs, with_blocks


class TextTask:
    """Base class of tasks on texts, whose microbatches hold ``tokens`` int64 [B, S].

    Attributes:
        term: name of the loss term.
        head_kind: kind of head that the task trains.
        further_inputs: inputs of the model other than tokens, positions, documents, lengths and attention blocks.
        trains_further_tokens: whether the task gives the inputs of multi-token prediction.
        reads_targets: whether microbatches hold ``targets``, which end the prefixes of prefix attention.
        config: config with ``head``, the head's name.
    """

    term: ClassVar[str]
    head_kind: ClassVar[str] = "causal_lm"
    further_inputs: ClassVar[tuple[str, ...]] = ()
    trains_further_tokens: ClassVar[bool] = False
    reads_targets: ClassVar[bool] = True
    config: Any
    _masks: tuple[str, ...] = ()  # attention_mask of the models, known after check()

    @property
    def coefficients(self) -> Mapping[str, float]:
        """Coefficient of the loss term."""
        return {self.term: 1.0}

    def check(self, model: Any, facts: State) -> None:
        """Find the head, and compare vocabulary and sequence length of model and data, if both state them.

        Raises:
            JobError: the head cannot be found, the data has token ids or positions that the model does not have, or the
                model predicts further tokens, which the task does not train, or has prefix attention, and the task
                reads no targets.
        """
        if not self.trains_further_tokens:
            check_next_tokens_only(model, self.config.name)
        check_language_model(model, self.head_kind, self.config.head, facts)
        if not self.reads_targets:
            check_prefixes(model, self.config.name)
        self._masks = masks_of(model)

    def count(self, microbatch: Microbatch) -> int | Tensor:
        """Number of positions of all rows without padding, including positions with ignored targets."""
        return count_positions(microbatch)

    def inputs(self, microbatch: Microbatch) -> StageInputs:
        """Inputs of a pipeline stage: tokens go to the first stage; all other inputs go to every stage.

        Raises:
            JobError: the model needs ``attention_blocks`` and the data gives none, or the reverse.
        """
        return stage_inputs(self._with_blocks(microbatch), *self.further_inputs)

    def split_positions(self, microbatch: Microbatch, share: PositionShare) -> Microbatch:
        """This rank's positions of the microbatch with their targets; each rank sums the losses of its own targets.

        Raises:
            ValueError: the ranks cannot share the positions evenly.
            JobError: the model needs ``attention_blocks`` and the data gives none, or the reverse.
        """
        return own_positions(self._with_blocks(microbatch), share)

    def _with_blocks(self, microbatch: Microbatch) -> Microbatch:
        """Microbatch with ``attention_blocks``, if the model needs them."""
        return with_blocks(microbatch, *self._masks)
