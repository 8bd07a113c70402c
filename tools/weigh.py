"""Writes into each README which distributions its package installs, and their size.

    uv run python tools/weigh.py    build all wheels, install each in an environment of its own, write the READMEs

Versions are taken from the lock. If torch is among the distributions, torch and its own dependencies are left out,
because their size depends on the platform. tests/test_weight.py compares the lists, not the sizes, with the metadata.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
MARKS = ("<!-- weight: written by tools/weigh.py -->", "<!-- end of weight -->")
MIB = 2**20
TORCH = "torch"


def members(root: Path = ROOT) -> dict[str, Path]:
    """Distribution -> directory, for all members of the workspace."""
    return {path.name: path for house in ("packages", "plugins") for path in sorted((root / house).iterdir())}


def extras(member: Path) -> list[str]:
    """Extras of a member, except torch itself, in order."""
    project = tomllib.loads((member / "pyproject.toml").read_text("utf-8"))["project"]
    return [extra for extra in project.get("optional-dependencies", {}) if extra != TORCH]


def required(name: str, extra: str = "") -> set[str]:
    """Distributions that one distribution requires, including itself, by the metadata of this environment."""
    seen: set[tuple[str, str]] = set()
    waiting = [(canonicalize_name(name), ""), (canonicalize_name(name), extra)]
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        for line in _requirements(current[0]):
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": current[1]}):
                waiting += [(canonicalize_name(requirement.name), one) for one in ("", *requirement.extras)]
    return {name for name, _ in seen}


def _requirements(name: str) -> Iterable[str]:
    """Requirements of a distribution, from the lock if this environment leaves the distribution out."""
    try:
        return distribution(name).requires or ()
    except PackageNotFoundError:
        locked = tomllib.loads((ROOT / "uv.lock").read_text("utf-8"))["package"]
        return [each["name"] for one in locked if one["name"] == name for each in one.get("dependencies", ())]


def brought(name: str, extra: str = "") -> list[str]:
    """Distributions that one distribution, or its extra, installs; without torch's if torch is among them."""
    found = required(name, extra)
    if TORCH in found:
        found -= required(TORCH)
    return sorted(found - required(name) if extra else found)


def build(directory: Path) -> dict[str, Path]:
    """Build the wheels of all members: distribution -> wheel."""
    _run("uv", "build", "--quiet", "--wheel", "--all-packages", "--out-dir", str(directory))
    return {str(canonicalize_name(path.name.split("-")[0])): path for path in directory.glob("*.whl")}


def measure(name: str, extra: str, wheels: dict[str, Path], pins: Path, directory: Path) -> dict[str, int]:
    """Install a member in a separate environment: distribution -> size in bytes."""
    python = directory / "bin" / "python"
    _run("uv", "venv", "--quiet", "--clear", "--python", sys.executable, str(directory))
    own = [one for one in required(name, extra) if one in wheels]
    wanted = [f"{one}{f'[{extra}]' if extra and one == name else ''} @ {wheels[one].as_uri()}" for one in own]
    _run("uv", "pip", "install", "--quiet", "--python", str(python), "--constraint", str(pins), *wanted)
    (site,) = directory.glob("lib/python*/site-packages")
    return {str(canonicalize_name(found.name)): _size(found) for found in distributions(path=[str(site)])}


def line(names: Iterable[str], sizes: dict[str, int], what: str) -> str:
    """Line for a README."""
    listed = sorted(names)
    mib = round(sum(sizes[name] for name in listed) / MIB)
    size = f"{mib} MiB" if mib else "less than 1 MiB"
    count = f"{len(listed)} distribution{'s' if len(listed) != 1 else ''}"
    return f"{what}: {count}, {size} ({', '.join(listed) or 'nothing new'})."


def lists(readme: str) -> list[list[str]]:
    """Distributions listed in a README, by line."""
    inside = readme.partition(MARKS[0])[2].partition(MARKS[1])[0]
    found = re.findall(r": \d+ distributions?, [\w ]+ \((.*?)\)\.$", inside, re.MULTILINE)
    return [[] if names == "nothing new" else names.split(", ") for names in found]


def write(readme: Path, text: str) -> None:
    """Write a text between the marks of a README; without marks, append a section with them."""
    before = readme.read_text("utf-8")
    if MARKS[0] not in before:
        before = before.rstrip() + f"\n\n## Weight\n\n{MARKS[0]}\n{MARKS[1]}\n"
    head, _, rest = before.partition(MARKS[0])
    readme.write_text(f"{head}{MARKS[0]}\n{text}\n{MARKS[1]}{rest.partition(MARKS[1])[2]}", encoding="utf-8")


def main() -> int:
    """Measure all members, and write their READMEs."""
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        wheels, pins = build(place / "wheels"), place / "pins.txt"
        _run("uv", "export", "--quiet", "--no-hashes", "--no-emit-workspace", "--output-file", str(pins))
        for name, member in members().items():
            sizes = measure(name, "", wheels, pins, place / "venv")
            beside = (
                "In addition to torch and its dependencies" if TORCH in sizes else "In total (torch is not required)"
            )
            lines = [line(brought(name), sizes, beside)]
            lines += [
                line(brought(name, extra), measure(name, extra, wheels, pins, place / "venv"), f"`[{extra}]`")
                for extra in extras(member)
            ]
            write(member / "README.md", "\n\n".join(lines))
            print(f"{name}: {' '.join(text.split('(')[0] for text in lines)}")
    return 0


def _size(found: Distribution) -> int:
    paths = [Path(str(file.locate())) for file in found.files or ()]
    return sum(path.stat().st_size for path in paths if path.is_file() and path.suffix != ".pyc")


def _run(*command: str) -> None:
    subprocess.run(command, cwd=ROOT, check=True)


if __name__ == "__main__":
    sys.exit(main())
