"""The library on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_core.kernel import OpSignature
from d9d_cublas import products
from d9d_cublas.binding import Functions, find_library
from d9d_cublas.choices import Choice, Choices, Key, read
from d9d_cublas.device import DeviceProducts
from d9d_cublas.library import Library
from d9d_cublas.problem import LAYOUTS, Problem, multiply, shape_of
from d9d_cublas.products import Products, forward
from d9d_cublas.swiglu import build
from d9d_cublas.tuning import Tuner, event_clock, is_right
from d9d_testing.suites.kernel import KernelSuite
from torch import Tensor

SwiGLU = pytest.importorskip("d9d_nn.swiglu").SwiGLU

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DTYPES = (torch.bfloat16, torch.float16)


class FirstListed:
    """Tuner that takes the library's first algorithm, so that products are the library's."""

    def choose(self, default: Any, candidates: Any) -> tuple[int | None, tuple[float, float]]:
        return 0 if candidates else None, (1.0, 1.0)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def library(device: torch.device) -> Library:
    return Library(Functions(find_library()), device)


@pytest.fixture
def opened(library: Library, tmp_path: Path) -> Callable[..., DeviceProducts]:
    """Products of one process that has just started, with choices of their own."""

    def open_device(tuner: Any) -> DeviceProducts:
        empty = tmp_path / "shipped.json"
        empty.write_text('{"format": 1, "choices": []}')
        return DeviceProducts(library, "chip", Choices(tmp_path / "cublas.json", empty), tuner, smallest=0)

    return open_device


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch, opened: Callable[..., DeviceProducts]) -> None:
    """The library's first algorithms behind the ops."""
    monkeypatch.setattr(products, "_PRODUCTS", Products(lambda _: opened(FirstListed())))


@pytest.mark.usefixtures("ops")
class TestSwigluOnCuda(KernelSuite):
    """The library itself."""

    pytestmark = pytestmark
    target = "swiglu.cublas"
    device = "cuda"
    dtypes = ("bfloat16", "float16")
    refused = ({"dtype": "float32"}, {"device": "cpu"})


def operands(
    layout: str, rows: int, wide: int, narrow: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor]:
    draw = torch.Generator("cuda").manual_seed(0)
    x, weight, grad = (
        torch.randn(shape, generator=draw, device="cuda").to(dtype)
        for shape in ((rows, narrow), (wide, narrow), (rows, wide))
    )
    return {"forward": (x, weight), "rows_gradient": (grad, weight), "weight_gradient": (grad, x)}[layout]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(1024, 512, 256), (333, 264, 520), (1, 8, 8), (4096, 136, 64)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_listed_algorithm_computes_the_product_and_is_made_again_from_its_settings(
    library: Library, layout: str, sizes: tuple[int, int, int], dtype: torch.dtype
) -> None:
    first, second = operands(layout, *sizes, dtype)
    expected = first.new_empty(shape_of(layout, first, second))
    multiply(layout, first, second, expected)
    out = torch.empty_like(expected)
    description = library.describe(Problem.of(layout, first, second), (first.stride(0), second.stride(0)))
    listed = library.listed(description, 8)
    assert listed
    for algorithm in listed:
        again = library.restore(description, algorithm.settings)
        assert again is not None, algorithm.settings
        assert again.settings == algorithm.settings
        for each in (algorithm, again):
            assert is_right(lambda each=each: library.run(description, each, first, second, out), out, expected)


def test_rows_that_lie_apart_are_read_and_nothing_beside_them(library: Library) -> None:
    wide, weight = (
        torch.full((64, 96), torch.nan, device="cuda").bfloat16(),
        torch.randn(48, 32, device="cuda").bfloat16(),
    )
    rows = wide[:, 32:64]
    rows.copy_(torch.randn(64, 32))
    out, expected = weight.new_empty(64, 48), rows.contiguous() @ weight.T
    description = library.describe(Problem.of("forward", rows, weight), (96, 32))
    for algorithm in library.listed(description, 8):
        assert is_right(lambda each=algorithm: library.run(description, each, rows, weight, out), out, expected)


def test_settings_that_the_library_does_not_have_are_refused(library: Library) -> None:
    pair = operands("forward", 64, 64, 64)
    description = library.describe(Problem.of("forward", *pair), (64, 64))
    settings = library.listed(description, 1)[0].settings
    assert library.restore(description, type(settings)(10**6)) is None
    assert library.restore(description, type(settings)(settings.id, tile=10**6)) is None


def test_a_choice_is_measured_once_and_kept_for_the_next_run(
    opened: Callable[..., DeviceProducts], tmp_path: Path
) -> None:
    calls: list[int] = []

    def counted(runs: Any, repetitions: Any) -> list[float]:
        calls.append(len(runs))
        return event_clock(runs, repetitions)

    first, second = operands("forward", 2048, 2048, 2048)
    out = first.new_empty(2048, 2048)
    opened(Tuner(counted)).multiply("forward", first, second, out)
    measured = len(calls)
    assert measured
    (choice,) = read(tmp_path / "cublas.json").values()
    assert choice.milliseconds is not None
    assert 0 < choice.milliseconds[1] <= choice.milliseconds[0] < 1
    opened(Tuner(counted)).multiply("forward", first, second, out)
    assert len(calls) == measured


def test_the_clock_tells_a_large_product_from_a_small_one() -> None:
    large, small = torch.randn(4096, 4096, device="cuda"), torch.randn(512, 512, device="cuda")
    runs = [lambda: large @ large, lambda: small @ small]
    event_clock(runs, [1, 1])
    slow, fast = event_clock(runs, [4, 40])
    assert slow > 4 * fast > 0


@pytest.mark.usefixtures("ops")
def test_a_captured_graph_computes_by_the_choices_of_before() -> None:
    rows, weight = operands("forward", 512, 256, 128)
    expected = forward(rows, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = forward(rows, weight)
    rows.mul_(2)
    graph.replay()
    assert torch.equal(found, expected * 2)


@pytest.mark.usefixtures("ops")
def test_a_graph_captured_before_anything_was_chosen_is_torchs(tmp_path: Path) -> None:
    rows, weight = operands("forward", 512, 256, 128)
    expected = rows @ weight.T
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = forward(rows, weight)
    graph.replay()
    assert torch.equal(found, expected)
    assert not (tmp_path / "cublas.json").exists()


@pytest.mark.usefixtures("ops")
def test_a_compiled_layer_computes_the_same() -> None:
    torch.manual_seed(0)
    layers = []
    for compiled in (False, True):
        module = SwiGLU(128, 256, std=0.1, output_std=0.1).to("cuda", torch.bfloat16)
        module.load_state_dict((layers[0] if layers else module).state_dict())
        if compiled:
            module.swiglu.bind("cublas", build(OpSignature("swiglu", "cuda", "bfloat16", compiled=True)))
            module.compile(fullgraph=True)
        layers.append(module)
    found = []
    for module in layers:
        x = torch.randn(4, 64, 128, generator=torch.Generator().manual_seed(1)).to("cuda", torch.bfloat16)
        x.requires_grad_()
        module(x).square().sum().backward()
        found.append([x.grad, *(parameter.grad for parameter in module.parameters())])
    for one, other in zip(*found, strict=True):
        assert (one.float() - other.float()).norm() <= 2e-2 * one.float().norm()


def test_the_devices_name_and_the_version_are_the_key(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = products.open_device(device)
    assert found is not None
    first, second = operands("forward", 8192, 2048, 2048)
    key = Key(
        torch.cuda.get_device_name(device), Functions(find_library()).version, Problem.of("forward", first, second)
    )
    out = first.new_empty(8192, 2048)
    found.multiply("forward", first, second, out)
    kept = Choices(tmp_path / "d9d" / "cublas.json").find(key)
    assert isinstance(kept, Choice)
