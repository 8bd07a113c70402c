import lightning
import torch
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, DataCollatorWithPadding, Qwen3Config
from transformers import Qwen3ForSequenceClassification, get_cosine_schedule_with_warmup

STEPS = 60


class Classification(lightning.LightningModule):
    def __init__(self, config):
        super().__init__()
        self.model = Qwen3ForSequenceClassification(config)

    def training_step(self, batch, index):
        loss = self.model(**batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, index):
        self.log("eval_loss", self.model(**batch).loss, batch_size=len(batch["labels"]))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3, weight_decay=0.0)
        schedule = get_cosine_schedule_with_warmup(optimizer, 20, STEPS)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def loader(split, shuffle):
    return DataLoader(data[split], 16, shuffle=shuffle, collate_fn=DataCollatorWithPadding(tokenizer))


lightning.seed_everything(0)
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
data = data.map(
    lambda batch: tokenizer(batch["text"], truncation=True, max_length=128),
    batched=True,
    remove_columns=["text"],
)
module = Classification(config)
trainer = lightning.Trainer(
    max_steps=STEPS,
    accelerator="cpu",
    gradient_clip_val=1.0,
    log_every_n_steps=10,
    enable_checkpointing=False,
    logger=False,
)
trainer.fit(module, loader("train", True))
trainer.validate(module, loader("held_out", False))
module.model.save_pretrained("runs/classification/model")
tokenizer.save_pretrained("runs/classification/model")
