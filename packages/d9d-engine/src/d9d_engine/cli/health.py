"""Health checks of the engine: torch, the training device, and the network."""

from __future__ import annotations

import os
import re
from collections import Counter
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from d9d_core.health import Health

#: File with the version of NVIDIA's kernel driver; it exists even if torch can use no GPU.
_DRIVER = Path("/proc/driver/nvidia/version")


def check_torch() -> Health:
    """Versions of torch, of CUDA or ROCm and of triton, and whether d9d supports this torch."""
    import torch
    from packaging.version import Version

    versions = [f"torch {torch.__version__}"]
    versions += [
        f"{name} {found}" for name, found in (("CUDA", torch.version.cuda), ("ROCm", torch.version.hip)) if found
    ]
    with suppress(PackageNotFoundError):
        versions.append(f"triton {version('triton')}")
    text = ", ".join(versions)
    if Version(torch.__version__) >= Version("2.11"):
        return Health(True, text)
    return Health(False, f"{text}; d9d needs torch 2.11 or newer")


def check_device() -> Health:
    """Device that a job with ``device: auto`` would use: its name, memory, driver and compute capability."""
    import torch

    from d9d_engine.distributed.devices import choose_device

    device, driver = choose_device("auto"), _driver()
    if device.type == "cpu":
        text = f"no accelerator; training runs on the CPU with {torch.get_num_threads()} threads"
        if driver is None:
            return Health(True, text)
        why = "a torch with CUDA" if torch.version.cuda is None else "a newer driver, or a torch for an older CUDA"
        return Health(True, text, f"NVIDIA driver {driver} is here, but torch finds no GPU: install {why}")
    if device.type != "cuda":
        return Health(True, f"{torch.accelerator.device_count()} x {device.type}")
    each = Counter(map(_gpu, range(torch.cuda.device_count())))
    gpus = "; ".join(f"{count} x {text}" for text, count in each.items())
    return Health(True, gpus + ("" if driver is None else f"; driver {driver}"))


def _gpu(index: int) -> str:
    import torch

    facts = torch.cuda.get_device_properties(index)
    return f"{facts.name}, {facts.total_memory / 2**30:.1f} GiB, capability {facts.major}.{facts.minor}"


def _driver() -> str | None:
    """Version of NVIDIA's kernel driver; ``None`` without one."""
    try:
        found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", _DRIVER.read_text())
    except OSError:
        return None
    return found[0] if found else None


def check_network() -> Health:
    """Network interfaces on which ``--nproc`` listens, and a reminder that machines need a private network."""
    names = [name for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if os.environ.get(name)]
    told = "".join(f"; {name}={os.environ[name]}" for name in names)
    local = f"--nproc listens on {'the interfaces named here' if names else 'the loopback only'}"
    several = "runs on several machines need a private network"
    return Health(True, f"{local}; {several} (docs/launching.md, Trust){told}")
