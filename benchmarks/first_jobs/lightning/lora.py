import lightning
import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers import DataCollatorWithFlattening, get_cosine_schedule_with_warmup

LENGTH, STEPS = 256, 60


class Tuning(lightning.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_step(self, batch, index):
        loss = self.model(**batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, index):
        self.log("eval_loss", self.model(**batch).loss, batch_size=(batch["labels"] >= 0).sum())

    def configure_optimizers(self):
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=3e-3, weight_decay=0.0)
        schedule = get_cosine_schedule_with_warmup(optimizer, 20, STEPS)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def tokens(record):
    found = tokenizer.apply_chat_template(record["messages"], return_dict=True, return_assistant_tokens_mask=True)
    ids = found["input_ids"][:LENGTH]
    masks = found["assistant_masks"]
    return {"input_ids": ids, "labels": [i if m else -100 for i, m in zip(ids, masks)]}


def packed(records):
    packs = []
    for record in sorted(records, key=lambda record: -len(record["input_ids"])):
        size = len(record["input_ids"])
        fits = [pack for pack in packs if pack[0] + size <= LENGTH]
        pack = max(fits, key=lambda pack: pack[0], default=None)
        if pack is None:
            packs.append(pack := [0, []])
        pack[0] += size
        pack[1].append(record)
    return [pack[1] for pack in packs]


def collate(packs):
    return DataCollatorWithFlattening()([record for pack in packs for record in pack])


def loader(split, shuffle):
    return DataLoader(packed(data[split]), 8, shuffle=shuffle, collate_fn=collate)


lightning.seed_everything(0)
tokenizer = AutoTokenizer.from_pretrained("base")
files = {"train": "conversations.train.jsonl", "held_out": "conversations.held_out.jsonl"}
data = load_dataset("json", data_files=files).map(tokens, remove_columns=["messages"])
model = AutoModelForCausalLM.from_pretrained("base")
model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
module = Tuning(model)
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
model.save_pretrained("runs/lora/model")
tokenizer.save_pretrained("runs/lora/model")
