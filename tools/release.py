"""Builds the wheels and sources of a release: of each member a copy with addresses, licence text and metadata.

    uv run python tools/release.py OUT       build all members into the directory OUT
    uv run python tools/release.py --check   exit with 1 if a member lacks licence text, classifiers or keywords

A wheel's README is read on the page of a package index, where links relative to the repository lead nowhere. So a
release builds from copies in which every such link begins with :data:`REPOSITORY`, as the project's addresses do.
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
#: Public address of the repository, without a slash at the end; unset as long as there is none.
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
#: Keywords that every member has; its own may follow.
KEYWORDS = ["deep-learning", "distributed-training", "pytorch"]

_LINK = re.compile(r"(\]\()(?![a-z]+:|#|//)([^)\s]+)(\))")
_FENCE = re.compile(r"(^[ ]*```.*?^[ ]*```[ ]*$|`[^`\n]*`)", re.DOTALL | re.MULTILINE)


class ReleaseError(Exception):
    """A release cannot be built."""


def members(root: Path = ROOT) -> list[Path]:
    """Directories of all members of the workspace."""
    return sorted(file.parent for house in ("packages", "plugins") for file in root.glob(f"{house}/*/pyproject.toml"))


def lacking(member: Path) -> list[str]:
    """Missing metadata of a member: fields that every wheel carries."""
    project = tomllib.loads((member / "pyproject.toml").read_text("utf-8"))["project"]
    found = []
    licence = member / "LICENSE"
    if not licence.is_file() or licence.read_bytes() != (ROOT / "LICENSE").read_bytes():
        found.append("LICENSE, a symbolic link to that of the repository")
    if project.get("classifiers") != CLASSIFIERS:
        found.append("the classifiers of tools/release.py")
    if not set(KEYWORDS) <= set(project.get("keywords", ())):
        found.append(f"the keywords {', '.join(KEYWORDS)}")
    return found


def absolute(text: str, member: Path, repository: str, tag: str) -> str:
    """Markdown of a member in which links relative to the repository are addresses; code stays as it is.

    Args:
        text: of the README.
        member: its directory below :data:`ROOT`.
        repository: address of the repository.
        tag: of the release.

    Raises:
        ReleaseError: a link leads out of the repository.
    """

    def address(link: re.Match[str]) -> str:
        path, mark, anchor = link[2].partition("#")
        target = (member / path).resolve()
        if not target.is_relative_to(ROOT):
            raise ReleaseError(f"{member.name}/README.md: the link {link[2]} leads out of the repository")
        kind = "tree" if target.is_dir() else "blob"
        place = target.relative_to(ROOT).as_posix()
        return f"{link[1]}{repository}/{kind}/{tag}/{place}{mark}{anchor}{link[3]}"

    parts = _FENCE.split(text)  # every second one is code
    # A link's text may be code, so links are found in the whole text, and code is put back.
    codes = parts[1::2]
    hidden = "".join(part if number % 2 == 0 else f"\0{number // 2}\0" for number, part in enumerate(parts))
    return re.sub(r"\0(\d+)\0", lambda found: codes[int(found[1])], _LINK.sub(address, hidden))


def stage(member: Path, directory: Path, repository: str = REPOSITORY) -> Path:
    """Copy a member as it is released: licence text, absolute links, addresses of the project.

    Args:
        member: its directory.
        directory: takes the copy.
        repository: address of the repository.

    Raises:
        ReleaseError: the repository has no address.
    """
    if not repository:
        raise ReleaseError(
            "the repository has no public address, so links and addresses in the packages would lead nowhere: "
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
    """Build a release, or check what its wheels would carry."""
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
