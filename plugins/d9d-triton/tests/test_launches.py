"""Grids and blocks of launches, over stand-ins of the kernels: which tile covers how many features or heads."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from d9d_triton import adamw, column_sums, gradient_power, launch, normed_rope, permutation, rms_norm, rope, silu_mul
from d9d_triton.joint import attention_inputs
from d9d_triton.launch import Blocks, as_rows, check_floats, persistent_programs
from d9d_triton.linear_cross_entropy import operators, passes
from d9d_triton.linear_cross_entropy.backend import rows_of_chunk


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


def test_every_choice_has_a_row_unless_the_caller_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[str, object]] = []
    for name in ("copy_tokens", "plain_sum", "weighted_sum"):
        monkeypatch.setattr(permutation, name, lambda *words, name=name: given.append((name, words[-1])))
    rows, slots, weights = torch.zeros(2, 4), torch.arange(2), torch.ones(2, 1)
    for more in ({}, {"absent": True}):
        permutation.permute(rows, slots, slots.view(2, 1), **more)
        permutation.unpermute(rows, slots, slots.view(2, 1), **more)
        permutation.unpermute(rows, slots, slots.view(2, 1), weights, **more)
    names = ("copy_tokens", "plain_sum", "weighted_sum")
    assert given == [(name, absent) for absent in (False, True) for name in names]


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


def test_quotients_and_powers_are_tritons() -> None:
    for number in range(1, 40):
        assert launch.next_power_of_2(number) == triton.next_power_of_2(number)
        assert [launch.cdiv(number, by) for by in range(1, 9)] == [triton.cdiv(number, by) for by in range(1, 9)]


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
        (2, tokens, (4, 4), 128, True), (tokens, 1, (4, 4), 128, True), (1, tokens + 1, (4, 4), 128, tokens == 1),
        (1, tokens, (7, 5), 128, False), (1, 64 * tokens, (4, 4), 96, False),
    ):  # fmt: skip
        query, key = (torch.zeros(samples, positions, count, features) for count in heads)
        assert normed_rope._tile(query, key)[0]["EXACT"] == exact


@pytest.mark.parametrize(
    ("words", "whole", "chunk"),
    [(1, 16, 16), (16, 16, 16), (17, 32, 32), (4096, 4096, 4096), (4097, 8192, 4096), (8193, 8192, 4096)],
)
def test_a_program_reads_a_row_of_logits_in_blocks(
    monkeypatch: pytest.MonkeyPatch, words: int, whole: int, chunk: int
) -> None:
    kernels = {name: Kernel() for name in ("take_statistics", "include_words", "count_above")}
    for name, kernel in kernels.items():
        monkeypatch.setattr(passes, name, kernel)
    logits, own, statistics = torch.zeros(3, 8256), torch.ones(3), torch.zeros(2, 3)
    targets, losses, ranks = torch.zeros(3, dtype=torch.int64), torch.zeros(3), torch.ones(3, dtype=torch.int64)
    sizes = {"words": words, "ignored": -7}
    passes.row_statistics(logits, own, targets, losses, statistics, ranks, **sizes)
    names = ("RANKED", "WORDS", "STRIDE", "BLOCK", "num_warps")
    assert kernels["take_statistics"].last(*names) == ((3,), True, words, 8256, whole, 8)
    given = kernels["take_statistics"].launched[0][1]
    assert given[0] is logits
    assert given[1] is own
    assert given[2] is targets
    assert given[3] is losses
    assert [tensor.data_ptr() for tensor in given[4:6]] == [row.data_ptr() for row in statistics]
    assert given[6] is ranks
    assert given[7] == -7
    passes.row_statistics(logits, own, targets, losses, statistics, None, **sizes)
    assert kernels["take_statistics"].last("RANKED") == ((3,), False)
    passes.include_chunk(logits, targets, own, statistics, first=11, **sizes)
    assert kernels["include_words"].last(*names[1:]) == ((3,), words, 8256, chunk, 8)
    assert kernels["include_words"].launched[0][1][5:] == (11, -7)
    passes.count_chunk(logits, targets, own, ranks, **sizes)
    assert kernels["count_above"].last(*names[1:]) == ((3,), words, 8256, chunk, 8)
    given = kernels["count_above"].launched[0][1]
    assert all(one is other for one, other in zip(given[:4], (logits, targets, own, ranks), strict=True))
    assert given[4:] == (-7,)


@pytest.mark.parametrize(
    ("words", "first", "block", "blocks", "sections"),
    [
        (16, None, 16, 1, 1),
        (8193, None, 8192, 2, 1),
        (4 * 8192, None, 8192, 4, 1),
        (4 * 8192 + 1, None, 8192, 4, 2),
        (4097, 5, 4096, 2, 1),
        (4 * 4096 + 1, 0, 4096, 4, 2),
    ],
)
def test_a_program_overwrites_at_most_four_blocks_of_a_row(
    monkeypatch: pytest.MonkeyPatch, words: int, first: int | None, block: int, blocks: int, sections: int
) -> None:
    monkeypatch.setattr(passes, "differentiate", kernel := Kernel())
    logits, targets = torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64)
    statistics, grads = torch.zeros(2, 3), torch.ones(3)
    passes.gradient_in_place(logits, targets, statistics, grads, words=words, ignored=-7, first=first)
    expected = ((3 * sections,), words, 4, block, blocks, 8)
    assert kernel.last("WORDS", "STRIDE", "BLOCK", "BLOCKS", "num_warps") == expected
    given = kernel.launched[0][1]
    assert given[4] is grads
    assert given[5:] == (sections, first or 0, -7)
    assert [tensor.data_ptr() for tensor in given[2:4]] == [row.data_ptr() for row in statistics]


def test_a_chunk_of_tokens_has_logits_of_a_gibibyte_but_256_tokens_at_least() -> None:
    hidden = torch.zeros(1, dtype=torch.bfloat16)
    assert [rows_of_chunk(hidden, size) for size in (1 << 20, 151_936, 1 << 21, 1 << 22)] == [512, 3533, 256, 256]
    assert rows_of_chunk(hidden.float(), 1 << 20) == 256


def test_only_logits_that_were_not_kept_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    project = operators.project
    monkeypatch.setattr(operators, "project", lambda *given: (computed.append(len(given[0])), project(*given))[1])
    hidden, weight = torch.randn(7, 3), torch.randn(5, 3)
    targets = torch.tensor([0, 1, 2, 3, 4, 0, 1])
    _, _, statistics, logits = operators.token_losses(hidden, weight, targets, 3, 2, False)
    assert computed == [2, 3, 2]
    computed.clear()
    operators.gradients(
        torch.ones(7), hidden, weight, targets, statistics, logits, 3, True, True, torch.float32
    )  # fmt: skip
    assert computed == [3, 2]


@pytest.mark.parametrize(
    ("shape", "grid", "blocks"), [((1, 1), 1, 1), ((128, 16), 1, 1), ((129, 17), 2, 2), ((257, 32), 2, 3)]
)
def test_columns_are_summed_in_blocks_of_128_rows_and_16_columns(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], grid: int, blocks: int
) -> None:
    monkeypatch.setattr(column_sums, "add_up", kernel := Kernel())
    out = column_sums.column_sums(torch.zeros(shape), torch.bfloat16)
    assert (out.shape, out.dtype) == (shape[1:], torch.bfloat16)
    assert kernel.last("ROWS", "BLOCKS", "COLUMNS") == ((grid,), 128, blocks, 16)
    assert kernel.launched[0][1][2:] == shape


@pytest.mark.skipif(torch.cuda.is_available(), reason="interprets the kernel, where there is no GPU")
@pytest.mark.parametrize("rows", [(1, 1), (130, 3), (3, 257), (128, 128)])
def test_sums_of_two_matrices_equal_separate_sums(rows: tuple[int, int]) -> None:
    matrix, dtypes = torch.randn(sum(rows), 17), (torch.float32, torch.bfloat16)
    found = column_sums.sums_of_two(matrix, rows[0], dtypes)
    for sums, part, dtype in zip(found, matrix.split(rows), dtypes, strict=True):
        assert torch.equal(sums, column_sums.column_sums(part, dtype))
        torch.testing.assert_close(sums, part.sum(0).to(dtype))


def test_two_matrices_are_summed_in_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(column_sums, "add_up_both", kernel := Kernel())
    column_sums.sums_of_two(torch.zeros(150, 17), 20, (torch.float32, torch.float32))
    assert kernel.last("ROWS", "BLOCKS", "COLUMNS") == ((2, 2), 128, 2, 16)
    assert kernel.launched[0][1][3:] == (20, 130, 17)


def test_squares_are_summed_by_dtype_and_alignment_in_programs_of_four_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_power, "add_squares", kernel := Kernel())
    monkeypatch.setattr(gradient_power, "interpreted", lambda: False)
    monkeypatch.setattr(torch, "empty", lambda *size, dtype, device: torch.full(size, 0.5, dtype=dtype, device=device))
    large, small, narrow = torch.ones(16385), torch.ones(16384), torch.ones(3).bfloat16()
    shifted = torch.ones(6)[1:]
    total = gradient_power.SumOfSquares()([large, small, narrow, shifted], torch.device("cpu"))
    assert (total.item(), total.dtype) == (0.5 * (3 + 1 + 1), torch.float64)
    names = ("ALIGNED", "PARTS", "BLOCK", "num_warps")
    found = [(grid, given[4], *(options[name] for name in names)) for grid, given, options in kernel.launched]
    assert found == [((3,), 2, True, 4, 4096, 4), ((1,), 1, True, 4, 4096, 4), ((1,), 1, False, 4, 4096, 4)]
    table, owners, firsts, sums = kernel.launched[0][1][:4]
    assert table.tolist() == [[large.data_ptr(), small.data_ptr()], [16385, 16384]]
    assert (owners.tolist(), firsts.tolist()) == ([0, 0, 1], [0, 2])
    assert (sums.shape, sums.dtype) == ((3,), torch.float32)


@pytest.mark.parametrize(("count", "grid"), [(1, 1), (128, 1), (129, 2)])
def test_a_step_of_adamw_counts_all_tensors_and_updates_their_blocks(
    monkeypatch: pytest.MonkeyPatch, count: int, grid: int
) -> None:
    counts, updates = Kernel(), Kernel()
    monkeypatch.setattr(adamw, "count_step", counts)
    monkeypatch.setattr(adamw, "update_weights", updates)
    monkeypatch.setattr(adamw, "interpreted", lambda: False)
    memory = [[torch.zeros(1025) for _ in range(count)] for _ in range(4)]
    steps, gate = [torch.zeros(()) for _ in range(count)], torch.tensor(True)
    batch: Any = SimpleNamespace(
        params=memory[0], grads=memory[1], gate=gate, divisor=None, lr=0.25, weight_decay=0.5,
        slots={"exp_avg": memory[2], "exp_avg_sq": memory[3], "step": steps},
    )  # fmt: skip
    adamw.FusedAdamW(stochastic=False)(batch, betas=(0.5, 0.25), eps=1e-3)
    options = ("LOG2_BETA1", "LOG2_BETA2", "STOCHASTIC", "BLOCK")
    assert counts.last(*options) == ((grid,), -1.0, -2.0, False, 128)
    table, factors, keys, *others = counts.launched[0][1]
    columns = [[tensor.data_ptr() for tensor in column] for column in (*memory, steps)]
    assert table.tolist() == [*columns, [1025] * count]
    assert (factors.shape, factors.dtype) == ((2, count), torch.float32)
    assert (keys.shape, keys.dtype) == ((count,), torch.int64)
    assert others[0] is gate
    assert others[1:] == [count, 0.25]
    flags = ("DIVIDES", "STOCHASTIC", "MASTERS", "ALIGNED", "BLOCK", "num_warps")
    assert updates.last(*flags) == ((2 * count,), False, False, False, True, 1024, 4)
    given = updates.launched[0][1]
    assert given[1].tolist() == [number for number in range(count) for _ in range(2)]
    assert given[2].tolist() == list(range(0, 2 * count, 2))
    assert given[5] is gate
    assert given[6] is gate
    assert given[7:] == (count, 0.875, 0.5, 0.25, 0.75, 1e-3)


def test_a_beta_of_zero_forgets_everything() -> None:
    assert [adamw._log2(beta) for beta in (0.0, 0.5, 1.0)] == [-float("inf"), -1.0, 0.0]


@pytest.mark.parametrize(
    ("rows", "features", "grid", "width"), [(4, 5, (1, 1), 8), (5, 1024, (2, 1), 1024), (9, 1025, (3, 2), 1024)]
)
def test_gradients_of_values_are_copied_in_blocks_of_four_rows(
    monkeypatch: pytest.MonkeyPatch, rows: int, features: int, grid: tuple[int, int], width: int
) -> None:
    monkeypatch.setattr(attention_inputs, "copy_rows", kernel := Kernel())
    out, x = torch.zeros(rows, 2 * features)[:, :features], torch.zeros(rows, features)
    attention_inputs._copy(out, x)
    assert kernel.last("ROWS", "FEATURES") == (grid, 4, width)
    assert kernel.launched[0][1][1] is x
    assert kernel.launched[0][1][2:] == (rows, features, 2 * features, features)
    attention_inputs._copy(out, torch.zeros(features, rows).T)
    assert kernel.launched[1][1][1].is_contiguous()
    attention_inputs._copy(out[:0], x[:0])
    assert len(kernel.launched) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="interprets the kernel, where there is no GPU")
@pytest.mark.parametrize(("rows", "features"), [(5, 6), (4, 8)])
def test_a_copy_writes_all_rows_and_nothing_between_them(rows: int, features: int) -> None:
    memory = torch.full((rows + 1, features + 3), torch.nan)
    x = torch.arange(rows * features, dtype=torch.float32).view(rows, features)
    attention_inputs._copy(memory[:rows, 1 : features + 1], x)
    assert torch.equal(memory[:rows, 1 : features + 1], x)
    assert memory.isnan().sum() == rows * 3 + features + 3


def test_norms_and_rotations_are_launched_over_tokens_and_groups_of_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    norms, gradients = Kernel(), Kernel()
    monkeypatch.setattr(normed_rope, "norm_and_rotate", norms)
    monkeypatch.setattr(normed_rope, "differentiate", gradients)
    summed: list[Any] = []
    monkeypatch.setattr(
        normed_rope, "sums_of_two", lambda *given: summed.append((given[0].shape, *given[1:])) or weights
    )
    query, key = torch.zeros(3, 3, 4, 128), torch.zeros(3, 3, 2, 128)  # 9 tokens, 8 of which make a tile
    weights, angles = (torch.ones(128), torch.ones(128).bfloat16()), (torch.zeros(1, 3, 64), torch.zeros(3, 3, 64))
    normed_rope.forward(query, key, *weights, *angles, 1e-6)
    names = ("TOKENS", "HEADS", "QUERY_GROUPS", "PAIRS", "EXACT", "num_warps")
    assert norms.last(*names) == ((2, 3), 8, 2, 2, 64, False, 2)
    given = norms.launched[0][1]
    assert [tuple(tensor.shape) for tensor in given[2:4]] == [(9, 4, 128), (9, 2, 128)]
    assert given[8:13] == (9, 3, 4, 2, 64)
    strides = ((512, 128, 1), (256, 128, 1), (0, 64, 1), (192, 64, 1))
    assert given[13:] == (*(number for tensor in strides for number in tensor), 1e-6)
    found = normed_rope.backward(query, key, query, key, *weights, *angles, 1e-6)
    assert gradients.last(*names) == ((1, 3), 8, 2, 2, 64, False, 2)
    assert summed == [((3, 128), 2, (torch.float32, torch.bfloat16))]
    assert [tensor.dtype for tensor in found[2:]] == [torch.float32, torch.bfloat16]
    given = gradients.launched[0][1]
    assert given[12:17] == (9, 3, 4, 2, 64)
    assert given[17:19] == (512, 256)
    assert normed_rope.forward(query[:0], key[:0], *weights, angles[0], angles[0], 1e-6)[0].shape == (0, 3, 4, 128)
    none = normed_rope.backward(query[:0], key[:0], query[:0], key[:0], *weights, angles[0], angles[0], 1e-6)
    assert [tensor.any().item() for tensor in none[2:]] == [False, False]
    assert (len(norms.launched), len(gradients.launched)) == (1, 1)


def test_programs_of_a_backward_share_the_tiles_of_all_groups_of_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(normed_rope, "differentiate", gradients := Kernel())
    monkeypatch.setattr(
        normed_rope, "persistent_programs", lambda _tensor, most, each: (asked.append((most, each)), 5)[1]
    )
    query, key = torch.zeros(3, 3, 4, 128), torch.zeros(3, 3, 2, 128)
    angles, weight = torch.zeros(1, 3, 64), torch.ones(128)
    monkeypatch.setattr(normed_rope, "sums_of_two", lambda *_: (weight, weight))
    normed_rope.backward(query, key, query, key, weight, weight, angles, angles, 1e-6)
    assert asked == [(2 * 3, 8)]  # 9 tokens are two tiles of 8, with two groups of query heads and one of key heads
    assert gradients.last() == ((2, 3),)  # 5 programs, rounded up to whole tokens
    of_query, of_key = gradients.launched[0][1][2:4]
    assert (of_query.shape, of_key.shape) == ((2 * 2, 128), (2 * 1, 128))


@pytest.mark.parametrize(("interpreted", "blocks"), [(True, (1 << 16, 1 << 14)), (False, (1024, 4096))])
def test_blocks_are_larger_where_triton_interprets_programs(
    monkeypatch: pytest.MonkeyPatch, interpreted: bool, blocks: tuple[int, int]
) -> None:
    for module in (adamw, gradient_power):
        monkeypatch.setattr(module, "interpreted", lambda: interpreted)
    step, squares = adamw.FusedAdamW(stochastic=True), gradient_power.SumOfSquares()
    assert (step._block, squares._block) == blocks
    assert step._blocks.of((blocks[0], blocks[0] + 1), torch.device("cpu"))[0].tolist() == [0, 1, 1]
