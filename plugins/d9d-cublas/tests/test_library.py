"""The library itself, as far as it goes without a device, and how it is found."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_cublas import binding, products
from d9d_cublas.binding import Algo, Functions, LibraryError, Result, find_library
from d9d_cublas.device import is_capturing
from d9d_cublas.library import Description
from d9d_cublas.problem import LAYOUTS, Problem, Settings


@pytest.fixture(scope="module")
def functions() -> Functions:
    try:
        return Functions(find_library())
    except LibraryError as error:
        pytest.skip(str(error))


def test_the_library_is_the_one_that_torch_has_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    lines = [
        "7f00-7f01 r-xp 00000000 fe:00 1 /with a space/libcublas.so.13",
        "7f02-7f03 r-xp 00000000 fe:00 2 /with a space/libcublasLt.so.13",
        "7f03-7f04 rw-p 00000000 fe:00 2 /with a space/libcublasLt.so.13",
        "7f04-7f05 rw-p 00000000 00:00 0",
    ]
    maps.write_text("\n".join(lines))
    monkeypatch.setattr(binding, "_MAPS", maps)
    assert find_library() == Path("/with a space/libcublasLt.so.13")


def test_a_library_that_is_not_loaded_is_that_of_the_wheels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wheel = tmp_path / "nvidia" / "cu13" / "lib" / "libcublasLt.so.13"
    wheel.parent.mkdir(parents=True)
    monkeypatch.setattr(binding, "_MAPS", tmp_path / "absent")
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    with pytest.raises(LibraryError, match="libcublasLt.so is neither loaded nor installed next to torch"):
        find_library()
    wheel.write_text("")
    assert find_library() == wheel


def test_without_the_library_products_are_torchs_after_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Path:
        raise LibraryError("not here")

    monkeypatch.setattr(products, "find_library", refuse)
    with pytest.warns(RuntimeWarning, match="cuBLASLt is not available on cuda:0: not here"):
        assert products.open_device(torch.device("cuda:0")) is None
    assert products.open_device(torch.device("cpu")) is None


def test_structures_have_the_sizes_of_the_header() -> None:
    assert ctypes.sizeof(Algo) == 64
    assert ctypes.sizeof(Result) == 96
    assert (Result.workspace.offset, Result.state.offset, Result.waves.offset) == (64, 72, 76)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_descriptors_say_what_the_transposed_product_is(functions: Functions, layout: str) -> None:
    """Of T 64, N 24 and K 16: A is the second operand, B the first."""
    expected = {
        "forward": ((1, 0), [(16, 24, 40), (16, 64, 32), (24, 64, 24)]),
        "rows_gradient": ((0, 0), [(16, 24, 40), (24, 64, 32), (16, 64, 16)]),
        "weight_gradient": ((0, 1), [(16, 64, 40), (24, 64, 32), (16, 24, 16)]),
    }
    description = Description(functions, Problem(layout, 64, 24, 16, "float16"), (32, 40))

    def of(matrix: Any) -> tuple[int, ...]:
        fields = ((2, ctypes.c_uint64), (3, ctypes.c_uint64), (4, ctypes.c_int64))
        assert functions.get("MatrixLayout", matrix, 0, ctypes.c_uint32) == 2  # CUDA_R_16F
        return tuple(functions.get("MatrixLayout", matrix, number, ctype) for number, ctype in fields)

    transposed = tuple(functions.get("MatmulDesc", description.operation, number, ctypes.c_int32) for number in (3, 4))
    assert (transposed, [of(matrix) for matrix in description.matrices]) == expected[layout]


def test_settings_are_written_and_read(functions: Functions) -> None:
    algo = Algo()
    settings = Settings(0, tile=36, stages=35, cluster=3, custom=1, swizzle=1, split_k=2, reduction=2, inner=1)
    functions.configure(algo, settings)
    assert functions.settings(algo) == settings


def test_a_refused_call_says_which_and_by_which_version(functions: Functions) -> None:
    with pytest.raises(
        LibraryError, match=rf"cublasLtMatmulDescCreate of cuBLASLt {functions.version} failed with status"
    ):
        functions.call("MatmulDescCreate", None, 68, 0)


class Shared:
    """Stand-in of the shared library that notes its calls."""

    def __init__(self) -> None:
        self.called: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        def function(*arguments: Any) -> int:
            if name == "cublasLtGetVersion":
                return 130100
            if name.endswith("Create"):
                arguments[0]._obj.value = 1234
            self.called.append((name, arguments[-1] if name.endswith("Destroy") else arguments[1:]))
            return 0

        setattr(self, name, function)
        return function


def test_a_descriptor_is_destroyed_with_its_last_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = Shared()
    monkeypatch.setattr(ctypes, "CDLL", lambda path: shared if path == "/a/path" else None)
    functions = Functions(Path("/a/path"))
    assert functions.version == 130100
    made = functions.make("MatmulDesc", 68, 0)
    assert shared.called == [("cublasLtMatmulDescCreate", (68, 0))]
    assert made.value == 1234
    del made
    name, destroyed = shared.called[-1]
    assert (name, destroyed.value, len(shared.called)) == ("cublasLtMatmulDescDestroy", 1234, 2)


def test_a_warning_about_the_library_points_to_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Path:
        raise OSError("broken")

    monkeypatch.setattr(products, "find_library", refuse)
    with pytest.warns(RuntimeWarning, match="not available on cuda:1: broken") as found:
        assert products.open_device(torch.device("cuda:1")) is None
    assert [warning.filename for warning in found] == [__file__]


def test_a_graph_is_captured_only_where_cuda_was_initialised(monkeypatch: pytest.MonkeyPatch) -> None:
    for initialised, capturing in ((False, True), (True, False), (True, True)):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda found=initialised: found)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda found=capturing: found)
        assert is_capturing() == (initialised and capturing)
