"""Results as files: numbers with the hardware, versions, command and commit of their measurement; tables in pages."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
GIB = 2**30


def hardware() -> dict[str, Any]:
    """Device of this process, and versions of Python, torch and CUDA."""
    versions = {"python": sys.version.split()[0], "torch": torch.__version__}
    if not torch.cuda.is_available():
        return {"device": f"CPU, {os.cpu_count()} cores", "versions": versions}
    properties = torch.cuda.get_device_properties(0)
    versions["cuda"] = str(torch.version.cuda)
    return {
        "device": properties.name,
        "memory_gib": round(properties.total_memory / GIB, 1),
        "processors": properties.multi_processor_count,
        "versions": versions,
    }


def commit(root: Path = ROOT) -> str:
    """Commit of the sources, with ``+`` if the working tree differs; ``unknown`` without git."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def write(result: Mapping[str, Any], folder: Path) -> Path:
    """Write a result into the file of its table and device; return the path."""
    folder.mkdir(parents=True, exist_ok=True)
    device = re.sub(r"[^a-z0-9]+", "-", str(result["hardware"]["device"]).lower()).strip("-")
    path = folder / f"{result['table']}--{device}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return path


def read(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Results of a kind, in order of their file names.

    Args:
        folder: folder of the files.
        kind: key that results of this kind have, and no others: ``contenders``, ``kernels`` or ``cpu``.
    """
    found = (json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json")))
    return [result for result in found if kind in result]


def fill(page: str, text: str, marks: tuple[str, str]) -> str:
    """Text of a page with new text between two marks.

    Raises:
        SystemExit: the page lacks the marks.
    """
    head, mark, rest = page.partition(marks[0])
    end, tail = rest.partition(marks[1])[1:]
    if not mark or not end:
        raise SystemExit(f"the page lacks the marks {marks[0]} and {marks[1]}")
    return f"{head}{marks[0]}\n{text}\n{marks[1]}{tail}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table; the first column is text, the others are numbers."""
    lines = [head, ["---", *("---:" for _ in head[1:])], *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def origin(result: Mapping[str, Any]) -> str:
    """Origin of a result as text: versions, commit, date and command."""
    versions = ", ".join(f"{name} {version}" for name, version in result["hardware"]["versions"].items())
    return f"{versions}; commit {result['commit']}, {result['taken']}; `{result['command']}`"
