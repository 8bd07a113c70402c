"""Starts of documents in the form that the libraries take, computed on the device without synchronisation.

Shapes: B samples, S positions, M largest number of documents.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Smallest mean document length, in tokens, that a long microbatch may have: M is the microbatch's number of tokens
#: divided by this length. M is limited, because the libraries launch work for each of M documents, and the backward of
#: FlashAttention 4 allocates memory for each.
SHORTEST_MEAN = 64
#: Lower bounds of M for short samples: documents per sample, and documents in all.
_ALWAYS = 4
_FEWEST = 64


def most_documents(samples: int, length: int) -> int:
    """Largest number of documents M that a microbatch may have.

    Args:
        samples: B.
        length: S.
    """
    tokens = samples * length
    return min(tokens, max(_FEWEST, _ALWAYS * samples, tokens // SHORTEST_MEAN))


def document_starts(documents: Tensor) -> Tensor:
    """Positions where documents start in the concatenated samples, as FlashAttention takes them; padded with B * S.

    The host does not know the number of documents without synchronisation. So the result has space for
    :func:`most_documents`, and the entries that are left over describe empty documents at the end. More documents are
    an error: a ``RuntimeError`` on a CPU, an assertion on the device on a GPU.

    Args:
        documents: int64 [B, S], document indices; tokens of one document are adjacent, as packing produces them. A
            sample never continues a document of the previous sample.

    Returns:
        int32 [M + 1].
    """
    samples, length = documents.shape
    first = torch.ones_like(documents, dtype=torch.bool)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    number = first.flatten().cumsum(0) - 1  # index of the document in the whole microbatch
    most = most_documents(samples, length)
    message = (
        f"attention: a microbatch of {samples} x {length} tokens has more than {most} documents, the most that "
        "FlashAttention supports here; set 'kernels: {attention: flex}' in the job"
    )
    torch._assert_async(number[-1] < most, message)  # noqa: SLF001 - the public assertion synchronises
    return torch.searchsorted(number, torch.arange(most + 1, device=documents.device), out_int32=True)
