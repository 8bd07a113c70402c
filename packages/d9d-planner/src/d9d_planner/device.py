"""Rates of devices and of the networks between them, built in or from a file. Imports no torch.

Rates are achieved in practice, below the peaks: for products of large bfloat16 matrices, copies, and elementwise ops.
The rates of the H200 were measured (torch 2.11, shapes of a 2 G parameter model); the H100 has the same rates, with
memory bandwidth scaled; the rates of the B200 are published peaks times the efficiencies of the H200.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

import yaml
from d9d_core.config import Section
from d9d_core.errors import JobError
from pydantic import Field, PositiveInt, ValidationError

Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


#: Number of positions for which :attr:`Device.attention` holds.
ATTENTION_LENGTH = 4096


class Device(Section):
    """Rates of a device and of its links, in bytes per second and FLOP/s."""

    memory_gib: Rate
    """Memory in GiB that a process can allocate."""
    product: Rate
    """FLOP/s of dense matrix products in bfloat16."""
    product_float32: Rate
    """FLOP/s of dense matrix products in float32."""
    grouped_product: Rate
    """FLOP/s of the grouped matrix products of experts."""
    attention: Rate
    """FLOP/s of fused attention over 4,096 positions, whose forward is counted as 2 matrix products and whose backward
    as 5."""
    copy_bytes: Rate
    """Bytes per second that a copy, or an optimizer update, reads and writes."""
    elementwise_bytes: Rate
    """Bytes per second that elementwise ops and norms read and write."""
    node: PositiveInt = 8
    """Number of devices per machine."""
    link: Rate
    """Bytes per second that a device sends to devices of the same machine in a collective."""
    network: Rate
    """Bytes per second that a device sends to other machines."""
    link_latency: Seconds = 10e-6
    """Seconds of the smallest collective within a machine."""
    network_latency: Seconds = 5e-6
    """Seconds that each further machine adds to ``link_latency``."""
    interference: Annotated[float, Field(ge=0, le=1)] = 0.7
    """Slowdown of computation by a concurrent collective, as a fraction of the overlapped time."""
    attention_half: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Positions of a causal sample for which attention reaches half of its highest FLOP/s; 0 if it is equally fast for
    all lengths."""
    overhead: Annotated[float, Field(ge=0, le=1)] = 0.0125
    """Idle time of the device between kernels, as a fraction of the computation time."""
    launch: Seconds = 1.9e-3
    """Seconds in which the host launches the kernels of a block: a third for the forward, the rest for the backward."""

    @property
    def memory(self) -> float:
        return self.memory_gib * 2**30

    @classmethod
    def named(cls, name: str) -> Self:
        """Device by name, ``h100``, ``h200`` or ``b200``, or from a YAML or JSON file with these fields.

        Raises:
            JobError: the name is unknown and no file, or the file is invalid.
        """
        if name in _KNOWN:
            return cls(**_KNOWN[name])
        path = Path(name)
        known = ", ".join(_KNOWN)
        try:
            values = yaml.safe_load(path.read_text("utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise JobError(
                f"--gpu: {name!r} is neither a known device ({known}) nor a readable file: {error}"
            ) from error
        if not isinstance(values, dict):
            raise JobError(f"--gpu: {path} is not a mapping of a device's fields, which docs/planning.md lists")
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            lines = (f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors())
            raise JobError(f"--gpu: {path}: " + "; ".join(lines)) from error


#: Published links: NVLink 4 450 GB/s, NVLink 5 900 GB/s in each direction; 400 Gbit/s InfiniBand per device.
#: Collectives achieve about four fifths of these.
_H200 = {
    "memory_gib": 139.8,
    "product": 700e12,
    "product_float32": 45e12,
    "grouped_product": 580e12,
    "attention": 430e12,
    "attention_half": 1300.0,
    "copy_bytes": 4.2e12,
    "elementwise_bytes": 3.0e12,
    "link": 360e9,
    "network": 42e9,
}
_KNOWN: dict[str, dict[str, float]] = {
    "h200": _H200,
    "h100": {**_H200, "memory_gib": 79.1, "copy_bytes": 2.9e12, "elementwise_bytes": 2.1e12},
    "b200": {
        **_H200,
        "memory_gib": 178.0,
        "product": 1590e12,
        "product_float32": 55e12,
        "grouped_product": 1320e12,
        "attention": 980e12,
        "copy_bytes": 7.0e12,
        "elementwise_bytes": 5.0e12,
        "link": 720e9,
    },
}
