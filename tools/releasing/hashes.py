"""Hashes of a release: ``SHA256SUMS`` of its files, and constraints with hashes for pip and uv."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

from packaging.utils import parse_sdist_filename, parse_wheel_filename

from releasing.workspace import ReleaseError

SUMS = "SHA256SUMS"


def sha256(file: Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def sums(directory: Path) -> str:
    """Lines for ``sha256sum --check``, one for each file of a directory, by name."""
    files = sorted(file for file in directory.iterdir() if file.name != SUMS)
    return "".join(f"{sha256(file)}  {file.name}\n" for file in files)


def constraints(directory: Path, third_party: str, version: str) -> str:
    """Constraints with hashes: members as they are in a directory, third-party packages as they are locked.

    Args:
        directory: wheels and source distributions of all members.
        third_party: requirements with hashes, as :func:`locked` returns them.
        version: version of the release.
    """
    hashes: dict[str, list[str]] = {}
    for file in sorted(directory.glob("*.whl")):
        hashes.setdefault(parse_wheel_filename(file.name)[0], []).append(sha256(file))
    for file in sorted(directory.glob("*.tar.gz")):
        hashes.setdefault(parse_sdist_filename(file.name)[0], []).append(sha256(file))
    lines = [
        f"{name}=={version}" + "".join(f" \\\n    --hash=sha256:{value}" for value in sorted(values))
        for name, values in sorted(hashes.items())
    ]
    head = f"# d9d {version} and the versions with which it was tested: pip install --constraint FILE PACKAGE\n"
    return head + "\n".join(lines) + "\n" + third_party


def locked(root: Path) -> str:
    """Third-party packages of all members and extras, as ``uv.lock`` pins them, with hashes and without addresses.

    Raises:
        ReleaseError: the lock is out of date, a package has no hash, or an address would be written.
    """
    command = ["uv", "export", "--quiet", "--all-packages", "--all-extras", "--no-dev"]
    command += ["--no-emit-workspace", "--no-annotate", "--no-header"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ReleaseError(f"uv.lock: its pins cannot be exported: {done.stderr.strip()}")
    for entry in done.stdout.replace("\\\n", " ").splitlines():
        name = entry.partition(" ")[0]
        if "--hash=" not in entry:
            raise ReleaseError(f"uv.lock: {name} has no hash, as the package index gives none: use another index")
        if "://" in entry:
            raise ReleaseError(f"uv.lock: {name} is pinned to an address: depend on a released version instead")
    return done.stdout
