"""Backend ``flex`` of ``attention``: skips invisible blocks of the score matrix (torch FlexAttention).

Shapes: B samples, S positions, N query heads, K key/value heads, D features of a head.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from d9d_core.attention import MASK_KINDS, Documents, MaskKind, mask_kind, mask_refusal
from d9d_core.kernel import Decision, OpSignature
from torch import Tensor
from torch.nn import functional

from d9d_nn.ops.attention import sdpa
from d9d_nn.ops.attention.block_mask import block_mask, queries_block_mask

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_FLOATS = ("bfloat16", "float16", "float32")
#: Priority of this backend, above sdpa. On an H200 (4 x 4096 tokens, 16 query and 8 key/value heads of 128, forward and
#: backward) sdpa with a mask takes 6.6 ms, flex 2.1 ms with 14 documents per sample and 1.2 ms with 41; without
#: documents sdpa takes 2.1 ms and flex 3.2 ms. Exception: if ranks of ``cp`` hold the queries of some positions and no
#: document or window hides keys, sdpa needs no mask, and its priority is above this one.
PRIORITY = 15
#: Largest number of features of a head for which the kernels of FlexAttention were tested.
_WIDEST_HEAD = 256

_log = logging.getLogger("d9d.attention")


def supports(signature: OpSignature) -> Decision:
    """Accept FlexAttention on CUDA for all kinds of masks; preferred to sdpa if documents or windows hide keys."""
    head_dim = signature.static.get("head_dim", 16)
    if signature.device == "cpu":
        return Decision(accept=False, reason="FlexAttention has no backward on the CPU; use sdpa")
    if signature.device != "cuda":
        return Decision(accept=False, reason=f"compiles for CUDA only, the device is {signature.device}")
    if signature.dtype not in _FLOATS:
        return Decision(accept=False, reason=f"needs one of {', '.join(_FLOATS)}, the model is {signature.dtype}")
    if refusal := mask_refusal(signature.static, *MASK_KINDS):
        return Decision(accept=False, reason=refusal)
    if head_dim < 16:
        return Decision(accept=False, reason=f"its kernels need head_dim of 16 or more, here it is {head_dim}")
    if signature.op != "attention":
        option = "soft caps" if signature.op == "capped_attention" else "sinks"
        reason = f"computes {option} without scores in memory; compiled in the first step"
    elif not _skips(signature):
        return Decision(accept=True, reason="samples are one document each, with no window, so it skips nothing")
    else:
        reason = _skipping(signature)
    if head_dim > _WIDEST_HEAD:
        return Decision(accept=True, reason=f"{reason}; not tested with head_dim above {_WIDEST_HEAD}")
    return Decision(accept=True, reason=reason, priority=PRIORITY)


def _skipping(signature: OpSignature) -> str:
    """Reason to choose FlexAttention: the keys that it skips for this signature."""
    window = signature.static.get("window")
    if signature.documents:
        skips = "the data packs documents: skips keys of other documents"
    elif window is not None:
        skips = f"skips keys outside of windows of {window}"
    elif mask_kind(signature.static) == "blocks":
        skips = "skips later keys outside of a query's own block"
    elif signature.documents is False:
        skips = "ranks of cp hold the queries of some positions: skips later keys"
    else:
        skips = "skips keys of other documents if microbatches pack them, which the data does not state"
    reason = f"{skips}, without a mask of S x S; compiled in the first step"
    if window is None and not signature.static.get("own_queries"):
        reason += "; microbatches without documents use sdpa"
    return reason


def _skips(signature: OpSignature) -> bool:
    facts, kind = signature.static, mask_kind(signature.static)
    if signature.documents is not False or facts.get("window") is not None or kind == "blocks":
        return True
    return bool(facts.get("own_queries")) and kind == "causal"


def build(signature: OpSignature) -> Callable[..., Tensor]:
    """Build the backend for a device, a window and data; on CUDA, it is compiled in its first call."""
    compiled = signature.device == "cuda"
    # sdpa computes calls that skip nothing. If no call can skip, flex was chosen by name, and computes all calls.
    plain = sdpa.build(signature) if compiled and signature.op == "attention" and _skips(signature) else None
    return Flex(
        signature.static.get("window"),
        compiled=compiled,
        plain=plain,
        of_one=sdpa.of_one(signature),
        softcap=signature.static.get("softcap"),
        mask=signature.static.get("mask", "causal"),
    )


class Flex:
    """FlexAttention backend of attention: ``flex_attention`` with a block mask.

    Args:
        window: number of positions that a query sees, including its own; ``None`` for all.
        compiled: whether to compile attention; otherwise all scores are in memory at once, and nothing is skipped.
        plain: function for calls in which a block mask would skip nothing, called with the mask ``None``; if absent,
            FlexAttention computes these calls, too.
        of_one: whether to ignore documents, see :func:`d9d_nn.ops.attention.sdpa.of_one`.
        softcap: soft cap of the scores; ``None`` for no cap.
        mask: kind of the mask.

    Attributes:
        takes_any_values: true: values may have fewer features than keys.
        mask_kinds: the kind that the function was built for, see :mod:`d9d_core.attention`.
    """

    takes_any_values = True

    def __init__(
        self,
        window: int | None,
        *,
        compiled: bool,
        plain: Callable[..., Tensor] | None = None,
        of_one: bool = False,
        softcap: float | None = None,
        mask: MaskKind = "causal",
    ) -> None:
        # Imported late: this imports torch's symbolic shapes, which takes a second and is not needed to refuse.
        from torch.nn.attention.flex_attention import AuxRequest, flex_attention

        self._sums = AuxRequest(lse=True)
        self._options = {} if softcap is None else {"score_mod": _capped(softcap)}
        self._window = window
        self._mask = mask
        self.mask_kinds = (mask,)
        self._plain = plain
        self._of_one = of_one
        self._attend: Callable[..., Any] = flex_attention
        # Two compiled functions, with and without gradients: generation between steps must not recompile training.
        self._compiled = {grad: compiled_alone(flex_attention) for grad in (False, True)} if compiled else None
        self._done: set[bool] = set()

    def prepare(self, documents: Documents, length: int, device: torch.device) -> BlockMask | None:
        """Make the block mask of partly and wholly visible scores.

        Returns ``None`` if the mask would skip nothing and the backend has a function for such calls.
        """
        if self._of_one:
            documents = None
        open_window = self._window is None or self._window >= length
        if documents is None and open_window and self._plain is not None:
            return None
        return block_mask(documents, length, None if open_window else self._window, device, mask=self._mask)

    def prepare_queries(
        self, documents: Documents, queries: Sequence[range], length: int, device: torch.device
    ) -> BlockMask:
        """Make the block mask for queries at some positions (contiguous ranges); see :func:`queries_block_mask`."""
        documents = None if self._of_one else documents
        return queries_block_mask(documents, queries, length, self._window, device, mask=self._mask)

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: BlockMask | None, sinks: Tensor | None = None
    ) -> Tensor:
        """Compute attention, see :func:`d9d_nn.ops.attention.reference.attention`; ``mask`` is from :meth:`prepare`."""
        if mask is None and self._plain is not None:
            return self._plain(query, key, _padded(value, key.shape[-1]), None)[..., : value.shape[-1]]
        heads = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        options: dict[str, Any] = {**self._options, "block_mask": mask, "enable_gqa": query.shape[2] != key.shape[2]}
        if sinks is not None:
            options["return_aux"] = self._sums
        # if the surrounding block is being compiled, it includes this call
        if self._compiled is None or torch.compiler.is_compiling():
            mixed = self._attend(*heads, **options)
        else:
            mixed = self._attend_compiled(*heads, **options)
        if sinks is not None:  # scale by the probability that does not go to the sink
            mixed, sums = mixed
            mixed = mixed * (sums.lse - sinks.to(sums.lse.dtype)[:, None]).sigmoid().unsqueeze(-1).to(mixed.dtype)
        out: Tensor = mixed.transpose(1, 2)
        return out

    def _attend_compiled(self, *heads: Tensor, **options: Any) -> Any:
        """Call the compiled function, and log the time of its first call with and its first call without gradients."""
        assert self._compiled is not None
        training, started = torch.is_grad_enabled(), time.perf_counter()
        # Compile even if a caller forces eager mode, because uncompiled attention holds all scores in memory.
        with compilable(), torch.compiler.set_stance("default"):
            mixed = self._compiled[training](*heads, **options)
        if training not in self._done:
            self._done.add(training)
            window = "" if self._window is None else f", window {self._window}"
            what = "" if training else ", forward only"
            _log.info("compiling attention (flex%s%s): %.1f s", window, what, time.perf_counter() - started)
        return mixed


def _padded(value: Tensor, features: int) -> Tensor:
    """Pad values with zeros to this number of features, as sdpa needs them."""
    missing = features - value.shape[-1]
    return functional.pad(value, (0, missing)) if missing else value


def _capped(softcap: float) -> Callable[..., Tensor]:
    """Make a ``score_mod`` function for ``flex_attention`` that caps scores softly."""

    def capped(score: Tensor, sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001
        return torch.tanh(score / softcap) * softcap

    return capped


def compiled_alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function with a code object of its own.

    Dynamo counts recompilations per code object, and after eight recompilations would run the function uncompiled, with
    all scores in memory. Each backend therefore gets its own code object, so that recompilations for several windows
    are not counted together; a recompilation beyond the limit is an error.
    """
    assert isinstance(function, FunctionType)
    code = function.__code__.replace(co_name=function.__name__)
    own = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    own.__kwdefaults__ = function.__kwdefaults__
    compiled: Callable[..., Any] = torch.compile(own, fullgraph=True)
    return compiled


def compilable() -> AbstractContextManager[None]:
    """Context in which Dynamo compiles, because it disables the dispatch modes of selective checkpointing.

    In these modes Dynamo would run the function uncompiled, with all scores in memory at once. Without the modes, the
    backward of a checkpointed block always computes attention again, even if the block stores other results.
    """
    # These functions are private, so a test checks them.
    from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
    from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

    kinds = (_CachedTorchDispatchMode, _CachingTorchDispatchMode)
    if any(isinstance(mode, kinds) for mode in _get_current_dispatch_mode_stack()):
        return _disable_current_modes()
    return nullcontext()
