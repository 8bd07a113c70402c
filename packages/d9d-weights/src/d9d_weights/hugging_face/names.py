"""Mapping between tensor names of decoders in transformers and in d9d. Except for experts, only the names differ.

transformers' names are ``model.embed_tokens``, ``model.layers.N...``, ``model.norm``, and ``lm_head`` or ``score``.
Some models are published without heads, and without the prefix ``model.``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate

from d9d_weights.graph.base import Mapper, Parallel
from d9d_weights.graph.mappers import Rename
from d9d_weights.graph.merging import Chunk
from d9d_weights.graph.select import Copy, Drop, Either, Explained, Fresh, Share
from d9d_weights.hugging_face.family import Head, LanguageModel, published_head, vocabulary_parts

__all__ = ["exporter", "importer", "layer_names"]

_EMBEDDING, _LM_HEAD, _SCORE = "model.embed_tokens.weight", "lm_head.weight", "score"
#: Errors about heads that do not fit their config.json.
_OTHER_HEAD = (
    f"'{_LM_HEAD}' in the files differs from '{_EMBEDDING}', and a model with tie_word_embeddings: true would drop "
    "it; set model.tie_embeddings to false to keep it, or remove it from the files"
)
_NO_HEAD = (
    "config.json says tie_word_embeddings: false, but the files have no '{}'; if the head is the embedding, set "
    "model.tie_embeddings to true, else download the missing weight file"
)
#: Parameters of heads other than language models, by kind; an embedding head has them only with a projection.
_PARTS = {"classification": ("weight",), "token_classification": ("weight", "bias"), "embedding": ("weight",)}


def importer(config: LanguageModel, stored: LanguageModel, layers: Sequence[Mapper]) -> Mapper:
    """Mapper from files of a model with config ``stored`` to a model with ``config``; heads and tokens may differ.

    A head is loaded from the stored head of its name, or from the only stored head of its kind; otherwise it keeps its
    initial values.
    A formerly tied head is loaded from the head in the files, or from the embedding if there is no such head.

    Args:
        config: config of the model to load into.
        stored: config of the model in the files.
        layers: mappers of the tensors in layers.
    """
    bare = [
        Rename(f"{name}", f"model.{name}", optional=True)
        for name in ("embed_tokens.weight", "norm.weight", "layers.{rest*}")
    ]
    first: Mapper = Parallel(*bare)
    if _starts_from_embedding(config, stored):
        first = first >> Either(Rename(_LM_HEAD, _LM_HEAD), Share(_EMBEDDING, (_EMBEDDING, _LM_HEAD)))
    return first >> _correspondence(config, stored, layers)


def exporter(config: LanguageModel, layers: Sequence[Mapper]) -> Mapper:
    """Mapper from d9d's tensor names to names of transformers. A tied head is left out.

    Args:
        config: config of the model.
        layers: mappers of the tensors in layers, from files to the model.
    """
    return _correspondence(config, config, layers).inverse()


def layer_names(names: Mapping[str, str], biased: Collection[str] = ()) -> Iterator[Mapper]:
    """Mappers of weights in a layer that differ only in their names.

    Args:
        names: d9d's names, by the names in transformers.
        biased: last components of d9d's names that have a bias too.
    """
    for theirs, ours in names.items():
        for kind in ("weight", "bias") if ours.rpartition(".")[2] in biased else ("weight",):
            yield Rename(f"model.layers.{{layer}}.{theirs}.{kind}", f"layers.{{layer}}.{ours}.{kind}")


def _correspondence(config: LanguageModel, stored: LanguageModel, layers: Sequence[Mapper]) -> Mapper:
    return Parallel(
        *_words(_EMBEDDING, "embedding", config, stored),
        *layers,
        Rename("model.norm.weight", "norm.weight"),
        *_heads(config, stored),
        # a buffer that old releases of transformers wrote
        Drop("model.layers.{layer}.self_attn.rotary_emb.inv_freq", optional=True),
    )


def _words(theirs: str, ours: str, config: LanguageModel, stored: LanguageModel) -> list[Mapper]:
    """Mappers of a weight with one row per token id; in the model, groups of added tokens are separate tensors.

    The vocabulary of the files may end after any group; later groups keep their initial values.
    """
    sizes = vocabulary_parts(config.vocab_size, config.added_tokens)
    if not sizes:
        return [Rename(theirs, f"{ours}.weight")]
    names, ends = [f"{ours}.{part}.weight" for part in sizes], list(accumulate(sizes.values()))
    # A size that ends after no group counts as one group; the later check of shapes reports it.
    count = 1 + ends.index(stored.vocab_size) if stored.vocab_size in ends else 1
    fresh = [Fresh(tuple(names[count:]))] if names[count:] else []
    if count == 1:
        return [Rename(theirs, names[0]), *fresh]
    return [Chunk(theirs, names[:count], sizes=list(sizes.values())[:count]), *fresh]


def _heads(config: LanguageModel, stored: LanguageModel) -> Iterator[Mapper]:
    used = set()
    for name, head in config.heads.items():
        if head.kind == "causal_lm":
            other = _origin(name, head, stored)
            if config.tie_embeddings:
                used.add(_LM_HEAD)
                yield Copy(_LM_HEAD, _EMBEDDING, _OTHER_HEAD)
            elif other is None:
                yield Fresh(tuple(_tensors(f"heads.{name}", config)))
            else:
                theirs = _stored_name(other, stored)
                used.add(theirs)
                text = _NO_HEAD.format(theirs)
                yield from (Explained(mapper, text) for mapper in _words(theirs, f"heads.{name}", config, stored))
        else:
            other = _origin(name, head, stored)
            for part in _parts(head):
                if other is None:
                    yield Fresh((f"heads.{name}.{part}",))
                else:
                    used.add(_stored_name(other, stored, part))
                    yield Rename(_stored_name(other, stored, part), f"heads.{name}.{part}")
    published = {
        _stored_name(name, stored, part)
        for name, head in stored.heads.items()
        for part in (("weight",) if head.kind == "causal_lm" else _parts(head))
    }
    for theirs in sorted((published | {_LM_HEAD}) - used):
        yield Drop(theirs, optional=True)  # heads in the files that the model does not have
    for name, head in stored.heads.items():
        if head.kind not in ("causal_lm", *_PARTS) and not any(one.startswith(f"heads.{name}.") for one in used):
            yield Drop(f"heads.{name}.{{rest*}}", optional=True)  # a head of a plugin, whose parameters are unknown


def _parts(head: Head) -> tuple[str, ...]:
    """Parameters of a head that is no language model; a head of a plugin names its own."""
    without = head.kind == "embedding" and getattr(head, "projection", None) is None
    return () if without else _PARTS.get(head.kind, getattr(head, "parameters", ()))


def _tensors(head: str, config: LanguageModel) -> list[str]:
    parts = vocabulary_parts(config.vocab_size, config.added_tokens)
    return [f"{head}.{part}.weight" for part in parts] or [f"{head}.weight"]


def _origin(name: str, head: Head, stored: LanguageModel) -> str | None:
    """Name of the stored head from which a head is loaded; ``None`` if the head keeps its initial values."""
    if name in stored.heads and _alike(head, stored.heads[name]):
        return name
    alike = [other for other, candidate in stored.heads.items() if _alike(head, candidate)]
    return alike[0] if len(alike) == 1 else None


def _alike(head: Head, other: Head) -> bool:
    sizes = [[getattr(h, name, None) for name in ("num_classes", "projection")] for h in (head, other)]
    return head.kind == other.kind and sizes[0] == sizes[1]


def _stored_name(head: str, stored: LanguageModel, part: str = "weight") -> str:
    """Name of a head's weight or bias in the files."""
    if head != published_head(stored.heads):
        return f"heads.{head}.{part}"
    return _LM_HEAD if stored.heads[head].kind == "causal_lm" else f"{_SCORE}.{part}"


def _starts_from_embedding(config: LanguageModel, stored: LanguageModel) -> bool:
    """Whether a head that was tied in the files gets its own weight, which starts as a copy of the embedding."""
    wanted = [name for name, head in config.heads.items() if head.kind == "causal_lm"]
    origins = [_origin(name, config.heads[name], stored) for name in wanted]
    return stored.tie_embeddings and not config.tie_embeddings and any(origin is not None for origin in origins)
