from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

files = {"train": "conversations.train.jsonl", "held_out": "conversations.held_out.jsonl"}
data = load_dataset("json", data_files=files)
arguments = SFTConfig(
    output_dir="runs/sft",
    max_length=256,
    packing=True,
    assistant_only_loss=True,
    max_steps=60,
    per_device_train_batch_size=8,
    per_device_eval_batch_size=8,
    learning_rate=3e-3,
    lr_scheduler_type="cosine",
    warmup_steps=20,
    bf16=False,
    gradient_checkpointing=False,
    eval_strategy="steps",
    eval_steps=60,
    save_strategy="no",
    report_to="none",
    use_cpu=True,
)
trainer = SFTTrainer("base", arguments, train_dataset=data["train"], eval_dataset=data["held_out"])
trainer.train()
trainer.save_model("runs/sft/model")
