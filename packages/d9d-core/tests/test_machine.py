"""Checks of the machine for d9d doctor: memory, disks, shared memory, versions."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from d9d_core.cli import machine as module
from d9d_core.cli.machine import machine
from d9d_core.health import Health

GIB = 2**30


def disks(monkeypatch: pytest.MonkeyPatch, free: float, shared: float | None) -> None:
    def usage(path: Path) -> SimpleNamespace:
        if str(path) != "/dev/shm":
            return SimpleNamespace(total=100 * GIB, free=free * GIB)
        if shared is None:
            raise FileNotFoundError
        return SimpleNamespace(total=shared * GIB, free=shared * GIB)

    monkeypatch.setattr(shutil, "disk_usage", usage)


def test_a_sound_machine_has_versions_memory_and_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    disks(monkeypatch, 50, 8)
    monkeypatch.setattr(module, "_memory", lambda _root: "16.0 GiB")
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: "/tmp")
    found = dict(machine())
    assert list(found) == ["python", "memory", "disk"]
    assert found["python"].message.startswith("Python 3.")
    assert found["disk"] == Health(True, "50.0 GiB free in the current directory, 50.0 GiB free in /tmp")
    assert dict(machine(verbose=True))["shared memory"] == Health(True, "8.0 GiB, 8.0 GiB free in /dev/shm")
    disks(monkeypatch, 50, None)
    monkeypatch.setattr(module, "_memory", lambda _root: None)
    assert list(dict(machine(verbose=True))) == ["python", "disk"]


def test_full_disks_and_small_shared_memory_are_warnings_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    disks(monkeypatch, 0.05, 0.0625)
    found = dict(machine())
    assert all(health.ok for health in found.values())
    assert found["disk"].message.startswith("51 MiB free in the current directory")
    assert "set run.dir and TMPDIR to another disk" in found["disk"].advice
    assert found["shared memory"].message == "64 MiB, 64 MiB free in /dev/shm"
    assert "--shm-size=8g" in found["shared memory"].advice


@pytest.mark.parametrize(
    ("limit", "told"), [("max", ""), (str(99 * GIB), ""), (str(8 * GIB), "; this container may use 8.0 GiB")]
)
def test_memory_names_the_limit_of_a_container(tmp_path: Path, limit: str, told: str) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: {16 * 2**20} kB\nMemAvailable: {4 * 2**20} kB\n")
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text(f"{limit}\n")
    assert module._memory(tmp_path) == f"16.0 GiB, 4.0 GiB available{told}"
    total = module._memory(tmp_path / "elsewhere")
    assert total is not None
    assert total.endswith(" GiB")
