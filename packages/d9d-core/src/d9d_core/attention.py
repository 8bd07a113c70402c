"""Kinds of attention masks: which other positions of its document a query sees.

Start here: :data:`MaskKind`. An attention backend accepts or refuses a kind in its function ``supports``; its kernel
function lists the kinds that it computes::

    from d9d_core.attention import mask_refusal
    from d9d_core.kernel import Decision

    def supports(signature):
        refusal = mask_refusal(signature.static, "causal", "bidirectional")
        return Decision(refusal is None, refusal or "fused", priority=10)

    class Function:
        def __init__(self, signature):
            self.mask_kinds = (signature.static.get("mask", "causal"),)

The kinds:

- ``causal``: a query sees its own and earlier positions.
- ``bidirectional``: a query sees all positions, as in encoders (Devlin et al. 2019, "BERT", section 3).
- ``blocks``: a query sees its own and earlier positions, and all positions of its own block, such as an image or a
  prefix (Raffel et al. 2020, "T5", section 3.2.1; Beyer et al. 2024, "PaliGemma", section 3.2). A microbatch gives the
  blocks by :class:`DocumentBlocks`; without blocks, the mask is causal.

An op slot of attention (:class:`d9d_core.kernel.OpSlot`) states its kind in its static facts: ``causal`` is true for
the kind ``causal`` only, and ``mask`` names any other kind. A kernel function lists its kinds in the attribute
``mask_kinds``; without this attribute it computes causal attention only, and a slot of another kind refuses it, even if
``supports`` accepted.

Shapes: B samples, S positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "MASK_KINDS", "DocumentBlocks", "Documents", "MaskKind", "documents_and_blocks", "function_refusal", "mask_facts",
    "mask_kind", "mask_refusal",
]  # fmt: skip

#: Kind of an attention mask.
MaskKind: TypeAlias = Literal["causal", "bidirectional", "blocks"]
#: All kinds, for functions that compute each of them.
MASK_KINDS: tuple[MaskKind, ...] = ("causal", "bidirectional", "blocks")


class DocumentBlocks:
    """Documents together with the blocks inside them, passed in place of documents to attention of kind ``blocks``.

    This class is neither a tuple nor a dataclass, because FSDP's mixed precision rebuilds tuples and dataclasses
    for every layer.

    Args:
        documents: int64 [B, S], index of each position's document; ``None`` if a sample is one document.
        blocks: int64 [B, S], the block of each position; negative outside of blocks. Positions of one block need not
            be adjacent; equal numbers in two documents are two blocks.
    """

    __slots__ = ("blocks", "documents")

    def __init__(self, documents: Tensor | None, blocks: Tensor) -> None:
        self.documents = documents
        self.blocks = blocks


#: Index of each position's document, int64 [B, S], with blocks or without; ``None`` if a sample is one document.
Documents: TypeAlias = "Tensor | DocumentBlocks | None"


def documents_and_blocks(given: Documents) -> tuple[Tensor | None, Tensor | None]:
    """Indices of documents and indices of blocks in ``given``, int64 [B, S] each; ``None`` for the absent ones."""
    return (given.documents, given.blocks) if isinstance(given, DocumentBlocks) else (given, None)


def mask_kind(static: Mapping[str, Any]) -> str:
    """Kind of mask that the static facts of a slot state; ``unknown`` if they only say that it is not causal."""
    kind: str = static.get("mask", "causal" if static.get("causal", True) else "unknown")
    return kind


def mask_facts(kind: MaskKind) -> dict[str, Any]:
    """Static facts that state a kind of mask."""
    return {"causal": True} if kind == "causal" else {"causal": False, "mask": kind}


def mask_refusal(static: Mapping[str, Any], *computed: MaskKind) -> str | None:
    """Reason why a backend that computes only the kinds ``computed`` refuses a slot; ``None`` if it does not refuse."""
    kind = mask_kind(static)
    if kind in computed:
        return None
    *others, last = computed
    known = f"{', '.join(others)} and {last}" if others else last
    return f"computes {known} attention only, here it is {kind}"


def function_refusal(static: Mapping[str, Any], function: Callable[..., Any]) -> str | None:
    """Reason why a function cannot compute the mask of a slot, by its attribute ``mask_kinds``; ``None`` if it can."""
    kinds: tuple[MaskKind, ...] = getattr(function, "mask_kinds", ("causal",))
    return mask_refusal(static, *kinds)
