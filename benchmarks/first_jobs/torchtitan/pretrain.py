from datasets import load_dataset
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.models.qwen3 import Qwen3ModelArgs, qwen3_args

qwen3_args["first"] = Qwen3ModelArgs(
    vocab_size=2048,
    max_seq_len=256,
    head_dim=32,
    dim=128,
    n_layers=4,
    n_heads=4,
    n_kv_heads=2,
    qk_norm=True,
    hidden_dim=384,
    rope_theta=1000000,
    enable_weight_tying=True,
)
for split in ("train", "held_out"):
    DATASETS[split] = DatasetConfig(
        path=f"texts.{split}.jsonl",
        loader=lambda path: load_dataset("json", data_files=path, split="train"),
        sample_processor=lambda sample: sample["text"],
    )
