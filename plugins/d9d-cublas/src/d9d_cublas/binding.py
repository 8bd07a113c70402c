"""ctypes binding of cuBLASLt: its functions with their types, and the path of the library.

Names are the names in the library's header ``cublasLt.h``, without the prefix ``cublasLt``.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from d9d_cublas.problem import Settings

_NAME = "libcublasLt.so"
_MAPS = Path("/proc/self/maps")

#: Field of ``Settings`` -> number and ctype of the ``cublasLtMatmulAlgoConfig`` attribute that holds it.
_ATTRIBUTES: dict[str, tuple[int, Any]] = {
    "id": (0, ctypes.c_int32),
    "tile": (1, ctypes.c_uint32),
    "stages": (6, ctypes.c_uint32),
    "cluster": (8, ctypes.c_uint16),
    "custom": (5, ctypes.c_uint32),
    "swizzle": (4, ctypes.c_uint32),
    "split_k": (2, ctypes.c_int32),
    "reduction": (3, ctypes.c_uint32),
    "inner": (7, ctypes.c_uint16),
}


class Algo(ctypes.Structure):
    """ctypes structure ``cublasLtMatmulAlgo_t``: an algorithm with its settings."""

    _fields_ = [("data", ctypes.c_uint64 * 8)]


class Result(ctypes.Structure):
    """ctypes structure ``cublasLtMatmulHeuristicResult_t``: an algorithm that the heuristic returns."""

    _fields_ = [
        ("algo", Algo),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


_P, _INT, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
_SIGNATURES: dict[str, list[Any]] = {
    "Create": [_P],
    "MatmulDescCreate": [_P, _INT, _INT],
    "MatmulDescDestroy": [_P],
    "MatmulDescSetAttribute": [_P, _INT, _P, _SIZE],
    "MatmulDescGetAttribute": [_P, _INT, _P, _SIZE, _P],
    "MatrixLayoutCreate": [_P, _INT, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64],
    "MatrixLayoutDestroy": [_P],
    "MatrixLayoutGetAttribute": [_P, _INT, _P, _SIZE, _P],
    "MatmulPreferenceCreate": [_P],
    "MatmulPreferenceDestroy": [_P],
    "MatmulPreferenceSetAttribute": [_P, _INT, _P, _SIZE],
    "MatmulAlgoGetHeuristic": [_P, _P, _P, _P, _P, _P, _P, _INT, _P, _P],
    "MatmulAlgoInit": [_P, _INT, _INT, _INT, _INT, _INT, _INT, _INT, _P],
    "MatmulAlgoCheck": [_P, _P, _P, _P, _P, _P, _P, _P],
    "MatmulAlgoConfigSetAttribute": [_P, _INT, _P, _SIZE],
    "MatmulAlgoConfigGetAttribute": [_P, _INT, _P, _SIZE, _P],
    "Matmul": [_P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _SIZE, _P],
}


class LibraryError(RuntimeError):
    """Error of cuBLASLt: the library is not installed, or a call failed."""


def find_library() -> Path:
    """Path of cuBLASLt: the copy that this process has loaded with torch, or the copy installed next to torch.

    Raises:
        LibraryError: no cuBLASLt was found, for example because torch was built for another vendor.
    """
    lines = _MAPS.read_text("utf-8").splitlines() if _MAPS.exists() else []
    loaded = sorted({line.split(maxsplit=5)[-1] for line in lines if f"/{_NAME}" in line})
    # The wheels of CUDA's libraries install into the folder ``nvidia``, next to torch's.
    wheels = Path(torch.__file__).parents[1].glob(f"nvidia/*/lib/{_NAME}*") if not loaded else ()
    paths = [Path(path) for path in loaded] or sorted(wheels)
    if not paths:
        raise LibraryError(f"the library {_NAME} is neither loaded nor installed next to torch {torch.__version__}")
    return paths[0]


class Functions:
    """Binding of cuBLASLt: the shared library's functions, with their types.

    Args:
        path: path of the shared library.
    """

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.cublasLtGetVersion.restype = ctypes.c_size_t
        for name, arguments in _SIGNATURES.items():
            function: Any = self._function(name)
            function.argtypes, function.restype = arguments, ctypes.c_int
        #: Version number of the library, such as 130100 for 13.1.
        self.version: int = self._library.cublasLtGetVersion()

    def status(self, name: str, *arguments: Any) -> int:
        """Call the function ``cublasLt<name>`` of the library and return its status; 0 is success."""
        status: int = self._function(name)(*arguments)
        return status

    def call(self, name: str, *arguments: Any) -> None:
        """Call the function ``cublasLt<name>`` of the library.

        Raises:
            LibraryError: the returned status is not success.
        """
        status = self.status(name, *arguments)
        if status:
            raise LibraryError(f"the function cublasLt{name} of cuBLASLt {self.version} failed with status {status}")

    def make(self, kind: str, *arguments: Any) -> Any:
        """Create a cuBLASLt descriptor of the given kind, which is destroyed when its last reference is deleted."""
        made = ctypes.c_void_p()
        self.call(f"{kind}Create", ctypes.byref(made), *arguments)
        weakref.finalize(made, self.status, f"{kind}Destroy", ctypes.c_void_p(made.value)).atexit = False
        return made

    def set(self, kind: str, descriptor: Any, attribute: int, value: Any) -> None:
        """Set an attribute of a descriptor."""
        self.call(f"{kind}SetAttribute", descriptor, attribute, ctypes.byref(value), ctypes.sizeof(value))

    def get(self, kind: str, descriptor: Any, attribute: int, ctype: Any) -> int:
        """Value of an attribute of a descriptor."""
        value, written = ctype(), ctypes.c_size_t()
        arguments = attribute, ctypes.byref(value), ctypes.sizeof(value), ctypes.byref(written)
        self.call(f"{kind}GetAttribute", descriptor, *arguments)
        found: int = value.value
        return found

    def settings(self, algo: Algo) -> Settings:
        """Settings of an algorithm, read from the library."""
        found = {
            name: self.get("MatmulAlgoConfig", ctypes.byref(algo), attribute, ctype)
            for name, (attribute, ctype) in _ATTRIBUTES.items()
        }
        return Settings(**found)

    def configure(self, algo: Algo, settings: Settings) -> None:
        """Write only settings that differ from the algorithm's own; the library refuses attributes that it lacks."""
        before = self.settings(algo)
        for name, (attribute, ctype) in _ATTRIBUTES.items():
            wanted = getattr(settings, name)
            if wanted != getattr(before, name):
                value = ctype(wanted)
                arguments = attribute, ctypes.byref(value), ctypes.sizeof(value)
                self.status("MatmulAlgoConfigSetAttribute", ctypes.byref(algo), *arguments)

    def _function(self, name: str) -> Callable[..., int]:
        function: Callable[..., int] = getattr(self._library, f"cublasLt{name}")
        return function
