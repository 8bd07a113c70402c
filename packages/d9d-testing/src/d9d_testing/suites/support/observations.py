"""Example microbatches, outputs and observations of first-party tasks.

Shapes: B samples, S positions, C classes, V token ids.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

#: B, the number of samples.
SAMPLES = 12
_POSITIONS, _CLASSES, _WORDS = 7, 5, 13
_IGNORE = -100


def microbatch(samples: slice, *, counted: bool = True) -> dict[str, Tensor]:
    """Microbatch of some of twelve samples: text tensors (:mod:`d9d_core.data`), and ``x``, ``y``, ``mask``.

    Args:
        samples: samples to return.
        counted: if ``False``, all targets, labels and samples are marked as ignored.
    """
    generator = torch.Generator().manual_seed(7)
    shape = (SAMPLES, _POSITIONS)
    tokens = torch.randint(_WORDS, shape, generator=generator)
    targets = torch.randint(_WORDS, shape, generator=generator)
    targets[torch.rand(shape, generator=generator) < 0.3] = _IGNORE
    labels = torch.randint(_CLASSES, (SAMPLES,), generator=generator)
    labels[::4] = _IGNORE
    x = torch.randn(SAMPLES, 4, generator=generator)
    mask = (torch.arange(SAMPLES) % 5 != 1).float()
    found = {
        "tokens": tokens,
        "targets": targets if counted else torch.full_like(targets, _IGNORE),
        "positions": torch.arange(_POSITIONS).expand(shape),
        "documents": torch.zeros(shape, dtype=torch.int64),
        "labels": labels if counted else torch.full_like(labels, _IGNORE),
        "lengths": torch.full((SAMPLES,), _POSITIONS),
        "x": x,
        "y": x.sin(),
        "mask": mask if counted else torch.zeros_like(mask),
    }
    return {name: tensor[samples].clone() for name, tensor in found.items()}


def outputs(batch: Mapping[str, Tensor], scale: Tensor) -> dict[str, Tensor]:
    """Outputs of a model for a microbatch: ``token_loss``, ``class_logits`` and ``y``, each a function of its sample.

    Args:
        batch: microbatch from :func:`microbatch`.
        scale: 0-d factor of all outputs, which stands for a parameter.
    """
    x = batch["x"]
    tokens, targets = batch["tokens"].float(), batch["targets"]
    loss = ((tokens + targets).sin().abs() + 0.1) * (targets != _IGNORE)
    logits = (tokens.sum(1, keepdim=True) * torch.arange(1.0, _CLASSES + 1)).sin()
    return {"token_loss": loss * scale, "class_logits": logits * scale, "y": torch.tanh(x) * scale}


def observed(samples: slice) -> dict[str, Tensor]:
    """Observations of first-party tasks and the toy task."""
    batch = microbatch(samples)
    found = outputs(batch, torch.ones(()))
    absolute = (found.pop("y") - batch["y"]).abs()
    counted = batch["targets"] != _IGNORE
    ranks = torch.where(counted, (batch["tokens"] * batch["targets"]) % _WORDS, -1)
    return {
        **found,
        "absolute": absolute,
        "targets": batch["targets"],
        "labels": batch["labels"],
        "weights": counted * (batch["tokens"] % 3 + 0.5),
        "token_ranks": ranks,
    }
