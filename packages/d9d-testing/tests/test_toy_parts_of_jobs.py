"""Data, task, metric, optimizer and defaults of the toy plugin, and fixtures for many GPUs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_core.data import DataContext
from d9d_core.errors import DataError
from d9d_testing import pytest_plugin
from d9d_testing.toy import config
from d9d_testing.toy.config import ToyDataConfig, ToyMetricConfig, ToyOptimizerConfig, ToyTaskConfig, ToyTokensConfig
from d9d_testing.toy.data import ToyStream, ToyTokens
from d9d_testing.toy.optimizer import ToyOptimizer
from d9d_testing.toy.runs import assert_identical
from d9d_testing.toy.task import ToyMetric, ToyTask
from torch import nn


def context(tmp_path: Path, **facts: Any) -> DataContext:
    return DataContext(**{"seed": 3, "batch_size": 4, "microbatch_size": 1, "cache_dir": tmp_path, **facts})


def test_toy_samples_depend_on_seed_and_place_alone(tmp_path: Path) -> None:
    whole = ToyStream(ToyDataConfig(features=2, nan_at=1, masked_at=2), context(tmp_path))
    packs = [whole.next_pack() for _ in range(3)]
    generator = torch.Generator().manual_seed(3_000_009)
    x = torch.randn(4, 2, generator=generator)
    assert [len(pack) for pack in packs] == [4, 4, 4]
    assert torch.equal(torch.cat([part["x"] for part in packs[0]]), x)
    assert torch.equal(torch.cat([part["y"] for part in packs[0]]), x.sin())
    generator = torch.Generator().manual_seed(3_000_010)
    assert torch.equal(torch.cat([part["x"] for part in packs[1]]), torch.randn(4, 2, generator=generator))
    assert [bool(torch.cat([part["y"] for part in pack]).isnan().all()) for pack in packs] == [False, True, False]
    assert [torch.cat([part["mask"] for part in pack]).sum().item() for pack in packs] == [4.0, 4.0, 0.0]
    for rank in (0, 1):
        part = ToyStream(ToyDataConfig(features=2), context(tmp_path, rank=rank, ranks=2, microbatch_size=2))
        (found,) = part.next_pack()
        assert torch.equal(found["x"], x[2 * rank : 2 * rank + 2])
        assert found.keys() == {"x", "y", "mask"}
    assert whole.state() == {"packs": 3, "features": 2}
    again = ToyStream(ToyDataConfig(features=2, nan_at=1), context(tmp_path))
    again.load_state({"packs": 1, "features": 2})
    assert torch.equal(again.next_pack()[0]["x"], packs[1][0]["x"])
    with pytest.raises(DataError, match="the checkpoint was saved with other data; use another run.name"):
        again.load_state({"packs": 1, "features": 3})
    again.save_assets(tmp_path)
    assert (tmp_path / "features.txt").read_text() == "2"


def test_rows_of_one_pass_are_numbered_and_fillers_marked(tmp_path: Path) -> None:
    stream = ToyStream(ToyDataConfig(samples=6), context(tmp_path, one_pass=True))
    assert stream.facts == {"features": 4, "samples": 6, "rows": 6}
    rows = [torch.cat([part["rows"] for part in stream.next_pack()]).tolist() for _ in range(2)]
    assert rows == [[0, 1, 2, 3], [4, 5, -1, -1]]
    assert ToyStream(ToyDataConfig(samples=6), context(tmp_path)).facts == {"features": 4, "samples": 6}
    assert ToyStream(ToyDataConfig(), context(tmp_path)).facts == {"features": 4}


def test_toy_targets_are_the_next_tokens_or_ignored(tmp_path: Path) -> None:
    stream = ToyTokens(ToyTokensConfig(vocab_size=5, sequence_length=40), context(tmp_path, microbatch_size=2))
    assert stream.facts == {"vocab_size": 5, "sequence_length": 40}
    first = stream.next_pack()
    assert [part["tokens"].shape for part in first] == [(2, 40), (2, 40)]
    tokens, targets = (torch.cat([part[name] for part in first]) for name in ("tokens", "targets"))
    ignored = targets == -100
    assert torch.equal(targets[:, :-1][~ignored[:, :-1]], tokens[:, 1:][~ignored[:, :-1]])
    assert 0.1 < ignored.float().mean() < 0.3
    assert (tokens.min(), tokens.max()) == (0, 4)
    second = ToyTokens(ToyTokensConfig(vocab_size=5, sequence_length=40), context(tmp_path, rank=1, ranks=2))
    assert torch.equal(torch.cat([part["tokens"] for part in second.next_pack()]), tokens[2:])
    assert (stream.state(), second.state()) == ({"packs": 1}, {"packs": 1})
    second.load_state({"packs": 7})
    assert second.state() == {"packs": 7}
    expected = ToyTokens(ToyTokensConfig(vocab_size=5, sequence_length=40), context(tmp_path))
    expected.next_pack()
    assert torch.equal(stream.next_pack()[0]["tokens"][0], expected.next_pack()[0]["tokens"][0])


def test_the_toy_task_sums_squares_over_samples() -> None:
    outputs = {"y": torch.tensor([[1.0, 3.0], [2.0, 4.0]])}
    batch = {"x": torch.ones(2, 2), "y": torch.zeros(2, 2), "mask": torch.tensor([1.0, 0.0])}
    task = ToyTask(ToyTaskConfig(decay=0.5))
    assert task.coefficients == {"error": 1.0, "decay": 0.5}
    assert ToyTask(ToyTaskConfig()).coefficients == {"error": 1.0}
    assert {name: loss.item() for name, loss in task.losses(outputs, batch).items()} == {"error": 5.0, "decay": 15.0}
    assert {name: weight.item() for name, weight in task.weights(batch).items()} == {"error": 1.0, "decay": 2.0}
    assert task.count(batch) == 2
    assert task.inputs(batch).first == {"x": batch["x"]}
    observed = task.observations(outputs, {**batch, "y": torch.full((2, 2), 2.0)})
    assert observed["absolute"].tolist() == [[1.0, 1.0], [0.0, 2.0]]
    task.check(SimpleNamespace(features=4), {"features": 4})
    task.check(SimpleNamespace(features=4), {})
    with pytest.raises(DataError, match=r"^the data has 3 features, but model.features is 4; "):
        task.check(SimpleNamespace(features=4), {"features": 3})


def test_the_toy_metric_is_the_mean_of_all_errors() -> None:
    metric = ToyMetric(ToyMetricConfig())
    assert metric.compute()["absolute_error"].item() == 0.0
    metric.update({"absolute": torch.tensor([[1.0, 3.0]])})
    metric.update({"absolute": torch.tensor([[5.0]])})
    assert {name: value.item() for name, value in metric.state().items()} == {"sum": 9.0, "count": 3.0}
    assert metric.compute()["absolute_error"].item() == 3.0
    assert metric.reductions == {"sum": "sum", "count": "sum"}
    other = ToyMetric(ToyMetricConfig())
    other.load_state(metric.state())
    assert other.compute()["absolute_error"].item() == 3.0
    metric.reset()
    assert {name: value.item() for name, value in metric.state().items()} == {"sum": 0.0, "count": 0.0}


def test_the_toy_optimizer_adds_up_nine_tenths_of_the_past() -> None:
    parameter, idle = nn.Parameter(torch.tensor([1.0])), nn.Parameter(torch.tensor([1.0]))
    optimizer = ToyOptimizer(ToyOptimizerConfig(lr=0.5), {"w": parameter, "idle": idle})
    optimizer.init_state()
    parameter.grad = torch.tensor([2.0])
    optimizer.step(torch.tensor(True))
    assert (parameter.item(), optimizer.state()["w/momentum"].item()) == (0.0, 2.0)
    optimizer.step(torch.tensor(False))
    assert (parameter.item(), optimizer.state()["w/momentum"].item()) == (0.0, 2.0)
    optimizer.set_lr_factor(0.1)
    assert optimizer.lr == pytest.approx(0.05)
    optimizer.step(torch.tensor(True))
    assert parameter.item() == pytest.approx(-0.05 * 3.8)
    assert optimizer.state()["w/momentum"].item() == pytest.approx(3.8)
    assert (idle.item(), optimizer.state()["idle/momentum"].item()) == (1.0, 0.0)
    assert optimizer.describe() == {"all": {"lr": 0.5, "parameters": ["w", "idle"]}}
    assert list(optimizer.collectives()) == []


def test_tensors_that_differ_are_named() -> None:
    one = {"a": torch.ones(1), "b": torch.ones(1)}
    assert_identical(one, {"a": torch.ones(1), "b": torch.ones(1)})
    with pytest.raises(AssertionError, match=r"only in one: \['b', 'c'\]"):
        assert_identical(one, {"a": torch.ones(1), "c": torch.ones(1)})
    with pytest.raises(AssertionError, match=r"differ: \['b'\]"):
        assert_identical(one, {"a": torch.ones(1), "b": torch.zeros(1)})


def test_defaults_of_the_toy_configs() -> None:
    names = (
        "Model",
        "Linears",
        "Data",
        "Tokens",
        "Task",
        "Optimizer",
        "Tracker",
        "Strategy",
        "Peft",
        "Adapter",
        "Schedule",
    )
    found = {name: getattr(config, f"Toy{name}Config")().model_dump(exclude={"name", "selector"}) for name in names}
    expected: dict[str, dict[str, Any]] = {
        "Model": {"features": 4, "blocks": 2, "dropout": 0.0},
        "Linears": {"features": 4, "blocks": 2},
        "Data": {"features": 4, "nan_at": None, "masked_at": None, "samples": None},
        "Tokens": {"vocab_size": 64, "sequence_length": 8},
        "Task": {"decay": 0.0},
        "Optimizer": {"lr": 0.05},
        "Tracker": {"path": None, "fails_in": "nothing"},
        "Strategy": {"blocks": 1},
        "Peft": {"trains": ("layers.0.weight",)},
        "Adapter": {"rank": 2, "match": "*"},
        "Schedule": {"forgets": "nothing"},
    }
    for name, fields in expected.items():
        assert fields.items() <= found[name].items(), name


@pytest.mark.parametrize(("needed", "there", "skipped"), [(None, 0, False), (2, 1, True), (2, 2, False)])
def test_a_test_of_several_gpus_is_skipped_without_them(
    needed: int | None, there: int, skipped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    marker = None if needed is None else SimpleNamespace(args=(needed,))
    asked: list[str] = []
    item: Any = SimpleNamespace(get_closest_marker=lambda name: asked.append(name) or marker)
    if skipped:
        with pytest.raises(pytest.skip.Exception, match="needs 2 CUDA devices, there are 1"):
            pytest_plugin.pytest_runtest_setup(item)
    else:
        pytest_plugin.pytest_runtest_setup(item)
    assert asked == ["gpus"]
