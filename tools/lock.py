"""Removes addresses from ``uv.lock``, so that the repository names no package index.

    python tools/lock.py strip                 remove every address from uv.lock
    python tools/lock.py upgrade [PACKAGE ...] lock again with newer releases (all, or only these), then strip
    python tools/lock.py check                 the committed lock has no address, and uv keeps all its pins
    python tools/lock.py install-filter        make git compare and commit the stripped form, while the working copy
                                               has addresses; again after a pull that changed uv.lock

The stripped lock keeps names, versions, markers, extras and dependency edges. It loses ``sdist`` and ``wheels``
(download addresses and hashes) and ``[manifest]`` (with it uv would believe the file complete and could not install
from it), and each ``registry`` becomes ``"."``. The next ``uv sync`` or ``uv run`` keeps all pins, asks whatever index
the machine uses, and writes the addresses back into the working copy; ``install-filter`` keeps that copy out of
``git status`` and of commits.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LOCK = "uv.lock"
FILTER = "uvlock"

_REGISTRY = re.compile(r'\bregistry = "[^"]*"')
_TABLE = re.compile(r"\[\[?[^\]]+\]\]?\s*$")
_MANIFEST = re.compile(r"\[\[?manifest[\].]")
_ADDRESS = re.compile(r'[A-Za-z][A-Za-z0-9+.-]*://|\bregistry = "(?!\.")|\b(?:url|git) = "')


class LockError(Exception):
    """The lock has an address that cannot be removed, or is not stripped."""


def strip(text: str) -> str:
    """Lock without addresses; idempotent.

    Raises:
        LockError: a package is pinned to a URL or a repository instead of a version, so its address cannot be removed.
    """
    kept: list[str] = []
    skip_until: str | None = None  # end of the block that is being skipped
    for line in text.splitlines():
        if skip_until == "]":
            if line == "]":
                skip_until = None
            continue
        if skip_until == "table":
            if not _TABLE.match(line):
                continue
            skip_until = None
        if _MANIFEST.match(line):
            skip_until = "table"
        elif line.startswith("sdist = "):
            continue
        elif line.startswith("wheels = "):
            skip_until = None if line.endswith("]") else "]"
        else:
            kept.append(_REGISTRY.sub('registry = "."', line))
    stripped = "\n".join(kept).rstrip("\n") + "\n"
    if left := addresses(stripped):
        raise LockError(f"{LOCK}: an address remains after stripping; depend on a released version instead: {left[0]}")
    return stripped


def addresses(text: str) -> list[str]:
    """Lines of a lock that contain an address, recognised by their form."""
    return [f"line {n}: {line.strip()}" for n, line in enumerate(text.splitlines(), 1) if _ADDRESS.search(line)]


def pins(text: str) -> dict[str, Any]:
    """Pinned content of a lock, without formatting and format revision."""
    import tomllib  # imported here, because git may run the filter with an older Python

    data = tomllib.loads(text)
    data.pop("revision", None)
    return data


def committed(root: Path = ROOT) -> str | None:
    """Lock in the last commit, or ``None`` if it has none."""
    shown = subprocess.run(["git", "show", f"HEAD:{LOCK}"], cwd=root, capture_output=True, check=False)
    return shown.stdout.decode() if shown.returncode == 0 else None


def check(root: Path = ROOT) -> None:
    """Compare the commit with the working copy.

    Raises:
        LockError: the commit contains an address, or the working copy has other pins.
    """
    working = (root / LOCK).read_text()
    kept = committed(root)
    if kept is None:
        kept = working
    if found := addresses(kept):
        raise LockError(
            f"{LOCK} as committed holds {len(found)} addresses, the first at {found[0]}\n"
            f"run: python tools/lock.py install-filter && git add --renormalize {LOCK}, and commit"
        )
    if pins(strip(working)) != pins(kept):
        raise LockError(
            f"{LOCK} differs from the commit in more than addresses: a pyproject.toml or a pin changed\n"
            f"run: uv lock, then commit {LOCK}"
        )


def upgrade(packages: list[str], root: Path = ROOT) -> None:
    """Lock with the newest releases of ``packages`` (of all packages if empty), then strip."""
    wanted = [f"--upgrade-package={name}" for name in packages] or ["--upgrade"]
    subprocess.run(["uv", "lock", *wanted], cwd=root, check=True)
    write_stripped(root)


def write_stripped(root: Path = ROOT) -> None:
    """Strip the working copy."""
    path = root / LOCK
    path.write_text(strip(path.read_text()), newline="\n")


def install_filter(root: Path = ROOT) -> None:
    """Configure git to store and compare the stripped form; ``.gitattributes`` names the filter."""
    python = "python3" if shutil.which("python3") else "python"  # by name, because virtual environments get deleted
    settings = {
        "clean": f"{python} tools/lock.py clean",
        "smudge": "cat",  # required filters need one
        "required": "true",  # a failing filter stops the commit; otherwise addresses would be committed
    }
    for key, value in settings.items():
        subprocess.run(["git", "config", f"filter.{FILTER}.{key}", value], cwd=root, check=True)


def fill_in(root: Path = ROOT) -> None:
    """Let uv write the addresses into the working copy, and update git's index to it."""
    subprocess.run(["uv", "lock", "--quiet"], cwd=root, check=True)
    settle(root)


def settle(root: Path = ROOT) -> None:
    """Record the working copy's size in git's index, if its stripped form equals the staged one; stages nothing.

    Git treats a file of another size as modified, without running the filter.
    """
    staged = subprocess.run(["git", "show", f":{LOCK}"], cwd=root, capture_output=True, check=False)
    if staged.returncode == 0 and staged.stdout.decode() == strip((root / LOCK).read_text()):
        subprocess.run(["git", "add", LOCK], cwd=root, check=True)


def clean() -> None:
    """Filter for git: reads a lock on standard input, writes its stripped form to standard output, both as bytes."""
    sys.stdout.buffer.write(strip(sys.stdin.buffer.read().decode()).encode())


def main(arguments: list[str] | None = None) -> int:
    """Run one command; the exit status is 1 if the lock is not in the required state."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("strip")
    commands.add_parser("upgrade").add_argument("packages", nargs="*", metavar="PACKAGE")
    commands.add_parser("check")
    commands.add_parser("install-filter")
    commands.add_parser("clean")
    options = parser.parse_args(arguments)
    try:
        if options.command == "strip":
            write_stripped()
        elif options.command == "upgrade":
            upgrade(options.packages)
        elif options.command == "check":
            check()
        elif options.command == "install-filter":
            install_filter()
            fill_in()
        else:
            clean()
    except (LockError, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        return error.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
