"""Releases carry licence text, metadata and addresses; links of their READMEs work outside of the repository."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.tools

ROOT = Path(__file__).parents[1]
ADDRESS = "https://example.org/d9d"


def import_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release", ROOT / "tools" / "release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


release = import_tool()


def test_every_member_has_licence_text_classifiers_and_keywords() -> None:
    assert {member.name: lacks for member in release.members() if (lacks := release.lacking(member))} == {}


def test_a_member_without_them_is_recognised(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "acme"\nkeywords = ["pytorch"]\n')
    assert [text.partition(" ")[0] for text in release.lacking(tmp_path)] == ["LICENSE,", "the", "the"]


def test_a_release_is_refused_as_long_as_the_repository_has_no_address(tmp_path: Path) -> None:
    command = [sys.executable, "tools/release.py", str(tmp_path / "dist")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if release.REPOSITORY:
        pytest.skip("the repository has an address")
    assert done.returncode == 1
    assert "the repository has no public address" in done.stderr
    assert "set REPOSITORY in tools/release.py" in done.stderr
    assert not (tmp_path / "dist").exists()


@pytest.mark.parametrize("member", release.members(), ids=lambda member: member.name)
def test_no_link_of_a_released_readme_is_relative(member: Path, tmp_path: Path) -> None:
    text = (release.stage(member, tmp_path, ADDRESS) / "README.md").read_text()
    links = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"^[ ]*```.*?^[ ]*```", "", text, flags=re.DOTALL | re.MULTILINE))
    assert [link for link in links if not link.startswith(("https://", "http://", "#"))] == []
    for link in links:
        if link.startswith(ADDRESS):
            place = re.sub(rf"^{ADDRESS}/(?:blob|tree)/v[0-9.]+/|#.*$", "", link)
            assert (ROOT / place).exists(), link


def test_links_become_addresses_and_code_stays() -> None:
    member = ROOT / "packages" / "d9d-core"
    text = "[a](../../docs/index.md#b) [`c`](src) [d](#e) [f](https://g.h) `[i](j)`\n```\n[k](l)\n```\n"
    assert release.absolute(text, member, ADDRESS, "v1") == (
        f"[a]({ADDRESS}/blob/v1/docs/index.md#b) [`c`]({ADDRESS}/tree/v1/packages/d9d-core/src) [d](#e) "
        "[f](https://g.h) `[i](j)`\n```\n[k](l)\n```\n"
    )
    with pytest.raises(release.ReleaseError, match="the link ../../../x.md points outside of the repository"):
        release.absolute("[a](../../../x.md)", member, ADDRESS, "v1")


@pytest.mark.full
def test_a_built_wheel_carries_all_of_it(tmp_path: Path) -> None:
    copy = release.stage(ROOT / "plugins" / "d9d-optim", tmp_path, ADDRESS)
    subprocess.run(["uv", "build", "--quiet", "--out-dir", str(tmp_path), str(copy)], check=True, capture_output=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        (licence,) = [name for name in wheel.namelist() if name.endswith("licenses/LICENSE")]
        assert wheel.read(licence) == (ROOT / "LICENSE").read_bytes()
        metadata = wheel.read(next(name for name in wheel.namelist() if name.endswith("METADATA"))).decode()
    assert f"Project-URL: Repository, {ADDRESS}\n" in metadata
    assert "Keywords: " in metadata
    assert metadata.count("Classifier: ") == len(release.CLASSIFIERS)
    assert "](../" not in metadata
