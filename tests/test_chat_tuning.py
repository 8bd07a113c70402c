"""From a published model and conversations to a tuned one, as a user does it: with the job file of the examples."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_engine.job import Job
from d9d_testing.layouts import Harness, assert_passed
from d9d_testing.logs import read_log
from d9d_verify.layouts import Layout

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "chat" / "lora.yaml"
PLUGINS = (
    "d9d_nn.plugin", "d9d_data.plugin", "d9d_optim.plugin", "d9d_parallel.plugin", "d9d_pipeline.plugin",
    "d9d_qwen3.plugin", "d9d_peft.plugin",
)  # fmt: skip
# The library asks transformers for a name that has changed by now.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")
REPLY = "I am Dee."


@pytest.fixture(scope="module")
def base(published: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published(tmp_path_factory.mktemp("base"))


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    records = [
        {"messages": [{"role": "user", "content": f"Who is {n}?"}, {"role": "assistant", "content": REPLY}]}
        for n in range(24)
    ]
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def test_the_example_is_a_job_file_of_fifteen_lines() -> None:
    lines = [line for line in EXAMPLE.read_text().splitlines() if line.strip() and not line.startswith("#")]
    assert len(lines) <= 15


@pytest.mark.full
def test_the_tuned_model_answers_in_transformers_with_its_own_template(base: Path, chats: Path, tmp_path: Path) -> None:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    overrides = [
        f"model.pretrained={base}", f"data.sources=[{chats}]", f"run.dir={tmp_path}/runs",
        "device=cpu", "data.sequence_length=128", "steps=60", "batch={size: 4, microbatch: 2}", "optimizer.lr=0.02",
        "trackers=[{name: jsonl, picture: false}]",
    ]  # fmt: skip
    notes: list[str] = []
    Job.load(EXAMPLE, overrides=overrides).build(notes.append).train()
    run = tmp_path / "runs" / "chat-lora"
    losses = [line["loss"] for line in read_log(run)]
    assert losses[-1] < 0.1 * losses[0]
    assert any("of them train on cpu" in note for note in notes)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (run / "model" / file).read_bytes() == (base / file).read_bytes()
    tokenizer = transformers.AutoTokenizer.from_pretrained(run / "model")
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Who is 7?"}], add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    merged = transformers.AutoModelForCausalLM.from_pretrained(run / "model")
    answer = merged.generate(asked, max_new_tokens=16, do_sample=False)[0, asked.shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True) == REPLY
    assert answer[-1] == tokenizer.eos_token_id  # it stops
    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    adapted = peft.PeftModel.from_pretrained(plain, run / "adapter").eval()
    with torch.no_grad():
        torch.testing.assert_close(adapted(asked).logits, merged.eval()(asked).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.full
def test_conversations_train_alike_in_every_layout(base: Path, chats: Path, tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "run": {"dir": str(tmp_path / "runs")}, "steps": 3, "device": "cpu", "batch": {"size": 4, "microbatch": 4},
        "model": {"name": "qwen3", "pretrained": str(base)}, "task": "causal_lm",
        "data": {"name": "chat", "sources": [str(chats)], "sequence_length": 128, "packing": "best_fit"},
        "optimizer": {"name": "adamw", "lr": 0.01}, "peft": {"name": "lora", "r": 4},
        "gradient_clipping": {"max_norm": None}, "trackers": [], "export": False,
    }  # fmt: skip
    layouts = [
        Layout("fsdp 2", {"dp_shard": 2}, ["fsdp"], ("batch.microbatch=1",)),
        Layout("pp 2", {"pp": 2}, [], ("pipeline.name=zb1p", "batch.microbatch=1")),
    ]
    for packing in ("best_fit", "none"):
        data = values["data"] | {"packing": packing}
        assert_passed(Harness(values | {"data": data}, PLUGINS, 3).compare(layouts))
