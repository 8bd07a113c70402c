"""First-pass results of a whole dataset, computed once and stored in the run's directory."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from d9d_core.data import DataStream
from d9d_core.errors import JobError
from d9d_core.job_file.job import JobConfig
from d9d_core.trees import join
from d9d_core.types import Microbatch
from d9d_weights.files.atomic import replacing
from d9d_weights.progress import SampleBar
from d9d_weights.sharding.agreement import on_all, on_main
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from d9d_engine.distributed.mesh import Topology
from d9d_engine.run.prefetch import DevicePrefetcher
from d9d_engine.step.first_pass import FirstForward, GroupRanks, StoredOutputs

#: Key of the sample indices in a microbatch. In the facts of a dataset, the same key has the number of samples.
SAMPLES = "samples"
_OTHERWISE = "results of the reference cannot be stored per sample; run it in every step instead of 'stored'"


def stored_outputs(
    job: JobConfig,
    forward: FirstForward,
    stream: DataStream,
    where: str,
    ranks: GroupRanks,
    holds_last: bool,
    topology: Topology,
    note: Callable[[str], None],
    split: Callable[[Microbatch], Microbatch] | None = None,
) -> StoredOutputs:
    """Load first-pass results of all samples from the run's directory, or compute and store them.

    Collective over all ranks.

    Args:
        job: job with the run's directory; its settings determine whether stored results are valid.
        forward: runs the first pass with the initial weights.
        stream: dataset at its start; its position is restored.
        where: field of the job file with the dataset.
        ranks: ranks with different samples.
        holds_last: whether this rank has the last stage.
        topology: rank, device, meshes and process groups of this process.
        note: prints a line.
        split: function that selects this rank's positions of a microbatch, if ranks split samples.

    Raises:
        JobError: the dataset does not number its samples, an epoch does not visit each of them, or a machine does not
            see the file.
        CheckpointError: the file cannot be written or read, on any rank.
    """
    path = job.run.directory / f"first-pass-{_identity(job, stream)}.safetensors"
    world = topology.world
    # Ranks of other axes than pp, such as tp, have the same results; of these, one rank writes.
    writes = holds_last and not any(index for axis, index in topology.coordinate.items() if axis != "pp")
    if on_main(lambda: _read(path) is None, world):
        numbers, rows = _run(forward, stream, where, ranks, topology, split)

        def write() -> None:
            if holds_last:
                table = _gathered(numbers, rows, _count(stream, where), where, ranks)
                if writes:
                    _write(path, table)

        on_all(write, world)
        note(f"{where}: the first pass over all samples is stored in {path}")
    else:
        note(f"{where}: the first pass over all samples was already stored in {path}")
    found = on_all(lambda: _read(path), world)
    if found is None:
        raise JobError(
            f"{where}: one of the machines does not see {path}; set run.dir to a directory that all machines share"
        )
    return StoredOutputs({name: tensor.to(topology.device) for name, tensor in found.items()})


def _count(stream: DataStream, where: str) -> int:
    count = stream.facts.get(SAMPLES)
    if not isinstance(count, int):
        raise JobError(f"{where}: the dataset's stream has no '{SAMPLES}' in its facts; {_OTHERWISE}")
    return count


def _run(
    forward: FirstForward,
    stream: DataStream,
    where: str,
    ranks: GroupRanks,
    topology: Topology,
    split: Callable[[Microbatch], Microbatch] | None,
) -> tuple[list[Tensor], list[Mapping[str, Tensor]]]:
    """Run the first pass over an epoch; return sample indices and kept outputs of each microbatch.

    Collective over ``pp``.
    """
    # Copy the state, because a stream may change it in place.
    count, start, seen = _count(stream, where), copy.deepcopy(stream.state()), 0
    numbers: list[Tensor] = []
    rows: list[Mapping[str, Tensor]] = []
    with (
        DevicePrefetcher(stream, topology.device, waiting_for=topology.watchdog.waiting_for, split=split) as prefetcher,
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
    """Gather the kept tensors of all samples: name -> [samples, ...]. Collective over the data-parallel ranks."""
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
    """Digest of settings that determine the results: data, task, model, fine-tuning, seed, precision, strategies."""
    peft = None if job.peft is None else job.peft.model_dump(mode="json")
    model, precision = job.model.model_dump(mode="json"), job.precision.model_dump(mode="json")
    # Fields of the task choose outputs, such as the head; strategies such as fp8 change them. Sizes of the mesh do not.
    task, strategies = job.task.model_dump(mode="json"), sorted(config.selector for config in job.parallel)
    parts = [dict(stream.state()), job.task.selector, task, model, peft, job.seed, precision, strategies]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _read(path: Path) -> dict[str, Tensor] | None:
    try:
        return load_file(path)
    except (FileNotFoundError, SafetensorError):  # results of a damaged file are computed again
        return None


def _write(path: Path, table: dict[str, Tensor]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        save_file({name: tensor.cpu().contiguous() for name, tensor in table.items()}, temporary)
