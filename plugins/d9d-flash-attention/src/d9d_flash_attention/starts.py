"""Starts of documents on the device, as the libraries read them; made without waiting for it.

Shapes: B samples, S positions, M documents that there is room for.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Tokens of a document, on average over a microbatch, that there has to be room for. The libraries launch work, and the
#: backward of FlashAttention 4 takes memory, for each document that there might be.
SHORTEST_MEAN = 64
#: Documents of a sample, on average, that there is always room for, however short samples are.
_ALWAYS = 4
_FEWEST = 64


def most_documents(samples: int, length: int) -> int:
    """Number M of documents of a microbatch that there is room for.

    Args:
        samples: B.
        length: S.
    """
    tokens = samples * length
    return min(tokens, max(_FEWEST, _ALWAYS * samples, tokens // SHORTEST_MEAN))


def document_starts(documents: Tensor) -> Tensor:
    """Starts of documents in samples that lie one behind the other for FlashAttention, then B * S up to the end.

    How many documents there are is not known without waiting for the device. So there is room for
    :func:`most_documents`, and documents that are not there are empty ones at the end. More than that is an error: on a
    CPU a ``RuntimeError``, on a GPU an assertion on the device.

    Args:
        documents: int64 [B, S], numbers of documents; equal numbers of one document follow each other, as packing
            numbers them. A sample never continues a document of the one before.

    Returns:
        int32 [M + 1].
    """
    samples, length = documents.shape
    first = torch.ones_like(documents, dtype=torch.bool)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    number = first.flatten().cumsum(0) - 1  # of the document, among all of the microbatch
    most = most_documents(samples, length)
    message = (
        f"attention: a microbatch of {samples} x {length} tokens has more than {most} documents, for which "
        "FlashAttention gets no room; say 'kernels: {attention: flex}' in the job"
    )
    torch._assert_async(number[-1] < most, message)  # noqa: SLF001 - the public assertion waits for the device
    return torch.searchsorted(number, torch.arange(most + 1, device=documents.device), out_int32=True)
