"""Copies of members in the form of a release: licence text, absolute links, project addresses."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from releasing.workspace import CHANGELOG, ReleaseError, project_of

_LINK = re.compile(r"(\]\()(?![a-z]+:|#|//)([^)\s]+)(\))")
_FENCE = re.compile(r"(^[ ]*```.*?^[ ]*```[ ]*$|`[^`\n]*`)", re.DOTALL | re.MULTILINE)


def absolute(text: str, member: Path, repository: str, tag: str) -> str:
    """Markdown of a member with absolute links to the repository; code is left unchanged.

    Args:
        text: text of the README.
        member: directory of the member, two levels below the root of the repository.
        repository: address of the repository.
        tag: tag of the release.

    Raises:
        ReleaseError: a link points outside of the repository.
    """
    root = member.parents[1]

    def address(link: re.Match[str]) -> str:
        path, mark, anchor = link[2].partition("#")
        target = (member / path).resolve()
        if not target.is_relative_to(root.resolve()):
            raise ReleaseError(f"{member.name}/README.md: the link {link[2]} points outside of the repository")
        kind = "tree" if target.is_dir() else "blob"
        place = target.relative_to(root.resolve()).as_posix()
        return f"{link[1]}{repository}/{kind}/{tag}/{place}{mark}{anchor}{link[3]}"

    parts = _FENCE.split(text)  # every second one is code
    # The text of a link may contain code, so code is replaced by placeholders while links are rewritten.
    codes = parts[1::2]
    hidden = "".join(part if number % 2 == 0 else f"\0{number // 2}\0" for number, part in enumerate(parts))
    return re.sub(r"\0(\d+)\0", lambda found: codes[int(found[1])], _LINK.sub(address, hidden))


def stage(member: Path, directory: Path, repository: str) -> Path:
    """Copy a member in the form of a release: licence text, absolute links, project addresses.

    Args:
        member: directory of the member, two levels below the root of the repository.
        directory: receives the copy.
        repository: address of the repository, without a trailing slash.
    """
    copy = directory / member.name
    shutil.copytree(member, copy, ignore=shutil.ignore_patterns("__pycache__", "dist", "tests"))
    tag = f"v{project_of(member)['version']}"
    readme = copy / "README.md"
    readme.write_text(absolute(readme.read_text("utf-8"), member, repository, tag), "utf-8")
    place = member.relative_to(member.parents[1]).as_posix()
    urls = {
        "Repository": repository,
        "Documentation": f"{repository}/blob/{tag}/{place}/README.md",
        "Changelog": f"{repository}/blob/{tag}/{CHANGELOG}",
        "Issues": f"{repository}/issues",
    }
    table = "".join(f'{name} = "{url}"\n' for name, url in urls.items())
    with (copy / "pyproject.toml").open("a", encoding="utf-8") as file:
        file.write(f"\n[project.urls]\n{table}")
    return copy
