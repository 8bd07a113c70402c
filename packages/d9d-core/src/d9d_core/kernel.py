"""Op slots: calls of a model whose kernel is chosen later.

Start here: a module holds an :class:`OpSlot` for each op it calls. A backend answers an :class:`OpSignature` with a
:class:`Decision`, and builds the function::

    import torch
    from d9d_core.kernel import Decision, OpSignature, OpSlot

    slot = OpSlot("silu", torch.nn.functional.silu)

    def supports(signature):
        return Decision(signature.device == "cpu", "runs on the CPU", priority=10)

    def build(signature):
        return lambda x: x * torch.sigmoid(x)

    if supports(OpSignature("silu", "cpu", "float32")).accept:
        slot.bind("by_hand", build(OpSignature("silu", "cpu", "float32")))

The slot starts with the op's readable reference; the kernel selector of the engine may bind another backend, once,
while the job is built. The bound function is a constant for the compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Decision", "OpSignature", "OpSlot"]


@dataclass(frozen=True, slots=True)
class OpSignature:
    """Signature of an op's call, for the choice of a kernel: all that is known before it happens.

    Attributes:
        op: name of the op, for example ``attention``.
        device: device type, for example ``cuda``.
        dtype: dtype of the tensors, for example ``bfloat16``; in optimizers, of most parameters.
        static: whatever else is fixed when the module is built, for example ``{"head_dim": 128, "causal": True}``.
        compiled: whether the module is compiled: its compiler fuses what it can look into, such as the reference, with
            the operations around it, and calls a kernel of somebody else's as it is.
        documents: whether samples of the job's data hold several documents. If not, ``documents`` of a microbatch tells
            padding behind a sample apart, which causal attention need not know. ``None`` if its datasets do not say
            (:class:`d9d_core.data.PacksDocuments`).
        checkpointed: whether the module is in a block that the backward computes again.
    """

    op: str
    device: str
    dtype: str
    static: Mapping[str, Any] = field(default_factory=dict)
    compiled: bool = False
    documents: bool | None = None
    checkpointed: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """Answer of a backend to a signature. Of those that accept, the highest priority above 0 wins.

    The reference has priority 0. A backend that answers 0 or less is taken by name only: when ``kernels`` of the job
    asks for it.
    """

    accept: bool
    reason: str
    priority: int = 0


class OpSlot:
    """Slot of one op in one module, bound to a backend, the op's kernel.

    Args:
        op: name of the op.
        reference: its PyTorch reference, which runs on every device.
        parts: ops that the module calls in its place where no backend is bound. A job that names a backend of one of
            them, and none of this op, gets the parts.
        instead: ops whose slots strategies may put in the place of this one. A rank does not see what happens to stages
            of others, and so takes a job that names a backend of one of these.
        static: what a backend needs to know to decide.

    Attributes:
        operators: patterns over the torch operators of the bound backend, see
            :attr:`d9d_core.plugin.KernelSpec.operators`.
    """

    def __init__(
        self,
        op: str,
        reference: Callable[..., Any],
        *,
        parts: Collection[str] = (),
        instead: Collection[str] = (),
        **static: Any,
    ) -> None:
        self.op = op
        self.parts = tuple(parts)
        self.instead = tuple(instead)
        self.static = static
        self.backend = "reference"
        self.operators: tuple[str, ...] = ()
        self._function = reference

    def refusal(self, function: Callable[..., Any]) -> str | None:  # noqa: ARG002 - for slots that ask more
        """Reason why calls cannot go to a function, for slots whose calls ask more of it; ``None`` if they can."""
        return None

    def bind(self, backend: str, function: Callable[..., Any]) -> None:
        """Replace the function that calls go to."""
        self.backend = backend
        self._function = function

    @property
    def function(self) -> Callable[..., Any]:
        """The bound function. Some ops say which further methods a backend's may have."""
        return self._function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the bound function."""
        return self._function(*args, **kwargs)
