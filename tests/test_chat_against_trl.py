"""Supervised fine-tuning computes what TRL computes: losses and the gradient of every trained parameter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_core.extend import OptimizerStepStarts
from d9d_engine.api import Job
from torch import Tensor, nn

# Other people's libraries warn of each other.
pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("ignore")]
STEPS, LR = 3, 0.05
QUESTIONS = ("one", "two and more", "three", "a longer question than the others")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def conversation(question: str) -> dict[str, Any]:
    turns = [question, f"It is {len(question)}.", "Sure?", "Yes."]
    return {"messages": [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(turns)]}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A published model with its tokenizer, and an adapter on top of it that changes what it computes."""
    from peft import LoraConfig, get_peft_model
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "base")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=128, initializer_range=0.2,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(tmp_path / "base")
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    adapted.save_pretrained(tmp_path / "adapter")
    return tmp_path / "base"


def theirs(base: Path, directory: Path) -> tuple[list[float], list[dict[str, Tensor]]]:
    """Losses of TRL's trainer, and gradients by the names of our parameters."""
    from datasets import Dataset
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    gradients: list[dict[str, Tensor]] = []

    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, *_args: Any, model: Any, **_rest: Any) -> None:
            gradients.append({ours(n): p.grad.clone() for n, p in model.named_parameters() if p.requires_grad})

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(model, base.parent / "adapter", is_trainable=True)
    settings = SFTConfig(
        output_dir=str(directory), max_steps=STEPS, per_device_train_batch_size=len(QUESTIONS), learning_rate=LR,
        optim="sgd", lr_scheduler_type="constant", max_grad_norm=0.0, logging_steps=1, report_to=[], save_strategy="no",
        assistant_only_loss=True, use_cpu=True, bf16=False, max_length=128, packing=False, gradient_checkpointing=False,
    )  # fmt: skip
    trainer = SFTTrainer(
        adapted,
        args=settings,
        train_dataset=Dataset.from_list([conversation(question) for question in QUESTIONS]),
        processing_class=AutoTokenizer.from_pretrained(base),
        callbacks=[Watch()],
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], gradients


def ours(name: str) -> str:
    """Our name of a parameter of theirs."""
    name = name.removeprefix("base_model.model.model.").replace(".default", "")
    return name.replace("self_attn", "attention").replace("mlp", "ffn")


class Watch:
    """Keeps the gradients of each step."""

    def __init__(self) -> None:
        self.stage: nn.Module
        self.gradients: list[dict[str, Tensor]] = []

    def subscriptions(self) -> list[Any]:
        return [(OptimizerStepStarts, self.keep)]

    def keep(self, _event: OptimizerStepStarts) -> None:
        named = self.stage.named_parameters()
        self.gradients.append({name: p.grad.clone() for name, p in named if p.grad is not None})


def test_losses_and_gradients_are_those_of_trl(base: Path, tmp_path: Path) -> None:
    for module in ("trl", "peft", "datasets", "transformers"):
        pytest.importorskip(module)
    expected, their_gradients = theirs(base, tmp_path / "trl")
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(conversation(text)) + "\n" for text in QUESTIONS))
    path = tmp_path / "job.json"
    path.write_text(json.dumps({
        "run": {"name": "ours", "dir": str(tmp_path / "runs")}, "steps": STEPS, "device": "cpu",
        "batch": {"size": len(QUESTIONS), "microbatch": 2}, "model": {"name": "qwen3", "pretrained": str(base)},
        "data": {"name": "chat", "sources": [str(tmp_path / "chats.jsonl")], "sequence_length": 128},
        "peft": {"name": "lora", "r": 4, "alpha": 8, "init_from": str(tmp_path / "adapter")}, "task": "causal_lm",
        "optimizer": {"name": "sgd", "lr": LR}, "gradient_clipping": {"max_norm": None}, "export": False,
        "logging": {"every": 1}, "trackers": [{"name": "jsonl", "picture": False}],
    }))  # fmt: skip
    watch = Watch()
    trainer = Job.load(path).build(lambda _: None, observers=[watch])
    watch.stage = trainer.stage
    trainer.train()
    losses = [json.loads(line)["loss"] for line in (tmp_path / "runs/ours/metrics.jsonl").read_text().splitlines()]
    assert losses == pytest.approx(expected, abs=1e-4)  # they print five digits
    assert losses[-1] < losses[0]
    assert len(watch.gradients) == len(their_gradients) == STEPS
    for mine, other in zip(watch.gradients, their_gradients, strict=True):
        assert mine.keys() == other.keys()
        for name, gradient in mine.items():
            torch.testing.assert_close(gradient, other[name], atol=1e-5, rtol=1e-5)
