"""Grids and blocks of launches, over stand-ins of the kernels: which tile covers how many features or heads."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_triton import launch, normed_rope, permutation, rms_norm, rope, silu_mul
from d9d_triton.launch import Blocks, as_rows, check_floats, persistent_programs


class Kernel:
    """Stand-in of a kernel that notes its launches."""

    def __init__(self) -> None:
        self.launched: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *given, **options: self.launched.append((grid, given, options))

    def last(self, *names: str) -> tuple[Any, ...]:
        """Grid of the last launch, and some of its options."""
        grid, _, options = self.launched[-1]
        assert options["enable_fp_fusion"] is True
        return (grid, *(options[name] for name in names))


@pytest.mark.parametrize(("features", "blocks", "block"), [(5, 1, 8), (1024, 1, 1024), (1025, 2, 1024)])
def test_rows_are_copied_and_summed_in_blocks_of_at_most_1024_features(
    monkeypatch: pytest.MonkeyPatch, features: int, blocks: int, block: int
) -> None:
    copies, sums, gradients = Kernel(), Kernel(), Kernel()
    for name, kernel in (("copy_to_rows", copies), ("sum_rows", sums), ("differentiate", gradients)):
        monkeypatch.setattr(permutation, name, kernel)
    slots, places = torch.arange(6), torch.arange(6).view(2, 3)
    rows, weights = torch.zeros(6, features), torch.zeros(2, 3)
    out = permutation.copy_tokens(torch.zeros(2, features), slots, places, False)
    assert out.shape == (6, features)
    assert copies.last("CHOICES", "BLOCK", "num_warps") == ((2, blocks), 3, block, max(1, block // 128))
    assert permutation.plain_sum(rows, slots, places, False).shape == (2, features)
    assert sums.last("CHOICES", "BLOCK", "WEIGHTED") == ((2, blocks), 3, block, False)
    permutation.weighted_sum(rows, places, weights, False)
    assert sums.last("WEIGHTED") == ((2, blocks), True)
    permutation.weighted_sum_backward(rows[:2], rows, places, weights, False, True, False)
    expected = {5: 8, 1024: 1024, 1025: 1024}[features]
    names = ("CHOICES", "LANES", "BLOCK", "OF_X", "OF_WEIGHTS")
    assert gradients.last(*names) == ((2,), 3, 4, expected, True, False)


def test_gradients_of_many_choices_are_computed_in_tiles_of_4096_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permutation, "differentiate", kernel := Kernel())
    places, weights = torch.zeros(1, 512, dtype=torch.int64), torch.zeros(1, 512)
    for features, block in ((64, 8 * 2), (4, 4)):
        rows = torch.zeros(512, features)
        permutation.weighted_sum_backward(rows[:1], rows, places, weights, False, True, True)
        assert kernel.last("LANES", "BLOCK") == ((1,), 512, block)


@pytest.mark.parametrize(
    ("heads", "features", "blocks", "groups"),
    [((4, 2), 128, (4, 2), 1), ((64, 8), 128, (32, 8), 2), ((3, 0), 6, (4, 1), 1), ((2, 1), 8192, (1, 1), 2)],
)
def test_a_program_rotates_at_most_2048_pairs_of_queries(
    monkeypatch: pytest.MonkeyPatch, heads: tuple[int, int], features: int, blocks: tuple[int, int], groups: int
) -> None:
    monkeypatch.setattr(rope, "rotate", kernel := Kernel())
    query, key = (torch.zeros(2, 3, count, features) for count in heads)
    angles = torch.zeros(1, 3, features // 2)
    rope.turn(query, key, angles, angles, True)
    width = {128: 64, 6: 4, 8192: 4096}[features]
    names = ("QUERY_HEADS", "KEY_HEADS", "PAIRS", "BACK")
    assert kernel.last(*names) == ((6, groups), *blocks, width, True)
    given = kernel.launched[0][1]
    assert given[6:10] == (3, *heads, features // 2)


def test_contiguous_tensors_are_one_long_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silu_mul, "gate_rows", kernel := Kernel())
    whole = torch.zeros(3, 2, 1000)
    silu_mul.silu_mul(whole, whole)
    assert kernel.last("BLOCK") == ((3,), 2048)  # 6000 numbers
    part = torch.zeros(3, 2, 20)[..., :10]
    silu_mul.silu_mul(part, torch.zeros(3, 2, 10))
    assert kernel.last("BLOCK") == ((6,), 16)


@pytest.mark.parametrize(
    ("features", "rows", "warps"), [(5, 256, 4), (2048, 1, 4), (4096, 1, 8), (8192, 1, 16), (16384, 1, 16)]
)
def test_a_tile_of_norms_has_2048_numbers_or_one_row(features: int, rows: int, warps: int) -> None:
    width = max(8, 1 << (features - 1).bit_length())
    assert rms_norm._tile(features) == {"ROWS": rows, "FEATURES": width, "num_warps": warps}


def test_programs_are_as_many_as_a_gpu_runs_at_once_or_as_there_is_work(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(multi_processor_count=10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)
    gpu: Any = SimpleNamespace(is_cuda=True, device="cuda:0")
    assert [persistent_programs(gpu, most) for most in (0, 1, 39, 41)] == [1, 1, 39, 40]
    assert persistent_programs(gpu, 100, each=8) == 80
    assert persistent_programs(torch.zeros(1), 100) == 2


def test_blocks_of_several_tensors_are_numbered_and_their_tables_kept_for_a_while() -> None:
    blocks, cpu = Blocks(4), torch.device("cpu")
    owners, firsts = blocks.of((4, 0, 9, 1), cpu)
    assert (owners.tolist(), firsts.tolist()) == ([0, 2, 2, 2, 3], [0, 1, 1, 4])
    assert (owners.dtype, firsts.dtype) == (torch.int32, torch.int32)
    assert blocks.of((4, 0, 9, 1), cpu)[0] is owners
    for size in range(31):
        blocks.of((100 + size,), cpu)
    assert blocks.of((4, 0, 9, 1), cpu)[0] is owners  # 32 tables
    blocks.of((1000,), cpu)
    assert blocks.of((4, 0, 9, 1), cpu)[0] is not owners


def test_rows_are_views_where_strides_allow_and_other_dtypes_are_refused() -> None:
    x = torch.zeros(2, 3, 4)
    assert as_rows(x).shape == (6, 4)
    assert as_rows(x).data_ptr() == x.data_ptr()
    assert launch.empty_like(x.mT).is_contiguous()
    check_floats("rope", query=x, key=x.half(), cos=x.bfloat16())
    with pytest.raises(TypeError, match=r"rope.triton: key is torch.float64, .* set 'kernels: \{rope: reference\}'"):
        check_floats("rope", query=x, key=x.double())


def test_norms_are_launched_over_tiles_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    norms, gradients = Kernel(), Kernel()
    monkeypatch.setattr(rms_norm, "normalise", norms)
    monkeypatch.setattr(rms_norm, "differentiate", gradients)
    summed: list[Any] = []
    monkeypatch.setattr(rms_norm, "column_sums", lambda sums, dtype: summed.append(sums.shape) or sums.sum(0).to(dtype))
    x, weight = torch.zeros(3, 3, 300), torch.ones(300)
    rms_norm.rms_norm(x, weight, 1e-6)
    assert norms.last("ROWS", "FEATURES", "ADDS") == ((3,), 4, 512, False)  # nine rows
    given = norms.launched[0][1]
    assert given[5:7] == (9, 300)
    rms_norm.fill_norm(x, x, weight, 1e-6, added=x, total=torch.empty_like(x))
    assert norms.last("ADDS") == ((3,), True)
    flags = ("OF_X", "OF_WEIGHT", "ADDS", "TWICE", "AHEAD")
    found = rms_norm.rms_norm_backward(x, x, weight, 1e-6, True, True)
    assert gradients.last(*flags) == ((2,), True, True, False, False, False)
    assert summed == [(2, 300)]
    assert [tensor.shape for tensor in found] == [x.shape, (300,), (0,)]
    found = rms_norm.rms_norm_backward(x, x, weight, 1e-6, True, False, x, torch.bfloat16)
    assert gradients.last(*flags) == ((2,), True, False, True, True, False)
    assert [tensor.shape for tensor in found] == [x.shape, (0,), x.shape]
    assert found[2].dtype == torch.bfloat16
    found = rms_norm.rms_norm_backward(x, x, weight, 1e-6, False, True, x)
    assert gradients.last(*flags)[1:4] == (False, True, False)
    assert [tensor.shape for tensor in found] == [(0,), (300,), (0,)]
    for features, ahead in ((8192, True), (8193, False)):
        row = torch.zeros(1, features, dtype=torch.bfloat16)
        rms_norm.rms_norm_backward(row, row, torch.ones(features), 1e-6, True, False)
        assert gradients.last("AHEAD") == ((1,), ahead)


@pytest.mark.parametrize(
    ("heads", "each", "of_queries", "groups"),
    [
        ((4, 2), 2, 2, 3),  # both divide by 2
        ((8, 4), 4, 2, 3),
        ((6, 3), 3, 2, 3),
        ((5, 1), 1, 5, 6),
        ((7, 5), 4, 2, 4),  # nothing divides both: four with a rest
        ((16, 8), 4, 4, 6),
    ],
)
def test_programs_of_a_token_share_its_heads(heads: tuple[int, int], each: int, of_queries: int, groups: int) -> None:
    query, key = (torch.zeros(1, 1, count, 128) for count in heads)
    tile, found = normed_rope._tile(query, key)
    assert (tile["HEADS"], tile["QUERY_GROUPS"], tile["PAIRS"], found) == (each, of_queries, 64, groups)


def test_a_tile_is_exact_only_if_heads_pairs_and_tokens_fill_it() -> None:
    tokens = normed_rope._tile(torch.zeros(1, 1, 4, 128), torch.zeros(1, 1, 4, 128))[0]["TOKENS"]
    for samples, positions, heads, features, exact in (
        (2, tokens, (4, 4), 128, True), (1, tokens + 1, (4, 4), 128, tokens == 1), (1, tokens, (7, 5), 128, False),
        (1, 64 * tokens, (4, 4), 96, False),
    ):  # fmt: skip
        query, key = (torch.zeros(samples, positions, count, features) for count in heads)
        assert normed_rope._tile(query, key)[0]["EXACT"] == exact
