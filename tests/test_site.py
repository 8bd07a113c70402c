"""The documentation site builds strictly, a dead link or an undocumented public name fails, and search works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from d9d_core.registry.api import Api

from tests.browser import chromium, find_chromium

pytestmark = pytest.mark.full
ROOT = Path(__file__).parents[1]
#: Sources of the site.
PARTS = (
    "mkdocs.yml",
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "docs",
    "packages",
    "plugins",
    "examples",
    "tools",
)
#: Declared module of the foundation -> its names.
DECLARED = {
    module: names
    for module, names in Api.shipped().names.items()
    if module.startswith(("d9d_core.", "d9d_weights.", "d9d_engine."))
}


def build(tree: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    environ = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=tree, env=environ, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    done = build(ROOT, directory)
    assert done.returncode == 0, done.stderr
    return directory


def test_every_page_is_there_with_its_content(site: Path) -> None:
    first = (site / "index.html").read_text()
    assert "What do you want to do?" in first
    for page in (ROOT / "docs").rglob("*.md"):
        assert (site / page.relative_to(ROOT / "docs").with_suffix(".html")).exists()
    for readme in [*ROOT.glob("packages/*/README.md"), *ROOT.glob("plugins/*/README.md")]:
        assert (site / readme.parent.parent.name / f"{readme.parent.name}.html").exists()
    assert "--max-restarts" in (site / "command-line.html").read_text()
    assert "forgotten_reduction" in (site / "layouts.html").read_text()


def test_the_reference_has_every_public_name(site: Path) -> None:
    pages = "\n".join(page.read_text() for page in sorted((site / "api").glob("*.html")))
    shown = set(re.findall(r'<h\d id="([\w.]+)"', pages))
    assert {f"{module}.{name}" for module, names in DECLARED.items() for name in names} - shown == set()
    assert 'href="api/d9d_core.task.html"' in (site / "index.html").read_text()


def test_the_reference_has_every_suite(site: Path) -> None:
    text = (site / "api/d9d_testing.suites.html").read_text()
    files = (ROOT / "packages/d9d-testing/src/d9d_testing/suites").rglob("*.py")
    suites = {name for file in files for name in re.findall(r"^class (\w+Suite)\b", file.read_text(), re.MULTILINE)}
    assert suites >= {"PluginSuite", "ModelSuite"}
    assert {name for name in suites if f'.{name}"' not in text} == set()


def test_no_page_needs_another_host(site: Path) -> None:
    fetched = re.compile(r'(?:<(?:script|img|iframe)\b[^>]*\bsrc|<link\b[^>]*\bhref)="?(https?:[^">\s]+)')
    assert {url for page in site.rglob("*.html") for url in fetched.findall(page.read_text())} == set()


def test_dead_links_and_undocumented_names_fail(tmp_path: Path) -> None:
    for part in PARTS:
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        ignored = {"ignore": shutil.ignore_patterns("__pycache__", "tests")} if (ROOT / part).is_dir() else {}
        copy(ROOT / part, tmp_path / part, **ignored)
    with (tmp_path / "docs/launching.md").open("a") as page:
        page.write("\n[a](nowhere.md) [b](../packages/d9d-core/src/nothing.py) [c](checkpoints.md#no-such-title)\n")
    with (tmp_path / "plugins/d9d-optim/README.md").open("a") as page:
        page.write("\n[d](../../docs/gone.md)\n\n```text\n[e](in-a-fence.md)\n```\n")
    plugin = tmp_path / "packages/d9d-core/src/d9d_core/health.py"
    added = [
        "class Bare:\n    pass\n",
        'class Half:\n    """Half."""\n\n    def method(self) -> None: ...\n',
        '__all__ = ["Bare", "Half", ',
    ]
    plugin.write_text(plugin.read_text().replace("__all__ = [", "\n\n".join(added)))

    done = build(tmp_path, tmp_path / "site")

    assert done.returncode == 1
    for message in (
        "docs/launching.md: the link nowhere.md leads nowhere",
        "docs/launching.md: the link ../packages/d9d-core/src/nothing.py leads nowhere",
        "no-such-title",
        "plugins/d9d-optim/README.md: the link ../../docs/gone.md leads nowhere",
        "the public name d9d_core.health.Bare has no docstring",
        "the public name d9d_core.health.Half.method has no docstring",
    ):
        assert message in done.stderr, done.stderr
    assert "in-a-fence" not in done.stderr


# --- in a browser ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_browser_shows_the_site_opened_as_files_and_its_search_finds_pages(site: Path, tmp_path: Path) -> None:
    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium; with Debian: apt-get install chromium")
    address = site.as_uri()
    with chromium(program, tmp_path / "profile") as browser:
        browser.listen()
        browser.resize(1280, 900)
        browser.open(f"{address}/index.html?q=learning_rate")
        results = "[...document.querySelectorAll('.md-search-result__link')].map(link => link.href).join(' ')"
        found = browser.wait_for(results)
        assert "words.html" in found
        searching = browser.screenshot()
        for width, dark in ((390, False), (1280, True)):
            browser.resize(width, 900, dark)
            browser.open("about:blank")
            browser.open(f"{address}/index.html")
            scheme = browser.wait_for("document.body?.dataset.mdColorScheme")
            assert scheme == ("slate" if dark else "default")
            assert browser.evaluate("document.documentElement.scrollWidth") <= width
        browser.evaluate("document.querySelector('nav a[href$=\"launching.html\"]').click()")
        browser.wait_for("location.href.endsWith('/launching.html') && document.readyState === 'complete'")
        browser.open(f"{address}/api/d9d_core.task.html#d9d_core.task.Task")
        assert browser.wait_for("document.querySelector('h3[id=\"d9d_core.task.Task\"]')?.innerText")
        broken = "[...document.images].filter(image => image.complete && !image.naturalWidth).length"
        assert browser.evaluate(broken) == 0
        reference = browser.screenshot()
    assert browser.complaints == []
    assert [url for url in browser.requests if not url.startswith(("file:", "data:", "about:"))] == []
    for name, picture in (("search", searching), ("reference", reference)):
        assert picture.startswith(b"\x89PNG")
        assert len(picture) > 20_000, "an empty page is smaller"
        (tmp_path / f"{name}.png").write_bytes(picture)
