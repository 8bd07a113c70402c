"""Trial of a release: install it from its directory in a fresh environment, and use it in an empty folder."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from releasing.hashes import SUMS, sums
from releasing.workspace import ReleaseError

#: First packages of a user; then everything first-party, which the job of the README needs.
PACKAGES = ("d9d-core", "d9d-moe", "d9d-all")
#: Variables of the caller's environment that would let parts of the repository into the trial.
LEAKS = {"VIRTUAL_ENV", "UV_PYTHON", "UV_PROJECT_ENVIRONMENT", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "D9D_PLUGINS"}


def use(root: Path, out: Path, python: str) -> None:
    """Install a release and a third-party plugin, and train with both.

    Args:
        root: directory of the repository, for the job of the README and for the third-party plugin.
        out: directory of the release.
        python: version of Python for the fresh environment.

    Raises:
        ReleaseError: files differ from ``SHA256SUMS``, or a command failed.
    """
    if not out.is_dir():
        raise ReleaseError(f"{out}: there is no such directory; give the directory of a release that this script built")
    constraints = next(out.glob("constraints-*.txt"), None)
    if constraints is None or not (out / SUMS).is_file():
        raise ReleaseError(f"{out}: no {SUMS} or no constraints: it is not the directory of a release")
    told, there = ({*text.splitlines()} for text in ((out / SUMS).read_text("utf-8"), sums(out)))
    if different := sorted({line.split()[-1] for line in told ^ there if line.strip()}):
        raise ReleaseError(f"{out}: the files differ from {SUMS}, in {', '.join(different)}: build the release again")
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        venv, plugin, empty = folder / "venv", folder / "plugin", folder / "empty"
        empty.mkdir()
        interpreter = str(venv / "bin" / "python")
        install = ["uv", "pip", "install", "--python", interpreter, "--find-links", str(out)]
        install += ["--constraint", str(constraints)]
        d9d = str(venv / "bin" / "d9d")
        _run(empty, "uv", "venv", "--quiet", "--python", python, str(venv))
        _run(empty, *install, *PACKAGES)
        _run(empty, d9d, "plugins", "check")
        # The README's job, for fewer steps.
        (empty / "job.yaml").write_bytes((root / "examples" / "quickstart" / "job.yaml").read_bytes())
        _run(empty, d9d, "train", "job.yaml", "--set", "steps=40")
        hello = root / "examples" / "d9d-hello"
        _run(empty, "uv", "build", "--quiet", "--wheel", "--out-dir", str(plugin), str(hello))
        _run(empty, *install, *(str(wheel) for wheel in plugin.glob("*.whl")))
        (empty / "hello.yaml").write_bytes((hello / "job.yaml").read_bytes())
        _run(empty, d9d, "train", "hello.yaml")
        for file in ("runs/quickstart/model/model.safetensors", "runs/hello/metrics.csv"):
            if not (empty / file).is_file():
                raise ReleaseError(f"the trial wrote no {file}")
    print(f"Python {python}: installed {', '.join(PACKAGES)}, trained the README's job and a third-party plugin's")


def _run(folder: Path, *command: str) -> None:
    environ = {name: value for name, value in os.environ.items() if name not in LEAKS}
    print(f"$ {' '.join(command)}", file=sys.stderr, flush=True)
    done = subprocess.run(command, cwd=folder, env=environ, check=False)
    if done.returncode:
        raise ReleaseError(f"exit status {done.returncode}: {' '.join(command)}")
