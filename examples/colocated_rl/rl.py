"""Plugin of the example: a dataset of rollouts, and the policy gradient as a task.

Shapes: B rollouts, S positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from d9d_core.config import PluginConfig
from d9d_core.data import DataContext
from d9d_core.errors import DataError
from d9d_core.plugin import DatasetSpec, Ref, TaskSpec, hookimpl
from d9d_core.task import StageInputs
from d9d_core.types import Microbatch, Pack, State
from safetensors.torch import load_file, save_file
from torch import Tensor

D9D_API = 2


class RolloutsConfig(PluginConfig):
    """Dataset of the rollouts that the loop writes, one file per step."""

    name: Literal["rollouts"] = "rollouts"
    """Selects the plugin."""
    directory: Path
    """Directory of the files."""


class Rollouts:
    """Stream of rollouts: the pack of step n is read from the file of :func:`write_rollouts`."""

    def __init__(self, config: RolloutsConfig, context: DataContext) -> None:
        self._directory = config.directory
        self._context = context
        self._packs = 0

    @property
    def facts(self) -> State:
        """Facts of the data: none, because the rollouts do not exist yet."""
        return {}

    def next_pack(self) -> Pack:
        """This rank's rollouts of the next step."""
        path = rollout_file(self._directory, self._packs)
        if not path.exists():
            raise DataError(
                f"{path} does not exist; write the rollouts of a step before it (and set batch.prefetch: 0)"
            )
        context, tensors = self._context, load_file(path)
        mine = context.batch_size // context.ranks
        own = {name: tensor[context.rank * mine :][:mine] for name, tensor in tensors.items()}
        parts = {name: tensor.split(context.microbatch_size) for name, tensor in own.items()}
        self._packs += 1
        return [{name: part[index] for name, part in parts.items()} for index in range(len(parts["tokens"]))]

    def state(self) -> State:
        """Number of packs read so far."""
        return {"packs": self._packs}

    def load_state(self, state: State) -> None:
        """Continue after the packs already read."""
        self._packs = int(state["packs"])

    def save_assets(self, directory: Path) -> None:
        """Save nothing: rollouts are tokens already, so there is no tokenizer."""


def rollout_file(directory: Path, step: int) -> Path:
    """Path of the rollouts of a step (0-based)."""
    return directory / f"step-{step:05}.safetensors"


def write_rollouts(directory: Path, step: int, sequences: Tensor, rewards: Tensor, prompt: int) -> None:
    """Write rollouts with their advantages: rewards, normalised over the batch (as in GRPO, with one group).

    Args:
        directory: created if it does not exist.
        step: optimizer step (0-based) that learns from them.
        sequences: int64 [B, S + 1], prompts with the policy's continuations.
        rewards: [B], reward of each rollout.
        prompt: number of leading tokens that the policy did not sample.
    """
    targets = sequences[:, 1:].clone()
    targets[:, : prompt - 1] = -100  # no loss on prompt tokens
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {"tokens": sequences[:, :-1].contiguous(), "targets": targets, "advantages": advantages.float()}
    save_file(tensors, rollout_file(directory, step))


class PolicyGradientConfig(PluginConfig):
    """Policy gradient on rollouts of the current policy."""

    name: Literal["policy_gradient"] = "policy_gradient"
    """Selects the plugin."""


class PolicyGradient:
    """REINFORCE (Williams 1992) with advantages: the sum over sampled tokens of ``-advantage * log_probability``."""

    def __init__(self, config: PolicyGradientConfig) -> None:
        self.config = config

    @property
    def coefficients(self) -> Mapping[str, float]:
        """Coefficient of each loss term in the loss, by the term's name."""
        return {"policy": 1.0}

    def check(self, model: Any, facts: State) -> None:
        """Check nothing: :func:`write_rollouts` makes the data."""

    def count(self, microbatch: Microbatch) -> int:
        """Number of tokens."""
        return microbatch["tokens"].numel()

    def weights(self, microbatch: Microbatch) -> Mapping[str, Tensor]:
        """Number of sampled tokens, the denominator of the loss."""
        return {"policy": (microbatch["targets"] != -100).sum(dtype=torch.float32)}

    def inputs(self, microbatch: Microbatch) -> StageInputs:
        """Input tokens for the first stage, targets for the last."""
        return StageInputs(first={"tokens": microbatch["tokens"]}, shared={"targets": microbatch["targets"]})

    def losses(self, outputs: Mapping[str, Tensor], microbatch: Microbatch) -> Mapping[str, Tensor]:
        """Sum of negative log-likelihoods [B, S] times the advantage [B] of their rollout."""
        return {"policy": (outputs["token_loss"] * microbatch["advantages"][:, None]).sum()}

    def observations(self, outputs: Mapping[str, Tensor], microbatch: Microbatch) -> Mapping[str, Tensor]:
        """Observations for the metric ``perplexity``."""
        return {"token_loss": outputs["token_loss"].detach(), "targets": microbatch["targets"]}


@hookimpl
def d9d_datasets() -> Iterator[DatasetSpec]:
    """Dataset ``rollouts``."""
    yield DatasetSpec(
        name="rollouts",
        summary="Rollouts that a loop writes, a file for each step.",
        config=Ref(f"{__name__}:RolloutsConfig"),
        build=Ref(f"{__name__}:Rollouts"),
    )


@hookimpl
def d9d_tasks() -> Iterator[TaskSpec]:
    """Task ``policy_gradient``."""
    yield TaskSpec(
        name="policy_gradient",
        summary="Policy gradient of rollouts with advantages.",
        config=Ref(f"{__name__}:PolicyGradientConfig"),
        build=Ref(f"{__name__}:PolicyGradient"),
        requires={"model:causal_lm"},
    )
