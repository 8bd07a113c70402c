"""Task ``dpo``: train a preference for the chosen text of a pair, relative to a frozen reference model.

Shapes: B pairs, S positions; rows 2i and 2i + 1 of a microbatch are the chosen and the rejected text of pair i.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from d9d_core.errors import JobError
from d9d_core.first_pass import DataRanks, FirstPass
from d9d_core.model import PositionShare
from d9d_core.task import StageInputs
from d9d_core.topology import Topology
from d9d_core.types import Microbatch
from torch import Tensor
from torch import distributed as dist
from torch.nn import functional

from d9d_nn.heads.choice import read_output
from d9d_nn.microbatch import (
    check_fields,
    counts_samples,
    own_positions_of_samples,
)
from d9d_nn.ops.linear_cross_entropy import IGNORE
from d9d_nn.preference.config import DpoConfig
from d9d_nn.preference.sums import summed
from d9d_nn.text_task import TextTask

_TERM = "dpo"
#: Field with the number of targets of each text, int64 [2B]; given if this rank has only some positions.
_TARGETS = "text_targets"
#: Field with the reference model's log-probabilities [B, 2]; the first pass adds it to a microbatch.
REFERENCE = "reference_logps"


class Dpo(TextTask):
    """Task of preferences: direct preference optimisation (DPO), one loss term ``dpo``, the mean over the pairs.

    Microbatches hold ``tokens`` and ``targets``, int64 [2B, S], and ``samples`` int64 [B]; they may hold ``positions``
    and ``documents``, int64 [2B, S], and ``lengths`` int64 [2B]. The model's last stage returns ``token_loss`` float32
    [2B, S]. A text's log-probability is the sum over its targets.

    Args:
        config: variant of the loss, and the reference model.
    """

    term = _TERM
    further_inputs = ("targets",)

    def __init__(self, config: DpoConfig) -> None:
        self.config = config
        self._context: dist.ProcessGroup | None = None

    def attach(self, topology: Topology) -> None:
        """Find the process group that shares the positions of samples. Collective over all ranks."""
        if topology.sizes["cp"] > 1:
            self._context = topology.axes_group("cp")

    def weights(self, microbatch: Microbatch) -> Mapping[str, Tensor]:
        """Weight of the loss term in a microbatch: the number of pairs that have a target.

        Zero on a rank of ``cp`` that does not count samples.
        """
        counted = _counted(microbatch).sum(dtype=torch.float32)
        return {_TERM: counted if counts_samples(microbatch) else torch.zeros_like(counted)}

    def split_positions(self, microbatch: Microbatch, share: PositionShare) -> Microbatch:
        """This rank's positions of the microbatch; log-probabilities are summed over ranks, one rank counts the pairs.

        Raises:
            ValueError: the ranks cannot share the positions evenly.
            JobError: the model needs ``attention_blocks`` and the data gives none, or the reverse.
        """
        own = own_positions_of_samples(self._with_blocks(microbatch), share)
        return {**own, _TARGETS: (microbatch["targets"] != IGNORE).sum(-1)} if "targets" in microbatch else own

    @property
    def first_pass(self) -> FirstPass:
        """Choice of the model for the first pass: the reference model."""
        reference = self.config.reference
        return FirstPass("frozen" if reference == "auto" else reference, where="task.reference")

    def first_inputs(self, microbatch: Microbatch) -> StageInputs:
        """Inputs of the reference model, the same as the inputs of the trained model.

        Raises:
            JobError: the dataset gives no pairs of texts with targets, or not the ``attention_blocks`` that the model
                needs.
        """
        check_fields(microbatch, self.config.name, "targets", "samples")
        rows, samples = len(microbatch["tokens"]), len(microbatch["samples"])
        if rows != 2 * samples:
            raise JobError(
                f"data: task 'dpo' needs two texts per sample, the dataset gives {rows} rows for {samples} samples; "
                "use a dataset of preferred and rejected texts"
            )
        return self.inputs(microbatch)

    def first_outputs(self, outputs: Mapping[str, Tensor], microbatch: Microbatch) -> Mapping[str, Tensor]:
        """Log-probabilities from the reference model, [B, 2]."""
        return {REFERENCE: self._log_probabilities(outputs, microbatch).detach()}

    def complete(self, kept: Sequence[Mapping[str, Tensor]], ranks: DataRanks) -> Sequence[Mapping[str, Tensor]]:  # noqa: ARG002
        """Return the log-probabilities unchanged, because the loss of a pair does not depend on other pairs."""
        return kept

    def losses(self, outputs: Mapping[str, Tensor], microbatch: Microbatch) -> Mapping[str, Tensor]:
        """Sum of the pairs' losses.

        Raises:
            JobError: the model did not return ``token_loss``.
        """
        ratios = self._log_probabilities(outputs, microbatch) - microbatch[REFERENCE]
        config = self.config
        if config.normalize_length or config.loss == "ipo":
            ratios = ratios / _target_counts(microbatch)
        margin = ratios[:, 0] - ratios[:, 1]
        if config.loss == "sigmoid":
            right, wrong = functional.logsigmoid(config.beta * margin), functional.logsigmoid(-config.beta * margin)
            losses = -(1 - config.label_smoothing) * right - config.label_smoothing * wrong
        elif config.loss == "hinge":
            losses = functional.relu(1 - config.beta * margin)
        else:
            losses = (margin - 1 / (2 * config.beta)) ** 2
        loss = torch.where(_counted(microbatch), losses, 0).sum()
        # If another rank counts the pairs, return zero with zero gradients: all ranks must run the collective backward.
        return {_TERM: loss if counts_samples(microbatch) else 0 * loss}

    def observations(self, outputs: Mapping[str, Tensor], microbatch: Microbatch) -> Mapping[str, Tensor]:
        """Implicit rewards ``beta * log(policy / reference)`` of both texts, float32 [B] each.

        Both are empty on a rank of ``cp`` that does not count samples.
        """
        ratios = self._log_probabilities(outputs, microbatch).detach() - microbatch[REFERENCE]
        rewards = self.config.beta * (ratios if counts_samples(microbatch) else ratios[:0])
        return {"chosen_rewards": rewards[:, 0], "rejected_rewards": rewards[:, 1]}

    def _log_probabilities(self, outputs: Mapping[str, Tensor], microbatch: Microbatch) -> Tensor:
        """Log-probability of each text, [B, 2]. Collective over ``cp``, forward and backward."""
        loss = read_output(outputs, "token_loss", self.config.head).sum(-1)
        whole = loss if self._context is None else summed(loss, self._context)
        return -whole.view(len(microbatch["tokens"]) // 2, 2)


def _counted(microbatch: Microbatch) -> Tensor:
    """Whether a pair has any target, bool [B]."""
    return (_targets(microbatch) > 0).any(-1)


def _target_counts(microbatch: Microbatch) -> Tensor:
    """Number of targets of each text, [B, 2], or 1 for a text without targets, so that it can be a divisor."""
    return _targets(microbatch).clamp(min=1)


def _targets(microbatch: Microbatch) -> Tensor:
    """Number of targets of each text, int64 [B, 2]."""
    whole = microbatch[_TARGETS] if _TARGETS in microbatch else (microbatch["targets"] != IGNORE).sum(-1)
    return whole.view(-1, 2)
