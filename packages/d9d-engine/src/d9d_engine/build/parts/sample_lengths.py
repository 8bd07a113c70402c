"""Lengths of microbatches that the ranks of a job can share, as far as its config tells them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from d9d_core.config.job import BaseJob, JobConfig
from d9d_core.errors import JobError
from d9d_core.layout.check import near_multiples
from d9d_core.plugin.capabilities import Chosen
from d9d_core.protocols.data import sample_lengths
from d9d_core.protocols.strategy import Applied


def check_lengths(job: BaseJob, applied: Sequence[tuple[Chosen, Applied]]) -> None:
    """Compare the lengths of microbatches, as far as the data's config tells them, with the ranks that split them.

    Raises:
        JobError: they do not divide every length.
    """
    lengths = sample_lengths(job.data)
    if lengths is None or not isinstance(job, JobConfig):
        return  # an inference makes one pass, whose last lengths are others
    multiple, cuts = lengths.multiple, list(_cuts(job.mesh.cp, applied))
    for chosen, parts, how in cuts:
        if multiple % parts == 0:
            continue
        near = " or ".join(map(str, near_multiples(multiple, math.lcm(*(others for _, others, _ in cuts)))))
        what = "sequence_length" if lengths.fixed else "pad_multiple"
        raise JobError(
            f"{chosen.where}: strategy '{chosen.spec.name}' splits positions {how}, but those of a microbatch are "
            f"{'' if lengths.fixed else 'multiples of '}{multiple} (data.{what}); use {near}, or other sizes of the "
            "mesh"
        )


def _cuts(cp: int, applied: Sequence[tuple[Chosen, Applied]]) -> Iterator[tuple[Chosen, int, str]]:
    """Strategies that split positions, the number of equal parts that a sample is cut into then, and how, in words."""
    for chosen, outcome in applied:
        if (chunks := outcome.context_chunks) > 1:
            yield chosen, chunks, f"into {chunks} chunks, {chunks // cp} for each of {cp} ranks"
        if (ranks := outcome.sequence_ranks) > 1:
            yield chosen, ranks * cp, f"over {ranks} ranks" + (f", on each of {cp} ranks of cp" if cp > 1 else "")
