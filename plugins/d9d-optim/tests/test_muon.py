"""Muon equals torch's, and whole matrices are computed alike wherever their parts are."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from d9d_core.errors import BuildError
from d9d_optim.optimizer.adamw import AdamW
from d9d_optim.optimizer.config import AdamWConfig, AdamWPart, MuonConfig
from d9d_optim.optimizer.muon import Muon
from d9d_optim.optimizer.newton_schulz import orthogonalize
from d9d_optim.optimizer.rounding import positions
from d9d_optim.optimizer.whole_matrices import map_matrices, matrix_collectives
from d9d_testing.world import World
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

SHAPES = {"tall": (24, 8), "wide": (8, 24), "square": (16, 16)}
ITERATE = partial(orthogonalize, coefficients=(3.4445, -4.775, 2.0315), steps=5, eps=1e-7)


def drawn(seed: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(drawn(seed, shape).to(dtype)) for seed, (name, shape) in enumerate(SHAPES.items())}


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "fields",
    [
        {"adjust_lr": "original"},
        {"adjust_lr": "match_rms_adamw", "nesterov": False},
        {"adjust_lr": "spectral_unclamped"},
        {"adjust_lr": "original", "ns_steps": 3, "ns_coefficients": (3.0, -3.2, 1.2), "eps": 30.0},
    ],
    ids=lambda fields: fields["adjust_lr"],
)
def test_steps_equal_those_of_torch_bit_for_bit(fields: dict[str, Any], dtype: torch.dtype) -> None:
    mine, other = parameters(dtype), parameters(dtype)
    optimizer = Muon(MuonConfig(lr=0.02, weight_decay=0.1, **fields), mine)
    optimizer.init_state()
    same = {name: value for name, value in fields.items() if name != "adjust_lr"}
    reference = torch.optim.Muon(
        list(other.values()), lr=0.02, weight_decay=0.1, adjust_lr_fn=fields["adjust_lr"], **same
    )
    for step in range(3):
        for name in mine:
            mine[name].grad = drawn(10 + step, SHAPES[name]).to(dtype)
            other[name].grad = drawn(10 + step, SHAPES[name]).to(dtype)
        optimizer.step(torch.tensor(True))
        reference.step()
    assert all(torch.equal(mine[name], other[name]) for name in mine)


def test_a_bank_is_updated_as_its_matrices_are() -> None:
    bank, gradient = drawn(0, (3, 12, 8)), drawn(1, (3, 12, 8))
    whole = {"bank": nn.Parameter(bank.clone())}
    parts = {f"{index}": nn.Parameter(matrix.clone()) for index, matrix in enumerate(bank)}
    for named, gradients in ((whole, [gradient]), (parts, list(gradient))):
        optimizer = Muon(MuonConfig(), named)
        optimizer.init_state()
        for parameter, grad in zip(named.values(), gradients, strict=True):
            parameter.grad = grad.clone()
        optimizer.step(torch.tensor(True))
    # Batched products of bfloat16 may round otherwise.
    together = torch.stack(list(parts.values())).detach()
    torch.testing.assert_close(whole["bank"].detach(), together, rtol=0, atol=1e-3)


def test_embeddings_heads_and_vectors_are_updated_by_adamw() -> None:
    def model() -> dict[str, nn.Parameter]:
        shapes = {"embed_tokens.weight": (8, 4), "heads.causal_lm.weight": (8, 4), "norm": (4,), "layer.weight": (4, 4)}
        shapes |= {"experts.up_bias": (4, 4)}
        return {name: nn.Parameter(drawn(0, shape)) for name, shape in shapes.items()}

    mine, other = model(), model()
    muon = Muon(MuonConfig(lr=0.02, weight_decay=0.5, adamw=AdamWPart(lr=0.003)), mine)
    adamw = AdamW(AdamWConfig(lr=0.003, weight_decay=0.5), other)
    for named, optimizer in ((mine, muon), (other, adamw)):
        optimizer.init_state()
        for parameter in named.values():
            parameter.grad = drawn(1, tuple(parameter.shape))
        optimizer.step(torch.tensor(True))
    equal = {name for name in mine if torch.equal(mine[name], other[name])}
    assert equal == {"embed_tokens.weight", "heads.causal_lm.weight", "norm", "experts.up_bias"}
    described = muon.describe()
    assert {label: group["lr"] for label, group in described.items()} == pytest.approx(
        {"muon, decay": 0.02, "adamw, decay": 0.003, "adamw, no decay": 0.003}
    )
    assert muon.lr == 0.02


def test_nothing_for_muon_is_an_error() -> None:
    with pytest.raises(BuildError, match="no trainable parameter is a matrix"):
        Muon(MuonConfig(), {"embed.weight": nn.Parameter(torch.zeros(2, 2))})
    with pytest.raises(BuildError, match=r"match\[0\]: the pattern 'embd' matches no trainable parameter.* embed"):
        Muon(MuonConfig(adamw=AdamWPart(match=("embd",))), {n: nn.Parameter(torch.zeros(2, 2)) for n in ("a", "embed")})


LAYOUTS: list[tuple[tuple[int, ...], list[Placement], tuple[int, ...]]] = [
    ((4,), [Shard(0)], (10, 6)),
    ((4,), [Shard(0)], (3, 8)),  # a rank without rows
    ((4,), [Shard(1)], (10, 6)),
    ((4,), [Shard(0)], (6, 4, 3)),
    ((4,), [Shard(1)], (3, 6, 4)),
    ((2, 2), [Replicate(), Shard(0)], (7, 6)),
    ((2, 2), [Shard(0), Shard(1)], (7, 5)),
]


def mapped() -> list[tuple[list[bool], bool]]:
    """Of each layout, whether each of five matrices has the bits that one process computes, and positions are right."""
    return [mapped_in(*layout) for layout in LAYOUTS]


def mapped_in(sizes: tuple[int, ...], placements: list[Placement], shape: tuple[int, ...]) -> tuple[list[bool], bool]:
    mesh = init_device_mesh("cpu", sizes)
    wholes = [drawn(seed, shape).bfloat16() for seed in range(5)]
    layouts = [distribute_tensor(whole, mesh, placements) for whole in wholes]
    results = map_matrices([layout.to_local() for layout in layouts], layouts, ITERATE)
    expected = [distribute_tensor(ITERATE(whole).contiguous(), mesh, placements).to_local() for whole in wholes]
    numbers = torch.arange(wholes[0].numel(), dtype=torch.int32).view(shape)
    own = distribute_tensor(numbers, mesh, placements).to_local()
    place: Any = sum(positions(layouts[0])[1:], start=positions(layouts[0])[0])
    return [torch.equal(a, b) for a, b in zip(results, expected, strict=True)], torch.equal(place, own)


@pytest.mark.thorough
def test_parts_of_matrices_are_computed_as_the_whole_is() -> None:
    assert World(4).run(mapped) == [[([True] * 5, True)] * len(LAYOUTS)] * 4


def communicated() -> list[list[tuple[str, tuple[int, ...], int | None, str, bool]]]:
    """Collectives of bfloat16 matrices in several layouts, on this rank."""
    found = []
    for sizes, placements, shapes in (
        ((4,), [Shard(0)], [(2, 2), (10, 6), (4, 4), (5,) * 2, (1, 2)]),
        ((2, 2), [Shard(0), Shard(1)], [(7, 5)]),
        ((4,), [Replicate()], [(7, 5)]),
        ((4,), [Shard(0)], [(6, 4, 3)]),  # whole matrices of a bank
    ):
        mesh = init_device_mesh("cpu", sizes)
        layouts = [distribute_tensor(torch.zeros(shape), mesh, placements) for shape in shapes]
        all_of = matrix_collectives(layouts, 2)
        found.append([(c.kind, tuple(c.ranks), c.bytes, c.purpose, c.approximate) for c in all_of])
    return found


@pytest.mark.thorough
def test_collectives_of_matrices_are_stated_in_rounds_of_large_ones_first() -> None:
    everyone = (0, 1, 2, 3)
    own = [(3, 2, 1, 1), (3, 2, 1, 1), (3, 1, 1, 0), (1, 0, 1, 0)]  # rows of matrices of 10, 5, 4 and 2 rows
    computed = [10 * 6, 5 * 5, 4 * 4, 2 * 2]
    for rank, found in enumerate(World(4).run(communicated)):
        ten, five, four, two = own[rank]
        first = 2 * (6 * ten + 5 * five + 4 * four + 2 * two)
        assert found[0] == [
            ("all_to_all", everyone, first, "parts of matrices", False),
            ("all_to_all", everyone, 2 * computed[rank], "computed matrices", False),
            ("all_to_all", everyone, 2 * 2 * (rank == 0), "parts of matrices", False),  # one row of two columns
            ("all_to_all", everyone, 2 * 2 * (rank == 0), "computed matrices", False),
        ]
        rows, columns = ((0, 2), (1, 3))[rank % 2], ((0, 1), (2, 3))[rank // 2]
        assert found[1] == [("all_gather", ranks, 2 * 35, "parts of a matrix", True) for ranks in (rows, columns)]
        assert found[2:] == [[], []]
