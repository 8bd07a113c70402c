"""Site pages from outside docs/: READMEs, linked source files, the API reference; the script of the offline search.

Every page has one source. Pages link to paths in the repository; here the links are rewritten to links of the site. A
broken link, or a public name of a declared module without a docstring, is a warning, which a strict build refuses.
"""

from __future__ import annotations

import logging
import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))
from reference import declared, pages, undocumented

#: MkDocs counts the warnings of this logger.
_LOG = logging.getLogger("mkdocs.hooks.d9d")
_FENCE = re.compile(r"^(```|~~~).*?^\1[^\S\n]*$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?<=\]\()([^)\s#]+)(#[^)\s]*)?(?=\))")
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".json": "json"}
_PICTURES = (".svg", ".png")


def root_of(config: MkDocsConfig) -> Path:
    """Root directory of the repository."""
    return Path(config.config_file_path).parent


#: Files in the root directory that become pages of the same name.
_TOP = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")


def page_of(path: str) -> str | None:
    """Site page of a file in the repository; ``None`` if it has none."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if readme := re.fullmatch(r"((?:packages|plugins|examples)/[^/]+)/README\.md", path):
        return f"{readme[1]}.md"
    return {"README.md": "start.md", **{name: name.lower() for name in _TOP}}.get(path)


def sources(root: Path) -> Iterator[str]:
    """Files outside docs/ that become pages."""
    yield from ("README.md", *_TOP)
    for top in ("packages", "plugins", "examples"):
        yield from sorted(str(path.relative_to(root)) for path in root.glob(f"{top}/*/README.md"))


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the declared modules to the navigation, after the page of the five contracts."""
    (section,) = [item["API reference"] for item in config.nav or [] if "API reference" in item]
    section[1:1] = [{page: f"api/{page}.md"} for page in declared(root_of(config))]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside docs/, and check the docstrings of public names."""
    root = root_of(config)
    origins = {file.src_uri: f"docs/{file.src_uri}" for file in files.documentation_pages()}
    for path in sources(root):
        target = page_of(path)
        assert target is not None
        origins[target] = path
    config.extra["origins"] = origins
    worker = Path(__file__).with_name("iframe-worker.js")
    files.append(File.generated(config, "assets/iframe-worker.js", content=worker.read_text("utf-8")))
    for target, path in origins.items():
        if not path.startswith("docs/"):
            files.append(File.generated(config, target, content=(root / path).read_text("utf-8")))
    for name, text in pages(root).items():
        files.append(File.generated(config, f"api/{name}.md", content=text))
    for path in sorted(linked_sources(root, origins.values())):
        if path.endswith(_PICTURES):
            files.append(File.generated(config, f"source/{path}", abs_src_path=str(root / path)))
        else:
            files.append(File.generated(config, f"source/{path}.md", content=as_page(root, path)))
    for problem in undocumented(root):
        _LOG.warning(problem)
    return files


def linked_sources(root: Path, origins: Any) -> set[str]:
    """Linked files that are not pages, such as modules and job files."""
    return {
        path
        for origin in origins
        for link, _ in _LINK.findall(_FENCE.sub("", (root / origin).read_text("utf-8")))
        if not is_foreign(link)
        and page_of(path := posixpath.normpath(posixpath.join(posixpath.dirname(origin), link))) is None
        and (root / path).exists()
    }


def is_foreign(link: str) -> bool:
    """Whether a link points outside of the repository."""
    return bool(re.match(r"[a-z]+:", link))


def as_page(root: Path, path: str) -> str:
    """Page that shows a file of the repository, or lists a directory."""
    language = _LANGUAGES.get(Path(path).suffix, "text")
    meta = "---\nsearch:\n  exclude: true\n---\n"
    if (root / path).is_dir():
        names = sorted(file.name for file in (root / path).iterdir() if file.is_file())
        return f"{meta}# {path}\n\n" + "".join(f"- `{name}`\n" for name in names)
    return f"{meta}# {path}\n\n~~~~~~{language}\n{(root / path).read_text('utf-8')}~~~~~~\n"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links between files of the repository to links between pages."""
    origin = config.extra["origins"].get(page.file.src_uri)
    if origin is None:
        return markdown

    def translated(match: re.Match[str]) -> str:
        link, anchor = match[1], match[2] or ""
        if is_foreign(link):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), link))
        target = page_of(path) or (f"source/{path}" if path.endswith(_PICTURES) else f"source/{path}.md")
        if files.get_file_from_path(target) is None:
            _LOG.warning("%s: the link %s leads nowhere", origin, link)
            return match[0]
        return posixpath.relpath(target, posixpath.dirname(page.file.src_uri) or ".") + anchor

    pieces, last = [], 0
    for fence in _FENCE.finditer(markdown):
        pieces += [_LINK.sub(translated, markdown[last : fence.start()]), fence[0]]
        last = fence.end()
    return "".join([*pieces, _LINK.sub(translated, markdown[last:])])
