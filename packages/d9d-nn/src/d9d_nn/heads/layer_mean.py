"""Mean of several layers' outputs, summed while they are computed, over all pipeline stages.

Outputs are normalised by the model's final norm. The norm's weight exists on the last stage only and is the same for
all layers, so stages add up ``x / rms(x)``, and the last stage multiplies by the weight. Shapes: B samples, S
positions, H features.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

Layers = tuple[int, ...]


def sum_name(layers: Layers) -> str:
    """Name of a running sum that stages pass on, for example ``layer_sum_0_2`` for the layers 0 and 2."""
    return "_".join(("layer_sum", *map(str, layers)))


class LayerSums:
    """Running sums of layer outputs in one forward, for heads that read a mean of layers.

    Args:
        wanted: sets of layers that are summed together, ascending.
        eps: added to the mean square, as in the final norm.
        so_far: sums from earlier stages, by :func:`sum_name`.
        done: indices of the layers of earlier stages.

    Raises:
        TypeError: an entry of ``so_far`` is not a sum begun by earlier stages.
        ValueError: a sum begun by earlier stages is missing; without it the mean would lack their layers.
    """

    def __init__(
        self, wanted: Iterable[Layers], eps: float, so_far: Mapping[str, Tensor], done: Sequence[int] | range
    ) -> None:
        self._wanted, self._eps = tuple(wanted), eps
        self._sums = dict(so_far)
        begun = set(sums_begun(self._wanted, done))
        if unknown := so_far.keys() - begun:
            raise TypeError(f"the model has no input '{min(unknown)}'; pass only outputs of the previous stage")
        if missing := begun - so_far.keys():
            raise ValueError(
                f"a head needs the input '{min(missing)}'; pass all outputs of the previous pipeline stage"
            )

    def add(self, layer: int, hidden: Tensor) -> None:
        """Add the output of a layer, [B, S, H], to each running sum that includes the layer."""
        names = [sum_name(layers) for layers in self._wanted if layer in layers]
        if names:
            scaled = functional.rms_norm(hidden, hidden.shape[-1:], eps=self._eps).to(hidden.dtype)
            for name in names:
                self._sums[name] = self._sums[name] + scaled if name in self._sums else scaled

    def to_send(self) -> dict[str, Tensor]:
        """Sums that contain at least one layer, to be sent to the next stage; [B, S, H] each."""
        return self._sums

    def means(self, norm_factor: Tensor) -> dict[Layers, Tensor]:
        """Mean of the normalised outputs of each set of layers, [B, S, H], after all layers have been added."""
        return {layers: self._mean(layers, norm_factor) for layers in self._wanted}

    def _mean(self, layers: Layers, norm_factor: Tensor) -> Tensor:
        total = self._sums[sum_name(layers)]
        wide = total.to(torch.promote_types(total.dtype, torch.float32))
        return (wide / len(layers) * norm_factor).to(total.dtype)


def sums_begun(wanted: Iterable[Layers], layers_done: Sequence[int] | range) -> list[str]:
    """Names of the sums that exist once these layers of a model have run."""
    done = set(layers_done)
    return [sum_name(layers) for layers in wanted if done & set(layers)]
