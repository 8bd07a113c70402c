"""Script of test_launcher.py: launches kernels on a stand-in of a GPU, and prints the launches as JSON."""

from __future__ import annotations

import contextlib
import gc
import json
import random
import weakref
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from d9d_triton import launcher
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

FUSION = {"enable_fp_fusion": True}
launches: list[tuple[Any, ...]] = []


class StandInLauncher:
    """Launcher of a compiled kernel that notes launches: kernel, grid and arguments."""

    def __init__(self, src: Any, metadata: Any) -> None:
        self.hash = metadata.hash

    def __call__(self, x: int, y: int, z: int, stream: Any, function: Any, metadata: Any, *rest: Any) -> None:
        arguments = [one.data_ptr() if isinstance(one, Tensor) else one for one in rest[3:]]
        launches.append((self.hash, (x, y, z), stream, function, arguments))


class StandInDriver:
    """Driver of two H100 that load nothing."""

    launcher_cls = StandInLauncher
    current = 0

    def __init__(self) -> None:
        self.utils = SimpleNamespace(
            load_binary=lambda name, *_: (object(), name, 0, 0, 1024),
            unload_module=lambda _module: None,
            get_device_properties=lambda _device: {"max_shared_mem": 232448},
        )

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return self.current

    def get_current_stream(self, device: int) -> int:
        return 100 + device


@triton.jit
def kernel(out, x, rows, columns, stride, eps, flag, FIRST: tl.constexpr, BLOCK: tl.constexpr):
    """Kernel of all kinds of arguments."""
    place = tl.program_id(0).to(tl.int64) * stride + tl.arange(0, BLOCK)
    value = tl.load(x + place, place < columns * rows, other=0.0).to(tl.float32) + eps
    if FIRST:
        value += 1
    tl.store(out + place, value.to(out.dtype.element_ty), (place < columns) & flag)


class Counted(launcher.Launcher):
    """Launcher that counts the launches that Triton makes."""

    by_triton = 0

    def _by_triton(self, *given: Any) -> Any:
        self.by_triton += 1
        return super()._by_triton(*given)


def expected(grid: tuple[int, ...], given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
    """Launch that Triton itself makes."""
    launches.clear()
    kernel[grid](*given, **named)
    return launches[-1]


def samples() -> list[tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any]]]:
    draw = random.Random(0)
    memory = {dtype: torch.zeros(64, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)}
    found = []
    small, large = (2, 15, 16, 17, 33, 48), (1, 2**31 - 1, 2**31, 2**31 + 5, 2**40)
    for _ in range(200):
        one, other = (memory[draw.choice(list(memory))][draw.choice((0, 0, 0, 1)) :] for _ in range(2))
        rows, stride = (draw.choice(small) for _ in range(2))
        columns = draw.choice(large) if draw.random() < 0.2 else draw.choice(small)
        named = {"FIRST": draw.choice((True, False)), "BLOCK": 16, "num_warps": draw.choice((1, 4)), **FUSION}
        grid = draw.choice(((3,), (3, 2), (3, 2, 1)))
        found.append((grid, (one, other, rows, columns, stride, draw.choice((1e-6, 1.0)), True), named))
    return [*found[:60], *found[:60], *found[60:]]


def launched(counted: Counted, grid: tuple[int, ...], given: tuple[Any, ...], named: dict[str, Any]) -> dict[str, int]:
    """Numbers of launches by Triton and of direct ones."""
    before = counted.by_triton
    launches.clear()
    with contextlib.suppress(Exception):  # of Triton, which has no such kernel; only the way counts
        counted[grid](*given, **named)
    by_triton = counted.by_triton - before
    return {"triton": by_triton, "direct": len(launches) - by_triton if not by_triton else 0}


def observed(counted: Counted, sample: tuple[Any, ...]) -> dict[str, Any]:
    """Ways of a launch that Triton must make."""
    hook = lambda *_: None  # noqa: E731
    runtime, found = knobs.runtime, {}
    for name, chain in (("an enter hook", runtime.launch_enter_hook), ("an exit hook", runtime.launch_exit_hook)):
        chain.add(hook)
        found[name] = launched(counted, *sample)
        chain.remove(hook)
    whole, runtime.launch_enter_hook = runtime.launch_enter_hook, hook
    found["a hook that is a function"] = launched(counted, *sample)
    runtime.launch_enter_hook = whole
    kernel.add_pre_run_hook(hook)
    found["a hook before runs"] = launched(counted, *sample)
    kernel.pre_run_hooks.clear()
    runtime.debug = True
    found["debug mode"] = launched(counted, *sample)
    runtime.debug = False
    knobs.compilation.instrumentation_mode = "profile"
    found["instrumentation"] = launched(counted, *sample)
    knobs.compilation.instrumentation_mode = ""
    device, launcher.device_of = launcher.device_of, REAL
    found["a CPU"] = launched(counted, *sample)
    launcher.device_of = device
    return found


REAL = launcher.device_of
driver.set_active(StandInDriver())
launcher.device_of = lambda tensors: 0
counted, wrong, compared, direct = Counted(kernel), [], 0, 0
for grid, given, named in samples():
    right = expected(grid, given, named)
    launches.clear()
    before = counted.by_triton
    counted[grid](*given, **named)
    compared += 1
    direct += counted.by_triton == before
    if launches != [right]:
        wrong.append([str(launches), str(right)])
by_triton, kernels = counted.by_triton, len(counted._by_classes)

sample = samples()[0]
x = sample[1][0]
assert launched(counted, *sample) == {"triton": 0, "direct": 1}
results = {"observed": observed(counted, sample)}
assert launched(counted, *sample) == {"triton": 0, "direct": 1}
named = {"FIRST": True, "BLOCK": 16, **FUSION}
forms: dict[str, Any] = {
    "a number before a tensor": launched(counted, (1,), (1, x, x, 1, 1, 1.0, True), named),
    "no number": launched(counted, (1,), (x, x, None, 1, 1, 1.0, True), named),
    "a constant by position": launched(counted, (1,), (*sample[1], True), {"BLOCK": 16, **FUSION}),
}
launcher.device_of = REAL
launcher._DEVICE = lambda tensor: tensor.get_device()
gpus = [SimpleNamespace(is_cuda=True, get_device=lambda device=device: device) for device in (0, 1)]
assert launcher.device_of(tuple(gpus[:1] * 2)) == 0
forms["two devices"] = {"triton": int(launcher.device_of(tuple(gpus)) is None), "direct": 0}

entered: list[int] = []
launcher.device_of = lambda tensors: 1


@contextlib.contextmanager
def device_context(device: int) -> Any:
    entered.append(device)
    StandInDriver.current = device
    yield
    StandInDriver.current = 0


torch.cuda.device = device_context
StandInDriver.current = 1
counted[sample[0]](*sample[1], **sample[2])
StandInDriver.current = 0
entered.clear()
launches.clear()
counted[sample[0]](*sample[1], **sample[2])
assert launches[0][2] == 101, launches
launcher.device_of = lambda tensors: 0

after: list[Any] = []
for size in range(20, 20 + launcher._MOST + 50):
    counted[(1,)](x, x, size, size, size, 1e-6, True, **named)
for size in (20, 48, 20 + launcher._MOST):
    arguments = (x, x, size, size, size, 1e-6, True)
    right = expected((1,), arguments, named)
    launches.clear()
    counted[(1,)](*arguments, **named)
    if launches != [right]:
        after.append([str(launches), str(right)])
remembered = max(len(counted._by_values), len(counted._by_classes))
loaded = weakref.ref(next(iter(counted._by_classes.values())).compiled)
kernel.device_caches.clear()
gc.collect()
print(
    json.dumps(
        {
            **results, "compared": compared, "wrong": wrong, "by_triton": by_triton, "kernels": kernels,
            "direct": direct, "forms": forms, "remembered": remembered, "most": launcher._MOST,
            "after_forgetting": after, "entered": entered, "loaded": loaded() is not None,
        }
    )
)  # fmt: skip
