"""Rotary position embeddings: the angles of each position.

Shapes: B samples, S positions, D features of a head.
"""

from __future__ import annotations

from collections.abc import Sequence

from d9d_core.errors import BuildError
from torch import Tensor, nn

from d9d_nn.rope.scaling import Rope, RopeScaling
from d9d_nn.rope.scaling_frequencies import rotary_frequencies


class Rotation:
    """Cosines and sines of each pair of features at each position, shared by all layers of a stage.

    This class is neither a tuple nor a dataclass, since FSDP's mixed precision would cast tensors in a tuple or
    dataclass, and rounded angles would give wrong positions for distant tokens.

    Args:
        cos: float32 [B or 1, S, D/2]; cosine and sine are already multiplied by the attention factor of YaRN and by the
            magnitude of the model.
        sin: float32 [B or 1, S, D/2].
    """

    __slots__ = ("cos", "sin")

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self.cos = cos
        self.sin = sin


class RotaryEmbedding(nn.Module):
    """Rotary embedding of positions by angles ``position * theta ** (-2 i / D)`` for pair i (Su et al. 2021, 3.2.2).

    The module has no buffers, which would need initialisation: each forward computes the few frequencies.

    Args:
        head_dim: D, or the number of features of a head that rotate.
        theta: base of the frequencies.
        scaling: change of frequencies for sequences longer than in pretraining.
        magnitude: multiplies cosine and sine, so its square multiplies the scores of attention.

    Raises:
        BuildError: NTK scaling, static or dynamic, of heads with a single pair.
    """

    def __init__(
        self, head_dim: int, *, theta: float, scaling: RopeScaling | None = None, magnitude: float = 1.0
    ) -> None:
        super().__init__()
        if scaling is not None and scaling.type in ("ntk", "dynamic") and head_dim <= 2:
            raise BuildError(
                f"rope_scaling: {scaling.type} scaling needs more than one pair of features per head, head_dim is "
                f"{head_dim}; choose a larger head_dim, or linear scaling"
            )
        self.head_dim = head_dim
        self.theta = theta
        self.scaling = scaling
        self.magnitude = magnitude

    def forward(self, positions: Tensor, lengths: Tensor | None = None) -> Rotation:
        """Compute the angles in float32.

        Dynamic scaling depends on the length of a sample, which is S without ``lengths``. The caller must therefore
        pass all positions of a sample, even if the rank computes only some of these positions.

        Args:
            positions: int64 [B or 1, S].
            lengths: int64 [B], positions of each right-padded sample; ``None`` if there is no padding.
        """
        length = positions.shape[1] if lengths is None else lengths
        frequencies, factor = rotary_frequencies(self.head_dim, self.theta, self.scaling, length, positions.device)
        angles = positions.unsqueeze(-1).float() * frequencies
        cos, sin, factor = angles.cos(), angles.sin(), factor * self.magnitude
        if factor != 1.0:
            cos, sin = cos * factor, sin * factor
        return Rotation(cos=cos, sin=sin)


class LayerRotations(nn.Module):
    """Rotary embeddings of a stage's layers: layers with equal settings share one rotation.

    Args:
        head_dim: D.
        ropes: settings of the rotary positions of each layer.

    Raises:
        BuildError: NTK scaling, static or dynamic, of heads with a single pair.
    """

    def __init__(self, head_dim: int, ropes: Sequence[Rope]) -> None:
        super().__init__()
        different = list(dict.fromkeys(ropes))
        self.embeddings = nn.ModuleList(
            RotaryEmbedding(features or head_dim, theta=theta, scaling=scaling, magnitude=magnitude)
            for theta, scaling, magnitude, features in different
        )
        self._choices = [different.index(rope) for rope in ropes]
        self._counted: tuple[object, list[Rotation]] | None = None

    def forward(self, positions: Tensor, lengths: Tensor | None = None, counted: object = None) -> list[Rotation]:
        """Compute the rotation of each layer, see :meth:`RotaryEmbedding.forward`.

        Args:
            positions: int64 [B or 1, S].
            lengths: int64 [B], positions of each right-padded sample; ``None`` if there is no padding.
            counted: value that determines ``positions``, such as their number if they count from 0. If the next call
                has the same value, it returns the same tensors: no kernel launches, fixed addresses for CUDA graphs.
        """
        key = None if counted is None or lengths is not None else (counted, positions.shape, positions.device)
        if key is not None and self._counted is not None and self._counted[0] == key:
            return self._counted[1]
        rotations = [embedding(positions, lengths) for embedding in self.embeddings]
        found = [rotations[choice] for choice in self._choices]
        if key is not None and all(_is_lasting(rotation.cos) for rotation in rotations):
            self._counted = key, found
        return found


def _is_lasting(tensor: Tensor) -> bool:
    """Whether later forwards may read and save a tensor: it is neither fake nor made in inference mode."""
    return type(tensor) is Tensor and not tensor.is_meta and not tensor.is_inference()
