from datasets import load_dataset
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForSequenceClassification
from transformers import Trainer, TrainingArguments, set_seed

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
    num_labels=3,
    pad_token_id=tokenizer.pad_token_id,
)
files = {"train": "kinds.train.jsonl", "held_out": "kinds.held_out.jsonl"}
data = load_dataset("json", data_files=files)
data = data.map(lambda batch: tokenizer(batch["text"], truncation=True, max_length=128), batched=True)
arguments = TrainingArguments(
    output_dir="runs/classification",
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
    Qwen3ForSequenceClassification(config),
    arguments,
    train_dataset=data["train"],
    eval_dataset=data["held_out"],
    processing_class=tokenizer,
)
trainer.train()
trainer.save_model("runs/classification/model")
