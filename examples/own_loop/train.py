"""Trains a small Llama in a loop of its own: a pipeline of two stages, each sharded over two ranks, without a job file.

uv run torchrun --nproc-per-node 4 examples/own_loop/train.py
"""

import torch
from d9d_engine.own_loop import OwnLoop, build_schedule, build_stages, topology_of
from d9d_llama.config import LlamaConfig
from d9d_llama.model import Llama
from d9d_nn.causal_lm.config import CausalLMConfig
from d9d_nn.causal_lm.task import CausalLM
from d9d_parallel.functions import fsdp, replicate
from d9d_pipeline.config import OneForwardOneBackwardConfig
from torch import distributed as dist

STEPS, MICROBATCHES, SAMPLES, POSITIONS, WORDS = 50, 4, 2, 64, 64
CONFIG = LlamaConfig(
    vocab_size=WORDS,
    hidden_size=64,
    intermediate_size=192,
    num_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def microbatch(numbers: torch.Generator, device: torch.device) -> dict[str, torch.Tensor]:
    """Samples that count upwards from a random token by a random step."""
    first, step = torch.randint(WORDS, (2, SAMPLES, 1), generator=numbers)
    tokens = (first + step * torch.arange(POSITIONS + 1)) % WORDS
    return {"tokens": tokens[:, :-1].to(device), "targets": tokens[:, 1:].to(device)}


def main() -> None:
    """Train on all ranks, and print the loss on the first."""
    dist.init_process_group()
    topology = topology_of(pp=2, dp_shard=2)
    schedule = build_schedule(OneForwardOneBackwardConfig(), topology, MICROBATCHES)
    stages = build_stages(lambda stage: Llama(CONFIG, stage), topology, schedule)
    fsdp(stages, match=["layers.*"])
    replicate(stages, match=["embedding", "norm", "heads"])
    loop = OwnLoop(stages, CausalLM(CausalLMConfig()), max_norm=1.0)
    optimizer = torch.optim.AdamW(loop.parameters(), lr=3e-3, foreach=False)
    # Ranks along pp see the same samples, ranks along dp_shard different ones.
    numbers = torch.Generator().manual_seed(topology.data_parallel_rank)
    for step in range(STEPS):
        result = loop.step([microbatch(numbers, topology.device) for _ in range(MICROBATCHES)])
        optimizer.step()
        loop.end_step()
        if topology.is_main and (step + 1) % 10 == 0:
            print(f"step {step + 1}: loss {result.loss.item():.3f}, gradient norm {result.grad_norm.item():.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
