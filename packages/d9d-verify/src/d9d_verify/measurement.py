"""Measurements of a job's first steps: records of ranks, merged over all ranks.

Each value has a name. Names of numbers: ``start/max_norm`` of clipping, ``0/loss`` (of step 0), ``0/loss/<term>`` if
there are several terms, ``0/tokens``, ``0/grad_norm``, ``0/lr``, ``end/<series>``. Names of tensors:
``start/model/<name>``, ``0/gradients/<parameter>``, and, after step 0, ``0/model/<name>`` and
``0/optimizer/<parameter>/<slot>``. ``model`` has parameters and persistent buffers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from d9d_weights.sharding.shards import describe
from safetensors.torch import load_file, save_file
from torch import Tensor

#: Separator between the name of a tensor and the offset of a rank's shard.
_AT = "@"


@dataclass
class Record:
    """Record of one rank in a measurement.

    Attributes:
        numbers: name -> value; should be equal on all ranks.
        windows: ``"<name>@<offset>"`` -> this rank's shard of a tensor, in host memory.
    """

    numbers: dict[str, float] = field(default_factory=dict)
    windows: dict[str, Tensor] = field(default_factory=dict)

    def take(self, prefix: str, tensors: Mapping[str, Tensor]) -> None:
        """Record copies of this rank's shards of tensors."""
        for name, local in describe(tensors).items():
            for shard in local.shards:
                key = f"{prefix}/{name}{_AT}{','.join(map(str, shard.offset))}"
                self.windows[key] = shard.tensor.to("cpu", copy=True).contiguous()

    def write(self, directory: Path, rank: int) -> None:
        """Save the record to ``<rank>.json`` and ``<rank>.safetensors`` in a directory."""
        save_file(self.windows, directory / f"{rank}.safetensors")
        # Numbers are written as texts: a broken layout may compute NaN, which JSON lacks.
        numbers = {name: repr(value) for name, value in self.numbers.items()}
        (directory / f"{rank}.json").write_text(json.dumps(numbers))

    @classmethod
    def read(cls, directory: Path, rank: int) -> Record:
        """Load the files that :meth:`write` saved."""
        numbers = json.loads((directory / f"{rank}.json").read_text())
        return cls(
            {name: float(value) for name, value in numbers.items()}, load_file(directory / f"{rank}.safetensors")
        )


@dataclass
class Measurement:
    """Merged records of all ranks over the first steps of a job.

    Attributes:
        numbers: name -> value.
        tensors: name -> full tensor.
        disagreements: names of values that should be equal on several ranks but are not, in order of steps.
    """

    numbers: dict[str, float] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    disagreements: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, records: Sequence[Record]) -> Measurement:
        """Merge the records of all ranks, given in the order of ranks."""
        merged = cls()
        differing: dict[str, None] = {}
        for record in records:
            for name, value in record.numbers.items():
                if repr(merged.numbers.setdefault(name, value)) != repr(value):
                    differing[name] = None
        windows: dict[str, dict[tuple[int, ...], Tensor]] = {}
        for record in records:
            for key, tensor in record.windows.items():
                name, _, at = key.rpartition(_AT)
                offset = tuple(int(index) for index in at.split(",") if index)
                held = windows.setdefault(name, {}).setdefault(offset, tensor)
                if held.shape != tensor.shape or not _same_bits(held, tensor):
                    differing[name] = None
        merged.tensors = {name: _joined(parts) for name, parts in windows.items()}
        merged.disagreements = sorted(differing, key=when)
        return merged

    @property
    def steps(self) -> int:
        """Number of measured steps."""
        return sum(
            1 for name in self.numbers if name.partition("/")[2] == "loss" and name.partition("/")[0].isdecimal()
        )

    def series(self, what: str) -> list[float]:
        """Values of ``loss``, ``grad_norm`` or ``lr`` in each step."""
        return [self.numbers[f"{step}/{what}"] for step in range(self.steps)]

    def under(self, prefix: str) -> dict[str, Tensor]:
        """Tensors whose names begin with ``prefix/``, by their names without the prefix."""
        return {name[len(prefix) + 1 :]: t for name, t in self.tensors.items() if name.startswith(f"{prefix}/")}

    def guide(self) -> Measurement:
        """Values to guide a :class:`~d9d_verify.measure.Witness`: gradients, buffers, frozen parameters of steps."""
        parts = {name: name.split("/", 2)[1:] for name in self.tensors}
        parameters = {name for kind, name in parts.values() if kind == "gradients"}
        return Measurement(
            tensors={
                whole: self.tensors[whole]
                for whole, (kind, name) in parts.items()
                if kind == "gradients" or (kind == "model" and name not in parameters)
            }
        )

    def with_steps_of(self, later: Measurement) -> Measurement:
        """Return this measurement extended by a measurement of later steps, such as steps after a resume."""
        ends = {name: value for name, value in self.numbers.items() if not name.startswith("end/")}
        return Measurement(
            ends | later.numbers,
            self.tensors | {name: t for name, t in later.tensors.items() if not name.startswith("start/")},
            [*self.disagreements, *later.disagreements],
        )


def read_all(directory: Path, ranks: int) -> Measurement:
    """Load and merge the records of all ranks."""
    return Measurement.of([Record.read(directory, rank) for rank in range(ranks)])


def when(name: str) -> tuple[float, int]:
    """Sort key of a name in the order of computation: by step, then gradients before updates."""
    step, _, rest = name.partition("/")
    order = ("loss", "tokens", "grad_norm", "gradients", "lr", "model", "optimizer")
    kind = rest.partition("/")[0]
    place = order.index(kind) if kind in order else len(order)
    return (-1.0 if step == "start" else float(step) if step.isdecimal() else float("inf")), place


def fill(tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copy full tensors into this rank's shards of the tensors with the same names."""
    known = {name: tensor for name, tensor in tensors.items() if name in values}
    for name, local in describe(known).items():
        for shard in local.shards:
            window = values[name]
            for dim, (start, size) in enumerate(zip(shard.offset, shard.shape, strict=True)):
                window = window.narrow(dim, start, size)
            shard.tensor.copy_(window)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _joined(parts: Mapping[tuple[int, ...], Tensor]) -> Tensor:
    if len(parts) == 1 and not any(next(iter(parts))):
        return next(iter(parts.values()))
    ends = [[start + size for start, size in zip(at, part.shape, strict=True)] for at, part in parts.items()]
    whole = _nothing(next(iter(parts.values())), [max(sizes) for sizes in zip(*ends, strict=True)])
    for at, part in parts.items():
        whole[tuple(slice(start, start + size) for start, size in zip(at, part.shape, strict=True))] = part
    return whole


def _nothing(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Tensor of NaN (zeros for integers), so that elements which no rank has recorded are detected."""
    return torch.full(shape, torch.nan if like.is_floating_point() else 0, dtype=like.dtype)
