"""Tasks: model inputs from a microbatch, loss sums from the model's outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from d9d_core.types import Microbatch, State

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class StageInputs:
    """Keyword arguments of a stage's forward.

    Attributes:
        first: for the first stage only; later stages get the previous stage's outputs instead.
        shared: for every stage.
    """

    first: Mapping[str, Tensor]
    shared: Mapping[str, Tensor] = field(default_factory=dict)


@runtime_checkable
class LanguageModelTask(Protocol):
    """Task of which a loss term says how probable the data is; evaluations report its perplexity."""

    @property
    def likelihood(self) -> str:
        """Name of the term whose mean is the negative log-likelihood of a token, in nats."""
        ...


class Task(Protocol):
    """Task of a training: from a microbatch to model inputs, and from outputs to loss sums.

    The loss of a step is the sum over its terms of ``coefficient * (sum of the term) / (global weight of the term)``.
    Weights depend on the microbatch alone, so they are known before the first backward and no pass over gradients is
    needed. A term of zero weight contributes zero.
    """

    @property
    def coefficients(self) -> Mapping[str, float]:
        """Coefficients of the loss terms, by term."""
        ...

    def check(self, model: Any, facts: State) -> None:
        """Compare the model's config with the facts of the data, before anything is built.

        Args:
            model: its config.
            facts: what the data stream knows of itself, which may be little; nothing while a job is planned.

        Raises:
            D9dError: they do not go together, for example a vocabulary larger than the model's.
        """
        ...

    def count(self, microbatch: Microbatch) -> int | Tensor:
        """Number of tokens without padding (or of samples) of this microbatch, for the series ``tokens``.

        From shapes alone; or, where some positions are padding, a 0-d integer tensor on the microbatch's device.
        """
        ...

    def weights(self, microbatch: Microbatch) -> Mapping[str, Tensor]:
        """Weights of the loss terms in this microbatch: 0-d tensors on its device, by term."""
        ...

    def inputs(self, microbatch: Microbatch) -> StageInputs:
        """Keyword arguments of the model for this microbatch.

        If there is padding, ``lengths`` int64 [B] is among them, and loss terms of the model's modules leave it out.
        """
        ...

    def losses(self, outputs: Mapping[str, Tensor], microbatch: Microbatch) -> Mapping[str, Tensor]:
        """Sums of the loss terms over this microbatch: 0-d float32 with a graph; finite also where nothing counts."""
        ...

    def observations(self, outputs: Mapping[str, Tensor], microbatch: Microbatch) -> Mapping[str, Tensor]:
        """Observations for metrics, by name; detached."""
        ...
