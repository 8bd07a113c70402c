"""The committed lock holds pins and no address, and nothing in the repository configures a package index."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
# A scheme with a host made of reserved words: an address for the eye of the code under test that leads nowhere.
HOST = "https" + "://index.invalid"

FULL = f"""version = 1
revision = 3
requires-python = ">=3.11"

[manifest]
members = [
    "one",
]

[[manifest.dependency-metadata]]
name = "left-pad"

[[package]]
name = "left-pad"
version = "1.3.0"
source = {{ registry = "{HOST}/simple" }}
sdist = {{ url = "{HOST}/left-pad-1.3.0.tar.gz", hash = "sha256:00", size = 1 }}
wheels = [
    {{ url = "{HOST}/left_pad-1.3.0-py3-none-any.whl", hash = "sha256:00", size = 1 }},
]

[[package]]
name = "one"
version = "0.1.0"
source = {{ editable = "packages/one" }}
dependencies = [
    {{ name = "left-pad", version = "1.3.0", source = {{ registry = "{HOST}/simple" }}, marker = "os_name == 'nt'" }},
]

[package.metadata]
requires-dist = [{{ name = "left-pad", specifier = ">=1" }}]
"""

STRIPPED = """version = 1
revision = 3
requires-python = ">=3.11"

[[package]]
name = "left-pad"
version = "1.3.0"
source = { registry = "." }

[[package]]
name = "one"
version = "0.1.0"
source = { editable = "packages/one" }
dependencies = [
    { name = "left-pad", version = "1.3.0", source = { registry = "." }, marker = "os_name == 'nt'" },
]

[package.metadata]
requires-dist = [{ name = "left-pad", specifier = ">=1" }]
"""


@pytest.fixture(scope="module")
def lock() -> ModuleType:
    spec = importlib.util.spec_from_file_location("d9d_tools_lock", ROOT / "tools" / "lock.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    (tmp_path / "tools").mkdir()
    for name in (".gitattributes", "tools/lock.py"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    git(tmp_path, "init", "--quiet")
    return tmp_path


def git(where: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=nobody", "-c", "user.email=nobody@invalid", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *identity, *arguments], cwd=where, check=True, capture_output=True, text=True)
    return done.stdout


# --- this repository -------------------------------------------------------------------------------------------------


def test_the_committed_lock_holds_no_address(lock: ModuleType) -> None:
    committed = lock.committed(ROOT)
    text = committed if committed is not None else lock.strip((ROOT / "uv.lock").read_text())
    assert lock.addresses(text) == []
    assert "sdist = " not in text
    assert "wheels = " not in text
    assert lock.strip(text) == text
    assert len(lock.pins(text)["package"]) > 50


# Written so that no pattern matches its own source line.
CONFIGURES_AN_INDEX = re.compile(
    r"""
    \[\[?tool\.uv\.(index|pip)\b                                  # uv tables
    | ^\s*(extra[-_])?index([-_]url)?\s*=\s*["'\[{]               # pip and uv settings
    | ^\s*(default[-_]index|find[-_]links)\s*=\s*["'\[{]
    | \bindex\s*=\s*"[^"]+"\s*\}                                  # tool.uv.sources
    | --(extra-)?index(-url)?[ =][^\s\\(]                         # command lines
    | --(default-index|find-links)[ =][^\s\\(]
    | \b(UV|PIP)_[A-Z_]*(INDEX|FIND_LINKS)[A-Z_]*\s*=\s*[^\s\\(]  # environments
    | [a-z][a-z0-9+.-]*://[^\s"'<>\\{]+/simple\b                  # a package index
    | [a-z][a-z0-9+.-]*://[^\s"'<>\\{]+\.(whl|tar\.gz|zip)\b      # a download
    """,
    re.VERBOSE | re.MULTILINE,
)
INDEX_FILES = {"pip.conf", "pip.ini", ".pypirc", "uv.toml"}


def tracked_files() -> list[Path]:
    names = git(ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


@pytest.mark.thorough
def test_no_tracked_file_configures_an_index() -> None:
    found = []
    for path in tracked_files():
        if path.name == "uv.lock":
            continue
        if path.name in INDEX_FILES:
            found.append(f"{path.relative_to(ROOT)}: configures an index by its name")
            continue
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}: {match.group()!r}" for match in CONFIGURES_AN_INDEX.finditer(text)]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "[[tool.uv" + ".index]]",
        "index" + "-url" + ' = "anything"',
        "extra-index" + "-url" + ' = ["anything"]',
        "torch = { index" + ' = "mirror" }',
        "uv pip install --index" + "-url mirror torch",
        "uv sync --default" + "-index=mirror",
        "export UV_DEFAULT" + "_INDEX=mirror",
        "PIP_FIND" + "_LINKS=/somewhere",
        HOST + "/simple",
        HOST + "/files/torch-2.11.0.whl",
    ],
)
def test_index_configuration_is_recognised_by_its_shape(line: str) -> None:
    assert CONFIGURES_AN_INDEX.search(line)


@pytest.mark.parametrize("line", ["index = 0", "[tool.uv.workspace]", f"see {HOST}/docs/", "--index" + "-url (any)"])
def test_other_lines_are_not_taken_for_index_configuration(line: str) -> None:
    assert not CONFIGURES_AN_INDEX.search(line)


# --- stripping -------------------------------------------------------------------------------------------------------


def test_stripping_keeps_pins_markers_and_edges_and_drops_addresses(lock: ModuleType) -> None:
    assert lock.strip(FULL) == STRIPPED


def test_stripping_twice_changes_nothing(lock: ModuleType) -> None:
    assert lock.strip(lock.strip(FULL)) == STRIPPED


def test_an_empty_wheel_list_on_one_line_hides_nothing_behind_it(lock: ModuleType) -> None:
    text = '[[package]]\nname = "a"\nwheels = []\n\n[[package]]\nname = "b"\n'
    assert lock.strip(text) == '[[package]]\nname = "a"\n\n[[package]]\nname = "b"\n'


@pytest.mark.parametrize("source", ['{ url = "file.whl" }', f'{{ git = "{HOST}/a.git" }}'])
def test_a_package_pinned_to_an_address_is_an_error(lock: ModuleType, source: str) -> None:
    text = STRIPPED.replace('{ editable = "packages/one" }', source)
    with pytest.raises(lock.LockError, match="depend on a released version instead"):
        lock.strip(text)


def test_addresses_finds_hosts_without_a_scheme(lock: ModuleType) -> None:
    assert lock.addresses(STRIPPED.replace('"."', '"index.invalid/simple"', 1)) != []


# --- the git filter --------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_git_stores_the_stripped_form_and_sees_no_change_in_the_full_one(lock: ModuleType, clone: Path) -> None:
    lock.install_filter(clone)
    lock.install_filter(clone)
    path = clone / "uv.lock"
    path.write_text(FULL)
    git(clone, "add", "--all")
    git(clone, "commit", "--quiet", "--message", "lock")
    assert lock.committed(clone) == STRIPPED
    assert git(clone, "status", "--porcelain") == ""

    for same in (STRIPPED, FULL):
        path.write_text(same)
        lock.settle(clone)
        assert git(clone, "status", "--porcelain") == ""
        assert git(clone, "diff", "--cached") == ""
        lock.check(clone)

    path.write_text(FULL.replace("1.3.0", "1.4.0"))
    lock.settle(clone)
    assert git(clone, "status", "--porcelain") == " M uv.lock\n"
    with pytest.raises(lock.LockError, match="differs from the commit in more than addresses"):
        lock.check(clone)


def test_a_broken_filter_stops_the_commit(lock: ModuleType, clone: Path) -> None:
    lock.install_filter(clone)
    (clone / "uv.lock").write_text(FULL + f'[[package]]\nsource = {{ git = "{HOST}" }}\n')
    with pytest.raises(subprocess.CalledProcessError):
        git(clone, "add", "uv.lock")


@pytest.mark.thorough
def test_check_refuses_a_commit_with_addresses_and_says_how_to_repair_it(lock: ModuleType, clone: Path) -> None:
    (clone / "uv.lock").write_text(FULL)
    git(clone, "add", "--all")
    git(clone, "commit", "--quiet", "--message", "lock without the filter")
    with pytest.raises(lock.LockError, match="install-filter && git add --renormalize uv.lock"):
        lock.check(clone)
    lock.install_filter(clone)
    git(clone, "add", "--renormalize", "uv.lock")
    git(clone, "commit", "--quiet", "--message", "lock without addresses")
    lock.check(clone)
    assert lock.committed(clone) == STRIPPED


@pytest.mark.thorough
def test_the_command_line_reports_in_one_line_and_fails(clone: Path) -> None:
    command = [sys.executable, "tools/lock.py", "check"]
    (clone / "uv.lock").write_text(FULL)
    done = subprocess.run(command, cwd=clone, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "holds 4 addresses" in done.stderr
    subprocess.run([sys.executable, "tools/lock.py", "strip"], cwd=clone, check=True)
    assert subprocess.run(command, cwd=clone, check=False).returncode == 0
