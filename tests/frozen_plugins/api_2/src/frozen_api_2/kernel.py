"""Backend of the op frozen_act."""

from collections.abc import Callable

import torch
from d9d_core.kernel import Decision, OpSignature
from torch import Tensor


def supports(signature: OpSignature) -> Decision:
    if signature.dtype != "float32":
        return Decision(False, f"supports float32, not {signature.dtype}")
    return Decision(True, f"any width, also {signature.static['width']}", priority=0)


def build(signature: OpSignature) -> Callable[[Tensor], Tensor]:
    return lambda x: 2 * torch.sigmoid(2 * x) - 1
