"""Sound jobs to verify: one for each task, dataset, optimizer and fine-tuning method that is installed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from d9d_core.registry.capabilities import missing_modules
from d9d_core.registry.registry import Registry
from d9d_testing.published import write_published

#: Kinds of components -> section of the job file.
SECTIONS = {"task": "task", "dataset": "data", "optimizer": "optimizer", "peft method": "peft"}
MODEL = {
    "name": "qwen3", "vocab_size": 257, "hidden_size": 32, "intermediate_size": 48, "num_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_positions": 64,
}  # fmt: skip


def jobs(registry: Registry, directory: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and values of a job for each installed component; its data files are written to the directory.

    A component without an entry in :func:`companions` gets a job with its default fields.
    """
    known = companions(_files(directory))
    for kind, section in SECTIONS.items():
        for entry in registry.entries(kind):
            if missing_modules(entry.spec):
                continue
            name = entry.spec.key
            own = known.get((kind, name), {})
            yield f"{kind} {name}", _base(directory) | {section: {"name": name}} | own


def companions(files: Mapping[str, str]) -> dict[tuple[str, str], dict[str, Any]]:
    """Sections that a component needs: (kind, name) -> sections, which replace sections of the plain job."""
    text = {"name": "text", "sources": [files["texts"]], "sequence_length": 24}
    labelled = {"name": "labelled", "sources": [files["labelled"]], "sequence_length": 24}
    tagged = {"name": "labelled", "per": "word", "sources": [files["tagged"]], "sequence_length": 24}
    pairs = {"name": "pairs", "sources": [files["pairs"]], "sequence_length": 24}
    preference = {"name": "preference", "sources": [files["preference"]], "sequence_length": 64}
    chats = {"name": "chat", "sources": [files["chats"]], "sequence_length": 64}
    published = {"name": "qwen3", "pretrained": files["published"]}
    classifier = MODEL | {"heads": {"kinds": {"kind": "classification", "num_classes": 2}}}
    tagger = MODEL | {"heads": {"tags": {"kind": "token_classification", "num_classes": 2}}}
    embedder = MODEL | {"heads": {"embedding": {"kind": "embedding"}}}
    return {
        ("task", "classification"): {"model": classifier, "data": labelled, "metrics": []},
        ("task", "token_classification"): {"model": tagger, "data": tagged, "metrics": []},
        ("task", "embedding"): {"model": embedder, "data": pairs, "metrics": []},
        ("task", "dpo"): {"model": published, "data": preference, "metrics": ["preference"]},
        ("task", "distillation"): {
            "task": {"name": "distillation", "teacher": {"name": "qwen3", "pretrained": files["teacher"]}},
            "model": published, "metrics": [],
        },
        ("dataset", "chat"): {"model": published, "data": chats},
        ("dataset", "dataset"): {"data": {"name": "dataset", "build": "tests.verified_jobs:numbers"}},
        ("dataset", "documents"): {"data": {"name": "documents", "sources": [files["lines"]], "sequence_length": 24}},
        ("dataset", "labelled"): {"task": "classification", "model": classifier, "data": labelled, "metrics": []},
        ("dataset", "mixture"): {
            "data": {"name": "mixture", "parts": [{"weight": 1, "data": text}, {"weight": 2, "data": text}]},
        },
        ("dataset", "pairs"): {"task": "embedding", "model": embedder, "data": pairs, "metrics": []},
        ("dataset", "preference"): {
            "task": "dpo", "model": published, "data": preference, "metrics": ["preference"],
        },
        ("dataset", "text"): {"data": text},
        ("dataset", "tokens"): {
            "model": published, "data": {"name": "tokens", "sources": [files["tokens"]], "sequence_length": 24},
        },
        ("optimizer", "sgd"): {"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}},
        ("optimizer", "ema"): {"optimizer": {"name": "ema", "decay": 0.5, "of": {"name": "muon", "lr": 0.01}}},
        ("optimizer", "stochastic_adamw"): {"precision": {"parameters": "bfloat16"}},
        ("optimizer", "torch"): {"optimizer": {"name": "torch", "target": "torch.optim.RAdam", "lr": 0.01}},
        ("peft method", "stack"): {
            "peft": {"name": "stack", "methods": [{"name": "lora", "r": 4}, {"name": "full_tune", "match": "*norm*"}]},
        },
        ("peft method", "full_tune"): {"peft": {"name": "full_tune", "match": "*norm*"}},
    }  # fmt: skip


def _base(directory: Path) -> dict[str, Any]:
    return {
        "run": {"name": "verified", "dir": str(directory / "runs")}, "device": "cpu", "steps": 100,
        "batch": {"size": 12, "microbatch": 2}, "model": MODEL, "task": "causal_lm",
        "data": {"name": "text", "sources": [str(directory / "texts.txt")], "sequence_length": 24},
        "optimizer": {"name": "adamw", "lr": 1e-3}, "lr_schedule": {"name": "cosine", "warmup_steps": 50},
        "metrics": ["perplexity"],
    }  # fmt: skip


def _files(directory: Path) -> dict[str, str]:
    """Write a small file of each form of record; return name -> path."""
    numbers = range(60)
    records: dict[str, list[Any]] = {
        "chats": [
            {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n + 1}."}]}
            for n in numbers
        ],
        "lines": [{"text": f"{n}: a dog jumps"[: 3 + n % 14]} for n in numbers],
        "labelled": [{"text": f"number {n}", "label": "odd" if n % 2 else "even"} for n in numbers],
        "tagged": [{"tokens": ["it", f"{n}"], "labels": ["word", "number"]} for n in numbers],
        "pairs": [{"query": f"{n}?", "positive": f"it is {n}"} for n in numbers],
        "tokens": [{"input_ids": [n % 8 + one for one in range(3 + n % 14)]} for n in numbers],
        "preference": [
            {
                "prompt": [{"role": "user", "content": f"{n}?"}],
                "chosen": [{"role": "assistant", "content": "yes"}],
                "rejected": [{"role": "assistant", "content": "no" * (1 + n % 3)}],
            }
            for n in numbers
        ],
    }
    for name, lines in records.items():
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (directory / "texts.txt").write_text("".join(f"{n}: the fox jumps over {n * n} dogs. " for n in range(900)))
    files = {name: str(directory / f"{name}.jsonl") for name in records}
    files["published"] = str(write_published(directory / "published"))
    files["teacher"] = str(write_published(directory / "teacher", hidden_size=80))
    return files | {"texts": str(directory / "texts.txt")}


class Numbers:
    """Map-style dataset of tokens, as a user writes one."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        tokens = [(index * 7 + place) % 200 for place in range(17)]
        return {"tokens": tokens[:-1], "targets": tokens[1:], "positions": list(range(16))}


def numbers() -> Numbers:
    """Dataset of the job for ``dataset``."""
    return Numbers()
