from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from d9d_core.errors import JobError
from d9d_nn.preference.config import DpoConfig, PreferenceMetricConfig
from d9d_nn.preference.metric import PreferenceMetric
from d9d_nn.preference.task import REFERENCE, Dpo
from pydantic import ValidationError
from torch import Tensor
from torch.nn import functional

B, S = 3, 5


def microbatch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    targets = torch.randint(9, (2 * B, S), generator=generator)
    targets[:, :2] = -100
    targets[1::2, 3:] = -100  # rejected texts are shorter
    return {
        "tokens": torch.randint(9, (2 * B, S), generator=generator),
        "targets": targets,
        "lengths": torch.tensor([5, 3] * B),
        REFERENCE: torch.randn(B, 2, generator=generator),
    }


def token_loss() -> Tensor:
    loss = torch.rand(2 * B, S, generator=torch.Generator().manual_seed(4))
    return torch.where(microbatch()["targets"] != -100, loss, 0).requires_grad_()


def margins(per_token: bool) -> Tensor:
    batch = microbatch()
    ratios = -token_loss().sum(-1).view(B, 2) - batch[REFERENCE]
    if per_token:
        ratios = ratios / torch.tensor([3.0, 1.0])
    return ratios[:, 0] - ratios[:, 1]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, -functional.logsigmoid(0.1 * margins(False))),
        ({"normalize_length": True, "beta": 2.0}, -functional.logsigmoid(2 * margins(True))),
        ({"loss": "hinge", "beta": 0.5}, (1 - 0.5 * margins(False)).clamp(min=0)),
        ({"loss": "ipo", "beta": 0.5}, (margins(True) - 1) ** 2),
        (
            {"label_smoothing": 0.25},
            -0.75 * functional.logsigmoid(0.1 * margins(False)) - 0.25 * functional.logsigmoid(-0.1 * margins(False)),
        ),
    ],
    ids=["sigmoid", "per token", "hinge", "ipo", "smoothed"],
)
def test_losses_are_those_of_the_papers(config: dict[str, object], expected: Tensor) -> None:
    task = Dpo(DpoConfig.model_validate({"name": "dpo", **config}))
    found = task.losses({"token_loss": token_loss()}, microbatch())["dpo"]
    torch.testing.assert_close(found, expected.sum())
    assert task.weights(microbatch())["dpo"] == B


def test_the_loss_is_that_of_the_named_head() -> None:
    outputs = {"words/token_loss": token_loss(), "draft/token_loss": torch.zeros(2 * B, S)}
    found = Dpo(DpoConfig(head="words")).losses(outputs, microbatch())["dpo"]
    assert found == Dpo(DpoConfig()).losses({"token_loss": token_loss()}, microbatch())["dpo"]


def test_a_pair_without_targets_does_not_count() -> None:
    task = Dpo(DpoConfig())
    batch = microbatch()
    batch["targets"][2:4] = -100
    loss = torch.where(batch["targets"] != -100, token_loss().detach(), 0)
    found = task.losses({"token_loss": loss}, batch)["dpo"]
    each = -functional.logsigmoid(0.1 * margins(False))
    torch.testing.assert_close(found, (each[0] + each[2]).detach())
    assert task.weights(batch)["dpo"] == B - 1


def test_rewards_are_log_ratios_times_beta() -> None:
    task = Dpo(DpoConfig(beta=0.5))
    seen = task.observations({"token_loss": token_loss()}, microbatch())
    torch.testing.assert_close(seen["chosen_rewards"] - seen["rejected_rewards"], 0.5 * margins(False).detach())
    assert not seen["chosen_rewards"].requires_grad


def test_the_reference_gives_one_number_for_each_text() -> None:
    task = Dpo(DpoConfig())
    kept = task.first_outputs({"token_loss": token_loss()}, microbatch())[REFERENCE]
    assert kept.shape == (B, 2)
    torch.testing.assert_close(kept, -token_loss().detach().sum(-1).view(B, 2))


def test_data_that_is_no_pairs_is_refused() -> None:
    task = Dpo(DpoConfig())
    with pytest.raises(JobError, match="task 'dpo' reads samples, but the dataset gives lengths, reference_logps, t"):
        task.first_inputs(microbatch())
    with pytest.raises(JobError, match="6 rows for 2 samples"):
        task.first_inputs({**microbatch(), "samples": torch.arange(2)})
    task.first_inputs({**microbatch(), "samples": torch.arange(B)})


def test_smoothing_without_meaning_is_refused() -> None:
    with pytest.raises(ValidationError, match="label_smoothing has no effect with the loss 'ipo'"):
        DpoConfig(loss="ipo", label_smoothing=0.1)


def test_ranks_that_share_positions_are_found_by_their_axis() -> None:
    for ranks, group in ((1, None), (2, "group of cp")):
        task, topology = Dpo(DpoConfig()), SimpleNamespace(sizes={"cp": ranks}, axes_group="group of {}".format)
        task.attach(topology)  # type: ignore[arg-type]
        assert task._context == group


def test_sums_of_preferences_move_to_the_device_of_the_rewards() -> None:
    metric = PreferenceMetric(PreferenceMetricConfig())
    metric.update({name: torch.zeros(3, device="meta") for name in ("chosen_rewards", "rejected_rewards")})
    sums = metric.state()["sums"]
    assert (sums.device.type, sums.dtype, sums.shape) == ("meta", torch.float64, (4,))
