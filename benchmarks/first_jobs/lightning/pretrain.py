import lightning
import torch
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM, default_data_collator
from transformers import get_cosine_schedule_with_warmup

LENGTH, STEPS = 128, 60


class Pretraining(lightning.LightningModule):
    def __init__(self, config):
        super().__init__()
        self.model = Qwen3ForCausalLM(config)

    def training_step(self, batch, index):
        loss = self.model(**batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, index):
        self.log("eval_loss", self.model(**batch).loss, prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3, weight_decay=0.0)
        schedule = get_cosine_schedule_with_warmup(optimizer, 20, STEPS)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


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
    tie_word_embeddings=True,
    eos_token_id=tokenizer.eos_token_id,
)


def blocks(batch):
    ids = [i for text in tokenizer(batch["text"])["input_ids"] for i in [*text, config.eos_token_id]]
    pieces = [ids[i : i + LENGTH] for i in range(0, len(ids) - LENGTH + 1, LENGTH)]
    return {"input_ids": pieces, "labels": pieces}


def loader(split, shuffle):
    return DataLoader(data[split], 16, shuffle=shuffle, collate_fn=default_data_collator)


files = {"train": "texts.train.jsonl", "held_out": "texts.held_out.jsonl"}
data = load_dataset("json", data_files=files)
data = data.map(blocks, batched=True, remove_columns=["text"])
module = Pretraining(config)
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
module.model.save_pretrained("runs/pretrain/model")
tokenizer.save_pretrained("runs/pretrain/model")
