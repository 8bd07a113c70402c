"""Small data to try a job with: questions about Python, and answers from docstrings of its library."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Iterator
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from d9d_data.chat.template import TEMPLATE_FILE
from d9d_data.new_job.kinds import Kind
from d9d_data.sources.python import topics
from d9d_data.tokenizer.base import CONFIG_FILE, TOKENIZER_FILE

#: Vocabulary size in tokens of a tokenizer that is trained for a new model.
VOCABULARY = 2048
#: Special tokens of the ChatML format, and its template.
_START, _END = "<|im_start|>", "<|im_end|>"
_TEMPLATE = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}
{% else %}{{ message.content }}<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
_LONGEST = 400
_TYPES = (str, bytes, list, dict, set, int, float)
_MODULES = (
    "builtins", "collections", "functools", "itertools", "json", "math", "os.path", "random", "shutil", "statistics",
    "string", "textwrap",
)  # fmt: skip


def answers() -> Iterator[tuple[str, str]]:
    """Names of functions and methods, and the first paragraph of the docstring of each."""
    owners: list[tuple[str, object]] = [(name, importlib.import_module(name)) for name in _MODULES]
    owners += [(kind.__name__, kind) for kind in _TYPES]
    for place, owner in owners:
        for name, member in sorted(vars(owner).items()):
            text = inspect.getdoc(member) if callable(member) and not name.startswith("_") else None
            paragraphs = [" ".join(part.split()) for part in (text or "").split("\n\n")]
            first = next((part for part in paragraphs if part and "(" not in part.split(" ")[0]), "")
            elsewhere = getattr(member, "__module__", None) in _MODULES and member.__module__ != place
            if first and len(first) <= _LONGEST and not elsewhere and not _is_exception(member):
                yield f"{place}.{name}".removeprefix("builtins."), first


def _is_exception(member: object) -> bool:
    return inspect.isclass(member) and issubclass(member, BaseException)


def write_samples(kind: Kind, file: Path) -> None:
    """Write records of a kind, one JSON object per line."""
    known = list(answers())
    records: list[dict[str, object]] = []
    for index, (name, text) in enumerate(known):
        question = f"What does {name} do in Python?"
        if kind.dataset == "chat":
            turns = ({"role": "user", "content": question}, {"role": "assistant", "content": text})
            records.append({"messages": list(turns)})
        elif kind.dataset == "preference":
            others = (other for _, other in [*known[index - 1 :: -1], *known] if other != text)
            records.append({"prompt": question, "chosen": text, "rejected": next(others)})
        else:
            records.append({"query": question, "positive": text})
    file.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), "utf-8")


def write_tokenizer(directory: Path) -> None:
    """Write a tokenizer with a chat template, trained on Python's language reference: a byte-level BPE with ChatML."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>", _START, _END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator([*topics(), *(text for _, text in answers())], trainer)
    directory.mkdir(parents=True)
    # The library's own writer raises no OSError on a full disk.
    (directory / TOKENIZER_FILE).write_text(backend.to_str(pretty=True), "utf-8")
    (directory / TEMPLATE_FILE).write_text(_TEMPLATE)
    tokens = {"eos_token": _END, "pad_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / CONFIG_FILE).write_text(json.dumps(tokens, indent=1) + "\n")
