"""Comparison of the vocabularies of a model and its teacher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from d9d_core.untrusted import parse_json, read_regular

_FILE = "tokenizer.json"


def check_vocabularies(model: Any, teacher: Any) -> list[str]:
    """Describe the differences between the vocabularies of student and teacher, one line each.

    Sizes may differ if the directories of both models have tokenizers, and the teacher's tokenizer gives every token of
    the student's tokenizer the same id, since published models pad their embedding matrices differently. Otherwise the
    sizes must be equal.

    Args:
        model: config of the student.
        teacher: config of the teacher.
    """
    ours, theirs = _vocabulary(model), _vocabulary(teacher)
    if ours is not None and theirs is not None:
        other = next((token for token in ours if theirs.get(token, ours[token]) != ours[token]), None)
        missing = next((token for token in ours if token not in theirs), None)
        if other is not None:
            return [
                f"task.teacher: the tokenizers differ: {other!r} is {theirs[other]} for the teacher, {ours[other]} here"
            ]
        if missing is not None:
            return [f"task.teacher: the teacher's tokenizer has {len(theirs)} tokens and lacks {missing!r}"]
        return []
    sizes = (getattr(model, "vocab_size", None), getattr(teacher, "vocab_size", None))
    if all(isinstance(size, int) for size in sizes) and sizes[0] != sizes[1]:
        return [
            f"task.teacher: the teacher has {sizes[1]} token ids, the model {sizes[0]}, and d9d cannot compare their "
            f"tokens without a {_FILE} next to the weights of each; use a teacher with the same vocabulary"
        ]
    return []


def _vocabulary(config: Any) -> dict[str, int] | None:
    """Map of tokens to ids from the tokenizer next to a model's weights; ``None`` if no tokenizer can be read there."""
    location = getattr(config, "pretrained", None)
    if not isinstance(location, str) or "://" in location:
        return None
    given = Path(location).expanduser()
    try:
        content: Any = parse_json(read_regular((given if given.is_dir() else given.parent) / _FILE))
        vocabulary = content["model"]["vocab"]
        if isinstance(vocabulary, list):  # kind Unigram: pairs of a token and its score
            vocabulary = {pair[0]: number for number, pair in enumerate(vocabulary)}
        return {**vocabulary, **{token["content"]: token["id"] for token in content.get("added_tokens", ())}}
    except (OSError, ValueError, AttributeError, LookupError, TypeError):  # another structure is as good as no file
        return None
