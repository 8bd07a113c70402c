"""Parameter names of transformers' Qwen3 classes and ours. Outside of experts, only names differ.

Theirs: ``model.embed_tokens``, ``model.layers.N...``, ``model.norm``, and ``lm_head`` or ``score``. Some publish the
backbone alone, without ``model.`` before each name.
"""

from __future__ import annotations

from collections.abc import Iterator

from d9d_nn.heads.config import CausalLMHeadConfig, HeadConfig
from d9d_weights.graph.base import Mapper, Parallel
from d9d_weights.graph.mappers import Rename
from d9d_weights.graph.merging import Chunk
from d9d_weights.graph.select import Copy, Drop, Either, Explained, Fresh, Share

from d9d_qwen3.base_config import Qwen3Base
from d9d_qwen3.hugging_face.config_json import published_head
from d9d_qwen3.hugging_face.expert_names import mixtures
from d9d_qwen3.moe_config import AnyQwen3Config, Qwen3MoeConfig

#: theirs -> ours, inside a layer.
_LAYER = {
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "attention.q_proj",
    "self_attn.k_proj": "attention.k_proj",
    "self_attn.v_proj": "attention.v_proj",
    "self_attn.o_proj": "attention.o_proj",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "post_attention_layernorm": "ffn_norm",
}
_DENSE = {
    "mlp.gate_proj": "ffn.gate_proj",
    "mlp.up_proj": "ffn.up_proj",
    "mlp.down_proj": "ffn.down_proj",
}
_EMBEDDING, _LM_HEAD, _SCORE = "model.embed_tokens.weight", "lm_head.weight", "score"
#: Errors about heads that their config.json does not describe.
_OTHER_HEAD = (
    f"'{_LM_HEAD}' in the files differs from '{_EMBEDDING}', and a model with tie_word_embeddings: true would throw it "
    "away; set model.tie_embeddings to false to keep it, or remove it from the files"
)
_NO_HEAD = (
    "config.json says tie_word_embeddings: false, but the files hold no '{}'; if the head is the embedding, set "
    "model.tie_embeddings to true, else download the missing weight file"
)
#: Parameters of classifiers, by kind.
_CLASSIFIERS = {"classification": ("weight",), "token_classification": ("weight", "bias")}


def importer(config: AnyQwen3Config, stored: AnyQwen3Config) -> Mapper:
    """Mapper from files of a model like ``stored`` to one like ``config``, with other heads and added tokens perhaps.

    A head starts from the stored one of its name, or from the only stored one of its kind; else it is fresh. A tied
    head of a model that is not tied any more starts from the head in the files, or where there is none from the
    embedding.
    """
    bare = [
        Rename(f"{name}", f"model.{name}", optional=True)
        for name in ("embed_tokens.weight", "norm.weight", "layers.{rest*}")
    ]
    first: Mapper = Parallel(*bare)
    if _starts_from_embedding(config, stored):
        first = first >> Either(Rename(_LM_HEAD, _LM_HEAD), Share(_EMBEDDING, (_EMBEDDING, _LM_HEAD)))
    return first >> _correspondence(config, stored)


def exporter(config: AnyQwen3Config) -> Mapper:
    """Mapper from our names to transformers'. A tied head appears nowhere."""
    return _correspondence(config, config).inverse()


def _correspondence(config: AnyQwen3Config, stored: AnyQwen3Config) -> Mapper:
    kinds = ("weight", "bias") if config.attention_bias else ("weight",)
    layers = [
        Rename(f"model.layers.{{layer}}.{theirs}.{kind}", f"layers.{{layer}}.{ours}.{kind}")
        for theirs, ours in _LAYER.items()
        for kind in (kinds if theirs.endswith("_proj") else ("weight",))
    ]
    return Parallel(
        *_words(_EMBEDDING, "embedding", config, stored),
        *layers,
        *_feed_forward(config, stored),
        Rename("model.norm.weight", "norm.weight"),
        *_heads(config, stored),
        Drop("model.layers.{layer}.self_attn.rotary_emb.inv_freq", optional=True),  # in files of old releases
    )


def _feed_forward(config: AnyQwen3Config, stored: AnyQwen3Config) -> Iterator[Mapper]:
    if isinstance(config, Qwen3MoeConfig):
        assert isinstance(stored, Qwen3MoeConfig)  # both are of one family
        yield from mixtures(config, stored)
        if not config.dense_layers:
            return
    for theirs, ours in _DENSE.items():
        yield Rename(f"model.layers.{{layer}}.{theirs}.weight", f"layers.{{layer}}.{ours}.weight")


def _words(theirs: str, ours: str, config: Qwen3Base, stored: Qwen3Base) -> list[Mapper]:
    """Mapper of weights with one row for each token; rows of added tokens have a tensor of their own."""
    added = config.added_tokens
    if not added:
        return [Rename(theirs, f"{ours}.weight")]
    regular, own = f"{ours}.regular.weight", f"{ours}.added.weight"
    if stored.vocab_size == config.vocab_size:
        return [Chunk(theirs, (regular, own), sizes=(config.vocab_size - added, added))]
    return [Rename(theirs, regular), Fresh((own,))]  # if the sizes do not fit, the shapes tell


def _heads(config: Qwen3Base, stored: Qwen3Base) -> Iterator[Mapper]:
    used = set()
    for name, head in config.heads.items():
        if isinstance(head, CausalLMHeadConfig):
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
        elif head.kind in _CLASSIFIERS:
            other = _origin(name, head, stored)
            for part in _CLASSIFIERS[head.kind]:
                if other is None:
                    yield Fresh((f"heads.{name}.{part}",))
                else:
                    used.add(_stored_name(other, stored, part))
                    yield Rename(_stored_name(other, stored, part), f"heads.{name}.{part}")
    published = {
        _stored_name(name, stored, part)
        for name, head in stored.heads.items()
        for part in _CLASSIFIERS.get(head.kind, ("weight",))
        if head.kind != "embedding"
    }
    for theirs in sorted((published | {_LM_HEAD}) - used):
        yield Drop(theirs, optional=True)  # heads that this model lacks


def _tensors(head: str, config: Qwen3Base) -> list[str]:
    return [f"{head}.{part}weight" for part in (("regular.", "added.") if config.added_tokens else ("",))]


def _origin(name: str, head: HeadConfig, stored: Qwen3Base) -> str | None:
    """Stored head that a head starts from."""
    if name in stored.heads and _alike(head, stored.heads[name]):
        return name
    alike = [other for other, candidate in stored.heads.items() if _alike(head, candidate)]
    return alike[0] if len(alike) == 1 else None


def _alike(head: HeadConfig, other: HeadConfig) -> bool:
    classes = [getattr(h, "num_classes", None) for h in (head, other)]
    return head.kind == other.kind and classes[0] == classes[1]


def _stored_name(head: str, stored: Qwen3Base, part: str = "weight") -> str:
    """Name of a head's weight or bias in files."""
    if head != published_head(stored):
        return f"heads.{head}.{part}"
    return _LM_HEAD if isinstance(stored.heads[head], CausalLMHeadConfig) else f"{_SCORE}.{part}"


def _starts_from_embedding(config: Qwen3Base, stored: Qwen3Base) -> bool:
    """Whether a head that was tied gets a weight of its own."""
    wanted = [name for name, head in config.heads.items() if isinstance(head, CausalLMHeadConfig)]
    origins = [_origin(name, config.heads[name], stored) for name in wanted]
    return stored.tie_embeddings and not config.tie_embeddings and any(origin is not None for origin in origins)
