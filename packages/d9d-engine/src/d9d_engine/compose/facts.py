"""Facts of a start that reports show: device, numbers of parameters, data, and the plugins in use."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Any

import torch
from d9d_core.data import DataStream
from d9d_core.job_file.resolve import Selection

from d9d_engine.compose.assemble import Assembly
from d9d_engine.compose.kernels import KernelChoice


def parameter_counts(assembly: Assembly) -> tuple[int, int]:
    """Numbers of parameters of the full model: all, and trained."""
    groups = (dict(assembly.full_model.named_parameters()), assembly.trained())
    count, trained = (sum(parameter.numel() for parameter in group.values()) for group in groups)
    return count, trained


def start_facts(
    selection: Selection, assembly: Assembly, kernels: Iterable[KernelChoice], device: torch.device, stream: DataStream
) -> dict[str, Any]:
    """Facts of this start of the run, for reports, as JSON values.

    Args:
        selection: plugin records of the job.
        assembly: assembled model.
        kernels: kernel choices of the model and of the optimizer.
        device: device of this process.
        stream: open data stream.
    """
    parameters, trained = parameter_counts(assembly)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        "device": name,
        "parameters": parameters,
        "trained_parameters": trained,
        "data": _plain(stream.facts),
        "plugins": _plugins(selection, kernels),
    }


def _plain(facts: Mapping[str, Any]) -> Any:
    """Facts of a data stream as JSON values; texts for values that JSON lacks, such as NaN."""
    return json.loads(json.dumps(dict(facts), default=str, skipkeys=True), parse_constant=str)


def _plugins(selection: Selection, kernels: Iterable[KernelChoice]) -> Mapping[str, list[str]]:
    """Plugin -> its components in the job, such as ``model qwen3``; without plugins that the job does not use."""
    found: dict[str, list[str]] = {}
    for chosen in selection.all():
        text = f"{chosen.entry.kind.name} {chosen.spec.name}"
        found.setdefault(PurePath(chosen.entry.origin.distribution).name, []).append(text)
    for choice in kernels:
        if choice.supplied_by:  # a distribution with its version, or a file
            name = PurePath(choice.supplied_by).name.split(" ")[0]
            found.setdefault(name, []).append(f"kernel {choice.backend} of {choice.op}")
    return {name: list(dict.fromkeys(parts)) for name, parts in sorted(found.items())}
