"""Health checks of the engine: torch and the device that would train."""

from __future__ import annotations

from d9d_core.protocols.health import Health


def check_torch() -> Health:
    """Version of torch, and whether it is new enough."""
    import torch
    from packaging.version import Version

    enough = Version(torch.__version__) >= Version("2.11")
    return Health(enough, f"torch {torch.__version__}" + ("" if enough else "; d9d needs 2.11 or newer"))


def check_device() -> Health:
    """Device that would train."""
    import torch

    from d9d_engine.distributed.devices import choose_device

    device = choose_device("auto")
    if device.type == "cpu":
        return Health(True, f"no accelerator; training runs on the CPU with {torch.get_num_threads()} threads")
    return Health(True, f"{torch.accelerator.device_count()} x {device.type}")
