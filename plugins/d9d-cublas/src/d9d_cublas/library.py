"""cuBLASLt through ctypes: lists the algorithms of a product, and computes it with one of them.

The library is column-major: a row-major [a, b] is a b x a matrix whose leading dimension is the row stride, and a
product is computed as its transpose: out.T = op(second).T op(first).T.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from d9d_cublas.binding import Algo, Functions, Result
from d9d_cublas.problem import LAYOUTS, Problem, Settings, stored_shapes

#: Largest workspace of an algorithm, in bytes.
WORKSPACE = 32 * 2**20

# Constants of the headers library_types.h, cublas_api.h and cublasLt.h.
_COMPUTE_32F = 68
_R_32F = 0
_TYPES = {"bfloat16": 14, "float16": 2}
_DESC_TRANSA, _DESC_TRANSB = 3, 4
_PREFERENCE_WORKSPACE, _PREFERENCE_REDUCTION = 1, 3
#: Split-K algorithms must add their partial sums in float32, not in the dtype of the result.
_REDUCTION_COMPUTE_TYPE = 2


@dataclass(frozen=True, slots=True)
class Algorithm:
    """Algorithm that the library offers for a product.

    Attributes:
        settings: settings of the algorithm.
        workspace: bytes of device memory that the algorithm needs.
        opaque: the library's own form of the settings; valid for its version and device only.
    """

    settings: Settings
    workspace: int
    opaque: Any


class Description:
    """Descriptor of a product for cuBLASLt; owns the library's descriptors.

    Args:
        functions: functions of the library.
        problem: layout, sizes and dtype.
        strides: row strides of the first and second operand, in elements.
    """

    def __init__(self, functions: Functions, problem: Problem, strides: tuple[int, int]) -> None:
        first_transposed, second_transposed = LAYOUTS[problem.layout]
        first, second, out = stored_shapes(problem)
        self.type = _TYPES[problem.dtype]
        self.operation = functions.make("MatmulDesc", _COMPUTE_32F, _R_32F)
        for attribute, transposed in ((_DESC_TRANSA, second_transposed), (_DESC_TRANSB, first_transposed)):
            functions.set("MatmulDesc", self.operation, attribute, ctypes.c_int32(transposed))
        #: Library descriptors of the memory layouts of the matrices A, B and D.
        self.matrices = [
            functions.make("MatrixLayout", self.type, columns, rows, stride)
            for (rows, columns), stride in ((second, strides[1]), (first, strides[0]), (out, out[1]))
        ]


class Library:
    """Library cuBLASLt: its algorithms on one device.

    Args:
        functions: functions of the library.
        device: a CUDA device.
    """

    def __init__(self, functions: Functions, device: torch.device) -> None:
        self._functions = functions
        self._device = device
        with torch.cuda.device(device):
            # The handle is never destroyed, because CUDA may be shut down before a destructor runs.
            self._handle = ctypes.c_void_p()
            functions.call("Create", ctypes.byref(self._handle))
        self.version = functions.version
        self._one, self._zero = ctypes.c_float(1), ctypes.c_float(0)

    def describe(self, problem: Problem, strides: tuple[int, int]) -> Description:
        """Create the descriptor of a product, see :class:`Description`."""
        return Description(self._functions, problem, strides)

    def listed(self, description: Description, count: int) -> list[Algorithm]:
        """At most ``count`` algorithms of the library's heuristic for a product; the first is the library's default."""
        functions = self._functions
        preference = functions.make("MatmulPreference")
        for attribute, value in (
            (_PREFERENCE_WORKSPACE, ctypes.c_uint64(WORKSPACE)),
            (_PREFERENCE_REDUCTION, ctypes.c_uint32(_REDUCTION_COMPUTE_TYPE)),
        ):
            functions.set("MatmulPreference", preference, attribute, value)
        results, found = (Result * count)(), ctypes.c_int()
        arguments = (self._handle, description.operation, *self._all(description), preference, count)
        with torch.cuda.device(self._device):
            functions.call("MatmulAlgoGetHeuristic", *arguments, results, ctypes.byref(found))
        good = [result for result in results[: found.value] if result.state == 0]
        return [Algorithm(functions.settings(result.algo), result.workspace, result.algo) for result in good]

    def restore(self, description: Description, settings: Settings) -> Algorithm | None:
        """Algorithm with the given settings; ``None`` if the library does not support it for the product."""
        functions, kind = self._functions, description.type
        algo, result = Algo(), Result()
        handle, algo_pointer = self._handle, ctypes.byref(algo)
        with torch.cuda.device(self._device):
            types = (_COMPUTE_32F, _R_32F, kind, kind, kind, kind)
            if functions.status("MatmulAlgoInit", handle, *types, settings.id, algo_pointer):
                return None
            functions.configure(algo, settings)
            operands = (description.operation, *self._all(description))
            refused = functions.status("MatmulAlgoCheck", handle, *operands, algo_pointer, ctypes.byref(result))
        if refused or result.workspace > WORKSPACE or functions.settings(algo) != settings:
            return None
        return Algorithm(settings, result.workspace, algo)

    def run(self, description: Description, algorithm: Algorithm, first: Tensor, second: Tensor, out: Tensor) -> None:
        """Compute a product on torch's current stream.

        Args:
            description: descriptor of the product of these operands.
            algorithm: algorithm for that descriptor.
            first: first operand in the layout of :data:`~d9d_cublas.problem.LAYOUTS`.
            second: second operand.
            out: receives the product; contiguous.

        Raises:
            LibraryError: the library refuses the call.
        """
        pointer, (a, b, d) = out.data_ptr(), description.matrices
        with torch.cuda.device(self._device):
            # Allocated on the product's stream, so the caching allocator reuses the workspace only after the product.
            workspace = out.new_empty(algorithm.workspace, dtype=torch.uint8) if algorithm.workspace else None
            self._functions.call(
                "Matmul",
                *(self._handle, description.operation, ctypes.byref(self._one)),
                *(second.data_ptr(), a, first.data_ptr(), b, ctypes.byref(self._zero)),
                *(pointer, d, pointer, d, ctypes.byref(algorithm.opaque)),
                *(None if workspace is None else workspace.data_ptr(), algorithm.workspace),
                torch.cuda.current_stream(self._device).cuda_stream,
            )

    def _all(self, description: Description) -> tuple[Any, Any, Any, Any]:
        """Matrix descriptors A, B, C and D of the library's call; C is not used, and gets the descriptor of D."""
        a, b, d = description.matrices
        return a, b, d, d
