"""What crosses to other processes arrives equal and shares no memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_testing.world import wire
from hypothesis import given
from hypothesis import strategies as st

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.bool]


@given(dtype=st.sampled_from(DTYPES), shape=st.lists(st.integers(0, 3), max_size=3), transpose=st.booleans())
def test_tensors_keep_dtype_shape_and_bits(dtype: torch.dtype, shape: list[int], transpose: bool) -> None:
    tensor = torch.randn(shape).to(dtype)
    tensor = tensor.mT if transpose and tensor.dim() > 1 else tensor
    copy = wire.unpack(wire.pack(tensor))
    assert copy.dtype == dtype
    assert copy.shape == tensor.shape
    assert torch.equal(copy.float(), tensor.float())
    if tensor.numel():
        copy.fill_(1)
        assert copy.data_ptr() != tensor.data_ptr()


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=8,
)


@given(PLAIN)
def test_plain_data_keeps_its_value_and_types(value: Any) -> None:
    copy = wire.unpack(wire.pack(value))
    assert copy == value
    assert repr(copy) == repr(value)


def test_torch_and_path_values_pass(tmp_path: Path) -> None:
    value = {"dtype": torch.bfloat16, "device": torch.device("cpu"), "path": tmp_path, "names": {"a", "b"}}
    assert wire.unpack(wire.pack(value)) == value
    assert wire.unpack(wire.pack(torch.Size([2, 3]))) == (2, 3)


def test_gradients_and_graphs_stay_behind() -> None:
    tensor = torch.ones(2, requires_grad=True)
    assert not wire.unpack(wire.pack({"weight": tensor * 2}))["weight"].requires_grad


@pytest.mark.parametrize("value", [object(), {"a": (1, lambda: None)}, [torch.nn.ReLU()]])
def test_other_objects_are_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="plain data"):
        wire.pack(value)


def test_the_refusal_says_where() -> None:
    with pytest.raises(TypeError, match=r"^results\['a'\]\[1\] is a builtins.object"):
        wire.pack({"a": [0, object()]}, "results")
