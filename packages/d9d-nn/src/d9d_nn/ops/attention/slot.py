"""Slot of ``attention``, which lets a backend make its mask once for all layers.

Shapes: B samples, S positions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from d9d_core.attention import Documents, MaskKind, function_refusal, mask_facts
from d9d_core.errors import BuildError
from d9d_core.kernel import OpSlot
from d9d_core.model import ContextShare
from torch import Tensor

from d9d_nn.ops.attention.reference import attention

#: Key by which layers share a mask: name of the backend, window, and kind of mask.
MaskKey: TypeAlias = tuple[str, int | None, MaskKind]


class AttentionSlot(OpSlot):
    """Slot of the op attention for one layer.

    A bound function may have an attribute ``prepare(documents, length, device) -> mask``; its calls then get this mask
    instead of documents. Masks may be of any type, and slots with equal ``mask_key`` may share them. A function with
    ``prepare_queries(documents, queries, length, device) -> mask`` can also compute queries at some positions, given as
    a list of ``range``, as context parallelism by ``all_gather`` needs. With this method, the static fact
    ``own_queries`` is true, so that backends without ``prepare_queries`` can refuse. A function with a true attribute
    ``takes_any_values`` accepts values with fewer features than keys; other functions get padded values. A function
    computes only causal masks, unless its attribute ``mask_kinds`` names others; ``documents`` of kind ``blocks`` are
    :class:`~d9d_core.attention.DocumentBlocks` if the microbatch has blocks.

    Args:
        query_heads: N.
        key_value_heads: K.
        head_dim: D.
        value_dim: number of features of a value head; ``None`` for D.
        window: number of positions that a query sees, including its own; ``None`` for all.
        softcap: soft cap of the scores; ``None`` for no cap.
        sinks: whether calls have sinks.
        mask: kind of the mask, see :mod:`d9d_core.attention`.
    """

    def __init__(
        self,
        *,
        query_heads: int,
        key_value_heads: int,
        head_dim: int,
        window: int | None,
        value_dim: int | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        mask: MaskKind = "causal",
    ) -> None:
        assert not (sinks and softcap)  # AttentionCore refuses sinks together with a soft cap
        options: dict[str, Any] = {"window": window, "softcap": softcap, "mask": None if mask == "causal" else mask}
        facts: dict[str, Any] = {} if softcap is None else {"softcap": softcap}
        if value_dim not in (None, head_dim):
            facts["value_dim"] = value_dim
        given = {name: value for name, value in options.items() if value is not None}
        super().__init__(
            "sink_attention" if sinks else "attention" if softcap is None else "capped_attention",
            partial(attention, **given) if given else attention,
            query_heads=query_heads,
            key_value_heads=key_value_heads,
            head_dim=head_dim,
            window=window,
            **mask_facts(mask),
            **facts,
        )
        self._prepare: Callable[[Documents, int, torch.device], Any] = _documents
        self.mask = mask
        self._share: ContextShare | None = None
        self._replacement: Callable[..., Tensor] | None = None

    @property
    def mask_key(self) -> MaskKey:
        """Key of this slot's mask: backend, window and kind, on which a mask depends in addition to the documents."""
        return getattr(self._replacement, "backend", self.backend), self.static["window"], self.mask

    @property
    def takes_any_values(self) -> bool:
        """Whether the bound function accepts values with fewer features than keys."""
        return self.backend == "reference" or getattr(self.function, "takes_any_values", False)

    def refusal(self, function: Callable[..., Any]) -> str | None:
        """Reason why a function cannot compute the mask or the queries of this slot; ``None`` if it can."""
        if self._replacement is None and (refusal := function_refusal(self.static, function)) is not None:
            return refusal
        if self._share is None or self._replacement is not None or hasattr(function, "prepare_queries"):
            return None
        return "needs queries of all positions of a sample, but ranks of cp hold only some"

    def bind(self, backend: str, function: Callable[..., Any]) -> None:
        """Replace the called function, and the function that makes its masks.

        Raises:
            BuildError: the function does not compute this kind of mask; or the rank holds the queries of some
                positions only, and the function has no ``prepare_queries``.
        """
        self._check(backend, function)
        super().bind(backend, function)
        self._prepare = getattr(function, "prepare", _documents)

    def see_queries(self, share: ContextShare) -> None:
        """Make masks for only this rank's queries and the keys of all positions from now on.

        Raises:
            BuildError: the bound backend cannot compute queries at some positions. Later, :meth:`bind` checks this.
        """
        self._share = share
        self.static = {**self.static, "own_queries": True}
        if self.backend != "reference":
            self._check(self.backend, self.function)

    def attend_by(self, function: Callable[..., Tensor]) -> None:
        """Call a function instead of any backend, and its ``prepare``, if it has one, for masks.

        Args:
            function: may have ``prepare(documents, length, window, device)``, which returns the mask for its calls;
                without it, calls get no mask. With ``prepare``, it also needs the attribute ``backend``, a name: slots
                with the same name, window and kind share a mask. If the mask of the slot is not causal, ``prepare``
                also gets its kind, as the keyword argument ``mask``.

        Raises:
            BuildError: the function does not compute this kind of mask.
        """
        if (refusal := function_refusal(self.static, function)) is not None:
            raise BuildError(
                f"context_parallel: this method {refusal}; use method ulysses, which gives each rank whole samples"
            )
        self._replacement = function

    def prepare(self, documents: Documents, length: int, device: torch.device) -> Any:
        """Make the mask that calls of this slot get instead of documents, by the bound function's ``prepare``.

        Args:
            documents: int64 [B, S] or ``DocumentBlocks``; ``None`` if a sample is one document.
            length: S.
            device: device of queries and keys.
        """
        if self._replacement is not None:
            prepare = getattr(self._replacement, "prepare", None)
            more = {} if self.mask == "causal" else {"mask": self.mask}
            return None if prepare is None else prepare(documents, length, self.static["window"], device, **more)
        if self._share is None:
            return self._prepare(documents, length, device)
        self._check(self.backend, self.function)
        # Positions are computed on the host, so that hidden keys are found without waiting for the device.
        queries = _runs(self._share.own(torch.arange(length).unsqueeze(0)).squeeze(0))
        return self.function.prepare_queries(documents, queries, length, device)  # type: ignore[attr-defined]

    def _check(self, backend: str, function: Callable[..., Any]) -> None:
        if (refusal := self.refusal(function)) is not None:
            raise BuildError(
                f"kernels.{self.op}: '{backend}' {refusal}; choose sdpa or flex"
                + ("" if self._share is None else ", or another method of context_parallel, such as ulysses")
            )


def _runs(places: Tensor) -> list[range]:
    """Split positions, int64 [Q] on the host, into runs of adjacent positions."""
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), (places.diff() != 1).nonzero()[:, 0] + 1]).tolist()
    ends = [*starts[1:], len(places)]
    firsts = places[starts].tolist()
    return [range(first, first + end - start) for first, start, end in zip(firsts, starts, ends, strict=True)]


def _documents(documents: Documents, length: int, device: torch.device) -> Documents:  # noqa: ARG001
    return documents
