"""Op slots: calls of a model whose kernel is chosen after the model is built.

Start here: a module holds an :class:`OpSlot` for each op it calls. A backend answers an :class:`OpSignature` with a
:class:`Decision`, and builds the kernel function::

    import torch
    from d9d_core.kernel import Decision, OpSignature, OpSlot

    slot = OpSlot("silu", torch.nn.functional.silu)

    def supports(signature):
        return Decision(signature.device == "cpu", "runs on the CPU", priority=10)

    def build(signature):
        return lambda x: x * torch.sigmoid(x)

    if supports(OpSignature("silu", "cpu", "float32")).accept:
        slot.bind("by_hand", build(OpSignature("silu", "cpu", "float32")))

The slot starts with the op's PyTorch reference; the kernel selector of the engine may bind another backend, once,
while the job is built. For the compiler, the bound function is a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Decision", "OpSignature", "OpSlot"]


@dataclass(frozen=True, slots=True)
class OpSignature:
    """Signature of an op's calls, from which a backend decides: all facts known before the calls.

    Attributes:
        op: name of the op, for example ``attention``.
        device: device type, for example ``cuda``.
        dtype: dtype of the tensors, for example ``bfloat16``; in optimizers, the dtype of most parameters.
        static: further facts fixed when the module is built, for example ``{"head_dim": 128, "causal": True}``.
        compiled: whether the module is compiled: the compiler fuses transparent code, such as the reference, with
            neighbouring operations, and calls opaque kernels unchanged.
        documents: whether samples of the job's data hold several documents. If false, ``documents`` of a microbatch
            only marks padding after a sample, which causal attention can ignore. ``None`` if the datasets do not state
            it (:class:`d9d_core.data.PacksDocuments`).
        checkpointed: whether the module is in a block that the backward recomputes.
        storing: whether this block stores outputs of torch operators that patterns name, such as ``aten.mm``. A
            pattern cannot match products inside of an opaque kernel.
    """

    op: str
    device: str
    dtype: str
    static: Mapping[str, Any] = field(default_factory=dict)
    compiled: bool = False
    documents: bool | None = None
    checkpointed: bool = False
    storing: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """Answer of a backend to a signature. The accepting backend with the highest priority above 0 is chosen.

    The reference has priority 0. An accepting backend with priority 0 or less is used only if ``kernels`` of the job
    names it.
    """

    accept: bool
    reason: str
    priority: int = 0


class OpSlot:
    """Slot of one op in one module, bound to a kernel function.

    Args:
        op: name of the op.
        reference: PyTorch reference of the op, which runs on every device.
        parts: ops that the module calls instead of this op if no backend is bound to this slot. A job that names a
            backend for one of these ops, and none for this op, uses these ops.
        instead: ops whose slots may replace this slot under some strategies. A job may name a backend for one of these
            ops even if the stages on this rank have no such slot, because stages on other ranks may have one.
        static: facts for :attr:`OpSignature.static`.

    Attributes:
        operators: patterns of the torch operators in the bound backend, see
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
        """Reason why a function cannot be bound to this slot; ``None`` if it can. Subclasses may refuse functions."""
        return None

    def bind(self, backend: str, function: Callable[..., Any]) -> None:
        """Replace the bound function."""
        self.backend = backend
        self._function = function

    @property
    def function(self) -> Callable[..., Any]:
        """The bound function. For some ops, the function object also has methods."""
        return self._function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the bound function."""
        return self._function(*args, **kwargs)
