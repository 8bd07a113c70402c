"""Makes a release: one version of all members, built from a commit, checked, with hashes.

    uv run python tools/release.py set X.Y.Z        write the version into all members, their pins and the changelog
    uv run python tools/release.py X.Y.Z OUT        build the release of this commit into the directory OUT
    uv run python tools/release.py try OUT          install the release in a fresh environment and use it
    uv run python tools/release.py check            check versions, pins and metadata of the members, as CI does

A package index shows a wheel's README, where links relative to the repository do not work. So a release is built from
copies in which every such link, and every project address, begins with the address of the repository. docs/releasing.md
lists the checks.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from datetime import UTC, datetime
from importlib.metadata import version as installed
from pathlib import Path

import lock
from packaging.version import Version
from platforms import Pins
from releasing import archives, hashes, trial
from releasing.staging import stage
from releasing.workspace import ReleaseError, members, own_problems, parse, problems, set_version

ROOT = Path(__file__).resolve().parents[1]
#: Public address of the repository, without a trailing slash; empty as long as there is none.
REPOSITORY = ""


def make(root: Path, version: Version, out: Path, repository: str) -> str:
    """Build the release of the last commit into a directory.

    Nothing is written before all checks have passed.

    Args:
        root: directory of the repository.
        version: version of the release.
        out: directory that receives the files: missing, empty, or with the same release.
        repository: public address of the repository, without a trailing slash.

    Returns:
        One line about the result.

    Raises:
        ReleaseError: a check failed; the message has one line for each problem.
    """
    found = commit_problems(root, version)
    if out.exists() and not out.is_dir():
        found.append(f"{out} is a file: name an empty or a new directory")
    repository = repository.rstrip("/")
    if repository and not re.fullmatch(r"https://[^\s/?#]+/[^\s?#]+", repository):
        raise ReleaseError(
            f"--repository: {repository!r} is no address of a repository, such as https://HOST/OWNER/NAME"
        )
    if not repository:
        found.append(
            "the repository has no public address, which links and addresses in the packages need: "
            "set REPOSITORY in tools/release.py, or pass --repository"
        )
    found += problems(root, version)
    _raise_if(found)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as directory:
        tree, built = Path(directory) / "tree", Path(directory) / "built"
        snapshot(root, tree)
        third_party = locked(tree)
        built.mkdir()
        build(tree, built, repository, epoch(root))
        text = hashes.constraints(built, third_party, str(version))
        (built / f"constraints-{version}.txt").write_text(text, "utf-8")
        (built / hashes.SUMS).write_text(hashes.sums(built), "utf-8")
        return place(built, out)


def commit_problems(root: Path, version: Version) -> list[str]:
    """Reasons why the last commit is not what would be released under a version."""
    found = []
    # Of uv.lock only the pins matter, and those are compared in the copy.
    if changed := _git(root, "status", "--porcelain", "--", ":/", ":!uv.lock").splitlines():
        found.append(
            f"the working tree has {len(changed)} files that are not committed, such as {changed[0][3:]}: "
            "commit them or put them away, since a release is built from a commit"
        )
    tag, head = f"v{version}", _git(root, "rev-parse", "HEAD")
    tagged = _git(root, "for-each-ref", "--format=%(objectname) %(*objectname)", f"refs/tags/{tag}").split()
    if tagged and tagged[-1] != head:
        found.append(
            f"the tag {tag} exists and names the commit {tagged[-1][:12]}, not {head[:12]}: "
            "a version is released once; choose the next one"
        )
    return found


def snapshot(root: Path, tree: Path) -> None:
    """Write the files of the last commit into a new directory."""
    tree.mkdir()
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=root, capture_output=True, check=True)
    subprocess.run(["tar", "--extract", "--directory", str(tree)], input=archive.stdout, check=True)


def epoch(root: Path) -> int:
    """Time of the last commit, in seconds since 1970."""
    return int(_git(root, "show", "--no-patch", "--format=%ct", "HEAD"))


def locked(tree: Path) -> str:
    """Third-party pins with hashes; every pin has a wheel on every supported platform and Python.

    Raises:
        ReleaseError: ``uv.lock`` is not up to date, a package has no wheel, or this environment's build backend is not
            the locked one.
    """
    committed = lock.pins(lock.strip((tree / lock.LOCK).read_text("utf-8")))
    third_party = hashes.locked(tree)  # uv fills in addresses and hashes
    filled = (tree / lock.LOCK).read_text("utf-8")
    if lock.pins(lock.strip(filled)) != committed:
        raise ReleaseError(f"{lock.LOCK} is not up to date with the members: run uv lock and commit it")
    found = [
        f"{lock.LOCK}: no wheel for {platform.name}, Python 3.{minor}: {name}: exclude it there with a marker, "
        "or pin another release"
        for platform, minor, names in Pins.of(tree).table()
        for name in names
    ]
    pins = {package["name"]: package.get("version") for package in tomllib.loads(filled)["package"]}
    if "hatchling" in pins and pins["hatchling"] != installed("hatchling"):
        found.append(
            f"hatchling {installed('hatchling')} is installed, but {pins['hatchling']} is locked, and another backend "
            "may build other bytes: run uv sync"
        )
    _raise_if(found)
    return third_party


def build(tree: Path, out: Path, repository: str, seconds: int) -> None:
    """Build all members of a snapshot into a directory and compare the archives with the sources.

    Args:
        tree: snapshot of the repository.
        out: directory that receives wheels and source distributions.
        repository: public address of the repository.
        seconds: time for the archives' entries, since 1970.

    Raises:
        ReleaseError: a build failed, or an archive lacks something.
    """
    found = []
    with tempfile.TemporaryDirectory() as directory:
        for member in members(tree):
            copy = stage(member, Path(directory), repository)
            wheel, source = archives.build(copy, out, seconds)
            found += archives.wheel_problems(wheel, member, repository)
            found += archives.source_problems(source, copy)
    (out / ".gitignore").unlink(missing_ok=True)  # uv writes it
    _raise_if(found)


def place(built: Path, out: Path) -> str:
    """Move a finished release to its directory, all files at once.

    Raises:
        ReleaseError: the directory has other files, or a build of the same version with other bytes.
    """
    if not out.exists() or not any(out.iterdir()):
        built.replace(out)
        return f"{out}: {len(list(out.iterdir()))} files"
    names = {file.name for file in out.iterdir()}
    if foreign := names - {file.name for file in built.iterdir()}:
        raise ReleaseError(f"{out} holds other files, such as {min(foreign)}: name an empty or a new directory")
    differing = [
        file.name
        for file in sorted(built.iterdir())
        if file.name not in names or file.read_bytes() != (out / file.name).read_bytes()
    ]
    if differing:
        raise ReleaseError(
            f"{out} holds another build of this version: {differing[0]} differs, and {len(differing) - 1} others: "
            "a version is released once; choose the next version, or remove the directory if it was never published"
        )
    return f"{out} holds this release already, with equal bytes"


def _git(root: Path, *command: str) -> str:
    return subprocess.run(["git", *command], cwd=root, capture_output=True, text=True, check=True).stdout.rstrip()


def _raise_if(found: list[str]) -> None:
    if found:
        raise ReleaseError("\n".join(found))


def main(arguments: list[str]) -> int:
    """Run one command; the exit status is 1 if a check failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    made = commands.add_parser("build", help="the default, if the first argument is a version")
    made.add_argument("version", metavar="X.Y.Z")
    made.add_argument("out", type=Path, metavar="OUT")
    made.add_argument("--repository", default=REPOSITORY, metavar="URL", help="public address of the repository")
    commands.add_parser("set").add_argument("version", metavar="X.Y.Z")
    tried = commands.add_parser("try")
    tried.add_argument("out", type=Path, metavar="OUT")
    tried.add_argument("--python", default="3.11", metavar="X.Y|PATH")
    commands.add_parser("check")
    first = arguments[0] if arguments else ""
    options = parser.parse_args(
        arguments if first in commands.choices or first.startswith("-") else ["build", *arguments]
    )
    try:
        if options.command == "build":
            print(make(ROOT, parse(options.version), options.out.resolve(), options.repository))
        elif options.command == "set":
            changed = set_version(ROOT, parse(options.version), datetime.now(UTC).date())
            print(f"{len(changed)} files changed; uv lock writes the versions into {lock.LOCK}")
            subprocess.run(["uv", "lock", "--quiet"], cwd=ROOT, check=True)
            print("run uv sync and the tests, then commit")
        elif options.command == "try":
            trial.use(ROOT, options.out.resolve(), options.python)
        else:
            _raise_if(own_problems(ROOT))
    except ReleaseError as error:
        print("\n".join(f"error: {line}" for line in str(error).splitlines()), file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"error: {error}\n{error.stderr or ''}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
