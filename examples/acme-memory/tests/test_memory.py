"""Tests of the plugin's own behaviour; conformance.py holds the suites."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from acme_memory.config import CopyingConfig, NgramConfig, RecallConfig
from acme_memory.copying import Copying
from acme_memory.ngram import HasContextLimit, Ngram
from acme_memory.recall import Recall
from d9d_core.data import DataContext
from d9d_core.errors import BuildError
from d9d_core.model import Stage


def test_the_second_half_repeats_the_symbols(tmp_path: Path) -> None:
    context = DataContext(seed=0, batch_size=2, microbatch_size=2, cache_dir=tmp_path)
    (microbatch,) = Copying(CopyingConfig(symbols=3), context).next_pack()
    assert microbatch["tokens"].shape == (2, 6)
    assert microbatch["targets"][:, :3].eq(-100).all()
    assert microbatch["targets"][:, 3:].equal(microbatch["tokens"][:, :3])


def test_a_prediction_sees_its_context_and_no_earlier_token() -> None:
    model = Ngram(NgramConfig(vocab_size=8, context=3), Stage())
    assert isinstance(model, HasContextLimit)
    tokens = torch.tensor([[1, 2, 3, 4]])
    same, other = (model(tokens=torch.tensor([[first, *tokens[0, 1:]]]))["logits"] for first in (1, 5))
    assert same[0, 3].equal(other[0, 3])
    assert not same[0, 2].equal(other[0, 2])


def test_pipeline_stages_are_refused() -> None:
    with pytest.raises(BuildError, match="ngram has no layers to split into 2 pipeline stages"):
        Ngram(NgramConfig(), Stage(index=0, count=2))


def test_half_of_the_probability_is_not_enough() -> None:
    metric = Recall(RecallConfig())
    loss = -torch.tensor([[0.49, 0.51, 0.9, 0.9]]).log()
    metric.update({"token_loss": loss, "targets": torch.tensor([[0, 0, 0, -100]])})
    torch.testing.assert_close(metric.compute()["recall"].item(), 2 / 3)
