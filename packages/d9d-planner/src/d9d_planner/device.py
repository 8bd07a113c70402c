"""Rates of devices and of the networks between them: published ones, or those of a file. Imports no torch.

Achieved rates, not peaks: products of large matrices in bfloat16, and what a copy or an elementwise op reaches. Those
of the H200 were measured (torch 2.11, shapes of a 2 G parameter model); those of the H100 have its memory's bandwidth
scaled, those of the B200 are the published peaks times the same efficiencies.
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


class Device(Section):
    """Rates of one device and of its links; bytes and operations are of a second."""

    memory_gib: Rate
    """Memory that a process can allocate."""
    product: Rate
    """Operations of dense products in bfloat16."""
    product_float32: Rate
    """Operations of dense products in float32."""
    grouped_product: Rate
    """Operations of the grouped products of experts."""
    attention: Rate
    """Operations of fused attention; its backward has five products for two of the forward."""
    copy_bytes: Rate
    """Bytes that a copy reads and writes; optimizers reach it too."""
    elementwise_bytes: Rate
    """Bytes that elementwise ops and norms read and write."""
    node: PositiveInt = 8
    """Devices of a machine."""
    link: Rate
    """Bytes that a device sends to others of its machine in a collective."""
    network: Rate
    """Bytes that a device sends to other machines."""
    link_latency: Seconds = 10e-6
    """Time of the smallest collective inside of a machine."""
    network_latency: Seconds = 5e-6
    """Time that each further machine adds to it."""
    interference: Annotated[float, Field(ge=0, le=1)] = 0.7
    """Part of the time of a collective beside computation by which that computation takes longer."""
    overhead: Annotated[float, Field(ge=0, le=1)] = 0.0125
    """Part of the time of computation in which the device idles between kernels."""
    launch: Seconds = 1.9e-3
    """Time in which the host launches forward and backward of a block, of which the forward is a third."""

    @property
    def memory(self) -> float:
        """Bytes of its memory."""
        return self.memory_gib * 2**30

    @classmethod
    def named(cls, name: str) -> Self:
        """Device of a name, ``h100``, ``h200`` or ``b200``, or of a YAML or JSON file with these fields.

        Raises:
            JobError: there is no such device, or the file is wrong.
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
            raise JobError(f"--gpu: {path} holds no fields of a device; write them as in docs/planning.md")
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            lines = (f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors())
            raise JobError(f"--gpu: {path}: " + "; ".join(lines)) from error


#: Published links: NVLink 4 450 GB/s, NVLink 5 900 GB/s in each direction; 400 Gbit/s InfiniBand for each device. In
#: collectives about four fifths of that arrive.
_H200 = {
    "memory_gib": 139.8,
    "product": 700e12,
    "product_float32": 45e12,
    "grouped_product": 580e12,
    "attention": 430e12,
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
