"""Sound files for the campaign of hostile files, made by a short training; and values that several kinds use."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from d9d_core.job_file.schema import job_schema
from d9d_core.registry.registry import Registry
from d9d_engine.checkpoint.store import CheckpointStore
from d9d_engine.job import Job
from d9d_testing.hostile.files import Draw
from d9d_weights.hugging_face.directory import ModelDirectory
from d9d_weights.state.tensors import Conversion, convert_state
from hypothesis import strategies as st
from torch import Tensor

TEXT = "the quick brown fox jumps over the lazy dog, and then it sleeps. " * 8
#: Escape sequence that would control a terminal.
ESCAPE = "\x1b]0;x\x07"
#: Function that damages a copy of the sound files by drawn choices; returns a description and the reader to judge.
Case = Callable[["Sound", Draw, Path], tuple[str, Callable[[], object]]]
#: Values of kinds that a field seldom has.
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.sampled_from(["(a*)*b", "((\\w+)+)+$", ".*" * 40]),
    st.lists(st.text(), max_size=3),
    st.dictionaries(st.text(), st.integers(), max_size=3),
)
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Sound:
    """Sound files to damage: a job, a model, checkpoints and tokenizers, made by a short training.

    Args:
        root: directory to create them in.
        registry: registry with all plugins.
    """

    def __init__(self, root: Path, registry: Registry) -> None:
        self.root = root
        self.registry = registry
        (root / "corpus").mkdir()
        for number in range(12):
            (root / "corpus" / f"{number}.txt").write_text(f"{number}: {TEXT}")
        self.outside = root.parent / "outside"
        self.outside.write_text("must not be read")
        self.job: dict[str, Any] = {
            "run": {"name": "sound", "dir": str(root / "runs")},
            "device": "cpu",
            "steps": 2,
            "batch": {"size": 4, "microbatch": 2},
            "model": {
                "name": "qwen3", "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_layers": 2,
                "num_attention_heads": 4, "num_key_value_heads": 2, "max_positions": 64,
            },
            "task": {"name": "causal_lm"},
            "data": {
                "name": "text", "sources": [str(root / "corpus")], "sequence_length": 32, "tokenizer": {"bpe": 300},
            },
            "optimizer": {"name": "adamw", "lr": 0.01},
            "lr_schedule": {"name": "cosine", "warmup_steps": 1},
            "metrics": [{"name": "perplexity"}],
            "trackers": [],
        }  # fmt: skip
        job = self.load(self.job, root / "job.json")
        job.build(note=lambda _: None).train()
        self.model = root / "model"
        source = str(root / "runs" / "sound" / "model")
        convert_state(Conversion(source, str(self.model), None, 40_000, 1), registry)
        self.specs = self.tensors_of(self.model)
        self.checkpoints = root / "checkpoints"
        self.saved = {step: saved_tensors(step) for step in (4, 8)}
        store = CheckpointStore(self.checkpoints)
        store.prepare()
        for step, tensors in self.saved.items():
            store.save(step, tensors, {"data": {"consumed": step}}, {"job": {"model": {}}, "plugins": {}})
        self.schema = job_schema(registry)
        self.chat_tokenizer = root / "chat_tokenizer"
        self.chat_tokenizer.mkdir()
        for file in self.model.glob("tokenizer*"):
            shutil.copy(file, self.chat_tokenizer)
        (self.chat_tokenizer / "chat_template.jinja").write_text(_TEMPLATE)

    def load(self, values: Mapping[str, Any], file: Path) -> Job:
        """Write a job file and load it."""
        file.write_text(json.dumps(values), "utf-8")
        return Job.load(file, registry=self.registry)

    def tensors_of(self, directory: Path) -> dict[str, Tensor]:
        """All tensors of a model directory."""
        found = {}
        with ModelDirectory.open(directory) as opened:
            for name, spec in opened.specs.items():
                found[name] = torch.empty(spec.shape, dtype=spec.dtype)
                opened.read(name, [0] * len(spec.shape), found[name])
            for name in opened.other_files():
                opened.read_file(name)
        return found


def saved_tensors(step: int) -> dict[str, Tensor]:
    """Tensors of a checkpoint, drawn from the number of its step."""
    generator = torch.Generator().manual_seed(step)
    return {
        "model/weight": torch.randn(3, 5, generator=generator),
        "model/other": torch.randn(3, 5, generator=generator),
        "model/half": torch.randn(4, generator=generator).bfloat16(),
        "optimizer/step": torch.tensor(float(step)),
        "metrics/empty": torch.zeros(0, 3, dtype=torch.int64),
    }


def changes_of(before: Any, after: Any) -> Any:
    """Fields of a job that differ, for display."""
    if isinstance(before, dict) and isinstance(after, dict):
        keys = [
            key for key in {**before, **after} if key not in before or key not in after or before[key] != after[key]
        ]
        return {key: changes_of(before.get(key), after.get(key, "absent")) for key in keys}
    return after
