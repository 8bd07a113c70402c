"""Model directory as hubs publish it. Needs transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_published(directory: Path, padded_vocabulary: int | None = None, **sizes: int) -> Path:
    """Write a tiny Qwen3 with random weights, tokenizer and chat template, saved by transformers.

    Args:
        directory: directory to write.
        padded_vocabulary: number of rows of the embedding; by default, one per token.
        sizes: fields of the config.
    """
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    make: Any = transformers.PreTrainedTokenizerFast
    tokenizer = make(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")  # noqa: S106
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    values: dict[str, Any] = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "initializer_range": 0.3, **sizes,
    }  # fmt: skip
    config = transformers.Qwen3Config(
        vocab_size=padded_vocabulary or len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **values,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory
