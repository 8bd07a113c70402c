"""Small parts of the optimizers, exactly: batches, gates, rounded bits, noise, factors of rates, shards of matrices."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from d9d_engine.distributed.simulate import simulated_world
from d9d_optim.optimizer import rounding
from d9d_optim.optimizer.base import Batch, _laid_out, counter, divide, keep_if, zeros
from d9d_optim.optimizer.newton_schulz import orthogonalize, rate_factor
from d9d_optim.optimizer.whole_matrices import _sizes, _with, map_matrices, matrix_collectives
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor


def bits(*values: int) -> Tensor:
    return torch.tensor([value - (1 << 32) if value >> 31 else value for value in values], dtype=torch.int32)


def rounded(value: int, noise: int) -> int:
    """Upper 16 bits of a float32 number after rounding, given as bits."""
    result = rounding.rounded(bits(value).view(torch.float32), bits(noise))
    assert result.dtype == torch.bfloat16
    return int(result.view(torch.int16)) & 0xFFFF


@pytest.mark.parametrize("sign", [0, 0x80000000])
def test_noise_carries_a_number_to_its_upper_neighbour(sign: int) -> None:
    top = sign >> 16
    assert rounded(sign | 0x3F800000, 0xFFFF) == top | 0x3F80  # exact
    assert rounded(sign | 0x3F800001, 0xFFFE) == top | 0x3F80
    assert rounded(sign | 0x3F800001, 0xFFFF) == top | 0x3F81
    assert rounded(sign | 0x3F80C000, 0x3FFF) == top | 0x3F80
    assert rounded(sign | 0x3F80C000, 0x4000) == top | 0x3F81
    assert rounded(sign | 0x3FFFFFFF, 1) == top | 0x4000  # into the exponent
    assert rounded(sign | 0x7F7FFFFF, 0xFFFF) == top | 0x7F7F  # the largest stays finite
    assert rounded(sign | 0x7F800000, 0xFFFF) == top | 0x7F80
    assert rounded(sign | 0x00000001, 0xFFFF) == top | 0x0001


def mixed(x: int) -> int:
    x = (x ^ (x >> 16)) * 0x7FEB352D % (1 << 32)
    x = (x ^ (x >> 15)) * 0x846CA68B % (1 << 32)
    return x ^ (x >> 16)


def test_noise_is_the_mixed_index_and_key_in_whole_numbers() -> None:
    for key in (0, 1, -1, 0x123456789ABCDEF0, -0x123456789ABCDEF0):
        low, high = key & 0xFFFFFFFF, (key >> 32) & 0xFFFFFFFF
        folded = mixed((mixed(low) + high) % (1 << 32))
        places = (0, 1, 2, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
        found = rounding.hashed(bits(*places), torch.tensor(key))
        expected = [mixed(place ^ folded) for place in places]
        assert [value & 0xFFFFFFFF for value in found.tolist()] == expected
        assert rounding.low_bits(found).tolist() == [value & 0xFFFF for value in expected]
        assert rounding.high_bits(found).tolist() == [value >> 16 for value in expected]


def test_keys_begin_with_the_seed_and_name_and_follow_each_other() -> None:
    digest = hashlib.sha256(b"7/layers.0.weight").digest()
    first = int.from_bytes(digest[:8], "little", signed=True)
    assert rounding.first_key(7, "layers.0.weight") == first
    later = int(rounding.next_key(torch.tensor(first)))
    assert later % (1 << 64) == (first * 6364136223846793005 + 1442695040888963407) % (1 << 64)


def test_positions_add_up_to_the_index_in_the_whole_tensor() -> None:
    for shape in ((5,), (3, 4), (2, 3, 4), ()):
        tensor = torch.empty(shape)
        found = rounding.positions(tensor)
        assert {part.dtype for part in found} == {torch.int32}
        assert sum(found, torch.zeros((), dtype=torch.int32)).flatten().tolist() == list(range(tensor.numel()))
    assert [tuple(part.shape) for part in rounding.positions(torch.empty(2, 3, 4))] == [(2, 1, 1), (1, 3, 1), (1, 1, 4)]
    assert rounding.are_consecutive(torch.empty(2, 3))


def test_the_elements_of_a_rank_are_consecutive_if_only_rows_are_split() -> None:
    with simulated_world(4):
        mesh = init_device_mesh("cpu", (2, 2))
        for placements, consecutive in (
            ((Replicate(), Replicate()), True),
            ((Replicate(), Shard(0)), True),
            ((Shard(0), Shard(0)), True),
            ((Replicate(), Shard(1)), False),
            ((Shard(0), Shard(1)), False),
        ):
            tensor = distribute_tensor(torch.zeros(4, 4), mesh, placements, src_data_rank=None)
            assert rounding.are_consecutive(tensor) is consecutive
            indices = sum(rounding.positions(tensor), torch.zeros((), dtype=torch.int32)).flatten()
            assert (indices.diff() == 1).all().item() is consecutive


def test_stochastic_copies_need_bfloat16_and_float32_of_one_shape() -> None:
    target, generator = torch.empty(4096, dtype=torch.bfloat16), torch.Generator().manual_seed(0)
    source = torch.full((4096,), 1 + 2**-9)  # a quarter of the way
    assert rounding.copy_fp32_to_bf16_stochastic_(target, source, generator) is target
    up = int((target == 1 + 2**-7).sum())
    assert up + int((target == 1).sum()) == 4096
    assert 900 < up < 1150
    for wrong in ((target, source.double()), (target.float(), source), (source, target)):
        with pytest.raises(TypeError, match="rounds float32 to bfloat16"):
            rounding.copy_fp32_to_bf16_stochastic_(*wrong)
    with pytest.raises(ValueError, match=r"the target has shape \(4096,\), but the source \(4095,\)"):
        rounding.copy_fp32_to_bf16_stochastic_(target, source[1:])


@pytest.mark.parametrize(
    ("kind", "shape", "factor"),
    [
        ("original", (8, 2), 2.0),
        ("original", (2, 8), 1.0),
        ("original", (3, 8, 2), 2.0),
        ("match_rms_adamw", (4, 25), 1.0),
        ("match_rms_adamw", (100, 25), 2.0),
        ("spectral_unclamped", (8, 2), 2.0),
        ("spectral_unclamped", (2, 8), 0.5),
    ],
)
def test_factors_of_rates_follow_the_papers(kind: Any, shape: tuple[int, ...], factor: float) -> None:
    assert rate_factor(kind, shape) == pytest.approx(factor)


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (2, 4, 6), (2, 6, 4)])
def test_iterations_orthogonalise_and_keep_directions(shape: tuple[int, ...]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    before = matrices.clone()
    found = orthogonalize(matrices, (1.5, -0.5, 0.0), 30, 1e-7).double()
    assert torch.equal(matrices, before)
    u, _, v = torch.linalg.svd(matrices.double(), full_matrices=False)
    assert found.shape == torch.Size(shape)
    torch.testing.assert_close(found, u @ v, atol=0.04, rtol=0)
    # No iteration only divides by the norm of each matrix.
    norms = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True)
    alone = orthogonalize(matrices, (1.5, -0.5, 0.0), 0, 1e-7)
    torch.testing.assert_close(alone.float(), matrices / norms, atol=0.01, rtol=0.01)
    assert orthogonalize(torch.zeros(shape), (3.0, -4.0, 2.0), 5, 1e-7).eq(0).all()
    assert torch.allclose(orthogonalize(torch.ones(1, 1), (2.0, 3.0, 5.0), 1, 1e-7).float(), torch.tensor(10.0))
    half = orthogonalize(torch.full((1, 1), 0.5), (2.0, 3.0, 4.0), 1, 1.0)  # divided by eps, not by its norm
    assert half.item() == 2 * 0.5 + 3 * 0.125 + 4 * 0.03125


def test_shards_of_a_dimension_are_equal_then_shorter_then_empty() -> None:
    assert [_sizes(length, 4) for length in (8, 7, 5, 2, 0)] == [
        [2, 2, 2, 2], [2, 2, 2, 1], [2, 2, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0],
    ]  # fmt: skip
    assert [_with((5, 6, 7), dim, 1) for dim in range(3)] == [(1, 6, 7), (5, 1, 7), (5, 6, 1)]


def test_whole_matrices_are_computed_without_communication() -> None:
    parts = [torch.ones(2, 3), torch.empty(0, 3), torch.full((2, 2, 2), 2.0)]
    found = map_matrices(parts, parts, lambda one: one * 3)
    assert [set(one.flatten().tolist()) for one in found] == [{3.0}, set(), {6.0}]
    assert list(matrix_collectives(parts, 2)) == []


def test_a_part_of_a_batch_has_the_chosen_tensors_and_the_same_numbers() -> None:
    tensors = [torch.full((1,), float(number)) for number in range(9)]
    flags = torch.tensor(True), torch.tensor(0.0)
    batch = Batch(
        ["a", "b", "c"],
        tensors[:3],
        tensors[3:6],
        tensors[6:],
        {"m": tensors[:3]},
        0.5,
        0.25,
        *flags,
        torch.tensor(2.0),
    )
    part = batch.part([2, 0])
    assert part.names == ["c", "a"]
    lists: list[list[Tensor]] = [part.layouts, part.params, part.grads, part.slots["m"]]
    assert [[int(one) for one in chosen] for chosen in lists] == [[2, 0], [5, 3], [8, 6], [2, 0]]
    assert (part.lr, part.weight_decay, part.gate, part.found_inf, part.divisor) == (0.5, 0.25, *flags, batch.divisor)


def test_a_closed_gate_keeps_every_bit_whatever_the_new_numbers_are() -> None:
    kept = torch.tensor([1.0, -0.0, 3.0], dtype=torch.bfloat16)
    keep_if(torch.tensor(False), kept, torch.tensor([float("nan"), 2.0, float("inf")]))
    assert kept.view(torch.int16).tolist() == torch.tensor([1.0, -0.0, 3.0]).bfloat16().view(torch.int16).tolist()
    keep_if(torch.tensor(True), kept, torch.tensor([4.0, 2.0, 6.0]))
    assert kept.tolist() == [4.0, 2.0, 6.0]


def test_gradients_are_divided_in_place_and_laid_out_as_their_parameters() -> None:
    gradients = [torch.tensor([4.0]), torch.tensor([6.0], dtype=torch.bfloat16)]
    divide(gradients, torch.tensor(2.0))
    assert [(one.item(), one.dtype) for one in gradients] == [(2.0, torch.float32), (3.0, torch.bfloat16)]
    divide([], torch.tensor(2.0))
    parameter = torch.zeros(2, 3)
    same, turned = torch.ones(2, 3), torch.arange(6.0, dtype=torch.float64).view(3, 2).T
    assert _laid_out(same, parameter) is same
    found = _laid_out(turned, parameter)
    assert (found.stride(), found.dtype, found.tolist()) == ((3, 1), torch.float64, turned.tolist())


def test_state_begins_with_zeros_of_the_parameters_layout() -> None:
    parameter = nn.Parameter(torch.ones(3, 2, dtype=torch.bfloat16).T)
    moment, count = zeros(parameter, torch.float32), counter(parameter, torch.bfloat16)
    assert (moment.stride(), moment.dtype, moment.requires_grad, moment.sum().item()) == (
        parameter.stride(), torch.float32, False, 0.0,
    )  # fmt: skip
    assert (count.shape, count.dtype, count.item()) == ((), torch.float32, 0.0)
