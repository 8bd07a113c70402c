"""Health checks of the engine: torch, the training device, and the network."""

from __future__ import annotations

import os

from d9d_core.health import Health


def check_torch() -> Health:
    """Version of torch, and whether d9d supports it."""
    import torch
    from packaging.version import Version

    enough = Version(torch.__version__) >= Version("2.11")
    return Health(enough, f"torch {torch.__version__}" + ("" if enough else "; d9d needs 2.11 or newer"))


def check_device() -> Health:
    """Device that a job with ``device: auto`` would use."""
    import torch

    from d9d_engine.distributed.devices import choose_device

    device = choose_device("auto")
    if device.type == "cpu":
        return Health(True, f"no accelerator; training runs on the CPU with {torch.get_num_threads()} threads")
    return Health(True, f"{torch.accelerator.device_count()} x {device.type}")


def check_network() -> Health:
    """Network interfaces that a run of several processes would listen on, and the processes that it would trust."""
    names = [name for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if os.environ.get(name)]
    told = "".join(f"; {name}={os.environ[name]}" for name in names)
    local = f"--nproc listens on {'the interfaces named here' if names else 'the loopback only'}"
    several = "runs on several machines trust everyone who reaches their ports, so keep them on a private network"
    return Health(True, f"{local}; {several} (docs/launching.md, Trust){told}")
