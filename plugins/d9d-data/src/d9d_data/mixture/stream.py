"""Stream of the dataset ``mixture``."""

from __future__ import annotations

import hashlib
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from d9d_core.data import DataContext, DataStream
from d9d_core.errors import DataError
from d9d_core.types import State

from d9d_data.mixture.config import MixtureConfig, MixturePart
from d9d_data.mixture.merge import LENGTHS, Sample, merge, with_lengths
from d9d_data.mixture.order import MixtureOrder
from d9d_data.order.layout import Layout
from d9d_data.stream.base import PackStream
from d9d_data.stream.one_pass import ROWS, OnePassStream
from d9d_data.stream.packing import NO_TARGET
from d9d_data.stream.reader import Arrays, Lost, PackSource, TellsLosses
from d9d_data.tokenizer.base import TOKENIZER_FILE

#: Field of a part's dataset that has no effect, because the mixture forms the packs -> advice.
_UNUSED: Mapping[str, str] = {
    "workers": "remove it, and use data.workers",
    "bucket_window": "remove it, because packs are formed of all parts",
}

#: Facts that must be equal in all parts -> their names in messages.
_EQUAL = {"labels": "classes", "texts": "texts"}
#: Names of the facts that count records; the counts of all parts are added.
_COUNTED = ("cut_documents", "incomplete", "dropped")


def build_mixture(
    config: MixtureConfig, context: DataContext, build_inner: Callable[[Any, DataContext], DataStream]
) -> MixtureStream | OnePassStream:
    """Open the datasets of all parts of a mixture, and mix them.

    Raises:
        DataError: the parts cannot be mixed; the message says how to change them.
    """
    streams = []
    for index, part in enumerate(config.parts):
        _check_fields(part, index)
        seed = int.from_bytes(hashlib.sha256(f"seed {context.seed} part {index}".encode()).digest()[:6], "big")
        # Packs of one sample, so that the part can give any single sample.
        own = replace(context, seed=seed, batch_size=1, microbatch_size=1, rank=0, ranks=1)
        try:
            streams.append(build_inner(part.data, own))
        except DataError as error:
            raise _placed(error, index) from error
    stream = MixtureStream(config, context, streams)
    return stream.one_pass(context) if context.one_pass else stream


class MixtureStream(PackStream):
    """Stream of a mixture of several datasets.

    A pack, the samples of one step, has the next ``batch_size`` samples of one global order. Rank r of R takes the r-th
    of R equal contiguous parts of the pack, divided into microbatches, each padded to its longest sample.

    Args:
        config: weights and epochs of the parts.
        context: context of the job.
        streams: streams of the parts, with packs of one sample; each has a ``source`` that builds any of its packs.

    Raises:
        DataError: the parts cannot be mixed.
    """

    def __init__(self, config: MixtureConfig, context: DataContext, streams: Sequence[Any]) -> None:
        layout = Layout.of(context)
        parts = list(zip(config.parts, streams, strict=True))
        sources = [_source(stream, part, index) for index, (part, stream) in enumerate(parts)]
        limits = [_limit(part, stream.facts, index) for index, (part, stream) in enumerate(parts)]
        self._streams = streams
        self._parts = config.parts
        self._order = MixtureOrder([part.weight for part in config.parts], limits)
        samples = [int(stream.facts.get("samples", 0)) for stream in streams]
        firsts = [source.pack_at(0)[0] for source in sources]
        uneven = len({first["tokens"].shape[1:] for first in firsts if "tokens" in first}) > 1
        lengths = uneven or any(LENGTHS in first for first in firsts)
        weighted = any("weights" in first for first in firsts)
        offsets = tuple(sum(samples[:index]) for index in range(len(samples)))
        source = MixturePacks(tuple(sources), self._order, layout, lengths, weighted, offsets, _fill(config.parts))
        _check_alike([source.completed(first, 0) for first in firsts], config.parts)
        self._check_tokenizers()
        self._check_facts()
        fingerprints = [stream.state()["fingerprint"] for stream in streams]
        identity = f"mixture {[(p.weight, p.epochs, f) for p, f in zip(config.parts, fingerprints, strict=True)]}"
        needs = "the order, weight and epochs of the parts, and all that the samples of each part depend on,"
        super().__init__(source, layout.batch_size, config.workers, identity, needs)
        self._sources = source
        self._workers = config.workers
        self._described = (identity, needs)

    def one_pass(self, context: DataContext) -> OnePassStream:
        """Stream of one pass over all parts, one after another; weights and epochs are ignored.

        Raises:
            DataError: a part cannot make one pass, or only some of the parts pack several documents into a row.
        """
        facts = [stream.facts for stream in self._streams]
        for index, (part, own) in enumerate(zip(self._parts, facts, strict=True)):
            where = f"data.parts[{index}].data: dataset '{part.data.selector}'"
            if not isinstance(own.get(ROWS), int):
                raise DataError(f"{where} cannot make a pass over its samples: its stream has no fact '{ROWS}'")
            if own.get("packed") != facts[0].get("packed"):
                raise DataError(
                    f"{where} and the dataset of parts[0] differ in whether a sample packs several documents, so their "
                    "rows cannot be numbered in the same way; use the same packing"
                )
        samples, rows = ([int(str(own[name])) for own in facts] for name in ("samples", ROWS))
        source = MixtureSamples(self._sources, *(tuple(accumulate(sizes[:-1], initial=0)) for sizes in (samples, rows)))
        more = {"packed": True} if facts[0].get("packed") else {}
        # The size of a sample is unknown until it is read, so nothing is sorted.
        return OnePassStream(
            source,
            sum(samples),
            sum(rows),
            context,
            self._workers,
            *self._described,
            {**self.facts, **more},
            self.save_assets,
            context.microbatch_size,
        )

    @property
    def facts(self) -> State:
        """Common facts of the parts, and under ``parts`` the facts of each part.

        ``samples`` is present if all parts have an end.
        """
        all_facts = [stream.facts for stream in self._streams]
        common: dict[str, Any] = {}
        if lengths := [facts["sequence_length"] for facts in all_facts if "sequence_length" in facts]:
            common["sequence_length"] = max(lengths)
        for name in ("vocab_size", "num_classes"):
            if values := [facts[name] for facts in all_facts if name in facts]:
                common[name] = max(values)
        for name in ("tokenizer", "texts_per_sample", *_EQUAL):
            if values := [facts[name] for facts in all_facts if name in facts]:
                common[name] = values[0]
        for name in _COUNTED:
            if values := [facts[name] for facts in all_facts if name in facts]:
                common[name] = sum(values)
        if self._order.samples is not None:
            common["samples"] = self._order.samples
        parts = [
            {
                "dataset": part.data.selector,
                "weight": part.weight,
                **({"epochs": part.epochs} if part.epochs else {}),
                **facts,
            }
            for part, facts in zip(self._parts, all_facts, strict=True)
        ]
        return {**common, "parts": parts}

    def save_assets(self, directory: Path) -> None:
        """Write the parts' files for an export, such as the tokenizer's; earlier parts overwrite later parts' files."""
        for stream in reversed(self._streams):
            stream.save_assets(directory)

    def close(self) -> None:
        """End the worker processes, if the stream has started any, and close the streams of the parts."""
        super().close()
        for stream in self._streams:
            if hasattr(stream, "close"):
                stream.close()

    def _check_tokenizers(self) -> None:
        found: dict[int, bytes] = {}
        for index, stream in enumerate(self._streams):
            with tempfile.TemporaryDirectory() as directory:
                stream.save_assets(Path(directory))
                file = Path(directory) / TOKENIZER_FILE
                if file.is_file():
                    found[index] = file.read_bytes()
        for index, content in found.items():
            first = next(iter(found))
            if content != found[first]:
                raise DataError(
                    f"data.parts: parts[{first}] and parts[{index}] have different tokenizers, so the same id would be "
                    "two tokens; give both the same 'tokenizer', such as the path of a tokenizer.json"
                )

    def _check_facts(self) -> None:
        """Check that all parts have the same class names and the same names of the texts in a sample.

        Label ids are indices of classes, and row r of a microbatch is text ``r % number of texts`` of its sample.
        """
        for name, what in _EQUAL.items():
            found = {index: stream.facts.get(name) for index, stream in enumerate(self._streams)}
            for index, values in found.items():
                if values != found[0]:
                    raise DataError(
                        f"data.parts: names of the {what} in parts[0]: {_listed(found[0])}; in parts[{index}]: "
                        f"{_listed(values)}; mix datasets with the same {what}"
                    )


@dataclass(frozen=True, slots=True)
class MixturePacks:
    """Source of one rank's share of any pack (samples of a step) of a mixture; see :class:`MixtureStream`.

    Attributes:
        sources: sources of the parts, with packs of one sample.
        order: assignment of samples to parts.
        layout: layout of the packs.
        lengths: whether microbatches have ``lengths``, the unpadded lengths of the samples.
        weighted: whether microbatches have loss weights of targets; in parts without weights, each target gets 1.
        fill: padding values set by the parts.
        offsets: number added to each part's sample indices, so that all indices differ.
    """

    sources: tuple[PackSource, ...]
    order: MixtureOrder
    layout: Layout
    lengths: bool
    weighted: bool
    offsets: tuple[int, ...]
    fill: Mapping[str, float]

    def pack_at(self, consumed: int) -> Arrays:
        """Microbatches of a pack (the samples of a step), arrays [B, S]; S differs between microbatches."""
        layout = self.layout
        first = consumed + layout.rank * layout.share
        return [
            self.merged([self.order(number) for number in range(begin, begin + layout.microbatch_size)])
            for begin in range(first, first + layout.share, layout.microbatch_size)
        ]

    def lost_at(self, consumed: int) -> Sequence[Lost]:
        """Numbers of tokens that the documents of the pack's rows lost to truncation; 0 for parts without counts."""
        layout = self.layout
        first = consumed + layout.rank * layout.share
        lost: list[Lost] = []
        for begin in range(first, first + layout.share, layout.microbatch_size):
            places = [self.order(number) for number in range(begin, begin + layout.microbatch_size)]
            lost.append([row for part, place in places for row in self._lost(part, place)])
        return lost

    def _lost(self, part: int, place: int) -> Lost:
        source = self.sources[part]
        if isinstance(source, TellsLosses):
            return source.lost_at(place)[0]
        return [[]] * len(source.pack_at(place)[0].get("tokens", ()))  # one for each row

    def completed(self, sample: Sample, part: int) -> Sample:
        """Add to a sample of a part the fields that it lacks, so that samples of all parts have the same fields."""
        if self.lengths and "tokens" in sample:
            sample = with_lengths(sample)
        if self.weighted and "targets" in sample and "weights" not in sample:
            sample = {**sample, "weights": (sample["targets"] != NO_TARGET).astype(np.float32)}
        return {**sample, "samples": sample["samples"] + self.offsets[part]} if "samples" in sample else sample

    def merged(self, places: Sequence[tuple[int, int]]) -> Sample:
        """Microbatch of samples, given as pairs of a part and the sample's index in the part."""
        samples = [self.completed(self.sources[part].pack_at(place)[0], part) for part, place in places]
        return merge(samples, self.fill)


@dataclass(frozen=True, slots=True)
class MixtureSamples:
    """Source of arbitrary samples of a mixture, numbered part after part.

    Attributes:
        packs: source of the mixture's packs.
        samples: index of the first sample of each part.
        rows: index of the first row of each part.
    """

    packs: MixturePacks
    samples: tuple[int, ...]
    rows: tuple[int, ...]

    def sizes(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Sizes of samples [b]: zeros, because the sizes are unknown."""
        return np.zeros(len(samples), dtype=np.int64)

    def microbatch(self, samples: npt.NDArray[np.int64]) -> Sample:
        """Microbatch of samples [b], with their ``rows``."""
        parts = np.searchsorted(self.samples, samples, side="right") - 1
        places = samples - np.asarray(self.samples)[parts]
        merged = dict(self.packs.merged(list(zip(parts.tolist(), places.tolist(), strict=True))))
        texts = len(merged[ROWS]) // len(samples)
        merged[ROWS] = merged[ROWS] + np.repeat(np.asarray(self.rows)[parts], texts)
        return merged


def _placed(error: DataError, index: int) -> DataError:
    """Copy an error of a part, with the part's position in the job file before the names of its fields."""
    text = str(error)
    own = text.removeprefix("data") if text.startswith(("data.", "data:")) else f": {text}"
    placed = DataError(f"data.parts[{index}].data{own}")
    placed.origin = error.origin
    return placed


def _check_fields(part: MixturePart, index: int) -> None:
    for field, instead in _UNUSED.items():
        if (
            field in type(part.data).model_fields
            and getattr(part.data, field) != type(part.data).model_fields[field].default
        ):
            raise DataError(f"data.parts[{index}].data.{field}: has no effect in a mixture; {instead}")


def _fill(parts: Sequence[MixturePart]) -> dict[str, float]:
    """Padding values by field, collected from the parts."""
    found: dict[str, float] = {}
    for index, part in enumerate(parts):
        if getattr(part.data, "side", "right") == "left":
            raise DataError(f"data.parts[{index}].data.side: padding on the left cannot be mixed; use 'right'")
        for name, value in getattr(part.data, "padding", {}).items():
            if found.setdefault(name, value) != value:
                raise DataError(
                    f"data.parts[{index}].data.padding: pads '{name}' with {value:g}, another part with "
                    f"{found[name]:g}; use one value"
                )
    return found


def _source(stream: Any, part: MixturePart, index: int) -> PackSource:
    source: PackSource | None = getattr(stream, "source", None)
    if source is None or not hasattr(source, "pack_at"):
        raise DataError(
            f"data.parts[{index}].data: dataset '{part.data.selector}' cannot be mixed: its stream has no 'source' "
            "with pack_at(consumed), which builds the pack after any number of samples"
        )
    return source


def _limit(part: MixturePart, facts: State, index: int) -> int | None:
    """Number of samples that a part gives before it ends; ``None`` if it never ends."""
    if part.epochs is None:
        return None
    samples = facts.get("samples")
    if not isinstance(samples, int):
        raise DataError(
            f"data.parts[{index}].epochs: dataset '{part.data.selector}' has an unknown number of samples per epoch; "
            "remove epochs"
        )
    return math.ceil(Fraction(str(part.epochs)) * samples)


def _listed(values: Any) -> str:
    return ", ".join(map(str, values)) if values else "none"


def _check_alike(samples: Sequence[Sample], parts: Sequence[MixturePart]) -> None:
    """Check that the parts give tensors of the same names, dtypes and shapes."""

    def kinds(sample: Sample) -> dict[str, tuple[object, ...]]:
        return {name: (np.asarray(a).dtype.str, a.ndim, *a.shape[2:], len(a)) for name, a in sorted(sample.items())}

    first = kinds(samples[0])
    for index, sample in enumerate(samples):
        own = kinds(sample)
        if differing := sorted(name for name in {*own, *first} if own.get(name) != first.get(name)):
            raise DataError(
                f"data.parts: parts[0] ('{parts[0].data.selector}') gives {', '.join(first)}, and parts[{index}] "
                f"('{parts[index].data.selector}') gives {', '.join(own)}; {', '.join(differing)} do not fit in "
                "one microbatch; mix datasets of the same kind"
            )
