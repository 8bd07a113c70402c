"""Lists locked packages without a wheel for a Python and platform that the README supports.

    python tools/platforms.py

The Python versions are 3.11 to the newest for which the locked torch has wheels. None of them needs to be installed:
the tags of the locked wheels are compared with the tags that each platform accepts. Exit status 1 if a package lacks a
wheel; a marker in the ``pyproject.toml`` of its dependent can exclude it there, which ``d9d doctor`` then reports.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags, mac_platforms
from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).resolve().parents[1]
#: Packages without wheels that are pure Python, and so need no compiler.
PURE_SOURCES = frozenset({"aim-ui"})

_OLDEST = 11  # the minor version of `requires-python`
_GLIBC = range(28, 4, -1)  # manylinux_2_28 and older
_CPYTHON = re.compile(r"-cp3(\d+)-cp3\d+-")


@dataclass(frozen=True, slots=True)
class Platform:
    """Operating system and processor architecture.

    Attributes:
        name: name for the table.
        tags: platform tags of compatible wheels.
        markers: values of the environment markers on this platform.
    """

    name: str
    tags: tuple[str, ...]
    markers: dict[str, str]


def _linux(machine: str) -> Platform:
    tags = (*(f"manylinux_2_{minor}_{machine}" for minor in _GLIBC), f"manylinux2014_{machine}")
    return Platform(f"Linux {machine}", tags, _markers("linux", "Linux", machine))


def _markers(system: str, name: str, machine: str) -> dict[str, str]:
    return {"sys_platform": system, "platform_system": name, "platform_machine": machine, "os_name": "posix"}


PLATFORMS = (
    _linux("x86_64"),
    _linux("aarch64"),
    Platform("macOS 14 arm64", tuple(mac_platforms((14, 0), "arm64")), _markers("darwin", "Darwin", "arm64")),
)


@dataclass(frozen=True, slots=True)
class Pins:
    """Locked dependencies of the workspace.

    Attributes:
        requirements: one requirement per package, with its marker.
        wheels: file names of the wheels, by package and version.
    """

    requirements: list[Requirement]
    wheels: dict[tuple[str, str], list[str]]

    @classmethod
    def of(cls, root: Path) -> Pins:
        """Pins of a checkout whose lock has addresses, as after ``uv sync``."""
        command = ["uv", "export", "--quiet", "--no-hashes", "--no-emit-workspace", "--no-annotate", "--no-header"]
        exported = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
        packages = tomllib.loads((root / "uv.lock").read_text())["package"]
        wheels = {
            (package["name"], package["version"]): _files(package) for package in packages if "version" in package
        }
        return cls([Requirement(line) for line in exported.splitlines()], wheels)

    def pythons(self) -> range:
        """Minor versions of Python for which torch has wheels; the oldest one if torch is not locked."""
        files = next((files for (name, _), files in self.wheels.items() if name == "torch"), ())
        found = [int(match.group(1)) for file in files if (match := _CPYTHON.search(file))]
        return range(_OLDEST, max(found, default=_OLDEST) + 1)

    def table(self) -> Iterator[tuple[Platform, int, list[str]]]:
        """Each platform and minor version of Python, with the packages that have no wheel there."""
        for platform in PLATFORMS:
            for minor in self.pythons():
                yield platform, minor, self.without_wheel(platform, minor)

    def without_wheel(self, platform: Platform, minor: int) -> list[str]:
        """Packages that are needed on a platform and Python but have no wheel for it."""
        python = {"python_version": f"3.{minor}", "python_full_version": f"3.{minor}.1"}
        names = {"implementation_name": "cpython", "platform_python_implementation": "CPython", "extra": ""}
        markers = {**platform.markers, **python, **names}
        tags = {
            *cpython_tags((3, minor), platforms=platform.tags),
            *compatible_tags((3, minor), f"cp3{minor}", platform.tags),
        }
        needed = [pin for pin in self.requirements if pin.marker is None or pin.marker.evaluate(markers)]
        return [str(pin) for pin in needed if pin.name not in PURE_SOURCES and not self._installs(pin, tags)]

    def _installs(self, pin: Requirement, tags: set[Tag]) -> bool:
        files = self.wheels[pin.name, str(pin.specifier).removeprefix("==")]
        return any(parse_wheel_filename(file)[3] & tags for file in files)


def _files(package: dict[str, Any]) -> list[str]:
    return [wheel["url"].rsplit("/", 1)[1] for wheel in package.get("wheels", ())]


def main() -> int:
    """Print a line for each platform and Python version."""
    sound = True
    for platform, minor, missing in Pins.of(ROOT).table():
        sound &= not missing
        found = f"no wheel: {'; '.join(missing)}" if missing else "wheels only"
        print(f"{platform.name:16} Python 3.{minor}  {found}")
    return int(not sound)


if __name__ == "__main__":
    sys.exit(main())
