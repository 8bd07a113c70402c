"""Reinforcement learning on one device: the trainer sleeps while the policy makes its rollouts, then learns from them.

    python train.py [steps=100 ...]

Each iteration hands the weights over as a model directory, which is what engines such as vLLM load; here transformers
generates. The reward is the share of tokens that are one more than the token before them, modulo the vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from d9d_core.subscriber import OwnEvent, subscribe
from d9d_engine.job import Job
from d9d_engine.run.trainer import Trainer
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parent))
from rl import write_rollouts

LENGTH = 8


class RolloutsDone(OwnEvent):
    """Event: the rollouts of a step exist, with this mean reward."""

    def __init__(self, step: int, reward: float) -> None:
        self.step = step
        self.reward = reward


def reward_of(sequences: Tensor, vocabulary: int) -> Tensor:
    """Rewards [B] of sequences [B, 1 + LENGTH]: the fraction of tokens that continue the count."""
    return (sequences[:, 1:] == (sequences[:, :-1] + 1) % vocabulary).float().mean(-1)


def make_rollouts(policy: Path, count: int, seed: int, device: torch.device) -> Tensor:
    """Sample continuations of random first tokens, [count, 1 + LENGTH]; stands in for a rollout engine."""
    model = AutoModelForCausalLM.from_pretrained(policy).to(device).eval()
    torch.manual_seed(seed)
    prompts = torch.randint(model.config.vocab_size, (count, 1), device=device)
    model.generation_config.eos_token_id = None  # no early end: every sequence has its full length
    sampling = {"do_sample": True, "top_k": 0, "max_new_tokens": LENGTH, "pad_token_id": 0}
    return model.generate(prompts, attention_mask=torch.ones_like(prompts), **sampling).cpu()


def learn(trainer: Trainer, rollouts: Path, policy: Path) -> None:
    """Alternate rollouts and steps until all steps of the job are done."""
    job, device = trainer.job, trainer.topology.device
    while (step := trainer.progress.step) < trainer.total_steps:
        trainer.export(policy)
        trainer.sleep()  # frees the device for the rollout engine
        sequences = make_rollouts(policy, job.batch.size, job.seed * 100_003 + step, device)
        rewards = reward_of(sequences, 16)
        write_rollouts(rollouts, step, sequences, rewards, prompt=1)
        trainer.wake()
        trainer.events.emit(RolloutsDone(step, rewards.mean().item()))
        for _result in trainer.steps(1):
            pass


def main(overrides: Sequence[str] = ()) -> list[float]:
    """Train, and return the mean reward of each iteration.

    Args:
        overrides: overrides of job-file fields, such as ``steps=20``.
    """
    logging.disable_progress_bar()
    job = Job.load(Path(__file__).parent / "job.yaml", overrides=overrides)
    rewards: list[float] = []

    @subscribe(RolloutsDone)
    def show(event: RolloutsDone) -> None:
        rewards.append(event.reward)
        if event.step % 10 == 0:
            print(f"step {event.step}: mean reward {event.reward:.2f}", flush=True)

    with job.build(observers=[show]) as trainer:
        trainer.start()  # continues from the newest checkpoint
        learn(trainer, job.data.directory, job.run.directory / "policy")
    if rewards:  # empty if all steps were done before
        print(f"mean reward {rewards[0]:.2f} at first, {rewards[-1]:.2f} at last")
    return rewards


if __name__ == "__main__":
    main(sys.argv[1:])
