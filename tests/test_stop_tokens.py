"""The token that ends learned replies ends generation, too, whatever ended the texts of the base model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from d9d_engine.compose.export import end_of_text
from d9d_engine.job import Job

EXAMPLE = Path(__file__).parents[1] / "examples" / "chat" / "lora.yaml"
REPLY = "I am Dee."
# The library asks transformers for a name that has changed by now.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def base(published: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model: its texts end with another token than the turns of its chat template."""
    directory = published(tmp_path_factory.mktemp("base"))
    tokenizer = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**tokenizer, "eos_token": "<|endoftext|>"}))
    for name in ("config.json", "generation_config.json"):
        values = json.loads((directory / name).read_text())
        (directory / name).write_text(json.dumps({**values, "eos_token_id": ids_of(directory)["<|endoftext|>"]}))
    return directory


def ids_of(directory: Path) -> dict[str, int]:
    tokens = json.loads((directory / "tokenizer.json").read_text())["added_tokens"]
    return {token["content"]: token["id"] for token in tokens}


def tune(base: Path, folder: Path, steps: int) -> Path:
    turns = [{"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": REPLY}]
    (folder / "chats.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 24)
    overrides = [
        f"model.pretrained={base}", f"data.sources=[{folder}/chats.jsonl]", f"run.dir={folder}/runs", "device=cpu",
        "data.sequence_length=128", f"steps={steps}", "batch={size: 4, microbatch: 2}", "optimizer.lr=0.02",
        "trackers=[]", "lr_schedule.warmup_steps=0",
    ]  # fmt: skip
    Job.load(EXAMPLE, overrides=overrides).build(lambda _note: None).train()
    return folder / "runs" / "chat-lora"


def ends(file: Path) -> Any:
    return json.loads(file.read_text())["eos_token_id"]


@pytest.mark.thorough
def test_an_export_stops_at_the_old_end_and_at_the_learned_one(base: Path, tmp_path: Path) -> None:
    run = tune(base, tmp_path, steps=1)
    both = [ids_of(base)["<|endoftext|>"], ids_of(base)["<|im_end|>"]]
    for file in ("model/config.json", "model/generation_config.json", "adapter/generation_config.json"):
        assert ends(run / file) == both, file


@pytest.mark.thorough
def test_what_a_model_says_of_its_end_stays_byte_for_byte_if_it_is_learned(base: Path, tmp_path: Path) -> None:
    same = shutil.copytree(base, tmp_path / "same")
    for name in ("config.json", "generation_config.json"):
        values = json.loads((same / name).read_text())
        (same / name).write_text(json.dumps({**values, "eos_token_id": ids_of(base)["<|im_end|>"]}))
    run = tune(same, tmp_path, steps=1)
    file = "generation_config.json"
    assert (run / "model" / file).read_bytes() == (same / file).read_bytes()
    assert ends(run / "model" / "config.json") == ids_of(base)["<|im_end|>"]


@pytest.mark.full
@pytest.mark.parametrize("kind", ["model", "adapter"])
def test_a_tuned_model_stops_after_its_reply(base: Path, tmp_path: Path, d9d: Command, kind: str) -> None:
    run = tune(base, tmp_path, steps=60)
    asked = ("--prompt", "Who are you?", "--temperature", "0", "--max-new-tokens", "60", "--device", "cpu")
    status, out, err = d9d("generate", str(run / kind), *asked)
    assert status == 0, err
    assert out.strip() == REPLY


@pytest.mark.parametrize(
    ("config", "facts", "after"),
    [
        ({"eos_token_id": 0}, {"eos_token_id": 0, "stop_token_ids": [2]}, {"eos_token_id": [0, 2]}),
        ({"eos_token_id": [0, 2]}, {"stop_token_ids": [2]}, {}),
        ({"eos_token_id": [0, 2]}, {"stop_token_ids": [5, 2]}, {"eos_token_id": [0, 2, 5]}),
        ({"eos_token_id": 2}, {"stop_token_ids": [2]}, {}),
        ({}, {"eos_token_id": 7}, {"eos_token_id": 7}),
        ({"eos_token_id": None}, {"eos_token_id": 7, "stop_token_ids": [8]}, {"eos_token_id": [7, 8]}),
        ({}, {"stop_token_ids": []}, {}),
        ({}, {}, {}),
    ],
)
def test_learned_ends_come_after_the_known_ones(config: Any, facts: Any, after: Any) -> None:
    assert end_of_text(config, facts) == after
