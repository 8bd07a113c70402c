"""Malicious values for job.yaml, adapter, model and tokenizer files, and functions that write such files."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: Text with escape sequences that control a terminal.
ESCAPE = "\x1b]0;owned\x07\x1b[2J\u202e\x9b31m"
#: Name of the file that malicious code would create.
CANARY = "canary"
#: Data section that runs a program.
CALL = {"name": "dataset", "build": "subprocess:check_call", "arguments": {"args": ["touch", CANARY]}}
CONFUSION = {
    "name": "confusion", "problem": {"kind": "multiclass", "num_classes": 257}, "statistics": ["function"],
    "function": "stranger:statistic", "predictions": "logits", "targets": "targets",
}  # fmt: skip
TEXTS = {"name": "text", "sources": ["python:topics"], "sequence_length": 32}
#: Description -> malicious sections of a job.yaml, which create the file CANARY if their code runs.
JOBS: Mapping[str, Mapping[str, Any]] = {
    "a plugin file": {"plugins": {"files": ["stranger.py"]}},
    "a list of plugin files": {"plugins": ["stranger.py"]},
    "a plugin file as a text": {"plugins": {"files": "stranger.py"}},
    "data that calls a function": {"data": CALL},
    "data that imports a module": {"data": {"name": "dataset", "build": "stranger:dataset"}},
    "a mixture with data that calls a function": {"data": {"name": "mixture", "parts": [{"data": CALL}]}},
    "an evaluation set that calls a function": {"evaluation": {"every": 1, "sets": {"a": CALL}}},
    "evaluation data that calls a function": {"evaluation": {"every": 1, "data": CALL}},
    "a metric that imports": {"metrics": [CONFUSION]},
    "a metric of an evaluation that imports": {"evaluation": {"every": 1, "data": TEXTS, "metrics": [CONFUSION]}},
    "an optimizer that imports": {"optimizer": {"name": "torch", "target": "stranger.Optimizer", "lr": 0.1}},
    "sources at an address": {"data": {"name": "text", "sources": ["canary://a.txt"], "sequence_length": 32}},
    "weights at an address": {"model": {"name": "qwen3", "pretrained": "canary://model"}},
    "checkpoints at an address": {"checkpoint": {"dir": "canary://checkpoints"}},
    "a tokenizer at an address": {"data": {"tokenizer": "canary://tokenizer.json"}},
}  # fmt: skip
#: Description -> fields of an ``adapter_config.json`` with which a library would compute for long or exhaust memory.
ADAPTERS: Mapping[str, Any] = {
    "a regular expression that backtracks": {"target_modules": "(a*)*(b*)*(\\w+\\.?)*$"},
    "one in exclude_modules": {"exclude_modules": "((\\w+)+)+$"},
    "one in rank_pattern": {"rank_pattern": {"(([a-z_.])+)+x": 3}},
    "one in alpha_pattern": {"alpha_pattern": {"(([a-z_.])+)+x": 3}},
    "one in layers_pattern": {"layers_pattern": "(([a-z_.])+)+x", "layers_to_transform": [0]},
    "one in modules_to_save": {"modules_to_save": ["(([a-z_.])+)+x"]},
    "a million names": {"target_modules": [f"q{number}" for number in range(1_000_000)]},
    "layers replicated": {"layer_replication": [[0, 1], [0, 100_000]]},
    "a huge rank": {"r": 10**8},
    "a rank that is no number": {"r": [2]},
    "a huge scale": {"lora_alpha": 1e300},
    "no kind": {"peft_type": None},
    "another kind": {"peft_type": "VBLORA"},
    "a decomposition of all weights": {"init_lora_weights": "pissa"},
    "a module to import": {"megatron_core": "os", "megatron_config": {"a": 1}},
    "a field of the future": {"run_this": "x"},
}
#: Description -> name of a model file, and its malicious fields or whole text.
CONFIGS: Mapping[str, tuple[str, Any]] = {
    "ends that are texts": ("generation_config.json", {"eos_token_id": "x"}),
    "ends that are lists of lists": ("generation_config.json", {"eos_token_id": [[1], {"a": 2}]}),
    "many beams": ("generation_config.json", {"num_beams": 20_000}),
    "beams that are a text": ("generation_config.json", {"num_beams": "x"}),
    "many sequences": ("generation_config.json", {"num_return_sequences": 1000}),
    "a temperature that is a list": ("generation_config.json", {"do_sample": True, "temperature": [1]}),
    "a negative temperature": ("generation_config.json", {"do_sample": True, "temperature": -1.0}),
    "a cache that does not exist": ("generation_config.json", {"cache_implementation": "x"}),
    "a list in place of an object": ("generation_config.json", []),
    "forced tokens that are none": ("generation_config.json", {"forced_bos_token_id": "x", "bad_words_ids": [["x"]]}),
    "a config without a kind": ("config.json", {"model_type": None, "architectures": None}),
    "a config of an unknown kind": ("config.json", {"model_type": "x"}),
    "a config that is a list": ("config.json", []),
    "architectures that are a number": ("config.json", {"architectures": 3}),
    "architectures that are numbers": ("config.json", {"architectures": [3]}),
    "sizes that are texts": ("config.json", {"hidden_size": "x"}),
    "a size of zero": ("config.json", {"num_attention_heads": 0}),
    "a negative size": ("config.json", {"hidden_size": -64}),
    "a billion layers": ("config.json", {"num_hidden_layers": 10**9}),
    "a huge matrix": ("config.json", {"intermediate_size": 10**12}),
    "positions that are a text": ("config.json", {"max_position_embeddings": "x"}),
    "an activation that does not exist": ("config.json", {"hidden_act": "os.system"}),
    "code of its own": ("config.json", {"model_type": "x", "auto_map": {"AutoConfig": "evil.Evil"}}),
    "a number format that does not exist": ("config.json", {"dtype": "float3", "torch_dtype": "float3"}),
    "quantization that does not exist": ("config.json", {"quantization_config": {"quant_method": "x"}}),
    "rotary settings that are a number": ("config.json", {"rope_scaling": 3, "rope_parameters": 3}),
    "text that is no JSON": ("config.json", "{"),
    "a tokenizer of an unknown class": ("tokenizer_config.json", {"tokenizer_class": "os.system"}),
    "special tokens that are numbers": ("tokenizer_config.json", {"eos_token": 3}),
}


def weights(file: Path, *names: str) -> Path:
    """Write a file of one-element tensors with any names."""
    header = {name: {"dtype": "U8", "shape": [1], "data_offsets": [at, at + 1]} for at, name in enumerate(names)}
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(len(names)))
    return file


#: Description -> parts of a ``tokenizer.json`` that turn a short text into gigabytes or take very long.
TOKENIZERS: Mapping[str, Mapping[str, Any]] = {
    "a normalizer that multiplies": {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "Replace", "pattern": {"String": "e"}, "content": "e" * 10}] * 10,
        }
    },
    "a normalizer that prepends": {"normalizer": {"type": "Prepend", "prepend": "e" * 50_000_000}},
    "an expression that backtracks": {
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": "^(([a-z ])+.)+[A-Z]([a-z ])+$"},
            "behavior": "Isolated",
            "invert": False,
        }
    },
}


def change_json(file: Path, fields: Mapping[str, Any]) -> None:
    """Replace fields of an object in a JSON file."""
    file.write_text(json.dumps({**json.loads(file.read_text("utf-8")), **fields}), "utf-8")


def replace_file(file: Path, kind: str, target: Path) -> None:
    """Replace a file by a named pipe, an endless device, or a link.

    Args:
        file: file to replace.
        kind: ``"pipe"``, ``"device"`` or ``"link"``.
        target: target of a link.
    """
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to("/dev/zero" if kind == "device" else target)
