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
    """Rollouts that the loop has written, a file for each step."""

    name: Literal["rollouts"] = "rollouts"
    """Selects the plugin."""
    directory: Path
    """Directory of the files."""


class Rollouts:
    """Stream of rollouts: the pack of step n is what :func:`write_rollouts` has written for it."""

    def __init__(self, config: RolloutsConfig, context: DataContext) -> None:
        self._directory = config.directory
        self._context = context
        self._packs = 0

    @property
    def facts(self) -> State:
        """Facts of the data: none before the rollouts are made."""
        return {}

    def next_pack(self) -> Pack:
        """The rollouts of the next step: this rank's part of them."""
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
        """Packs taken."""
        return {"packs": self._packs}

    def load_state(self, state: State) -> None:
        """Continue after the packs taken."""
        self._packs = int(state["packs"])

    def save_assets(self, directory: Path) -> None:
        """There is no tokenizer."""


def rollout_file(directory: Path, step: int) -> Path:
    """File of the rollouts of a step (0-based)."""
    return directory / f"step-{step:05}.safetensors"


def write_rollouts(directory: Path, step: int, sequences: Tensor, rewards: Tensor, prompt: int) -> None:
    """Write rollouts with their advantages: rewards, normalised over the batch (as in GRPO, with one group).

    Args:
        directory: made if it is absent.
        step: optimizer step (0-based) that learns from them.
        sequences: int64 [B, S + 1], prompts and what the policy continued them with.
        rewards: [B], of each rollout.
        prompt: tokens of each sequence that the policy did not choose.
    """
    targets = sequences[:, 1:].clone()
    targets[:, : prompt - 1] = -100  # nothing is learned from what was given
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {"tokens": sequences[:, :-1].contiguous(), "targets": targets, "advantages": advantages.float()}
    save_file(tensors, rollout_file(directory, step))


class PolicyGradientConfig(PluginConfig):
    """Policy gradient of rollouts that the present policy has made."""

    name: Literal["policy_gradient"] = "policy_gradient"
    """Selects the plugin."""


class PolicyGradient:
    """REINFORCE (Williams 1992) with advantages: the sum over chosen tokens of ``-advantage * log_probability``."""

    def __init__(self, config: PolicyGradientConfig) -> None:
        self.config = config

    @property
    def coefficients(self) -> Mapping[str, float]:
        """One term."""
        return {"policy": 1.0}

    def check(self, model: Any, facts: State) -> None:
        """Everything is compared where rollouts are made."""

    def count(self, microbatch: Microbatch) -> int:
        """Positions."""
        return microbatch["tokens"].numel()

    def weights(self, microbatch: Microbatch) -> Mapping[str, Tensor]:
        """Number of chosen tokens."""
        return {"policy": (microbatch["targets"] != -100).sum(dtype=torch.float32)}

    def inputs(self, microbatch: Microbatch) -> StageInputs:
        """Tokens for the first stage, chosen tokens for the last."""
        return StageInputs(first={"tokens": microbatch["tokens"]}, shared={"targets": microbatch["targets"]})

    def losses(self, outputs: Mapping[str, Tensor], microbatch: Microbatch) -> Mapping[str, Tensor]:
        """Negative log-likelihoods [B, S], times the advantage [B] of their rollout."""
        return {"policy": (outputs["token_loss"] * microbatch["advantages"][:, None]).sum()}

    def observations(self, outputs: Mapping[str, Tensor], microbatch: Microbatch) -> Mapping[str, Tensor]:
        """Observations that the perplexity reads."""
        return {"token_loss": outputs["token_loss"].detach(), "targets": microbatch["targets"]}


@hookimpl
def d9d_datasets() -> Iterator[DatasetSpec]:
    """The dataset ``rollouts``."""
    yield DatasetSpec(
        name="rollouts",
        summary="Rollouts that a loop writes, a file for each step.",
        config=Ref(f"{__name__}:RolloutsConfig"),
        build=Ref(f"{__name__}:Rollouts"),
    )


@hookimpl
def d9d_tasks() -> Iterator[TaskSpec]:
    """The task ``policy_gradient``."""
    yield TaskSpec(
        name="policy_gradient",
        summary="Policy gradient of rollouts with advantages.",
        config=Ref(f"{__name__}:PolicyGradientConfig"),
        build=Ref(f"{__name__}:PolicyGradient"),
        requires={"model:causal_lm"},
    )
