from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from d9d_core.errors import JobError
from d9d_core.registry.registry import Registry
from d9d_nn import plugin
from d9d_nn.causal_lm import perplexity
from d9d_nn.causal_lm.config import CausalLMConfig, PerplexityConfig
from d9d_nn.causal_lm.perplexity import Perplexity
from d9d_nn.causal_lm.task import CausalLM
from torch import Tensor

TASK = CausalLM(CausalLMConfig())
TARGETS = torch.tensor([[1, 2, -100], [-100, -100, 3]])
MICROBATCH = {"tokens": torch.zeros(2, 3, dtype=torch.long), "targets": TARGETS}


def test_weight_is_the_number_of_targets() -> None:
    weight = TASK.weights(MICROBATCH)["cross_entropy"]
    assert weight.shape == ()
    assert weight.dtype == torch.float32
    assert weight == 3
    assert TASK.weights({"targets": torch.full((1, 4), -100)})["cross_entropy"] == 0
    assert TASK.weights(MICROBATCH).keys() == TASK.coefficients.keys()


def test_count_includes_ignored_targets() -> None:
    assert TASK.count(MICROBATCH) == 6


def test_loss_is_the_sum_of_the_token_losses_with_a_graph() -> None:
    token_loss = torch.tensor([[1.0, 2.0, 0.0], [0.0, 0.0, 4.0]], requires_grad=True)
    loss = TASK.losses({"token_loss": token_loss}, MICROBATCH)["cross_entropy"]
    loss.backward()
    assert loss == 7
    assert token_loss.grad.eq(1).all()


def test_inputs_pass_on_what_the_microbatch_has() -> None:
    inputs = TASK.inputs(MICROBATCH)
    assert inputs.first.keys() == {"tokens"}
    assert inputs.shared.keys() == {"targets"}
    packed = {**MICROBATCH, "documents": TARGETS, "positions": TARGETS}
    assert TASK.inputs(packed).shared.keys() == {"targets", "documents", "positions"}


def test_observations_are_those_of_the_record() -> None:
    seen = TASK.observations({"token_loss": torch.ones(2, 3)}, MICROBATCH)
    assert seen["targets"] is TARGETS
    assert seen.keys() == Registry.of(plugin).find("task", "causal_lm").spec.observes


def test_check_names_both_numbers_and_the_field() -> None:
    model = SimpleNamespace(vocab_size=1024, max_positions=128)
    TASK.check(model, {"vocab_size": 1024, "sequence_length": 128})
    with pytest.raises(JobError) as error:
        TASK.check(model, {"vocab_size": 2048, "sequence_length": 256})
    assert str(error.value) == (
        "model.vocab_size: the model has 1024 token ids, the data has 2048; "
        "set model.vocab_size to 2048 or more, or give the data a smaller vocabulary\n"
        "model.max_positions: the model has 128 positions, the data has 256; "
        "set model.max_positions to 256 or more, or lower data.sequence_length"
    )


def test_check_passes_what_nobody_states() -> None:
    TASK.check(SimpleNamespace(), {"vocab_size": 2048})
    TASK.check(SimpleNamespace(vocab_size=8), {})


def observed(losses: list[float]) -> dict[str, Tensor]:
    return {"token_loss": torch.tensor(losses), "targets": torch.zeros(len(losses), dtype=torch.long)}


def test_perplexity_ignores_ignored_targets() -> None:
    metric = Perplexity(PerplexityConfig())
    metric.update({"token_loss": torch.tensor([[1.0, 3.0, 99.0]]), "targets": torch.tensor([[5, 6, -100]])})
    assert metric.compute()["perplexity"].item() == pytest.approx(torch.tensor(2.0).exp().item())


def test_perplexity_of_nothing_is_no_series_and_never_nan() -> None:
    metric = Perplexity(PerplexityConfig())
    assert metric.compute() == {}
    metric.update({"token_loss": torch.zeros(1, 2), "targets": torch.full((1, 2), -100)})
    assert metric.compute()["perplexity"] == 1
    metric.reset()
    assert metric.compute() == {}


def test_perplexity_states_given_out_do_not_change_later() -> None:
    metric = Perplexity(PerplexityConfig())
    metric.update(observed([1.0]))
    kept = metric.state()
    metric.update(observed([2.0]))
    metric.reset()
    assert kept["loss"] == 1
    assert kept["targets"] == 1


@pytest.mark.thorough
def test_perplexity_stays_on_its_device_when_it_starts_anew() -> None:
    metric = Perplexity(PerplexityConfig())
    metric.update({"token_loss": torch.zeros(2, 3, device="meta"), "targets": torch.zeros(2, 3, device="meta").long()})
    metric.reset()
    assert all(tensor.is_meta for tensor in metric.state().values())
    assert metric.compute() == {}


def test_perplexity_adds_up_in_the_widest_format_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perplexity, "wide_dtype", lambda _device: torch.float32)  # as if there were no wider one
    metric = Perplexity(PerplexityConfig())
    metric.update({"token_loss": torch.zeros(2, 3, device="meta"), "targets": torch.zeros(2, 3, device="meta").long()})
    assert [tensor.dtype for tensor in metric.state().values()] == [torch.float32] * 2


def test_perplexity_of_another_task_says_what_is_missing() -> None:
    with pytest.raises(
        JobError, match="perplexity needs token_loss, but the task's observations\\(\\) returns only targets"
    ):
        Perplexity(PerplexityConfig()).update({"targets": TARGETS})
