"""Ahead-of-time compilation of Triton kernels without a GPU: shows that kernels tested by the interpreter compile.

A function of the caller launches kernels with CPU tensors, in a process where Triton does not interpret. Each launch
compiles its kernel for a given GPU, as Triton would for these arguments, and runs nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import pkgutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

#: Compute capability -> largest number of bytes of shared memory per thread block.
_SHARED_MEMORY = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
_SECONDS = 600


def compile_launches(
    package: str, file: str | Path, function: str, capabilities: Iterable[int] = (80, 90)
) -> dict[str, list[int]]:
    """Compile the Triton kernels that a function launches, for several GPUs, in a new process.

    Args:
        package: package of the kernels; all its modules are examined.
        file: Python file of the function, such as the test's ``__file__``.
        function: name of a function without arguments that launches kernels. Its outputs are not computed.
        capabilities: compute capabilities of the GPUs: 80, 86, 89, 90, 100 or 120.

    Returns:
        ``module:name`` of each Triton function of the package, and of each other one that was compiled -> capabilities
        for which it was compiled; empty if it was not. A function that a kernel calls is compiled with that kernel.

    Raises:
        AssertionError: the function fails, or a kernel does not compile or needs more shared memory than a GPU has;
            the message has the end of the output.
    """
    command = [sys.executable, "-m", __name__, package, str(file), function, *map(str, capabilities)]
    # Triton reads the variable when it is imported, so the process must start with it.
    env = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=_SECONDS, check=False)  # noqa: S603
    assert done.returncode == 0, f"{function} of {file}:\n{done.stdout[-2000:]}{done.stderr[-6000:]}"
    found: dict[str, list[int]] = json.loads(done.stdout.splitlines()[-1])
    return found


class _Absent:
    """Triton driver of an absent GPU, which only reports the compute capability."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return self.capability  # a number per capability, because Triton caches kernels by device

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        target = importlib.import_module("triton.backends.compiler").GPUTarget
        return target("cuda", self.capability, 32)


def _functions(package: str) -> Iterator[Any]:
    jit_function = importlib.import_module("triton").JITFunction
    root = importlib.import_module(package)
    names = [found.name for found in pkgutil.walk_packages(root.__path__, f"{package}.")]
    for module in (root, *map(importlib.import_module, names)):
        # A package may wrap its kernels, as d9d-triton does: a wrapper has the kernel in its attribute `kernel`.
        values = [getattr(value, "kernel", value) for value in vars(module).values()]
        found = [value for value in values if isinstance(value, jit_function)]
        yield from (function for function in found if function.fn.__module__ == module.__name__)


def _with_callees(function: Any, seen: dict[int, Any]) -> None:
    """Collect a Triton function and the functions that it calls by a name in its module."""
    if id(function) in seen:
        return
    seen[id(function)] = function
    plain = function.fn
    for name in plain.__code__.co_names:
        value = plain.__globals__.get(name)
        if isinstance(value, type(function)):
            _with_callees(value, seen)


def _import_file(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("launches", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _main(package: str, file: str, function: str, *capabilities: str) -> None:
    triton = importlib.import_module("triton")
    driver = importlib.import_module("triton.runtime").driver
    compiled: dict[int, set[int]] = {}
    plain_run = triton.JITFunction.run
    by_identity: dict[int, Any] = {}

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:  # noqa: ARG001
        capability = driver.active.capability
        result = plain_run(kernel, *args, grid=grid, warmup=True, **kwargs)
        shared, most = result.metadata.shared, _SHARED_MEMORY[capability]
        assert shared <= most, f"{kernel.fn.__name__} needs {shared} bytes of shared memory, sm_{capability} has {most}"
        reached: dict[int, Any] = {}
        _with_callees(kernel, reached)
        by_identity.update(reached)
        for identity in reached:
            compiled.setdefault(identity, set()).add(capability)

    triton.JITFunction.run = compile_only
    launch = getattr(_import_file(file), function)
    for capability in map(int, capabilities):
        driver.set_active(_Absent(capability))
        launch()
    known = {id(found): found for found in _functions(package)} | by_identity
    names = {
        f"{found.fn.__module__}:{found.fn.__name__}": sorted(compiled.get(key, ())) for key, found in known.items()
    }
    print(json.dumps(names))  # noqa: T201 - result for the parent process


if __name__ == "__main__":
    _main(*sys.argv[1:])
