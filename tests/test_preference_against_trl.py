"""Pairs become the token ids, prompts and completions that TRL's trainer for DPO makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from d9d_core.data import DataContext
from d9d_data.config import PreferenceConfig
from d9d_data.stream.chat import build_preference

# Other people's libraries warn of each other.
pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}


def ask(content: str) -> list[dict[str, str]]:
    """Prompt of one message."""
    return [{"role": "user", "content": content}]


def said(*contents: str) -> list[dict[str, str]]:
    """Messages of user and assistant in turn, the last by the assistant."""
    roles = ("user", "assistant")[len(contents) % 2 :] * len(contents)
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]


DATA: dict[str, list[dict[str, Any]]] = {
    "messages": [
        {"prompt": ask("who?"), "chosen": said("me"), "rejected": said("you")},
        {"prompt": ask("x" * 20), "chosen": said("y" * 30), "rejected": said("no", "why", "z")},
    ],
    "tools": [
        {"prompt": ask("1+1?"), "chosen": said("2"), "rejected": said("3"), "tools": [TOOL]},
    ],
    "whole conversations": [
        {"chosen": said("a", "b", "c", "d"), "rejected": said("a", "b", "c", "e")},
        {"chosen": said("a", "b"), "rejected": said("a", "c", "d", "e")},
    ],
    "strings": [
        {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " five"},
        {"prompt": "The sky is", "chosen": " blue", "rejected": " bluer"},
    ],
    "strings with the prompt in both": [{"chosen": "H: hi A: hello", "rejected": "H: hi A: go"}],
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    directory = tmp_path_factory.mktemp("base")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)  # type: ignore[call-arg]
    backend.train_from_iterator([TEMPLATE, "blue bluer user assistant", json.dumps(DATA)], trainer)
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("cut", [False, True])
def test_texts_and_completions_are_those_of_trl(base: Path, tmp_path: Path, kind: str, cut: bool) -> None:
    for module in ("trl", "datasets", "transformers"):
        pytest.importorskip(module)
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    records = DATA[kind]
    length = 128 if not cut else 96 if kind == "tools" else 40
    trainer = DPOTrainer(
        AutoModelForCausalLM.from_pretrained(base),
        args=DPOConfig(output_dir=str(tmp_path / "trl"), use_cpu=True, bf16=False, report_to=[], max_length=length),
        train_dataset=Dataset.from_list(records),
        processing_class=AutoTokenizer.from_pretrained(base),
    )
    expected = []
    for row in trainer.train_dataset:
        for side in ("chosen_ids", "rejected_ids"):
            ids, prompt = [*row["prompt_ids"], *row[side]][:length], len(row["prompt_ids"])
            expected.append((ids[:-1], [-100] * (prompt - 1) + ids[prompt:]))
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    fields = {"sources": [str(tmp_path / "pairs.jsonl")], "sequence_length": length - 1, "shuffle": False}
    stream = build_preference(
        PreferenceConfig.model_validate(fields | {"pad_multiple": 1}),
        DataContext(0, len(records), len(records), tmp_path / "cache", pretrained=str(base)),
    )
    (batch,) = stream.next_pack()
    rows = zip(batch["tokens"].tolist(), batch["targets"].tolist(), batch["lengths"].tolist(), strict=True)
    found = [(tokens[:size], targets[:size]) for tokens, targets, size in rows]
    order = batch["samples"].tolist()
    assert [found[2 * order.index(place) + side] for place in range(len(records)) for side in range(2)] == expected
