"""Health checks of the engine for d9d doctor: torch, and the training device."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from d9d_core.health import Health
from d9d_engine.cli import health
from d9d_engine.distributed import devices

DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 2025\nGCC version: gcc 12.3.0\n"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """File of a driver, which is absent at first."""
    monkeypatch.setattr(health, "_DRIVER", tmp_path / "version")
    return tmp_path / "version"


def test_versions_of_torch_name_its_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.11.1")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(health, "version", lambda _: "3.5")
    assert health.check_torch() == Health(True, "torch 2.11.1, CUDA 13.0, triton 3.5")
    monkeypatch.setattr(torch, "__version__", "2.10.0")
    assert health.check_torch() == Health(False, "torch 2.10.0, CUDA 13.0, triton 3.5; d9d needs torch 2.11 or newer")


def test_equal_gpus_are_counted_and_named_with_memory_capability_and_driver(
    monkeypatch: pytest.MonkeyPatch, driver: Path
) -> None:
    driver.write_text(DRIVER)
    large = SimpleNamespace(name="NVIDIA H200", total_memory=140 * 2**30, major=9, minor=0)
    small = SimpleNamespace(name="NVIDIA L4", total_memory=22 * 2**30, major=8, minor=9)
    gpus = [large, large, small]
    monkeypatch.setattr(devices, "choose_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpus[index])
    assert health.check_device() == Health(
        True,
        "2 x NVIDIA H200, 140.0 GiB, capability 9.0; 1 x NVIDIA L4, 22.0 GiB, capability 8.9; driver 580.65.06",
    )


def test_a_driver_without_a_usable_gpu_is_a_warning_that_names_the_remedy(
    monkeypatch: pytest.MonkeyPatch, driver: Path
) -> None:
    monkeypatch.setattr(devices, "choose_device", lambda _: torch.device("cpu"))
    assert health.check_device().advice == ""
    driver.write_text(DRIVER)
    for cuda, remedy in ((None, "a torch with CUDA"), ("13.0", "a newer driver, or a torch for an older CUDA")):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        advice = f"NVIDIA driver 580.65.06 is here, but torch finds no GPU: install {remedy}"
        assert health.check_device().advice == advice
