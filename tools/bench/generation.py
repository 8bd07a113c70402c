"""Tokens per second of ``d9d generate`` and of transformers' ``generate``, with the same weights and prompts.

    python tools/bench/generation.py
    python tools/bench/generation.py --prompts 1 --tokens 512

Both complete the same prompts in one batch, greedily, in bfloat16, and always generate all tokens. Rounds alternate;
the first call of each is stated apart. The tokens of both are compared: kernels differ, so in bfloat16 the most
probable token may differ.
"""

from __future__ import annotations

import argparse
import importlib
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from d9d_inference.generation.language_model import Decoding, LanguageModel
from records import hardware
from timing import synchronise
from tokenizers import Tokenizer, models

Generate = Callable[[], list[list[int]]]
transformers: Any = importlib.import_module("transformers")
#: Sizes of the tested models.
SIZES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512},
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "vocab_size": 151_936},
}


def main() -> None:
    """Compare both, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, default="0.6b")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--length", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of each prompt")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory), SIZES[options.model])
        model = LanguageModel(Path(directory), Path(directory), None, device, torch.bfloat16)
        draw = random.Random(0)  # noqa: S311 - tokens, no secrets
        vocabulary = SIZES[options.model]["vocab_size"]
        prompts = [[draw.randrange(vocabulary) for _ in range(options.length)] for _ in range(options.prompts)]
        loaded = transformers.Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).to(device).eval()
        contenders: dict[str, Generate] = {
            "d9d": lambda: model.complete(prompts, Decoding(options.tokens, temperature=0), 0),
            "transformers": lambda: plain(loaded, prompts, options.tokens),
        }
        compare(contenders, options)


def write_model(directory: Path, sizes: dict[str, int]) -> None:
    """Write a model with random weights, whose tokenizer has a word for each id and no end of text."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128 if sizes["hidden_size"] > 64 else 8}
    config = transformers.Qwen3Config(**sizes, **heads, tie_word_embeddings=True, eos_token_id=None, bos_token_id=None)
    transformers.Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    words = {f"w{number}": number for number in range(sizes["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))  # noqa: S106 - a word, no password
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(directory)  # noqa: S106


def plain(model: Any, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    """New tokens of transformers' ``generate`` with its defaults."""
    rows = torch.tensor([list(one) for one in prompts], device=model.device)
    with torch.inference_mode():
        output = model.generate(
            rows, attention_mask=torch.ones_like(rows), max_new_tokens=tokens, do_sample=False, pad_token_id=0
        )
    return [list(row) for row in output[:, rows.shape[1] :].tolist()]


def compare(contenders: dict[str, Generate], options: argparse.Namespace) -> None:
    """Time the contenders in turns, and print the table."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    found: dict[str, list[list[int]]] = {}
    for _ in range(options.rounds + 1):
        for name, generate in contenders.items():
            synchronise()
            start = time.perf_counter()
            found[name] = generate()
            seconds[name].append(time.perf_counter() - start)
    both = zip(*found.values(), strict=True)
    same = statistics.mean(one == other for rows in both for one, other in zip(*rows, strict=True))
    new = options.prompts * options.tokens
    print(f"{hardware()}; torch {torch.__version__}, transformers {transformers.__version__}")
    print(f"{options.model}, {options.prompts} prompts of {options.length} tokens, {options.tokens} new ones each")
    for name, times in seconds.items():
        later = statistics.median(times[1:])
        print(f"{name}: {new / later:,.0f} tokens/s ({later:.2f} s; the first call {times[0]:.2f} s)")
    ratios = [other / ours for ours, other in zip(*(times[1:] for times in seconds.values()), strict=True)]
    print(f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}); {same:.1%} equal tokens")


if __name__ == "__main__":
    main()
