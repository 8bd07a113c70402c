"""Backends ``sdpa_flash``, ``sdpa_cudnn``, ``sdpa_efficient`` of ``attention``: ``sdpa`` limited to one kernel.

These backends serve to measure kernels or to exclude some. They are never chosen automatically, because the backend
``sdpa`` lets torch choose among the same kernels by the shapes of the call.

Shapes: B samples, S positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from d9d_core.attention import Documents
from d9d_core.errors import JobError
from d9d_core.kernel import Decision, OpSignature
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from d9d_nn.ops.attention.queries import QueryRectangles
from d9d_nn.ops.attention.sdpa import Sdpa, of_one


@dataclass(frozen=True, slots=True)
class PinnedKernel:
    """Pinned SDPA: one kernel of PyTorch's sdpa, and the signatures that it computes.

    Attributes:
        name: common name of the kernel.
        dtypes: supported dtypes.
        widest_head: maximum number of features of a head.
        head_multiple: the number of features of a head must be a multiple of this.
        grouped: whether it accepts fewer key/value heads than query heads, if there is no mask.
        masks: whether it accepts a mask.
    """

    name: str
    dtypes: tuple[str, ...]
    widest_head: int
    head_multiple: int
    grouped: bool
    masks: bool

    def supports(self, signature: OpSignature) -> Decision:
        """Accept the signatures that the kernel computes, with priority 0, so it is used only if a job names it."""
        if refusal := self._refusal(signature):
            return Decision(accept=False, reason=refusal)
        masks = "; a call with documents is an error, as it has no mask"
        if self.masks or signature.documents is False:
            masks = ""
        reason = f"only {self.name}; used only if the job names it, because sdpa chooses among all kernels{masks}"
        return Decision(accept=True, reason=reason)

    def build(self, signature: OpSignature) -> Callable[..., Tensor]:
        """Build the backend function for the window of a signature."""
        return _Pinned(self, signature.static.get("window"), of_one(signature))

    def _refusal(self, signature: OpSignature) -> str | None:
        head_dim = signature.static.get("head_dim")
        if signature.device != "cuda":
            return f"{self.name} is a CUDA kernel, the device is {signature.device}"
        if signature.dtype not in self.dtypes:
            return f"{self.name} needs one of {', '.join(self.dtypes)}, the model is {signature.dtype}"
        if not signature.static.get("causal", True):
            return "computes causal attention only"
        if head_dim is not None and (head_dim > self.widest_head or head_dim % self.head_multiple):
            return (
                f"{self.name} needs head_dim up to {self.widest_head}, a multiple of {self.head_multiple}; "
                f"here it is {head_dim}"
            )
        if signature.static.get("window") is not None and not self.masks:
            return f"a window needs a mask, which {self.name} does not have"
        if signature.static.get("own_queries") and not self.masks:
            return f"ranks of cp hold the queries of some positions, which {self.name} cannot mask"
        if signature.documents and not self.masks:
            return f"the data packs documents, which {self.name} cannot mask"
        return None


class _Pinned(Sdpa):
    def __init__(self, kernel: PinnedKernel, window: int | None, of_one: bool) -> None:
        super().__init__(window, grouped=kernel.grouped, grouped_with_mask=False, of_one=of_one)
        self._kernel = kernel
        self._backend: SDPBackend = _BACKENDS[kernel.name]

    def prepare(self, documents: Documents, length: int, device: torch.device) -> Tensor | None:
        if documents is not None and not self._kernel.masks and not self._of_one:
            raise JobError(
                f"kernels.attention: {self._kernel.name} has no mask, but samples hold several documents; "
                "choose sdpa, sdpa_efficient or flex, or data of one document per sample"
            )
        return super().prepare(documents, length, device)

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | QueryRectangles | None = None
    ) -> Tensor:
        # Fused kernels need stride 1 along the features, and there is no other kernel to fall back to.
        q, k, v = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (query, key, value))
        with sdpa_kernel(self._backend):
            return super().__call__(q, k, v, mask)


# Widths that work forward and backward on every GPU from compute capability 8.0 (cuDNN supports more on some).
FLASH = PinnedKernel("flash attention", ("bfloat16", "float16"), 256, 8, grouped=True, masks=False)
CUDNN = PinnedKernel("cuDNN attention", ("bfloat16", "float16"), 128, 8, grouped=True, masks=True)
EFFICIENT = PinnedKernel(
    "memory-efficient attention", ("bfloat16", "float16", "float32"), 2**16, 8, grouped=False, masks=True
)

_BACKENDS = {
    FLASH.name: SDPBackend.FLASH_ATTENTION,
    CUDNN.name: SDPBackend.CUDNN_ATTENTION,
    EFFICIENT.name: SDPBackend.EFFICIENT_ATTENTION,
}
