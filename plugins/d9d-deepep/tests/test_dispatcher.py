"""DeepEP's way of dispatching keeps what every dispatcher must, with a buffer that stands in for the library's."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_core.errors import BuildError
from d9d_deepep.buffer import open_buffer
from d9d_deepep.dispatcher import DeepEPDispatcher
from d9d_deepep.kernels import Handle, combine, dispatch_again
from d9d_moe.router.routing import TopKRouting
from d9d_testing.suites.moe.dispatcher import DispatcherSuite


@pytest.mark.thorough
class TestDeepEPDispatcher(DispatcherSuite):
    factory = f"{Path(__file__).with_name('stand_in.py')}:build"
    dtypes = ("bfloat16",)


class Group:
    """As much of a process group as is asked before anything is sent."""

    def size(self) -> int:
        return 2


@pytest.mark.parametrize(
    ("hidden", "dtype", "weights", "experts", "text"),
    [
        (16, torch.float32, torch.float32, 4, "moves bfloat16, the tokens are torch.float32"),
        (12, torch.bfloat16, torch.float32, 4, "rows of a multiple of 16 bytes, the tokens have 12 features"),
        (16, torch.bfloat16, torch.float64, 4, "float32 weights"),
        (16, torch.bfloat16, torch.float32, 6, "built for 4 experts, the routing has 6"),
    ],
)
def test_what_the_library_cannot_move_is_refused(
    hidden: int, dtype: torch.dtype, weights: torch.dtype, experts: int, text: str
) -> None:
    routing = TopKRouting.of(torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2, dtype=weights), experts)
    with pytest.raises(ValueError, match=text):
        DeepEPDispatcher(Group(), 4).dispatch(torch.zeros(3, hidden, dtype=dtype), routing)


def test_experts_that_cannot_be_shared_out_are_refused() -> None:
    with pytest.raises(BuildError, match="5 experts cannot be divided equally over 2 ranks"):
        DeepEPDispatcher(Group(), 5)


def test_without_the_library_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    with pytest.raises(BuildError, match="python setup.py install"):
        open_buffer(Group(), 32)


def test_one_buffer_serves_until_rows_get_wider() -> None:
    opened: list[int] = []

    def opening(_group: Group, row_bytes: int) -> SimpleNamespace:
        opened.append(row_bytes)
        return SimpleNamespace(capture=lambda: None, get_dispatch_layout=lambda *_, **__: (None,) * 5)

    dispatcher = DeepEPDispatcher(Group(), 2, opening)
    routing = TopKRouting.of(torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1), 2)
    for hidden in (16, 8, 16, 32, 16):
        dispatcher.dispatch(torch.zeros(1, hidden, dtype=torch.bfloat16), routing)
    assert opened == [32, 64]


def test_the_buffer_is_as_large_as_the_librarys_configurations_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    library = ModuleType("deep_ep")
    library.Buffer = LibraryBuffer
    monkeypatch.setitem(sys.modules, "deep_ep", library)
    assert open_buffer(Group(), 32).arguments[1:] == (2 * 32 * 2, 3 * 32 * 2)


class LibraryBuffer:
    """The constructor and the hints of ``deep_ep.Buffer``."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    @staticmethod
    def get_dispatch_config(ranks: int) -> SimpleNamespace:
        return config(2, 1)

    @staticmethod
    def get_combine_config(ranks: int) -> SimpleNamespace:
        return config(1, 3)


def config(over_nvlink: int, over_rdma: int) -> SimpleNamespace:
    return SimpleNamespace(
        get_nvl_buffer_size_hint=lambda row, ranks: over_nvlink * row * ranks,
        get_rdma_buffer_size_hint=lambda row, ranks: over_rdma * row * ranks,
    )


def test_indices_of_other_integers_are_refused() -> None:
    routing = TopKRouting.of(torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2), 4)
    routing.indices = routing.indices.int()
    with pytest.raises(ValueError, match="float32 weights and int64 indices, .* torch.float32 and torch.int32"):
        DeepEPDispatcher(Group(), 4).dispatch(torch.zeros(3, 8, dtype=torch.bfloat16), routing)


def test_a_handle_gives_its_tensors_away_and_takes_them_again() -> None:
    first, second = torch.zeros(1), torch.ones(1)
    handle = Handle((first, 3, None, second))
    assert handle.tensors == (first, second)
    empty = handle.shape()
    assert empty.tensors == ()
    assert empty.filled((second, first)) == (second, 3, None, first)


def test_a_buffer_is_opened_for_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    library, group = ModuleType("deep_ep"), Group()
    library.Buffer = LibraryBuffer
    monkeypatch.setitem(sys.modules, "deep_ep", library)
    assert open_buffer(group, 8).arguments == (group, 32, 48)


def test_kernels_are_launched_after_an_event_and_awaited_on_the_stream() -> None:
    said: list[Any] = []
    event = SimpleNamespace(current_stream_wait=lambda: said.append("waited"))
    rows, weights = torch.arange(6.0).view(3, 2).T, torch.ones(2, 3).T

    def run(*given: Any, **options: Any) -> Any:
        said.append((given, options))
        return ("summed", "weights", event) if "topk_weights" in options else ("sent", *(None,) * 4, event)

    buffer = SimpleNamespace(capture=lambda: "now", combine=run, dispatch=run)
    launched = {"previous_event": "now", "async_finish": True, "allocate_on_comm_stream": True}
    assert combine(buffer, rows, ("handle",), weights).wait() == ("summed", "weights")
    (given, handle), options = said[0]
    assert given.is_contiguous()
    assert handle == ("handle",)
    assert options.pop("topk_weights").is_contiguous()
    assert options == launched
    assert dispatch_again(buffer, rows, ("handle",)).wait() == ("sent",)
    (given,), options = said[2]
    assert given.is_contiguous()
    assert options == {"handle": ("handle",), **launched}
    assert said[1] == said[3] == "waited"
