"""The registry fixture holds the given plugins and refuses to look further."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from d9d_core.plugin import Ref, TaskSpec, hookimpl
from d9d_core.registry.loader import discover
from d9d_core.registry.registry import Registry


@hookimpl
def d9d_tasks() -> Iterator[TaskSpec]:
    yield TaskSpec(name="guess", summary="Guess.", config=Ref("acme:Config"), build=Ref("acme:Task"))


ACME = SimpleNamespace(__name__="acme", D9D_API=2, d9d_tasks=d9d_tasks)


def test_a_registry_holds_the_given_plugins_and_core(registry: Callable[..., Registry]) -> None:
    made = registry(ACME)
    assert [entry.spec.key for entry in made.entries("task")] == ["guess"]
    assert "jsonl" in [entry.spec.key for entry in made.entries("tracker")]
    assert made.entries("model") == []


def test_plugins_may_be_named_by_module(
    registry: Callable[..., Registry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "acme_named.py").write_text("D9D_API = 2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "acme_named" in [origin.module for origin in registry("acme_named").plugins]
    with pytest.raises(ModuleNotFoundError, match="acme_nowhere"):
        registry("acme_nowhere.plugin")


@pytest.mark.usefixtures("registry")
def test_discovery_is_refused() -> None:
    with pytest.raises(AssertionError, match="must not look for installed plugins"):
        discover()
