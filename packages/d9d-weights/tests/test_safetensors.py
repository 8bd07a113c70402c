from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_core.errors import CheckpointError
from d9d_weights.files.safetensors import TensorFile, write_tensors
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
]  # fmt: skip


def random(dtype: torch.dtype, *shape: int) -> Tensor:
    size = torch.Size(shape).numel() * dtype.itemsize
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), dtype=torch.uint8)
    return bits.view(dtype).reshape(shape)


def same(a: Tensor, b: Tensor) -> bool:
    """Every bit, NaN included."""
    flat = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*flat)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_written_opens_in_the_safetensors_library_and_the_other_way_round(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    tensors = {
        "matrix": random(dtype, 3, 5), "zero_d": random(dtype, 1)[0], "empty": random(dtype, 0, 4),
        "strided": random(dtype, 4, 6).T, "byte": random(torch.uint8, 3), "step": torch.tensor(3.0),
    }  # fmt: skip
    with (tmp_path / "ours").open("wb") as file:
        written = write_tensors(file, tensors)
    content = (tmp_path / "ours").read_bytes()
    assert (written.bytes, written.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    theirs = load_file(tmp_path / "ours")
    assert theirs.keys() == tensors.keys()
    assert all(same(theirs[name], tensors[name]) for name in tensors)
    with safe_open(tmp_path / "ours", framework="pt") as opened:
        assert opened.get_slice("matrix").get_shape() == [3, 5]

    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "theirs", {"format": "pt"})
    with (tmp_path / "theirs").open("rb") as file:
        read = TensorFile(file, "theirs")
        for name, tensor in tensors.items():
            into = torch.empty_like(tensor)
            read.read(name, (0,) * tensor.ndim, into)
            assert same(into, tensor)


class Counting(io.BytesIO):
    """Remembers how many bytes were read."""

    count = 0

    def readinto(self, buffer: Any) -> int:
        count = super().readinto(buffer)
        self.count += count
        return count


def written(**tensors: Tensor) -> bytes:
    file = io.BytesIO()
    write_tensors(file, tensors)
    return file.getvalue()


@pytest.mark.thorough
@settings(max_examples=150)
@given(st.data())
def test_any_window_is_read(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 6), max_size=4))
    tensor = random(data.draw(st.sampled_from(DTYPES)), *shape)
    bounds = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    window = tuple(slice(first, last) for first, last in bounds)
    into = torch.empty_like(tensor[window])
    if data.draw(st.booleans()):
        into = torch.empty(into.shape[::-1], dtype=into.dtype).permute([*reversed(range(into.ndim))])
    TensorFile(io.BytesIO(written(a=random(torch.int8, 3), b=tensor)), "x").read("b", [b[0] for b in bounds], into)
    assert same(into, tensor[window])


def test_a_window_of_rows_reads_no_other_rows_and_of_long_rows_no_other_columns() -> None:
    tensor = random(torch.float32, 8, 1 << 17)  # rows of half a megabyte
    file = Counting(written(a=tensor))
    opened = TensorFile(file, "x")
    for window, expected in (((2, 3), (0, 1 << 17)), ((1, 4), (100, 200))):
        part = tensor[slice(*window), slice(*expected)]
        into, file.count = torch.empty(part.shape), 0
        opened.read("a", (window[0], expected[0]), into)
        assert same(into, part)
        assert file.count == part.nbytes


def test_short_rows_are_read_in_blocks() -> None:
    tensor = random(torch.float64, 1500, 7, 100)  # more than one block
    into = torch.empty(1490, 2, 100, dtype=torch.float64)
    TensorFile(io.BytesIO(written(a=tensor)), "x").read("a", (4, 3, 0), into)
    assert same(into, tensor[4:1494, 3:5])


def header(**entries: Any) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "the file has 0 bytes, but its first bytes give a header of 0"),
        (
            (1 << 40).to_bytes(8, "little") + b"{}",
            "the file has 10 bytes, but its first bytes give a header of 1099511627776",
        ),
        (header(a=ENTRY) + bytes(7), "its tensors need 8 bytes after the header, but 7 follow it"),
        (header(a=ENTRY) + bytes(9), "its tensors need 8 bytes after the header, but 9 follow it"),
        (header(a=ENTRY, b={**ENTRY, "data_offsets": [4, 12]}) + bytes(12), "tensor 'b' overlaps the tensor before it"),
        (
            header(a=ENTRY, b={**ENTRY, "data_offsets": [12, 20]}) + bytes(20),
            "tensor 'b' leaves a gap after the tensor before it",
        ),
        (header(a={**ENTRY, "shape": [3]}) + bytes(8), "tensor 'a' has 8 bytes, too many or too few for F32 [3]"),
        (header(a={**ENTRY, "shape": [-1, -2]}) + bytes(8), "not a whole number from 0 up"),
        (header(a={**ENTRY, "dtype": "F31"}) + bytes(8), "F31"),
        (header(a={"dtype": "F32"}) + bytes(8), "its header is unreadable"),
        (header(a=7) + bytes(8), "its header is unreadable"),
        ((5).to_bytes(8, "little") + b"{{{{{", "its header is unreadable"),
    ],
)
def test_a_header_that_does_not_fit_its_file_is_refused(content: bytes, why: str) -> None:
    with pytest.raises(CheckpointError, match="file.st is damaged: ") as caught:
        TensorFile(io.BytesIO(content), "file.st")
    assert why in str(caught.value)


def test_a_name_that_appears_twice_is_refused() -> None:
    text = (
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[0],"data_offsets":[8,8]}}'
    )
    with pytest.raises(CheckpointError, match="'a' appears twice"):
        TensorFile(io.BytesIO(len(text).to_bytes(8, "little") + text + bytes(8)), "x")


@settings(max_examples=100)
@given(st.data())
def test_a_damaged_header_is_an_error_of_ours_or_harmless(data: st.DataObject) -> None:
    content = bytearray(written(a=random(torch.float32, 2, 3), b=random(torch.int8, 5)))
    position = data.draw(st.integers(0, len(content) - 12))
    content[position] = data.draw(st.integers(0, 255))
    try:
        opened = TensorFile(io.BytesIO(content), "x")
    except CheckpointError:
        return
    assume("a" in opened.entries)
    entry = opened.entries["a"]
    opened.read("a", (0,) * len(entry.shape), torch.empty(entry.shape, dtype=entry.dtype))


@pytest.mark.parametrize(
    ("key", "offset", "into"),
    [("b", (0,), torch.empty(1)), ("a", (1,), torch.empty(2)), ("a", (0,), torch.empty(2, dtype=torch.int32)),
     ("a", (0, 0), torch.empty(1, 1)), ("a", (-1,), torch.empty(1))],
)  # fmt: skip
def test_a_window_outside_of_the_file_is_refused(key: str, offset: tuple[int, ...], into: Tensor) -> None:
    with pytest.raises(CheckpointError, match="x is damaged: "):
        TensorFile(io.BytesIO(written(a=torch.zeros(2))), "x").read(key, offset, into)


def test_a_dtype_that_the_format_does_not_know_is_refused() -> None:
    with pytest.raises(CheckpointError, match="tensor 'a' is torch.complex128"):
        write_tensors(io.BytesIO(), {"a": torch.zeros(2, dtype=torch.complex128)})
