"""Wheels and source distributions of a staged member: reproducible builds, and checks against the sources."""

from __future__ import annotations

import base64
import configparser
import csv
import hashlib
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email.errors import MessageError
from pathlib import Path

from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from releasing.workspace import ReleaseError, project_of

_RELATIVE_LINK = re.compile(r"\]\(\.\.?/")


def build(copy: Path, out: Path, epoch: int) -> tuple[Path, Path]:
    """Build a staged member with the build backend of this environment, the wheel from the source distribution.

    Times in the archives are the commit's, and the backend sorts entries and sets permissions, so the same commit and
    backend make the same bytes.

    Args:
        copy: directory of the staged member.
        out: directory that receives both archives.
        epoch: time of the commit, in seconds since 1970.

    Returns:
        The wheel and the source distribution.

    Raises:
        ReleaseError: the build failed.
    """
    command = ["uv", "build", "--quiet", "--offline", "--no-build-isolation", "--python", sys.executable]
    environ = os.environ | {"SOURCE_DATE_EPOCH": str(epoch)}
    done = subprocess.run(
        [*command, "--out-dir", str(out), str(copy)], env=environ, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ReleaseError(f"{copy.name}: the build failed: {done.stderr.strip()}")
    project = project_of(copy)
    stem = f"{canonicalize_name(project['name']).replace('-', '_')}-{project['version']}"
    return out / f"{stem}-py3-none-any.whl", out / f"{stem}.tar.gz"


def wheel_problems(wheel: Path, member: Path, repository: str) -> list[str]:
    """Differences between a wheel and the sources of its member, one line each.

    Args:
        wheel: path of the wheel.
        member: directory of the member, without files that git ignores.
        repository: address of the repository.
    """
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    folder = "-".join(wheel.name.split("-")[:2]) + ".dist-info/"
    found = _missing(files, _files(member / "src"))
    found += [
        f"{name} is not in src/"
        for name in files
        if not name.startswith(folder) and not (member / "src" / name).exists()
    ]
    found += _missing(files, {f"{folder}licenses/LICENSE": (member / "LICENSE").read_bytes()})
    found += _record_problems(files, f"{folder}RECORD")
    found += _metadata_problems(files.get(f"{folder}METADATA", b""), member, repository)
    found += _entry_point_problems(files.get(f"{folder}entry_points.txt", b""), member)
    return [f"{wheel.name}: {text}" for text in found]


def source_problems(archive: Path, copy: Path) -> list[str]:
    """Differences between a source distribution and the staged member, one line each."""
    folder = archive.name.removesuffix(".tar.gz")
    with tarfile.open(archive) as tar:
        files = {
            member.name.removeprefix(f"{folder}/"): content.read()
            for member in tar
            if (content := tar.extractfile(member)) is not None
        }
    found = _missing(files, _files(copy))
    if "PKG-INFO" not in files:
        found.append("PKG-INFO is missing")
    return [f"{archive.name}: {text}" for text in found]


def _files(directory: Path) -> dict[str, bytes]:
    return {
        file.relative_to(directory).as_posix(): file.read_bytes() for file in directory.rglob("*") if file.is_file()
    }


def _missing(files: dict[str, bytes], expected: dict[str, bytes]) -> list[str]:
    lost = [f"{name} is missing" for name in expected if name not in files]
    return lost + [
        f"{name} differs from its source" for name in expected if name in files and files[name] != expected[name]
    ]


def _record_problems(files: dict[str, bytes], record: str) -> list[str]:
    rows = csv.reader(files.get(record, b"").decode().splitlines())
    hashes = {name: value for name, value, _ in rows if name != record}
    actual = {
        name: "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
        for name, data in files.items()
        if name != record
    }
    return [f"RECORD does not have the hash of {name}" for name in actual if hashes.get(name) != actual[name]] + [
        f"RECORD lists {name}, which is missing" for name in hashes if name not in actual
    ]


def _metadata_problems(data: bytes, member: Path, repository: str) -> list[str]:
    project = project_of(member)
    try:
        metadata = Metadata.from_email(data, validate=True)
    except (ExceptionGroup, MessageError) as error:
        causes = error.exceptions if isinstance(error, ExceptionGroup) else [error]
        return [f"METADATA is not valid: {cause}" for cause in causes]
    pairs = {
        "Name": (metadata.name, project["name"]),
        "Version": (str(metadata.version), project["version"]),
        "License-Expression": (metadata.license_expression, project["license"]),
        "Requires-Python": (str(metadata.requires_python), project["requires-python"]),
        "Classifier": (metadata.classifiers, project["classifiers"]),
        "Requires-Dist": (
            {str(requirement) for requirement in metadata.requires_dist or () if "extra ==" not in str(requirement)},
            {str(Requirement(text)) for text in project.get("dependencies", ())},
        ),
        "Provides-Extra": (set(metadata.provides_extra or ()), set(project.get("optional-dependencies", ()))),
    }
    found = [
        f"METADATA: {name} is {value!r}, but the sources say {expected!r}"
        for name, (value, expected) in pairs.items()
        if value != expected
    ]
    addresses = (metadata.project_urls or {}).values()
    if not addresses or not all(address.startswith(repository) for address in addresses):
        found.append(f"METADATA: the addresses of the project are not below {repository}")
    if not metadata.description or _RELATIVE_LINK.search(metadata.description):
        found.append("METADATA: the description is empty or has relative links")
    return found


def _entry_point_problems(data: bytes, member: Path) -> list[str]:
    project = project_of(member)
    expected: dict[str, dict[str, str]] = dict(project.get("entry-points", {}))
    if "scripts" in project:
        expected["console_scripts"] = project["scripts"]
    parser = configparser.ConfigParser(delimiters=("=",), interpolation=None)
    parser.optionxform = str  # type: ignore[method-assign, assignment] # names are case-sensitive
    parser.read_string(data.decode())
    actual = {name: dict(parser[name]) for name in parser.sections()}
    return [] if actual == expected else [f"the entry points are {actual}, but the sources say {expected}"]
