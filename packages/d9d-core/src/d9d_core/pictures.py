"""Pictures as PNG, for trackers that keep files."""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def encode_png(picture: Tensor) -> bytes:
    """Encode a picture as PNG (W3C Portable Network Graphics, third edition), without an imaging library.

    Args:
        picture: uint8 [height, width, 3], red, green and blue, on the host.
    """
    height, width, _ = picture.shape
    rows = picture.contiguous().reshape(height, 3 * width).numpy()
    lines = b"".join(b"\0" + row.tobytes() for row in rows)  # filter 0: each row as it is
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits, true colour, not interlaced
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines, 6)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
