"""Ahead-of-time compilation of kernels, over a stand-in of Triton."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from d9d_testing import ahead_of_time

KERNELS = """
import triton

@triton.JITFunction
def helper():
    pass

@triton.JITFunction
def used():
    helper()

@triton.JITFunction
def unused():
    pass
"""
LAUNCHES = """
from {package}.kernels import used

def launches():
    used.run(1, 2, grid=(1,), warmup=False, BLOCK=4)
"""


class JITFunction:
    """Stand-in of a Triton function: its launch says how much shared memory it takes."""

    shared = 100
    ran: list[tuple[Any, ...]] = []

    def __init__(self, fn: Any) -> None:
        self.fn = fn

    def run(self, *given: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        self.ran.append((self.fn.__name__, given, grid, warmup, options))
        return SimpleNamespace(metadata=SimpleNamespace(shared=self.shared))


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a package of kernels, compiled by a stand-in of Triton."""

    class Jit(JITFunction):
        ran: list[tuple[Any, ...]] = []

    driver = SimpleNamespace(active=None)
    driver.set_active = lambda active: setattr(driver, "active", active)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(JITFunction=Jit))
    monkeypatch.setitem(sys.modules, "triton.runtime", SimpleNamespace(driver=driver))
    target = SimpleNamespace(GPUTarget=lambda *given: given)
    monkeypatch.setitem(sys.modules, "triton.backends.compiler", target)
    name = f"kernels_{tmp_path.name.replace('-', '_')}"
    (folder := tmp_path / name).mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "kernels.py").write_text(KERNELS)
    (folder / "other.py").write_text(f"from {name}.kernels import used\n")
    (tmp_path / "launches.py").write_text(LAUNCHES.format(package=name))
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def test_functions_of_other_packages_are_not_listed_unless_they_are_launched(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / f"{package}_base.py").write_text("import triton\n\n@triton.JITFunction\ndef far():\n    pass\n")
    (tmp_path / package / "other.py").write_text(f"from {package}_base import far\n")
    monkeypatch.delitem(sys.modules, f"{package}_base", raising=False)
    ahead_of_time._main(package, str(tmp_path / "launches.py"), "launches", "90")
    assert list(json.loads(capsys.readouterr().out)) == [names(package)[place] for place in (0, 1, 2)]


def names(package: str) -> list[str]:
    return [f"{package}.kernels:{name}" for name in ("helper", "used", "unused")]


def test_launched_kernels_and_the_functions_that_they_call_are_compiled(
    package: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ahead_of_time._main(package, str(tmp_path / "launches.py"), "launches", "90", "80")
    helper, used, unused = names(package)
    assert json.loads(capsys.readouterr().out) == {helper: [80, 90], used: [80, 90], unused: []}
    ran = importlib.import_module("triton").JITFunction.ran
    assert ran == [("used", (1, 2), (1,), True, {"BLOCK": 4})] * 2


@pytest.mark.parametrize(
    ("capability", "most"),
    [(80, 166_912), (86, 101_376), (89, 101_376), (90, 232_448), (100, 232_448), (120, 101_376)],
)
def test_a_kernel_that_takes_more_shared_memory_than_a_gpu_has_is_named(
    package: str, tmp_path: Path, capability: int, most: int
) -> None:
    kind, file = importlib.import_module("triton").JITFunction, str(tmp_path / "launches.py")
    plain = kind.run
    kind.shared = most
    ahead_of_time._main(package, file, "launches", str(capability))
    kind.run, kind.shared = plain, most + 1
    with pytest.raises(
        AssertionError, match=f"used needs {most + 1} bytes of shared memory, sm_{capability} has {most}"
    ):
        ahead_of_time._main(package, file, "launches", str(capability))


@pytest.mark.usefixtures("package")
def test_the_driver_of_an_absent_gpu_knows_its_capability() -> None:
    driver = ahead_of_time._Absent(89)
    assert driver.get_current_device() == 89
    assert driver.get_current_stream(89) == 0
    assert driver.get_current_target() == ("cuda", 89, 32)


def test_a_new_process_compiles_and_a_failure_shows_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[list[str], str]] = []
    result = SimpleNamespace(returncode=0, stdout='a warning\n{"k:f": [80]}\n', stderr="")

    def run(command: list[str], env: dict[str, str], **more: Any) -> Any:
        assert more == {"capture_output": True, "text": True, "timeout": 600, "check": False}
        asked.append((command[1:], env["TRITON_INTERPRET"]))
        return result

    monkeypatch.setattr(ahead_of_time.subprocess, "run", run)
    assert ahead_of_time.compile_launches("k", "f.py", "launches") == {"k:f": [80]}
    assert asked == [(["-m", "d9d_testing.ahead_of_time", "k", "f.py", "launches", "80", "90"], "0")]
    result.returncode, result.stderr = 1, "does not compile"
    with pytest.raises(AssertionError, match=r"(?s)^launches of f.py:.*a warning.*does not compile"):
        ahead_of_time.compile_launches("k", "f.py", "launches")
    result.stdout, result.stderr = "o" * 2001, "E" * 6001
    with pytest.raises(AssertionError) as caught:
        ahead_of_time.compile_launches("k", "f.py", "launches", (90,))
    for letter, most in (("o", 2000), ("E", 6000)):
        assert letter * most in str(caught.value)
        assert letter * (most + 1) not in str(caught.value)
    assert asked[-1][0][-2:] == ["launches", "90"]
