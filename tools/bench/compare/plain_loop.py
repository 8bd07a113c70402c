"""Training loop around a rival's model: fused AdamW, clipping, microbatches that lie on the device already."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import count

import torch
from d9d_engine.profiling.ranges import OPTIMIZER, PREFIX
from microbatches import DIFFERENT, microbatch_of
from settings import BETAS, CLIP, DECAY, LR, Setting
from torch import Tensor, nn
from torch.profiler import record_function

Microbatch = Mapping[str, Tensor]


def dtype_of(setting: Setting) -> torch.dtype:
    """Dtype of the parameters."""
    return torch.bfloat16 if setting.width == 2 else torch.float32


def cast(setting: Setting, device: torch.device) -> AbstractContextManager[object]:
    """Context of the forward."""
    if setting.precision == "autocast":
        return torch.autocast(device.type, torch.bfloat16)
    return nullcontext()


def visible(documents: Tensor) -> Tensor:
    """Mask of packed documents: bool [B, 1, S, S], true where a query sees a key."""
    length = documents.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=documents.device).tril_()
    return (causal & (documents[:, :, None] == documents[:, None]))[:, None]


def training_step(
    model: nn.Module, loss_of: Callable[[Microbatch], Tensor], setting: Setting, device: torch.device
) -> Callable[[], Tensor]:
    """Step of a model in training.

    Args:
        model: model to train.
        loss_of: mean loss of a microbatch on the device.
        setting: setting of the comparison.
        device: device of the model.
    """
    fused = device.type == "cuda"
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LR, betas=BETAS, weight_decay=DECAY, fused=fused)
    batches = [
        {name: tensor.to(device) for name, tensor in microbatch_of(setting, number).items()}
        for number in range(DIFFERENT)
    ]
    taken = count()

    def step() -> Tensor:
        with cast(setting, device):
            loss = loss_of(batches[next(taken) % DIFFERENT])
        loss.backward()  # type: ignore[no-untyped-call]
        with record_function(PREFIX + OPTIMIZER):
            nn.utils.clip_grad_norm_(parameters, CLIP)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step
