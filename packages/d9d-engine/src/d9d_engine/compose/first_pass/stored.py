"""Results of a first pass over a whole dataset, computed once and kept in the run's directory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from d9d_core.data import DataStream
from d9d_core.errors import JobError
from d9d_core.job_file.job import JobConfig
from d9d_core.trees import join
from d9d_weights.files.atomic import replacing
from d9d_weights.progress import SampleBar
from d9d_weights.sharding.agreement import on_all, on_main
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from d9d_engine.distributed.mesh import Topology
from d9d_engine.run.prefetch import DevicePrefetcher
from d9d_engine.step.first_pass import FirstForward, GroupRanks, StoredOutputs

#: Name of the samples' numbers in microbatches, and of their count among the facts of a dataset.
SAMPLES = "samples"
_OTHERWISE = "nothing can be stored for each, so let the reference run in every step"


def stored_outputs(
    job: JobConfig,
    forward: FirstForward,
    stream: DataStream,
    where: str,
    ranks: GroupRanks,
    holds_last: bool,
    topology: Topology,
    note: Callable[[str], None],
) -> StoredOutputs:
    """Stored outputs of a first pass for each sample of a dataset: read in the run's directory or computed and written.

    Collective over all ranks.

    Args:
        job: has the run's directory, and decides which results belong to it.
        forward: runs the model, which has the weights that the run starts with.
        stream: the dataset, at its start, where it is left.
        where: field of the job file it is from.
        ranks: those that see other samples.
        holds_last: whether this rank has the last stage.
        topology: the ranks.
        note: prints a line.

    Raises:
        JobError: the dataset does not number its samples.
        CheckpointError: the file cannot be written or read, on any rank.
    """
    path = job.run.directory / f"first-pass-{_identity(job, stream)}.safetensors"
    world = topology.world
    if on_main(lambda: _read(path) is None, world):
        numbers, rows = _run(forward, stream, where, ranks, topology)

        def write() -> None:
            if holds_last:
                table = _gathered(numbers, rows, _count(stream, where), where, ranks)
                if ranks.rank == 0:
                    _write(path, table)

        on_all(write, world)
        note(f"{where}: the first pass over all samples is stored in {path}")
    else:
        note(f"{where}: the first pass over all samples is there, in {path}")
    found = on_all(lambda: _read(path), world)
    if found is None:
        raise JobError(f"{where}: {path} is not there on every machine; runs of several machines need a shared run.dir")
    return StoredOutputs({name: tensor.to(topology.device) for name, tensor in found.items()})


def _count(stream: DataStream, where: str) -> int:
    count = stream.facts.get(SAMPLES)
    if not isinstance(count, int):
        raise JobError(f"{where}: the dataset does not say how many samples it has; {_OTHERWISE}")
    return count


def _run(
    forward: FirstForward, stream: DataStream, where: str, ranks: GroupRanks, topology: Topology
) -> tuple[list[Tensor], list[Mapping[str, Tensor]]]:
    """Run over an epoch: numbers of the samples of each microbatch, and what is kept of them.

    Collective over ``pp``.
    """
    count, start, seen = _count(stream, where), stream.state(), 0
    numbers: list[Tensor] = []
    rows: list[Mapping[str, Tensor]] = []
    with (
        DevicePrefetcher(stream, topology.device, waiting_for=topology.watchdog.waiting_for) as prefetcher,
        SampleBar("first pass", count, shown=topology.is_main) as bar,
    ):
        while seen < count:
            topology.watchdog.beat()
            pack = prefetcher.next()
            if any(SAMPLES not in microbatch for microbatch in pack):
                raise JobError(f"{where}: the dataset does not number its samples; {_OTHERWISE}")
            rows += forward.outputs(pack)
            numbers += [microbatch[SAMPLES] for microbatch in pack]
            done = sum(len(microbatch[SAMPLES]) for microbatch in pack) * ranks.ranks
            seen += done
            bar.add(done)
    stream.load_state(start)
    return numbers, rows


def _gathered(
    numbers: list[Tensor], rows: list[Mapping[str, Tensor]], count: int, where: str, ranks: GroupRanks
) -> dict[str, Tensor]:
    """Tensors [samples, ...] by name. Collective over the ranks that see other samples."""
    places = ranks.all_gather(torch.cat(numbers))
    found = torch.zeros(count, dtype=torch.bool, device=places.device)
    found[places] = True
    table: dict[str, Tensor] = {}
    for name, rows_here in join(rows, 0).items():
        values = ranks.all_gather(rows_here)
        table[name] = values.new_zeros(count, *values.shape[1:])
        table[name][places] = values
    if not found.all():
        raise JobError(f"{where}: an epoch of the dataset does not visit each of its {count} samples; {_OTHERWISE}")
    return table


def _identity(job: JobConfig, stream: DataStream) -> str:
    """Digest of what the results depend on: the data, the model, its start and its number format."""
    peft = None if job.peft is None else job.peft.model_dump(mode="json")
    model, precision = job.model.model_dump(mode="json"), job.precision.model_dump(mode="json")
    parts = [dict(stream.state()), job.task.selector, model, peft, job.seed, precision]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _read(path: Path) -> dict[str, Tensor] | None:
    try:
        return load_file(path)
    except (FileNotFoundError, SafetensorError):  # a damaged one is computed again
        return None


def _write(path: Path, table: dict[str, Tensor]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        save_file({name: tensor.cpu().contiguous() for name, tensor in table.items()}, temporary)
