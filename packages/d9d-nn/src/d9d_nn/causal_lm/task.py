"""Task ``causal_lm``: predict the next token.

Shapes: B samples, S positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from d9d_core.errors import JobError
from d9d_core.model import PositionShare
from d9d_core.task import StageInputs
from d9d_core.types import Microbatch, State
from torch import Tensor

from d9d_nn.causal_lm.config import CausalLMConfig
from d9d_nn.further_targets import MTP_TARGETS, MTP_TOKENS, further_targets
from d9d_nn.heads.causal_lm import RANKS
from d9d_nn.heads.choice import further_depths, observed_states, read_output
from d9d_nn.microbatch import check_fields, counted_targets
from d9d_nn.text_task import TextTask

_TERM = "cross_entropy"


class CausalLM(TextTask):
    """Task of causal language modelling with one loss term, ``cross_entropy``: mean negative log-likelihood of targets.

    Optional ``weights`` float32 [B, S], not negative, weight the targets; the mean is then weighted. Either all
    microbatches of a batch have weights or none has.

    Microbatches have ``tokens`` and ``targets``, and optional ``positions`` and ``documents``, all int64 [B, S]; with
    right-padded samples also ``lengths`` int64 [B]. The model's last stage returns ``token_loss`` float32 [B, S], named
    ``<head>/token_loss`` if the model has several heads. A model that predicts further tokens (``mtp`` in its config)
    also gets their inputs and targets, see :func:`~d9d_nn.further_targets.further_targets`.

    Args:
        config: config with the name of the head.
    """

    term = _TERM
    further_inputs = ("targets", MTP_TOKENS, MTP_TARGETS)
    trains_further_tokens = True

    def __init__(self, config: CausalLMConfig) -> None:
        self.config = config
        self._depths = 0  # number of further tokens that each position predicts

    @property
    def likelihood(self) -> str:
        """Name of the loss term whose exponential is the perplexity."""
        return _TERM

    def check(self, model: Any, facts: State) -> None:
        """Find the head, compare vocabulary and sequence length, and read how many further tokens the model predicts.

        Raises:
            JobError: the head is not found, or the data has token ids or positions that the model lacks.
        """
        super().check(model, facts)
        self._depths = further_depths(model)

    def inputs(self, microbatch: Microbatch) -> StageInputs:
        """Inputs of a pipeline stage: tokens go to the first stage; all other inputs go to every stage.

        Raises:
            JobError: the model predicts further tokens, but the dataset gives no targets, or weights them; or the model
                needs ``attention_blocks`` and the data gives none, or the reverse.
        """
        return super().inputs(self._shifted(microbatch))

    def split_positions(self, microbatch: Microbatch, share: PositionShare) -> Microbatch:
        """This rank's positions of the microbatch, with their targets, also of multi-token prediction.

        Raises:
            ValueError: the ranks cannot share the positions evenly.
            JobError: the same problems as in :meth:`inputs`.
        """
        return super().split_positions(self._shifted(microbatch), share)

    def weights(self, microbatch: Microbatch) -> Mapping[str, Tensor]:
        """Weight of the loss term in a microbatch: the number of targets, or the sum of their weights.

        Raises:
            JobError: the dataset gives no targets.
        """
        check_fields(microbatch, self.config.name, "targets")
        return {_TERM: counted_targets(microbatch)}

    def losses(self, outputs: Mapping[str, Tensor], microbatch: Microbatch) -> Mapping[str, Tensor]:
        """Sum of the weighted token losses; ignored targets have loss zero.

        Raises:
            JobError: the model did not return ``token_loss``.
        """
        loss = read_output(outputs, "token_loss", self.config.head)
        return {_TERM: (loss * microbatch["weights"]).sum() if "weights" in microbatch else loss.sum()}

    def observations(self, outputs: Mapping[str, Tensor], microbatch: Microbatch) -> Mapping[str, Tensor]:
        """Observations ``token_loss`` (unweighted) and ``targets``, and ``weights`` if the data has them.

        Also ``token_ranks``, if a metric reads it, and ``hidden_states``, if the model has such a head.
        """
        loss = read_output(outputs, "token_loss", self.config.head)
        weights = {"weights": microbatch["weights"]} if "weights" in microbatch else {}
        names = (f"{self.config.head}/{RANKS}", RANKS)
        ranks = next((outputs[name] for name in names if name in outputs), None)
        further = weights if ranks is None else {**weights, RANKS: ranks}
        return {"token_loss": loss.detach(), "targets": microbatch["targets"], **further, **observed_states(outputs)}

    def _shifted(self, microbatch: Microbatch) -> Microbatch:
        """Microbatch with the inputs of multi-token prediction, if the model needs them and they are not there yet."""
        if not self._depths or MTP_TOKENS in microbatch:
            return microbatch
        check_fields(microbatch, self.config.name, "targets")
        if "weights" in microbatch:
            raise JobError(
                "model.mtp: the dataset gives weights of targets, which losses of further tokens do not support; set "
                "model.mtp.depths to 0, or leave the weights out of the data"
            )
        further = further_targets(
            microbatch["tokens"],
            microbatch["targets"],
            self._depths,
            documents=microbatch.get("documents"),
            lengths=microbatch.get("lengths"),
        )
        return {**microbatch, **further}
