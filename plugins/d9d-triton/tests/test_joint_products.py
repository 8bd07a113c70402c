"""Weights that follow each other in memory are read as one, others are copied."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from d9d_triton.joint import swiglu
from d9d_triton.joint.products import joint_rows_gradient, stacked
from torch import Tensor


def weights(kind: str) -> list[Tensor]:
    memory = torch.arange(40.0).view(10, 4)
    shared = bytearray(memory.numpy().tobytes())
    return {
        "adjacent": [memory[1:4], memory[4:9]],
        "in another order": [memory[4:9], memory[1:4]],
        "with a gap": [memory[1:3], memory[4:9]],
        "of other memory": [memory[1:4], memory[4:9].clone()],
        "not contiguous": [memory[1:4].T.contiguous().T, memory[4:9]],
        "transposed": [memory[1:4].view(4, 3).T, memory[4:9]],
        "of two storages": [
            torch.frombuffer(shared, dtype=torch.float32, count=12, offset=16).view(3, 4),
            torch.frombuffer(shared, dtype=torch.float32, count=20, offset=64).view(5, 4),
        ],
        "one": [memory[2:5]],
    }[kind]


@pytest.mark.parametrize(
    ("kind", "copied"),
    [
        ("adjacent", False), ("one", False), ("in another order", True), ("with a gap", True),
        ("of other memory", True), ("not contiguous", True), ("transposed", True), ("of two storages", True),
    ],
)  # fmt: skip
def test_weights_are_copied_only_where_they_do_not_follow_each_other(kind: str, copied: bool) -> None:
    parts = weights(kind)
    found = stacked(parts)
    assert torch.equal(found, torch.cat(parts))
    assert (found.data_ptr() != parts[0].data_ptr()) == copied


@pytest.mark.thorough
def test_the_gradient_of_rows_is_one_product() -> None:
    grad, parts = torch.randn(3, 8), weights("adjacent")
    torch.testing.assert_close(joint_rows_gradient(grad, parts), grad @ torch.cat(parts))
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(joint_rows_gradient.overload, (grad, parts), test_utils=tests)


@pytest.mark.parametrize("needed", list(product([False, True], repeat=4)))
def test_only_needed_gradients_of_the_layer_are_computed(needed: tuple[bool, ...]) -> None:
    rows, gate, up, down = (torch.randn(shape) for shape in ((5, 3), (4, 3), (4, 3), (3, 4)))
    inputs = [tensor.requires_grad_(wanted) for tensor, wanted in zip((rows, gate, up, down), needed, strict=True)]
    found = swiglu._gradients(swiglu.TorchProducts(), needed, torch.ones(5, 3), *inputs, rows @ gate.T, rows @ up.T)
    assert [gradient is not None for gradient in found] == list(needed)
