"""Copy of all members' sources, which pytest processes import instead of the installed ones."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: Marker expression of the tests to run on slips.
MARKED = "not slow and not gpu"
_TOOLS = Path(__file__).parent
_TAG = "D9D_MUTATION_SANDBOX"


class Sandbox:
    """Copy of the sources; the working tree is never changed.

    Args:
        directory: directory of the copy and all temporary files; its path must be short, because sockets are below it.
        marked: marker expression of the tests.
    """

    def __init__(self, directory: Path, marked: str = MARKED) -> None:
        self._marked = marked
        self.directory = directory
        self.sources = directory / "s"
        self._temporary = directory / "t"
        self.sources.mkdir(parents=True)
        for package in [*ROOT.glob("packages/*/src/*"), *ROOT.glob("plugins/*/src/*")]:
            if package.is_dir():
                shutil.copytree(package, self.sources / package.name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(_TOOLS / "recorder.py", self.sources / "sitecustomize.py")
        shutil.copy(_TOOLS / "selection.py", self.sources / "d9d_mutation_selection.py")

    @contextlib.contextmanager
    def changed(self, file: str, text: bytes) -> Iterator[None]:
        """Replace the content of a file, given by its path in the repository, within the block."""
        copy = self.sources / Path(*Path(file).parts[3:])
        before = copy.read_bytes()
        try:
            self._write(copy, text)
            yield
        finally:
            self._write(copy, before)

    def pytest(self, files: Sequence[str], environ: Mapping[str, str], limit: float) -> tuple[int | None, str]:
        """Run test files; return the exit status, ``None`` after the time limit, and the output."""
        shutil.rmtree(self._temporary, ignore_errors=True)
        self._temporary.mkdir()
        log = self.directory / "log"
        inherited = {name: value for name, value in os.environ.items() if name not in _LEFT_OUT}
        path = os.pathsep.join(filter(None, [str(self.sources), os.environ.get("PYTHONPATH")]))
        settings = {
            "PYTHONPATH": path, "TMPDIR": str(self._temporary), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE",
            "CUDA_VISIBLE_DEVICES": "", _TAG: str(self.directory),
        }  # fmt: skip
        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "d9d_mutation_selection", "--tb=line"]
        options += ["-m", self._marked]
        if "D9D_MUTATION_RECORDS" in environ:
            options.remove("-x")
        command = [sys.executable, "-m", "pytest", *options, "--basetemp", str(self._temporary / "p"), *files]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, cwd=ROOT, env=inherited | settings | dict(environ), stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                status: int | None = process.wait(limit)
            except subprocess.TimeoutExpired:
                status = None
            self._sweep()
            process.wait()
        return status, log.read_text("utf-8", "replace")

    def _write(self, copy: Path, text: bytes) -> None:
        copy.write_bytes(text)
        # Python detects stale bytecode by seconds and size, both of which a slip may leave unchanged.
        for old in (copy.parent / "__pycache__").glob(f"{copy.stem}.*.pyc"):
            old.unlink()

    def _sweep(self) -> None:
        """Kill processes that tests left behind, found by the mark in their environment."""
        mark = f"{_TAG}={self.directory}\0".encode()
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (process / "environ").read_bytes():
                    os.kill(int(process.name), signal.SIGKILL)


_LEFT_OUT = {"PYTHONDONTWRITEBYTECODE", "PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "D9D_PLUGINS"}
