"""Environments with the libraries of engines, which have hundreds of MB and are therefore not in the workspace's own.

Tests that need one are `full`, and run commands in it; the environment is made on the first use, as by hand::

    uv run python tests/engine_environments.py ray skypilot
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: Engine -> requirements, and whether d9d itself is installed with them.
ENGINES: Mapping[str, tuple[tuple[str, ...], bool]] = {
    "ray": (("ray[default,train]>=2.60",), True),
    "skypilot": (("skypilot>=0.14",), False),
}


def python_of(engine: str) -> Path:
    """Interpreter of the environment ``.venv-ENGINE``, which may not exist."""
    return ROOT / f".venv-{engine}" / "bin" / "python"


def make(engine: str) -> str | None:
    """Make the environment of an engine, unless it exists; return why it cannot be made, or ``None``."""
    python, (needs, with_d9d) = python_of(engine), ENGINES[engine]
    marker = python.parents[1] / "complete"
    if marker.exists():
        return None
    if shutil.which("uv") is None:
        return f"uv is missing, which makes .venv-{engine}"
    steps = [["uv", "venv", "--quiet", "--clear", "--python", sys.executable, str(python.parents[1])]]
    install = ["uv", "pip", "install", "--quiet", "--python", str(python), *needs]
    if with_d9d:
        pins = python.parents[1] / "pins.txt"
        export = ["uv", "export", "--quiet", "--no-hashes", "--no-emit-workspace"]
        steps.append([*export, "--output-file", str(pins)])
        members = [member for folder in ("packages", "plugins") for member in sorted((ROOT / folder).glob("d9d-*"))]
        install += ["--constraint", str(pins), *(word for member in members for word in ("--editable", str(member)))]
    for step in [*steps, install]:
        done = subprocess.run(step, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            return f"{' '.join(step[:4])} for .venv-{engine}: {done.stderr.strip()[-300:]}"
    marker.touch()
    return None


if __name__ == "__main__":
    for name in sys.argv[1:] or ENGINES:
        print(f".venv-{name}: {make(name) or 'ready'}")
