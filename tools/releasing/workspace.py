"""Members of the workspace: their metadata, their one version, their pins to each other and the changelog's section."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

CHANGELOG = "CHANGELOG.md"
CLASSIFIERS = [
    "Development Status :: 3 - Alpha",
    "Intended Audience :: Developers",
    "Intended Audience :: Science/Research",
    "Operating System :: MacOS",
    "Operating System :: POSIX :: Linux",
    "Programming Language :: Python :: 3 :: Only",
    "Topic :: Scientific/Engineering :: Artificial Intelligence",
    "Typing :: Typed",
]
#: Keywords of every member; a member may add others.
KEYWORDS = ["deep-learning", "distributed-training", "pytorch"]

_UNRELEASED = "not released yet"
_HEADING = re.compile(r"^## (?P<version>\S+)(?: \((?P<note>[^)]*)\))?[ ]*$", re.MULTILINE)
_VERSION = re.compile(r'^version = "[^"]*"$', re.MULTILINE)
_QUOTED = re.compile(r'"(d9d-[^"]*)"')
#: Operators of a lower bound: no older release satisfies the specifier.
_LOWER = (">=", "==", "~=")


class ReleaseError(Exception):
    """A release cannot be made; the message has one line for each problem."""


def parse(text: str) -> Version:
    """Version of three numbers in the canonical form of PEP 440, such as ``0.2.0`` or ``0.2.0rc1``.

    Raises:
        ReleaseError: the text is no version, or not in this form.
    """
    try:
        version = Version(text)
    except InvalidVersion:
        raise ReleaseError(
            f"{text!r} is not a version (PEP 440): write numbers as in 0.2.0, or 0.2.0rc1 for a candidate"
        ) from None
    if str(version) != text or version.local is not None or len(version.release) != 3:
        numbers = ".".join(map(str, (*version.release, 0, 0)[:3]))
        raise ReleaseError(f"{text!r} is not in the canonical form X.Y.Z of PEP 440, such as {numbers} or {numbers}rc1")
    return version


def members(root: Path) -> list[Path]:
    """Directories of all members of the workspace."""
    return sorted(file.parent for house in ("packages", "plugins") for file in root.glob(f"{house}/*/pyproject.toml"))


def project_of(member: Path) -> dict[str, Any]:
    """Table ``project`` of a member's ``pyproject.toml``."""
    project: dict[str, Any] = tomllib.loads((member / "pyproject.toml").read_text("utf-8"))["project"]
    return project


def requirements(project: dict[str, Any]) -> Iterator[Requirement]:
    """Requirements of a member and of its extras."""
    for texts in (project.get("dependencies", ()), *project.get("optional-dependencies", {}).values()):
        yield from map(Requirement, texts)


def problems(root: Path, version: Version) -> list[str]:
    """Reasons why the members cannot be released under a version, one line each; empty if they can."""
    found = changelog_problems(root, version)
    versions: dict[str, list[str]] = {}
    for member in members(root):
        versions.setdefault(project_of(member)["version"], []).append(member.name)
    names = {name for group in versions.values() for name in group}
    found += [
        f"{len(group)} of {len(names)} members have the version {other} instead of {version}, such as {group[0]}: "
        f"run tools/release.py set {version}"
        for other, group in versions.items()
        if other != str(version)
    ]
    for member in members(root):
        project = project_of(member)
        place = f"{member.relative_to(root).as_posix()}/pyproject.toml"
        found += [f"{member.name} lacks {text}" for text in lacking(member)]
        pinned = {project["name"]}
        for requirement in requirements(project):
            if requirement.name not in names:
                continue
            if requirement.specifier:
                pinned.add(requirement.name)
                if not fits(requirement.specifier, version):
                    found.append(
                        f"{place}: the pin {requirement} must admit {version} and no older release: "
                        f"run tools/release.py set {version}"
                    )
        needed = {requirement.name for requirement in requirements(project)} & names
        found += [f"{place}: {name} has no pin: write {name}>={version}" for name in sorted(needed - pinned)]
    return found


def own_problems(root: Path) -> list[str]:
    """Problems of the members under the version of most of them; the changelog may say that it is not released yet."""
    versions = Counter(project_of(member)["version"] for member in members(root))
    version = Version(versions.most_common(1)[0][0])
    return [problem for problem in problems(root, version) if _UNRELEASED not in problem]


def fits(specifier: SpecifierSet, version: Version) -> bool:
    """Whether a pin of a member admits the release and no older one; all members are released together."""
    bounds = [Version(part.version.removesuffix(".*")) for part in specifier if part.operator in _LOWER]
    return version in bounds and specifier.contains(version, prereleases=True)


def lacking(member: Path) -> list[str]:
    """Metadata that a member lacks."""
    project = project_of(member)
    found = []
    licence = member / "LICENSE"
    if not licence.is_file() or licence.read_bytes() != (member.parents[1] / "LICENSE").read_bytes():
        found.append("LICENSE, a symbolic link to the repository's")
    if project.get("classifiers") != CLASSIFIERS:
        found.append("the classifiers of tools/releasing/workspace.py")
    if not set(KEYWORDS) <= set(project.get("keywords", ())):
        found.append(f"the keywords {', '.join(KEYWORDS)}")
    return found


def changelog_problems(root: Path, version: Version) -> list[str]:
    """Reasons why the changelog does not describe a release."""
    section = _section(root, version)
    if section is None:
        return [f"{CHANGELOG}: no section '## {version}': describe the release there, for its users"]
    note, text = section
    if note == _UNRELEASED:
        return [f"{CHANGELOG}: the section '## {version}' says '{note}': run tools/release.py set {version}"]
    if not text.strip():
        return [f"{CHANGELOG}: the section '## {version}' is empty: describe the release there, for its users"]
    return []


def _section(root: Path, version: Version) -> tuple[str | None, str] | None:
    """Note in the heading of a release's section, and the section's text."""
    text = (root / CHANGELOG).read_text("utf-8")
    headings = list(_HEADING.finditer(text))
    ends = [heading.start() for heading in headings[1:]] + [len(text)]
    for heading, end in zip(headings, ends, strict=True):
        if heading["version"] == str(version):
            return heading["note"], text[heading.end() : end]
    return None


def set_version(root: Path, version: Version, day: date) -> list[Path]:
    """Write a version into all members, their pins to each other and the heading of the changelog.

    Args:
        root: directory of the repository.
        version: version of the release.
        day: date for the heading, if the heading says that the version is not released yet.

    Returns:
        The changed files.

    Raises:
        ReleaseError: the changelog has no section for the version; no file is changed.
    """
    if _section(root, version) is None:
        raise ReleaseError("\n".join(changelog_problems(root, version)))
    names = {canonicalize_name(project_of(member)["name"]) for member in members(root)}

    def pin(quoted: re.Match[str]) -> str:
        requirement = Requirement(quoted[1])
        if requirement.name not in names or not requirement.specifier or fits(requirement.specifier, version):
            return quoted[0]
        # Plugins set no upper bound (docs/api-policy.md); packages that share private modules do.
        upper = [part for part in requirement.specifier if part.operator.startswith("<")]
        admitting = [f",{part}" for part in upper if version in part]
        bound = (admitting or [f",<{version.major}.{version.minor + 1}"])[0] if upper else ""
        start = re.match(r"[^<>=~!\s]+", quoted[1])
        assert start is not None
        return f'"{start[0]}>={version}{bound}"'

    texts = {}
    for file in (member / "pyproject.toml" for member in members(root)):
        texts[file] = _QUOTED.sub(pin, _VERSION.sub(f'version = "{version}"', file.read_text("utf-8"), count=1))
    heading = f"## {version} ({_UNRELEASED})"
    changelog = root / CHANGELOG
    texts[changelog] = changelog.read_text("utf-8").replace(heading, f"## {version} ({day.isoformat()})", 1)
    changed = [file for file, text in texts.items() if text != file.read_text("utf-8")]
    for file in changed:
        file.write_text(texts[file], "utf-8")
    return changed
