from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory on the path, for distributions."""
    directory = tmp_path / "site"
    directory.mkdir()
    monkeypatch.syspath_prepend(str(directory))
    return directory


@pytest.fixture
def install(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Put a distribution on the path: its metadata, and a plugin module with the given code."""
    monkeypatch.delenv("D9D_PLUGINS", raising=False)

    def put(distribution: str, version: str, code: str, module: str | None = None) -> None:
        module = module or distribution.replace("-", "_") + "_plugin"
        (site / f"{module}.py").write_text(HEADER + textwrap.dedent(code))
        info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[d9d]\nplugin = {module}\n")

    yield put
    for name, found in list(sys.modules.items()):
        if str(getattr(found, "__file__", None)).startswith(str(site)):
            del sys.modules[name]


HEADER = """
from d9d_core.plugin import *
from d9d_core.plugin import hookimpl
D9D_API = 2
def strategy(name, **kw):
    return StrategySpec(name=name, summary="for a test", config=Ref("nowhere:Config"), build=Ref("nowhere:Build"),
                        anchor="data", **kw)
"""
