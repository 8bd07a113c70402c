"""Head that returns hidden states. Shapes: B samples, S positions, L layers, H features."""

from __future__ import annotations

from torch import Tensor, nn

#: Name of the head's output, and of the observation in which tasks pass it to metrics.
HIDDEN_STATES = "hidden_states"


class HiddenStatesHead(nn.Module):
    """Hidden-states head: returns the states that it reads, with their gradient, as an output of the model."""

    def forward(self, hidden: Tensor) -> dict[str, Tensor]:
        """Map hidden states [B, S, H] or [B, S, L, H] to ``{"hidden_states": hidden}``.

        If ranks of ``cp`` split the positions, S is the number of this rank's positions.
        """
        return {HIDDEN_STATES: hidden}
