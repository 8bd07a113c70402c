"""Launches of compiled Triton kernels with little host time; the only file that depends on the version of Triton.

In each launch, ``kernel[grid](*arguments)`` of Triton 3.6 to 3.9 specialises each argument, formats the options as a
string, and looks the compiled kernel up. A :class:`Launcher` recognises arguments that it has launched before, and
calls ``run`` of the compiled kernel, as ``compiled[grid](*arguments)`` does in Triton's tutorial on a fused softmax.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from operator import attrgetter, or_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction, driver

#: Bytes of the alignment of pointers, and divisor of integers, to which Triton 3.6 to 3.9 specialises.
_ALIGNMENT = 16
#: Largest number of remembered launches of a kernel; beyond it, all are forgotten. Shapes may change in each step.
_MOST = 1024
#: Types of numbers that a direct launch accepts.
_NUMBERS = frozenset({int, float, bool})

#: Functions that read one fact of a tensor.
_ADDRESS, _DEVICE, _DTYPE = Tensor.data_ptr, Tensor.get_device, attrgetter("dtype")


class _Launch(NamedTuple):
    """Compiled kernel, ready to be launched.

    Attributes:
        compiled: the kernel; the reference keeps it loaded, because Triton 3.9 unloads a kernel that is collected.
        run: launches the kernel; takes three sizes of the grid, stream, function, metadata, the hooks' metadata and the
            two hooks, and the kernel's arguments.
        function: handle of the kernel on its device.
        metadata: packed metadata of the kernel.
        constants: values of the parameters that the call passes by keyword, in the order of the parameters.
    """

    compiled: CompiledKernel
    run: Callable[..., None]
    function: Any
    metadata: Any
    constants: tuple[Any, ...]


class Launcher:
    """Triton kernel with little host time per launch; called like the kernel, ``kernel[grid](*arguments, **options)``.

    A direct launch needs positional arguments that are tensors of one CUDA device, followed by int, float and bool
    numbers; constants and compiler options by keyword; and a compiled kernel for these arguments. Two calls use the
    same compiled kernel only if all facts are equal to which Triton specialises: device, dtypes, alignment of pointers,
    types and classes of numbers (:func:`specialisation`), constants and options.

    Triton itself launches all other calls: the first one of a specialisation, calls under Triton's interpreter, on
    AMD's GPUs, whose kernels are also specialised to sizes of storages, under launch hooks, such as a profiler's, and
    in Triton's debug mode.

    Args:
        kernel: result of ``triton.jit``.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._compiled = isinstance(kernel, JITFunction) and torch.version.hip is None
        self._pointers: dict[tuple[type, ...], int] = {}
        self._by_values: dict[Any, _Launch] = {}
        self._by_classes: dict[Any, _Launch] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """Function that launches the kernel on the device of its first argument.

        Args:
            grid: numbers of programs along one to three axes.
        """
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], /, *given: Any, **named: Any) -> None:
        # On the path of every launch: functions that are written in C take half of the time of comprehensions.
        types = tuple(map(type, given))
        count = self._pointers.get(types)
        if count is None:
            count = self._pointers[types] = self._count_pointers(given)
        tensors, numbers = given[:count], given[count:]
        device = device_of(tensors) if count and not is_observed(self.kernel) else None
        if device is None:
            self._by_triton(grid, given, named)
            return
        addresses = tuple(map(_ADDRESS, tensors))
        aligned = all_aligned(addresses) or tuple(address % _ALIGNMENT == 0 for address in addresses)
        facts = device, types, tuple(map(_DTYPE, tensors)), aligned, tuple(named), tuple(named.values())
        launch = self._by_values.get((facts, numbers))
        if launch is None:
            launch = self._find(facts, grid, given, named, numbers)
        if launch is None:  # Triton has just launched
            return
        if driver.active.get_current_device() == device:
            _run(launch, grid, device, addresses, numbers)
        else:
            with torch.cuda.device(device):
                _run(launch, grid, device, addresses, numbers)

    def _find(
        self,
        facts: tuple[Any, ...],
        grid: tuple[int, ...],
        given: tuple[Any, ...],
        named: dict[str, Any],
        numbers: tuple[Any, ...],
    ) -> _Launch | None:
        """Compiled kernel for numbers of the same classes; ``None`` after Triton has compiled and launched it."""
        classes = facts, tuple(map(specialisation, numbers))
        launch = self._by_classes.get(classes)
        if launch is None:
            compiled = self._by_triton(grid, given, named)
            if isinstance(compiled, CompiledKernel):
                self._remember(self._by_classes, classes, self._ready(compiled, len(given), named))
            return None
        self._remember(self._by_values, (facts, numbers), launch)
        return launch

    def _count_pointers(self, given: tuple[Any, ...]) -> int:
        """Number of leading tensors; 0 if Triton must launch arguments of these types."""
        if not self._compiled:
            return 0
        count = next((place for place, value in enumerate(given) if not isinstance(value, Tensor)), len(given))
        plain = all(type(value) in _NUMBERS for value in given[count:])
        constant = any(parameter.is_constexpr for parameter in self.kernel.params[: len(given)])
        return count if plain and not constant else 0

    def _ready(self, compiled: CompiledKernel, given: int, named: dict[str, Any]) -> _Launch:
        constants = tuple(named.get(parameter.name, parameter.default) for parameter in self.kernel.params[given:])
        return _Launch(compiled, compiled.run, compiled.function, compiled.packed_metadata, constants)

    def _by_triton(self, grid: tuple[int, ...], given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if given and isinstance(given[0], Tensor) and given[0].is_cuda:
            with torch.cuda.device(given[0].device):
                return self.kernel[grid](*given, **named)
        return self.kernel[grid](*given, **named)

    @staticmethod
    def _remember(launches: dict[Any, _Launch], key: Any, launch: _Launch) -> None:
        if len(launches) >= _MOST:
            launches.clear()
        launches[key] = launch


def specialisation(number: float) -> Any:
    """Class of a number: Triton compiles one kernel for all numbers of a class.

    Triton makes 1 a constant, and specialises other integers to 32, 64 or unsigned 64 bits and to divisibility by 16.
    It specialises floats and bools to their type only.
    """
    if type(number) is not int or number == 1:
        return type(number)
    bits = 32 if -(2**31) <= number < 2**31 else 64 if number < 2**63 else 65
    return bits, number % _ALIGNMENT == 0


def device_of(tensors: tuple[Tensor, ...]) -> int | None:
    """Index of the CUDA device of all tensors, at least one; ``None`` if they are on a CPU or on several devices."""
    if not tensors[0].is_cuda:
        return None
    devices = set(map(_DEVICE, tensors))
    return devices.pop() if len(devices) == 1 else None


def all_aligned(addresses: tuple[int, ...]) -> bool:
    """Whether all addresses are aligned as Triton specialises."""
    return reduce(or_, addresses) % _ALIGNMENT == 0


def is_observed(kernel: Any) -> bool:
    """Whether something observes or changes launches: hooks of Triton or of the kernel, or Triton's debug mode."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(
        getattr(enter, "calls", enter)
        or getattr(leave, "calls", leave)
        or kernel.pre_run_hooks
        or runtime.debug
        or knobs.compilation.instrumentation_mode
        or runtime.add_stages_inspection_hook is not None
    )


def _run(
    launch: _Launch, grid: tuple[int, ...], device: int, addresses: tuple[int, ...], numbers: tuple[Any, ...]
) -> None:
    _, run, function, metadata, constants = launch
    x, y, z = (*grid, 1, 1)[:3]
    stream = driver.active.get_current_stream(device)
    run(x, y, z, stream, function, metadata, None, None, None, *addresses, *numbers, *constants)
