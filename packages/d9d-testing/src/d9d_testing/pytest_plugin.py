"""Pytest fixtures and markers, available wherever d9d-testing is installed.

Every pytest run loads this file, so it imports nothing heavy.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, NoReturn

import pytest

if TYPE_CHECKING:
    from d9d_core.registry.registry import Registry

    from d9d_testing.world import World


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers of the suites."""
    config.addinivalue_line("markers", "smoke: quick; shows that the installed versions work together")
    config.addinivalue_line("markers", "gpus(n): needs n CUDA devices")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that need more CUDA devices than there are."""
    marker = item.get_closest_marker("gpus")
    if marker is None:
        return
    import torch

    if torch.cuda.device_count() < marker.args[0]:
        pytest.skip(f"needs {marker.args[0]} CUDA devices, there are {torch.cuda.device_count()}")


@pytest.fixture
def world() -> type[World]:
    """Class of worlds: ``world(4).run(function, *args)`` runs a module-level function on four gloo processes."""
    from d9d_testing.world import World

    return World


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Registry]:
    """Factory of registries with given plugins only: ``registry("d9d_qwen3.plugin", my_module)``.

    While the test runs, discovery of installed plugins is an error, so that the result does not depend on them.
    """
    from d9d_core.registry import installed
    from d9d_core.registry.registry import Registry

    scan = installed.scan

    def refuse() -> NoReturn:
        raise AssertionError("this test uses the `registry` fixture, so it must not look for installed plugins")

    def of(*plugins: str | ModuleType | object) -> Registry:
        modules = [importlib.import_module(plugin) if isinstance(plugin, str) else plugin for plugin in plugins]
        with monkeypatch.context() as patch:
            patch.setattr(installed, "scan", scan)  # needed to find the distribution of a given module
            return Registry.of(*modules)

    monkeypatch.setattr(installed, "scan", refuse)
    return of
