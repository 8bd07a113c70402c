import lightning
import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from torch.nn.functional import logsigmoid
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, get_cosine_schedule_with_warmup

LENGTH, STEPS, BETA = 256, 60, 0.1


class Preferences(lightning.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def log_probabilities(self, ids, mask, learned):
        logits = self.model(input_ids=ids, attention_mask=mask).logits[:, :-1]
        tokens = logits.log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
        chosen, rejected = (tokens * learned[:, 1:]).sum(1).chunk(2)
        return chosen - rejected

    def loss(self, batch):
        margin = self.log_probabilities(*batch)
        with torch.no_grad(), self.model.disable_adapter():
            reference = self.log_probabilities(*batch)
        return -logsigmoid(BETA * (margin - reference)).mean()

    def training_step(self, batch, index):
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, index):
        self.log("eval_loss", self.loss(batch), batch_size=len(batch[0]) // 2)

    def configure_optimizers(self):
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=5e-4, weight_decay=0.0)
        schedule = get_cosine_schedule_with_warmup(optimizer, 20, STEPS)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def tokens(messages):
    found = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    return found["input_ids"][:LENGTH], found["assistant_masks"][:LENGTH]


def collate(records):
    rows = [tokens(record["prompt"] + record["chosen"]) for record in records]
    rows += [tokens(record["prompt"] + record["rejected"]) for record in records]
    longest = max(len(ids) for ids, _ in rows)
    ids, mask, learned = torch.zeros(3, len(rows), longest, dtype=torch.long)
    for row, (row_ids, row_learned) in enumerate(rows):
        ids[row, : len(row_ids)] = torch.tensor(row_ids)
        mask[row, : len(row_ids)] = 1
        learned[row, : len(row_ids)] = torch.tensor(row_learned)
    return ids, mask, learned


def loader(split, shuffle):
    return DataLoader(data[split], 8, shuffle=shuffle, collate_fn=collate)


lightning.seed_everything(0)
tokenizer = AutoTokenizer.from_pretrained("base")
files = {"train": "preferences.train.jsonl", "held_out": "preferences.held_out.jsonl"}
data = load_dataset("json", data_files=files)
model = AutoModelForCausalLM.from_pretrained("base")
model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
module = Preferences(model)
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
model.save_pretrained("runs/dpo/model")
