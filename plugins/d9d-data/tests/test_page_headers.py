"""Headers of Parquet pages in Thrift's compact protocol, and the longest text of a dictionary."""

from __future__ import annotations

import io
import struct

import pytest
from d9d_data.sources import table_sizes
from d9d_data.sources.table_sizes import _longest_text, _Pages, _Thrift

FIELDS = bytes.fromhex(
    "15 9601"  # 1: the number 75, in zigzag order
    "11 12"  # 2 and 3: true and false
    "13 07"  # 4: a byte
    "17 0000000000000000"  # 5: a double
    "18 03 616263"  # 6: a text
    "19 25 02 04"  # 7: a list of two numbers
    "19 31 01 00 01"  # 8: a list of three booleans
    "1c 15 01 00"  # 9: a structure with the number -1
    "05 28 14"  # 20: its number in full, and the number 10
    "19 f5 10 00000000000000000000000000000000"  # 21: a list of sixteen numbers
    "19 22 01 02"  # 22: a list of two booleans, by their other type
    "1a 1c 15 01 00"  # 23: a set of a structure
    "14 04"  # 24: the number 2
    "00"
)


def test_fields_of_every_type_are_read_or_skipped() -> None:
    reader = _Thrift(io.BytesIO(FIELDS + b"rest"))
    assert reader.struct() == {
        1: 75, 2: True, 3: False, 4: 7, 5: 8, 6: 3, 7: 2, 8: 3, 9: {1: -1}, 20: 10, 21: 16, 22: 2,
        23: 1, 24: 2,
    }  # fmt: skip
    assert reader.read == len(FIELDS)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "the header is cut off"),
        (FIELDS[:-1], "the header is cut off"),
        (b"\x1d\x00", "the header has a field of the unknown type 13"),
        (b"\x15" + b"\x80" * 10 + b"\x01\x00", "the header has a number of more than 64 bits"),
        (b"\x1c" * 9 + b"\x00" * 10, "the header is nested too deeply"),
        (b"\x18\xff\xff\xff\x7f", f"the header has more than {table_sizes._MAX_PAGE_HEADER:,} bytes"),
    ],
)
def test_malformed_headers_are_refused(content: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        _Thrift(io.BytesIO(content)).struct()


def test_the_limits_of_headers_themselves_are_allowed() -> None:
    deep = _Thrift(io.BytesIO(b"\x1c" * 8 + b"\x00" * 9)).struct()
    for _ in range(8):
        deep = deep[1]
    assert deep == {}
    assert _Thrift(io.BytesIO(b"\x16" + b"\xff" * 9 + b"\x01\x00")).struct() == {1: -(2**63)}
    most = table_sizes._MAX_PAGE_HEADER
    for length, fits in ((most - 6, True), (most - 5, False)):  # the field, its length in four bytes, and the end
        size = bytes((length >> shift & 127) | (128 if shift < 21 else 0) for shift in (0, 7, 14, 21))
        reader = _Thrift(io.BytesIO(b"\x18" + size + bytes(length + 1)))
        if fits:
            assert reader.struct() == {1: length}
        else:
            with pytest.raises(ValueError, match="the header has more than"):
                reader.struct()


def test_the_longest_text_of_a_dictionary_is_found_wherever_it_stands() -> None:
    texts = [b"abc", b"abcdefg", b"", b"ab"]
    data = b"".join(struct.pack("<I", len(text)) + text for text in texts)
    content = io.BytesIO(b"before" + data + b"after")
    pages = _Pages(dictionary=len(data), dictionary_place=(6, len(data)))
    assert _longest_text(content, pages, "UNCOMPRESSED") == 7
    pages.dictionary_place = (6, len(data) - 3)  # a length is cut
    assert _longest_text(content, pages, "UNCOMPRESSED") == len(data)
    assert _longest_text(content, pages, "SNAPPY") == len(data)
