from datasets import load_dataset
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
from transformers import Trainer, TrainingArguments, default_data_collator, set_seed

LENGTH = 128

set_seed(0)
tokenizer = AutoTokenizer.from_pretrained("tokenizer")
config = Qwen3Config(
    vocab_size=2048,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=256,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    tie_word_embeddings=True,
    eos_token_id=tokenizer.eos_token_id,
)


def blocks(batch):
    ids = [i for text in tokenizer(batch["text"])["input_ids"] for i in [*text, config.eos_token_id]]
    pieces = [ids[i : i + LENGTH] for i in range(0, len(ids) - LENGTH + 1, LENGTH)]
    return {"input_ids": pieces, "labels": pieces}


files = {"train": "texts.train.jsonl", "held_out": "texts.held_out.jsonl"}
data = load_dataset("json", data_files=files)
data = data.map(blocks, batched=True, remove_columns=["text"])
arguments = TrainingArguments(
    output_dir="runs/pretrain",
    max_steps=60,
    per_device_train_batch_size=16,
    per_device_eval_batch_size=16,
    learning_rate=3e-3,
    lr_scheduler_type="cosine",
    warmup_steps=20,
    logging_steps=10,
    eval_strategy="steps",
    eval_steps=60,
    save_strategy="no",
    report_to="none",
    use_cpu=True,
)
trainer = Trainer(
    Qwen3ForCausalLM(config),
    arguments,
    train_dataset=data["train"],
    eval_dataset=data["held_out"],
    data_collator=default_data_collator,
    processing_class=tokenizer,
)
trainer.train()
trainer.save_model("runs/pretrain/model")
