"""Builds the wheels and source distributions of a release from copies of the members.

    uv run python tools/release.py OUT       build all members into the directory OUT
    uv run python tools/release.py --check   exit with 1 if a member lacks licence text, classifiers or keywords

A package index shows a wheel's README, where links relative to the repository do not work. So a release is built from
copies in which every such link, and every project address, begins with :data:`REPOSITORY`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
#: Public address of the repository, without a trailing slash; empty as long as there is none.
REPOSITORY = ""
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

_LINK = re.compile(r"(\]\()(?![a-z]+:|#|//)([^)\s]+)(\))")
_FENCE = re.compile(r"(^[ ]*```.*?^[ ]*```[ ]*$|`[^`\n]*`)", re.DOTALL | re.MULTILINE)


class ReleaseError(Exception):
    """A release cannot be built."""


def members(root: Path = ROOT) -> list[Path]:
    """Directories of all members of the workspace."""
    return sorted(file.parent for house in ("packages", "plugins") for file in root.glob(f"{house}/*/pyproject.toml"))


def lacking(member: Path) -> list[str]:
    """Metadata that a member lacks."""
    project = tomllib.loads((member / "pyproject.toml").read_text("utf-8"))["project"]
    found = []
    licence = member / "LICENSE"
    if not licence.is_file() or licence.read_bytes() != (ROOT / "LICENSE").read_bytes():
        found.append("LICENSE, a symbolic link to the repository's")
    if project.get("classifiers") != CLASSIFIERS:
        found.append("the classifiers of tools/release.py")
    if not set(KEYWORDS) <= set(project.get("keywords", ())):
        found.append(f"the keywords {', '.join(KEYWORDS)}")
    return found


def absolute(text: str, member: Path, repository: str, tag: str) -> str:
    """Markdown of a member with absolute links to the repository; code is left unchanged.

    Args:
        text: text of the README.
        member: directory of the member, below :data:`ROOT`.
        repository: address of the repository.
        tag: tag of the release.

    Raises:
        ReleaseError: a link points outside of the repository.
    """

    def address(link: re.Match[str]) -> str:
        path, mark, anchor = link[2].partition("#")
        target = (member / path).resolve()
        if not target.is_relative_to(ROOT):
            raise ReleaseError(f"{member.name}/README.md: the link {link[2]} points outside of the repository")
        kind = "tree" if target.is_dir() else "blob"
        place = target.relative_to(ROOT).as_posix()
        return f"{link[1]}{repository}/{kind}/{tag}/{place}{mark}{anchor}{link[3]}"

    parts = _FENCE.split(text)  # every second one is code
    # The text of a link may contain code, so code is replaced by placeholders while links are rewritten.
    codes = parts[1::2]
    hidden = "".join(part if number % 2 == 0 else f"\0{number // 2}\0" for number, part in enumerate(parts))
    return re.sub(r"\0(\d+)\0", lambda found: codes[int(found[1])], _LINK.sub(address, hidden))


def stage(member: Path, directory: Path, repository: str = REPOSITORY) -> Path:
    """Copy a member in the form of a release: licence text, absolute links, project addresses.

    Args:
        member: directory of the member.
        directory: receives the copy.
        repository: address of the repository.

    Raises:
        ReleaseError: the repository has no address.
    """
    if not repository:
        raise ReleaseError(
            "the repository has no public address, which links and addresses in the packages need: "
            "set REPOSITORY in tools/release.py"
        )
    copy = directory / member.name
    shutil.copytree(member, copy, ignore=shutil.ignore_patterns("__pycache__", "dist", "tests"))
    project: dict[str, Any] = tomllib.loads((member / "pyproject.toml").read_text("utf-8"))["project"]
    readme = copy / "README.md"
    readme.write_text(absolute(readme.read_text("utf-8"), member, repository, f"v{project['version']}"), "utf-8")
    place = member.relative_to(ROOT).as_posix()
    urls = {
        "Repository": repository,
        "Documentation": f"{repository}/blob/v{project['version']}/{place}/README.md",
        "Changelog": f"{repository}/blob/v{project['version']}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }
    table = "".join(f'{name} = "{url}"\n' for name, url in urls.items())
    with (copy / "pyproject.toml").open("a", encoding="utf-8") as file:
        file.write(f"\n[project.urls]\n{table}")
    return copy


def build(out: Path, repository: str = REPOSITORY) -> None:
    """Build all members into a directory.

    Raises:
        ReleaseError: the repository has no address, or a member lacks metadata.
    """
    problems = [f"{member.name} lacks {text}" for member in members() for text in lacking(member)]
    if problems:
        raise ReleaseError("\n".join(problems))
    with tempfile.TemporaryDirectory() as directory:
        for member in members():
            copy = stage(member, Path(directory), repository)
            subprocess.run(["uv", "build", "--quiet", "--out-dir", str(out.resolve()), str(copy)], check=True)


def main(arguments: list[str]) -> int:
    """Build a release, or check the members' metadata."""
    try:
        if arguments == ["--check"]:
            problems = [f"{member.name} lacks {text}" for member in members() for text in lacking(member)]
            print("\n".join(problems), file=sys.stderr, end="\n" if problems else "")
            return int(bool(problems))
        if len(arguments) != 1 or arguments[0].startswith("-"):
            print(__doc__, file=sys.stderr)
            return 2
        build(Path(arguments[0]))
    except ReleaseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
