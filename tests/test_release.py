"""A release has one version, complete archives and hashes; each bad input is refused and leaves nothing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement

pytestmark = pytest.mark.tools

ROOT = Path(__file__).parents[1]
ADDRESS = "https://example.org/d9d"
MEMBERS = sorted(file.parent for house in ("packages", "plugins") for file in ROOT.glob(f"{house}/*/pyproject.toml"))


@pytest.fixture(scope="session")
def release(tool: Callable[[str], ModuleType]) -> ModuleType:
    return tool("release")


@pytest.fixture(scope="session")
def workspace(release: ModuleType) -> ModuleType:
    return sys.modules["releasing.workspace"]


@pytest.fixture(scope="session")
def archives(release: ModuleType) -> ModuleType:
    return sys.modules["releasing.archives"]


@dataclass(frozen=True)
class Repository:
    """Repository with the two members d9d-one, and d9d-two, which requires d9d-one."""

    root: Path
    tool: ModuleType

    def file(self, place: str, change: Callable[[str], str]) -> None:
        """Change a file."""
        path = self.root / place
        path.write_text(change(path.read_text() if path.exists() else ""))

    def commit(self, day: int = 1) -> None:
        """Commit all files."""
        git(self.root, "add", "--all")
        git(self.root, "commit", "--quiet", "--message", "Change", day=day)

    def make(self, out: Path, version: str = "0.1.0", repository: str = ADDRESS) -> str:
        """Build a release."""
        version_of = sys.modules["releasing.workspace"].parse(version)
        result: str = self.tool.make(self.root, version_of, out, repository)
        return result

    def refusal(self, out: Path, version: str = "0.1.0", repository: str = ADDRESS) -> str:
        """Message of a refused release, which leaves nothing."""
        with pytest.raises(sys.modules["releasing.workspace"].ReleaseError) as refused:
            self.make(out, version, repository)
        assert not out.exists()
        assert not [path for path in out.parent.iterdir() if path.name.startswith(f".{out.name}")]
        return str(refused.value)


def git(root: Path, *command: str, day: int = 1) -> None:
    when = f"2026-01-{day:02}T00:00:00Z"
    author = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@example.org", "GIT_AUTHOR_DATE": when}
    committer = {"GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@example.org", "GIT_COMMITTER_DATE": when}
    subprocess.run(["git", *command], cwd=root, env=os.environ | author | committer, check=True, capture_output=True)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory, workspace: ModuleType) -> Path:
    root = tmp_path_factory.mktemp("template")
    (root / "LICENSE").write_text("A licence.\n")
    (root / "CHANGELOG.md").write_text("# Changelog\n\n## 0.1.0 (2026-01-01)\n\n- Begins.\n")
    (root / ".gitignore").write_text("__pycache__/\n")
    (root / "pyproject.toml").write_text(
        '[project]\nname = "root"\nversion = "0"\nrequires-python = ">=3.11"\n[tool.uv]\npackage = false\n'
        '[tool.uv.workspace]\nmembers = ["packages/*", "plugins/*"]\n'
        "[tool.uv.sources]\nd9d-one = { workspace = true }\nd9d-two = { workspace = true }\n"
    )
    for house, name, needed, entry in (
        ("packages", "one", "", '[project.scripts]\nOne = "d9d_one:main"\n'),
        ("plugins", "two", '"d9d-one>=0.1,<0.2"', '[project.entry-points.d9d]\ntwo = "d9d_two.plugin"\n'),
    ):
        member = root / house / f"d9d-{name}"
        source = member / "src" / f"d9d_{name}"
        source.mkdir(parents=True)
        (source / "__init__.py").write_text(f'"""Package {name}."""\n')
        (source / "plugin.py").write_text("")
        (source / "data.json").write_text("{}\n")
        (member / "LICENSE").symlink_to("../../LICENSE")
        (member / "README.md").write_text(f"# d9d-{name}\n\n[the changelog](../../CHANGELOG.md)\n")
        (member / "pyproject.toml").write_text(
            f'[project]\nname = "d9d-{name}"\nversion = "0.1.0"\ndescription = "Package {name}."\n'
            f'readme = "README.md"\nlicense = "Apache-2.0"\nrequires-python = ">=3.11"\n'
            f"keywords = {workspace.KEYWORDS}\nclassifiers = {workspace.CLASSIFIERS}\ndependencies = [{needed}]\n"
            f'{entry}[build-system]\nrequires = ["hatchling>=1.26"]\nbuild-backend = "hatchling.build"\n'
            f'[tool.hatch.build.targets.wheel]\npackages = ["src/d9d_{name}"]\n'
        )
    git(root, "init", "--quiet")
    uv_lock(root)
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "Begin")
    return root


def uv_lock(root: Path) -> None:
    command = ["uv", "lock", "--quiet", "--offline", "--python", sys.executable]
    subprocess.run(command, cwd=root, check=True, capture_output=True)


@pytest.fixture
def tiny(template: Path, tmp_path: Path, release: ModuleType) -> Repository:
    shutil.copytree(template, tmp_path / "tiny", symlinks=True)
    return Repository(tmp_path / "tiny", release)


def test_every_member_has_licence_text_classifiers_and_keywords(workspace: ModuleType) -> None:
    assert {member.name: lacks for member in MEMBERS if (lacks := workspace.lacking(member))} == {}


def test_a_member_without_them_is_recognised(tmp_path: Path, workspace: ModuleType) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "acme"\nkeywords = ["pytorch"]\n')
    assert [text.partition(" ")[0] for text in workspace.lacking(tmp_path)] == ["LICENSE,", "the", "the"]


def test_the_members_of_this_repository_fit_each_other(workspace: ModuleType) -> None:
    assert workspace.own_problems(ROOT) == []


def test_members_that_do_not_fit_each_other_are_told_before_a_release(tiny: Repository, workspace: ModuleType) -> None:
    assert workspace.own_problems(tiny.root) == []
    tiny.file("CHANGELOG.md", lambda text: text.replace("(2026-01-01)", "(not released yet)"))
    assert workspace.own_problems(tiny.root) == []
    tiny.file(
        "plugins/d9d-two/pyproject.toml", lambda text: text.replace('"0.1.0"', '"0.2.0"').replace(">=0.1", ">=0.2")
    )
    tiny.file("CHANGELOG.md", lambda text: text.replace("0.1.0", "0.0.1"))
    assert [line.partition(":")[0] for line in workspace.own_problems(tiny.root)] == [
        "CHANGELOG.md",
        "1 of 2 members have the version 0.2.0 instead of 0.1.0, such as d9d-two",
        "plugins/d9d-two/pyproject.toml",
    ]


@pytest.mark.parametrize("member", MEMBERS, ids=lambda member: member.name)
def test_no_link_of_a_released_readme_is_relative(member: Path, tmp_path: Path, release: ModuleType) -> None:
    text = (release.stage(member, tmp_path, ADDRESS) / "README.md").read_text()
    links = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"^[ ]*```.*?^[ ]*```", "", text, flags=re.DOTALL | re.MULTILINE))
    assert [link for link in links if not link.startswith(("https://", "http://", "#"))] == []
    for link in links:
        if link.startswith(ADDRESS):
            place = re.sub(rf"^{ADDRESS}/(?:blob|tree)/v[0-9.]+/|#.*$", "", link)
            assert (ROOT / place).exists(), link


def test_links_become_addresses_and_code_stays(release: ModuleType, workspace: ModuleType) -> None:
    member = ROOT / "packages" / "d9d-core"
    absolute = sys.modules["releasing.staging"].absolute
    text = "[a](../../docs/index.md#b) [`c`](src) [d](#e) [f](https://g.h) `[i](j)`\n```\n[k](l)\n```\n"
    assert absolute(text, member, ADDRESS, "v1") == (
        f"[a]({ADDRESS}/blob/v1/docs/index.md#b) [`c`]({ADDRESS}/tree/v1/packages/d9d-core/src) [d](#e) "
        "[f](https://g.h) `[i](j)`\n```\n[k](l)\n```\n"
    )
    with pytest.raises(workspace.ReleaseError, match="the link ../../../x.md points outside of the repository"):
        absolute("[a](../../../x.md)", member, ADDRESS, "v1")


def test_a_release_has_archives_of_all_members_with_metadata_and_hashes(tiny: Repository, tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    assert tiny.make(out) == f"{out}: 6 files"
    archives = [f"d9d_{name}-0.1.0{end}" for name in ("one", "two") for end in ("-py3-none-any.whl", ".tar.gz")]
    assert sorted(file.name for file in out.iterdir()) == ["SHA256SUMS", "constraints-0.1.0.txt", *archives]
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=out, check=True, capture_output=True)
    sums = dict(reversed(line.split()) for line in (out / "SHA256SUMS").read_text().splitlines())
    constraints = (out / "constraints-0.1.0.txt").read_text()
    assert all(f"--hash=sha256:{sums[name]}" in constraints for name in archives)
    assert "://" not in constraints
    with zipfile.ZipFile(out / archives[2]) as wheel:
        metadata = wheel.read("d9d_two-0.1.0.dist-info/METADATA").decode()
        assert wheel.read("d9d_two-0.1.0.dist-info/licenses/LICENSE") == b"A licence.\n"
    assert f"Project-URL: Repository, {ADDRESS}\n" in metadata
    assert f"[the changelog]({ADDRESS}/blob/v0.1.0/CHANGELOG.md)" in metadata


def test_two_builds_of_a_commit_have_equal_bytes(tiny: Repository, tmp_path: Path) -> None:
    elsewhere = tmp_path / "another folder" / "of another length"
    elsewhere.parent.mkdir()
    git(tmp_path, "clone", "--quiet", str(tiny.root), str(elsewhere))
    for file in elsewhere.rglob("*.py"):
        os.utime(file, (10**9, 10**9))
    tiny.make(tmp_path / "first")
    mask = os.umask(0o077)
    try:
        Repository(elsewhere, tiny.tool).make(tmp_path / "second")
    finally:
        os.umask(mask)
    files = sorted((tmp_path / "first").iterdir())
    assert [file.name for file in files] == sorted(file.name for file in (tmp_path / "second").iterdir())
    for file in files:
        assert file.read_bytes() == (tmp_path / "second" / file.name).read_bytes(), file.name


def test_an_altered_wheel_is_not_installed_with_the_constraints(tiny: Repository, tmp_path: Path) -> None:
    out = tmp_path / "out"
    tiny.make(out)
    command = ["uv", "pip", "install", "--python", sys.executable, "--no-cache", "--no-index", "--find-links", str(out)]
    command += ["--constraint", str(out / "constraints-0.1.0.txt"), "--target", str(tmp_path / "target"), "d9d-two"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "target" / "d9d_one" / "data.json").is_file()
    shutil.rmtree(tmp_path / "target")
    with zipfile.ZipFile(out / "d9d_one-0.1.0-py3-none-any.whl", "a") as wheel:
        wheel.writestr("d9d_one/more.py", "")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "Hash mismatch for `d9d-one==0.1.0`" in done.stderr


def test_the_same_release_is_accepted_twice_and_another_build_of_its_version_is_not(
    tiny: Repository, tmp_path: Path, workspace: ModuleType
) -> None:
    out = tmp_path / "out"
    tiny.make(out)
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    assert "holds this release already" in tiny.make(out)
    tiny.file("packages/d9d-one/src/d9d_one/__init__.py", lambda text: text + "X = 1\n")
    tiny.commit()
    with pytest.raises(workspace.ReleaseError, match="holds another build of this version: SHA256SUMS differs"):
        tiny.make(out)
    (out / "notes.txt").write_text("Mine.")
    with pytest.raises(workspace.ReleaseError, match=r"holds other files, such as notes\.txt"):
        tiny.make(out)
    with pytest.raises(workspace.ReleaseError, match=r"notes\.txt is a file: name an empty or a new directory"):
        tiny.make(out / "notes.txt")
    (out / "notes.txt").unlink()
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before


def test_a_tagged_version_is_released_from_the_tagged_commit_only(tiny: Repository, tmp_path: Path) -> None:
    git(tiny.root, "tag", "--annotate", "--message", "Release", "v0.1.0")
    tiny.make(tmp_path / "out")
    tiny.file("packages/d9d-one/README.md", lambda text: text + "More.\n")
    tiny.commit()
    assert "the tag v0.1.0 exists and names the commit" in tiny.refusal(tmp_path / "again")


def test_a_tag_without_a_section_of_the_changelog_is_refused(tiny: Repository, tmp_path: Path) -> None:
    for heading, said in (
        ("## 0.0.9 (2025-01-01)", "CHANGELOG.md: no section '## 0.1.0'"),
        ("## 0.1.0 (not released yet)", "CHANGELOG.md: the section '## 0.1.0' says 'not released yet'"),
        ("## 0.1.0 (2026-01-01)\n\n## 0.0.9 (2025-01-01)", "CHANGELOG.md: the section '## 0.1.0' is empty"),
    ):
        tiny.file("CHANGELOG.md", lambda _, heading=heading: f"# Changelog\n\n{heading}\n\n- Text.\n")  # type: ignore[misc]
        tiny.commit()
        assert said in tiny.refusal(tmp_path / "out")


def test_members_of_different_versions_are_refused(tiny: Repository, tmp_path: Path) -> None:
    tiny.file("plugins/d9d-two/pyproject.toml", lambda text: text.replace('"0.1.0"', '"0.1.1"'))
    tiny.commit()
    assert "1 of 2 members have the version 0.1.1 instead of 0.1.0, such as d9d-two" in tiny.refusal(tmp_path / "out")


@pytest.mark.parametrize(
    ("pin", "said"),
    [
        ("d9d-one>=0.0.9,<0.2", "the pin d9d-one<0.2,>=0.0.9 must admit 0.1.0 and no older release"),
        ("d9d-one>=0.1,<0.1", "the pin d9d-one<0.1,>=0.1 must admit 0.1.0"),
        ("d9d-one<0.2", "the pin d9d-one<0.2 must admit 0.1.0 and no older release"),
        ("d9d-one", "d9d-one has no pin: write d9d-one>=0.1.0"),
    ],
)
def test_a_pin_to_another_release_of_a_member_is_refused(tiny: Repository, tmp_path: Path, pin: str, said: str) -> None:
    tiny.file("plugins/d9d-two/pyproject.toml", lambda text: text.replace("d9d-one>=0.1,<0.2", pin))
    tiny.commit()
    assert f"plugins/d9d-two/pyproject.toml: {said}" in tiny.refusal(tmp_path / "out")


def test_a_member_without_metadata_is_refused(tiny: Repository, tmp_path: Path) -> None:
    (tiny.root / "plugins/d9d-two/LICENSE").unlink()
    tiny.commit()
    assert "d9d-two lacks LICENSE" in tiny.refusal(tmp_path / "out")


@pytest.mark.parametrize("text", ["v0.1.0", "0.1", "1", "0.1.0-rc1", "0.1.0+local", "", "next", "0.1.0.0", "../0.1.0"])
def test_a_text_that_is_no_version_is_refused(text: str, workspace: ModuleType) -> None:
    with pytest.raises(workspace.ReleaseError, match="PEP 440"):
        workspace.parse(text)
    assert str(workspace.parse("0.1.0rc1")) == "0.1.0rc1"


def test_a_working_tree_with_uncommitted_files_is_refused(tiny: Repository, tmp_path: Path) -> None:
    (tiny.root / "packages/d9d-one/src/d9d_one/new.py").write_text("")
    said = "the working tree has 1 files that are not committed, such as packages/d9d-one/src/d9d_one/new.py"
    assert said in tiny.refusal(tmp_path / "out")
    git(tiny.root, "clean", "--quiet", "--force")
    tiny.file("README.md", lambda _: "x")
    assert "1 files that are not committed, such as README.md" in tiny.refusal(tmp_path / "out")


def test_a_release_is_refused_as_long_as_the_repository_has_no_address(tiny: Repository, tmp_path: Path) -> None:
    assert "the repository has no public address" in tiny.refusal(tmp_path / "out", repository="")


def test_all_problems_of_the_sources_are_told_at_once(tiny: Repository, tmp_path: Path) -> None:
    tiny.file("README.md", lambda _: "x")
    lines = tiny.refusal(tmp_path / "out", version="0.2.0", repository="").splitlines()
    starts = ["the working tree", "the repository", "CHANGELOG.md", "2 of 2 members", "plugins/d9d-two/pyproject.toml"]
    assert [line.startswith(start) for line, start in zip(lines, starts, strict=True)] == [True] * 5


def test_a_lock_that_is_not_up_to_date_is_refused(tiny: Repository, tmp_path: Path) -> None:
    tiny.file(
        "uv.lock",
        lambda text: text.replace('name = "d9d-two"\nversion = "0.1.0"', 'name = "d9d-two"\nversion = "0.0.9"'),
    )
    tiny.commit()
    assert "uv.lock is not up to date with the members: run uv lock" in tiny.refusal(tmp_path / "out")


def test_a_dependency_without_a_wheel_on_one_platform_is_refused(
    tiny: Repository, tmp_path: Path, release: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels = {
        ("acme", "1.0"): [
            "acme-1.0-cp311-cp311-manylinux_2_28_x86_64.whl",
            "acme-1.0-cp311-cp311-macosx_11_0_arm64.whl",
        ]
    }
    pins = release.Pins([Requirement("acme==1.0; sys_platform == 'linux'")], wheels)
    monkeypatch.setattr(release.Pins, "of", lambda root: pins)
    assert tiny.refusal(tmp_path / "out").splitlines() == [
        'uv.lock: no wheel for Linux aarch64, Python 3.11: acme==1.0; sys_platform == "linux": '
        "exclude it there with a marker, or pin another release"
    ]


@pytest.mark.parametrize(
    ("exported", "said"),
    [
        ("acme==1.0 \\\n    --hash=sha256:00\nlost==2.0\n", "lost==2.0 has no hash"),
        ("acme @ https://example.org/acme \\\n    --hash=sha256:00\n", "acme is pinned to an address"),
    ],
)
def test_a_pin_without_hash_or_with_an_address_is_refused(
    exported: str, said: str, workspace: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = sys.modules["releasing.hashes"]
    done = subprocess.CompletedProcess([], 0, exported, "")
    monkeypatch.setattr(module, "subprocess", type("Fake", (), {"run": staticmethod(lambda *_, **__: done)}))
    with pytest.raises(workspace.ReleaseError, match=said):
        module.locked(ROOT)


def test_a_wheel_that_lost_a_file_is_refused(tiny: Repository, tmp_path: Path) -> None:
    tiny.file("plugins/d9d-two/pyproject.toml", lambda text: text + 'exclude = ["data.json"]\n')
    tiny.commit()
    said = tiny.refusal(tmp_path / "out")
    assert said.splitlines() == ["d9d_two-0.1.0-py3-none-any.whl: d9d_two/data.json is missing"]


def test_a_source_distribution_that_lost_a_file_is_refused(tiny: Repository, tmp_path: Path) -> None:
    tiny.file(
        "plugins/d9d-two/pyproject.toml",
        lambda text: text + '[tool.hatch.build.targets.sdist]\nexclude = ["data.json"]\n',
    )
    tiny.commit()
    assert "d9d_two-0.1.0.tar.gz: src/d9d_two/data.json is missing" in tiny.refusal(tmp_path / "out")


def test_a_build_that_fails_is_refused_with_its_message(tiny: Repository, tmp_path: Path) -> None:
    tiny.file("plugins/d9d-two/pyproject.toml", lambda text: text.replace('"README.md"', '"OTHER.md"'))
    tiny.commit()
    assert "d9d-two: the build failed" in tiny.refusal(tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("d9d_two/plugin.py", lambda _: b"x = 1\n", "d9d_two/plugin.py differs from its source"),
        ("d9d_two/more.py", lambda _: b"", "d9d_two/more.py is not in src/"),
        ("{info}/licenses/LICENSE", lambda _: None, "d9d_two-0.1.0.dist-info/licenses/LICENSE is missing"),
        ("{info}/METADATA", lambda _: b"Metadata-Version: 9\n", "METADATA is not valid"),
        ("{info}/METADATA", lambda data: data.replace(b": 0.1.0", b": 0.2.0"), "METADATA: Version is '0.2.0'"),
        ("{info}/METADATA", lambda data: data.replace(b"d9d-one", b"d9d-six"), "METADATA: Requires-Dist is"),
        ("{info}/METADATA", lambda data: data.replace(b"https://", b"http://"), "the addresses of the project are not"),
        ("{info}/entry_points.txt", lambda data: data.replace(b"two =", b"Two ="), "the entry points are"),
        ("{info}/entry_points.txt", lambda _: None, "the entry points are {}"),
        ("{info}/RECORD", lambda data: data.replace(b"sha256=", b"sha256=0"), "RECORD does not have the hash of"),
    ],
)  # fmt: skip
def test_a_wheel_that_differs_from_its_sources_is_recognised(
    built: Path,
    tmp_path: Path,
    template: Path,
    archives: ModuleType,
    name: str,
    change: Callable[[bytes], bytes | None],
    said: str,
) -> None:
    name = name.format(info="d9d_two-0.1.0.dist-info")
    with zipfile.ZipFile(built) as source, zipfile.ZipFile(tmp_path / built.name, "w") as target:
        for entry in {*source.namelist(), name}:
            data = source.read(entry) if entry in source.namelist() else b""
            changed = change(data) if entry == name else data
            if changed is not None:
                target.writestr(entry, changed)
    member = template / "plugins" / "d9d-two"
    assert archives.wheel_problems(built, member, ADDRESS) == []
    assert said in "\n".join(archives.wheel_problems(tmp_path / built.name, member, ADDRESS))


@pytest.fixture(scope="module")
def built(template: Path, tmp_path_factory: pytest.TempPathFactory, release: ModuleType, archives: ModuleType) -> Path:
    directory = tmp_path_factory.mktemp("built")
    copy = release.stage(template / "plugins" / "d9d-two", directory, ADDRESS)
    wheel: Path = archives.build(copy, directory, 10**9)[0]
    return wheel


def test_set_writes_versions_pins_and_the_date_of_the_changelog(
    tiny: Repository, tmp_path: Path, workspace: ModuleType
) -> None:
    tiny.file(
        "CHANGELOG.md", lambda text: text.replace("## 0.1.0", "## 0.2.0 (not released yet)\n\n- More.\n\n## 0.1.0")
    )
    changed = workspace.set_version(tiny.root, workspace.parse("0.2.0"), date(2026, 2, 3))
    assert len(changed) == 3
    assert "## 0.2.0 (2026-02-03)\n" in (tiny.root / "CHANGELOG.md").read_text()
    assert '"d9d-one>=0.2.0,<0.3"' in (tiny.root / "plugins/d9d-two/pyproject.toml").read_text()
    uv_lock(tiny.root)
    tiny.commit()
    tiny.make(tmp_path / "out", version="0.2.0")
    assert workspace.set_version(tiny.root, workspace.parse("0.2.0"), date(2026, 2, 4)) == []


def test_set_keeps_extras_and_an_upper_bound_that_admits_the_version(tiny: Repository, workspace: ModuleType) -> None:
    tiny.file("plugins/d9d-two/pyproject.toml", lambda text: text.replace("d9d-one>=0.1,<0.2", "d9d-one[x]>=0.1,<1"))
    tiny.file("CHANGELOG.md", lambda text: text.replace("## 0.1.0", "## 0.2.0rc1"))
    workspace.set_version(tiny.root, workspace.parse("0.2.0rc1"), date(2026, 2, 3))
    assert '"d9d-one[x]>=0.2.0rc1,<1"' in (tiny.root / "plugins/d9d-two/pyproject.toml").read_text()


def test_set_adds_no_upper_bound_to_a_pin_without_one(tiny: Repository, workspace: ModuleType) -> None:
    tiny.file("plugins/d9d-two/pyproject.toml", lambda text: text.replace("d9d-one>=0.1,<0.2", "d9d-one>=0.1"))
    tiny.file("CHANGELOG.md", lambda text: text.replace("## 0.1.0", "## 0.2.0"))
    workspace.set_version(tiny.root, workspace.parse("0.2.0"), date(2026, 2, 3))
    assert '"d9d-one>=0.2.0"' in (tiny.root / "plugins/d9d-two/pyproject.toml").read_text()


def test_set_without_a_section_of_the_changelog_writes_nothing(tiny: Repository, workspace: ModuleType) -> None:
    with pytest.raises(workspace.ReleaseError, match=r"no section '## 0\.2\.0'"):
        workspace.set_version(tiny.root, workspace.parse("0.2.0"), date(2026, 2, 3))
    done = subprocess.run(["git", "status", "--short"], cwd=tiny.root, capture_output=True, text=True, check=True)
    assert done.stdout == ""


def test_the_trial_refuses_files_that_differ_from_their_hashes(
    tiny: Repository, tmp_path: Path, workspace: ModuleType
) -> None:
    tiny.make(tmp_path / "out")
    with (tmp_path / "out" / "constraints-0.1.0.txt").open("a") as file:
        file.write("# more\n")
    use = sys.modules["releasing.trial"].use
    with pytest.raises(workspace.ReleaseError, match=r"differ from SHA256SUMS, in constraints-0\.1\.0\.txt"):
        use(ROOT, tmp_path / "out", "3.11")
    next((tmp_path / "out").glob("*.whl")).unlink()
    with pytest.raises(workspace.ReleaseError, match=r"differ from SHA256SUMS, in .*\.whl"):
        use(ROOT, tmp_path / "out", "3.11")
    with pytest.raises(workspace.ReleaseError, match="not the directory of a release"):
        use(ROOT, tmp_path, "3.11")
    with pytest.raises(workspace.ReleaseError, match="no such directory"):
        use(ROOT, tmp_path / "absent", "3.11")


def test_the_command_reports_each_problem_and_exits_with_1(
    capsys: pytest.CaptureFixture[str], release: ModuleType, tmp_path: Path
) -> None:
    assert release.main(["0.0.1", str(tmp_path / "out")]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) > 2
    assert all(line.startswith("error: ") for line in errors)
    assert release.main(["check"]) == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_release_of_this_repository_installs_and_trains(
    tmp_path: Path, release: ModuleType, workspace: ModuleType
) -> None:
    clone = Repository(tmp_path / "clone", release)
    git(tmp_path, "clone", "--quiet", str(ROOT), str(clone.root))
    version = workspace.project_of(MEMBERS[0])["version"]
    workspace.set_version(clone.root, workspace.parse(version), date(2026, 1, 1))
    clone.commit()
    clone.make(tmp_path / "out", version)
    sys.modules["releasing.trial"].use(clone.root, tmp_path / "out", sys.executable)


@pytest.mark.parametrize("address", ["nonsense", "http://example.org/a/b", "https://example.org", "https://a b/c"])
def test_an_address_that_no_repository_has_is_refused(
    tiny: Repository, tmp_path: Path, workspace: ModuleType, address: str
) -> None:
    with pytest.raises(workspace.ReleaseError, match="is no address of a repository"):
        tiny.make(tmp_path / "out", repository=address)
