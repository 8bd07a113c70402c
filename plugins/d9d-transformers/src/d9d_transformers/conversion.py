"""Mappers between the tensors in files of transformers and the tensors of its models in memory.

Most tensors have the same name in files and in memory. For other tensors, transformers has a list of conversions for
each type of model. This module translates the operations of the list to mappers; each operation moves elements only, so
that a rank reads only the bytes of its own shards.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from d9d_core.errors import CheckpointError
from d9d_weights.graph.base import Mapper, Parallel
from d9d_weights.graph.mappers import Identity, Rename, Transpose
from d9d_weights.graph.merging import Chunk, Concatenate, Stack
from d9d_weights.graph.select import Copy, Drop, Rest

from d9d_transformers.attention import register
from d9d_transformers.config import TransformersConfig
from d9d_transformers.containers import name_inside
from d9d_transformers.experts import BANK, DOWN, GATE_UP, replace_experts
from d9d_transformers.head import Head
from d9d_transformers.library import base_of, conversions, native_config, native_model

#: Placeholder of an expert's index in a pattern.
_INDEX = "*"


#: Name prefixes of a language model's tensors in the files of a larger model, and the name prefix of its head there.
_INSIDE = ("language_model.model", "model.language_model", "model.text_model")
_HEAD_INSIDE = "language_model"
#: Regular expression, in a tuple, that matches every tensor name.
_ANY = ("",)


@dataclass
class _Correspondence:
    """Correspondence of the tensors in files to d9d's tensors: mappers in four steps, and names.

    Attributes:
        first: mappers from files to transformers' tensors in memory, or to pieces of these tensors.
        second: mappers that join the pieces to transformers' tensors.
        third: mappers from transformers' tensors of experts to gate, up and down projections.
        fourth: mappers from these projections to d9d's stacked expert weights.
        base: name of the model without its head.
        head: name of the head.
        tied: names of the head's weight and of the embedding's weight, if they are tied.
        prefixes: mappers from names in files of larger models that contain this model.
        ignored: regular expressions of names in files that the model does not use.
        known: names of transformers' tensors in memory.
    """

    first: list[Mapper] = field(default_factory=list)
    second: list[Mapper] = field(default_factory=list)
    third: list[Mapper] = field(default_factory=list)
    fourth: list[Mapper] = field(default_factory=list)
    base: str = ""
    head: str = ""
    tied: tuple[str, str] | None = None
    prefixes: list[Mapper] = field(default_factory=list)
    ignored: tuple[str, ...] = ()
    known: frozenset[str] = frozenset()

    def mapper(self, *others: Mapper) -> Mapper:
        mapper: Mapper = Parallel(*others, *self.first, Rest(self.known, self.ignored))
        for step in (self.second, self.third, self.fourth):
            mapper = mapper >> Parallel(*step, Identity()) if step else mapper
        return mapper

    def add_banks(self, experts: str) -> None:
        """Add mappers that split and transpose an expert module's tensors into d9d's stacked expert weights."""
        halves = f"{experts}.gate", f"{experts}.up"
        self.third.append(Chunk(f"{experts}.{GATE_UP}", halves, dim=1))
        banks = dict(zip((*halves, f"{experts}.{DOWN}"), ("gate_proj", "up_proj", "down_proj"), strict=True))
        self.fourth += [Transpose(name, to=f"{experts}.{BANK}.{bank}") for name, bank in banks.items()]


def importer(config: TransformersConfig, stored: TransformersConfig) -> Mapper:
    """Mapper from files to the model.

    Args:
        config: config of the model.
        stored: config of the files, which may belong to a larger model.

    Raises:
        CheckpointError: transformers converts tensors by an operation that d9d does not have.
    """
    found = _correspondence(config)
    if stored.container is not None:
        found.prefixes, found.ignored = _from_container(found), _ANY
    first: list[Mapper] = [Drop("{layer*}.rotary_emb.inv_freq", optional=True)]  # written by old releases
    if found.tied is not None:
        head, embedding = found.tied
        text = f"'{head}' in the files differs from '{embedding}', but config.json ties them"
        first.append(Copy(head, embedding, text))
    mapper = found.mapper(*first)
    return Parallel(*found.prefixes, Identity()) >> mapper if found.prefixes else mapper


def exporter(config: TransformersConfig) -> Mapper:
    """Mapper from the model to files. A tied head is left out.

    Raises:
        CheckpointError: transformers converts tensors by an operation that d9d does not have.
    """
    return _correspondence(config).mapper().inverse()


def adapter_names(config: TransformersConfig) -> Mapper:
    """Mapper from the model's names to the names in adapters: names in the larger model, or without one, in files."""
    if config.container is None:
        return exporter(config)
    register()
    with torch.device("meta"):
        native = native_model(native_config(config.config))
        inside = name_inside(config.container, native)
    prefix = base_of(native)[0]
    return exporter(config) >> Parallel(Rename(f"{prefix}.{{rest*}}", f"{inside}.{{rest*}}"), Identity())


def _correspondence(config: TransformersConfig) -> _Correspondence:
    register()
    with torch.device("meta"):
        native = native_model(native_config(config.config))
    head = Head.of(native)
    found = _Correspondence()
    if head.tied:
        found.tied = f"{head.name}.weight", f"{head.embedding}.weight"
    transforms = conversions(native)
    merging = [transform for transform in transforms if getattr(transform, "operations", None)]
    longer = {id(one) for one in transforms if getattr(one, "prefix_to_remove", None)}
    for transform in (one for one in transforms if id(one) in longer):
        prefix = f"{transform.model_prefix}." if transform.model_prefix else ""
        name = f"{prefix}{{rest*}}"
        found.prefixes.append(Rename(f"{prefix}{transform.prefix_to_remove}.{{rest*}}", name, optional=True))
    renaming = [one for one in transforms if not getattr(one, "operations", None) and id(one) not in longer]
    stored = native.state_dict(keep_vars=True)
    found.known, found.ignored = frozenset(stored), tuple(native._keys_to_ignore_on_load_unexpected or ())  # noqa: SLF001 - no public attribute; a test reads it
    for name, tensor in stored.items():
        if found.tied is None or name != found.tied[0]:
            _add(found, name, tensor.shape, merging, renaming)
    prefix, base = base_of(native)
    found.base, found.head = prefix, head.name
    for experts in replace_experts(base, head.std):
        found.add_banks(f"{prefix}.{experts}")
    return found


def _from_container(found: _Correspondence) -> list[Mapper]:
    """Mappers from the names that a larger model, such as a model of images and text, gives to its language model."""
    head = Rename(f"{_HEAD_INSIDE}.{found.head}.weight", f"{found.head}.weight", optional=True)
    return [*(Rename(f"{outer}.{{rest*}}", f"{found.base}.{{rest*}}", optional=True) for outer in _INSIDE), head]


def _add(
    found: _Correspondence, name: str, shape: Sequence[int], merging: Sequence[Any], renaming: Sequence[Any]
) -> None:
    for transform in merging:
        (target,) = transform.target_patterns if len(transform.target_patterns) == 1 else (None,)
        if target is None:
            kinds = ", ".join(type(operation).__name__ for operation in transform.operations)
            if any(_plain(one) in name for one in transform.target_patterns):
                raise CheckpointError(f"transformers makes {name} of files by {kinds}, which d9d does not support")
            continue
        before, matched, after = name.partition(_plain(target))
        if matched:
            sources = [_stored(f"{before}{_plain(source)}{after}", renaming) for source in transform.source_patterns]
            found.first += _merged(found, name, shape, sources, transform.operations)
            return
    if (stored := _stored(name, renaming)) != name:
        found.first.append(Rename(stored, name))


def _merged(
    found: _Correspondence, name: str, shape: Sequence[int], sources: Sequence[str], operations: Sequence[Any]
) -> Iterator[Mapper]:
    """Yield the mappers of the first step for a merged tensor; a concatenation after stacking joins the second step."""
    kinds = [type(operation).__name__ for operation in operations]
    dims: list[Any] = [getattr(operation, "dim", None) for operation in operations]
    if kinds not in (["MergeModulelist"], ["MergeModulelist", "Concatenate"], ["Concatenate"]) or (
        "MergeModulelist" in kinds and dims[0] != 0
    ):
        raise CheckpointError(f"transformers makes {name} of files by {', '.join(kinds)}, which d9d does not support")
    parts = sources
    if "MergeModulelist" in kinds:
        parts = [name] if len(sources) == 1 else [f"{name}.part{index}" for index in range(len(sources))]
        for source, part in zip(sources, parts, strict=True):
            yield Stack([source.replace(_INDEX, str(index)) for index in range(shape[0])], part)
    if len(parts) > 1:
        merged = Concatenate(parts, name, dims[-1])
        if "MergeModulelist" in kinds:
            found.second.append(merged)
        else:
            yield merged


def _stored(name: str, renaming: Sequence[Any]) -> str:
    """Name of a tensor in files, from its name in memory; applies the renamings backwards."""
    for transform in reversed(renaming):
        for source, target in zip(transform.source_patterns, transform.target_patterns, strict=True):
            name = name.replace(_plain(target), _plain(source))
    return name


def _plain(pattern: str) -> str:
    """Convert a regular expression without special characters, except ``*`` for an expert's index, to its text.

    Raises:
        CheckpointError: the pattern has other special characters.
    """
    text = pattern.replace("\\.", ".").removeprefix("^").removesuffix("$")
    if re.search(r"[\\()\[\]+?|{}^$]", text):
        raise CheckpointError(f"transformers renames tensors by the pattern {pattern!r}, which d9d does not support")
    return text
