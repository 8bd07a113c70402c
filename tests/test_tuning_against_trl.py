"""Fine-tuning on conversations and on preferences computes what TRL does: losses, and gradients of all that trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_core.events import OptimizerStepStarts
from d9d_engine.job import Job
from torch import Tensor, nn

# Other people's libraries warn of each other.
pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]
STEPS, LR = 3, 0.01
#: Losses, and gradients by name, of each step.
Curve = tuple[list[float], list[dict[str, Tensor]]]
QUESTIONS = ("one", "two and more", "three", "a longer question than the others")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def pair(question: str) -> dict[str, Any]:
    prompt = [{"role": "user", "content": question}]
    sides = {"chosen": f"It is {len(question)}.", "rejected": "No." * (1 + len(question) % 3)}
    return {"prompt": prompt} | {side: [{"role": "assistant", "content": text}] for side, text in sides.items()}


def conversation(question: str) -> dict[str, Any]:
    turns = [question, f"It is {len(question)}.", "Sure?", "Yes."]
    return {"messages": [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(turns)]}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A published model with its tokenizer, and an adapter on top of it that changes its outputs."""
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


def adapted(base: Path) -> Any:
    """The published model with its adapter, which trains."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return PeftModel.from_pretrained(model, base.parent / "adapter", is_trainable=True)


def settings(directory: Path, **more: Any) -> dict[str, Any]:
    """Settings of a trainer of theirs: plain gradient descent on all records at once."""
    return {
        "output_dir": str(directory), "max_steps": STEPS, "per_device_train_batch_size": len(QUESTIONS),
        "learning_rate": LR, "optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "logging_steps": 1,
        "report_to": [], "save_strategy": "no", "use_cpu": True, "bf16": False, "max_length": 128,
        "gradient_checkpointing": False, **more,
    }  # fmt: skip


def theirs(kind: type, base: Path, args: Any, records: list[dict[str, Any]], **more: Any) -> Curve:
    """Losses of a trainer of theirs, and gradients by the names of our parameters."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback

    gradients: list[dict[str, Tensor]] = []

    class Keep(TrainerCallback):
        def on_pre_optimizer_step(self, *_args: Any, model: Any, **_rest: Any) -> None:
            gradients.append({ours(n): p.grad.clone() for n, p in model.named_parameters() if p.requires_grad})

    trainer = kind(
        adapted(base),
        args=args,
        train_dataset=Dataset.from_list(records),
        processing_class=AutoTokenizer.from_pretrained(base),
        callbacks=[Keep()],
        **more,
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


def mine(base: Path, directory: Path, data: str, task: Any, records: list[dict[str, Any]]) -> Curve:
    """Losses and gradients of a job."""
    directory.mkdir()
    (directory / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    job = Job.from_values({
        "run": {"name": "ours", "dir": str(directory)}, "steps": STEPS, "device": "cpu",
        "batch": {"size": len(QUESTIONS), "microbatch": 2}, "model": {"name": "qwen3", "pretrained": str(base)},
        "data": {"name": data, "sources": [str(directory / "records.jsonl")], "sequence_length": 128}, "task": task,
        "peft": {"name": "lora", "r": 4, "alpha": 8, "init_from": str(base.parent / "adapter")},
        "optimizer": {"name": "sgd", "lr": LR}, "gradient_clipping": {"max_norm": None}, "export": False,
        "logging": {"every": 1}, "trackers": [{"name": "jsonl", "picture": False}],
    })  # fmt: skip
    watch = Watch()
    trainer = job.build(lambda _: None, observers=[watch])
    watch.stage = trainer.stage
    trainer.train()
    lines = (directory / "ours/metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines], watch.gradients


def assert_equal(found: Curve, expected: Curve) -> None:
    assert found[0] == pytest.approx(expected[0], abs=1e-4)  # they print few digits
    assert found[0][-1] < found[0][0]
    assert len(found[1]) == len(expected[1]) == STEPS
    for here, there in zip(found[1], expected[1], strict=True):
        assert here.keys() == there.keys()
        for name, gradient in here.items():
            torch.testing.assert_close(gradient, there[name], atol=1e-5, rtol=1e-5)


@pytest.fixture(autouse=True)
def _libraries() -> None:
    for module in ("trl", "peft", "datasets", "transformers"):
        pytest.importorskip(module)


def test_fine_tuning_on_conversations_is_that_of_trl(base: Path, tmp_path: Path) -> None:
    from trl import SFTConfig, SFTTrainer

    records = [conversation(question) for question in QUESTIONS]
    args = SFTConfig(**settings(tmp_path / "trl", assistant_only_loss=True, packing=False))
    expected = theirs(SFTTrainer, base, args, records)
    assert_equal(mine(base, tmp_path / "job", "chat", "causal_lm", records), expected)


@pytest.mark.parametrize(
    ("reference", "their_loss", "task"),
    [
        ("copy", "sigmoid", {"beta": 0.5}),
        ("without_adapter", "ipo", {"loss": "ipo", "beta": 0.5}),
        ("stored", "sigmoid_norm", {"normalize_length": True, "beta": 2.0}),
        ("stored", "hinge", {"loss": "hinge", "beta": 0.5}),
    ],
)
def test_preference_tuning_is_that_of_trl(
    base: Path, tmp_path: Path, reference: str, their_loss: str, task: dict[str, Any]
) -> None:
    """Their reference is the adapter that training starts from, or the model that is given."""
    from transformers import AutoModelForCausalLM
    from trl import DPOConfig, DPOTrainer

    records = [pair(question) for question in QUESTIONS]
    args = DPOConfig(**settings(tmp_path / "trl", beta=task["beta"], loss_type=[their_loss]))
    plain = reference == "without_adapter"
    given = {"ref_model": AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)} if plain else {}
    expected = theirs(DPOTrainer, base, args, records, **given)
    job = mine(base, tmp_path / "job", "preference", {"name": "dpo", "reference": reference, **task}, records)
    assert_equal(job, expected)
