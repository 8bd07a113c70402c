from datasets import load_dataset
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer

files = {"train": "preferences.train.jsonl", "held_out": "preferences.held_out.jsonl"}
data = load_dataset("json", data_files=files)
arguments = DPOConfig(
    output_dir="runs/dpo",
    beta=0.1,
    max_length=256,
    max_steps=60,
    per_device_train_batch_size=8,
    per_device_eval_batch_size=8,
    learning_rate=5e-4,
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
trainer = DPOTrainer(
    "base",
    args=arguments,
    train_dataset=data["train"],
    eval_dataset=data["held_out"],
    peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
)
trainer.train()
trainer.save_model("runs/dpo/model")
