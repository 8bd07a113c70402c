"""Parts of the conformance suites that need no processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_testing.suites.inference.writer import WriterSuite
from d9d_testing.suites.strategy import StrategySuite
from d9d_testing.suites.subscriber import SubscriberSuite
from d9d_testing.suites.support.model_matrices import MatrixUse, residual_writers
from d9d_testing.suites.support.observations import microbatch, observed, outputs
from d9d_verify.compare import Verdict
from torch import Tensor, nn

PASSED = Verdict("good", 0.0, 0.0, (0.0, "a"), (0.0, "a"), (0.0, "a"), None)
FAILED = Verdict.failure("bad", "the loss is off")


def suite(*verdicts: Verdict, meshes: Sequence[dict[str, int]] = ({"dp_shard": 2},)) -> Any:
    """A suite whose layouts have given verdicts, and the layouts that it compared."""
    compared: list[Any] = []
    left = iter(verdicts)

    def compare(layouts: Sequence[Any]) -> list[Verdict]:
        compared.extend(layouts)
        return [next(left) for _ in layouts]

    class Suite(StrategySuite):
        plugin = "d9d_testing.toy.plugin"
        target = "mine"
        settings = ({"a": 1}, {"a": 2})
        seen = compared

        def harness(self, mesh: Any, microbatch: int) -> Any:
            def resumed(*_: Any) -> Verdict:
                return next(left)

            return SimpleNamespace(compare=compare, compare_resumed=resumed)

        def layout(self, mesh: Any, settings: Any) -> Any:
            return dict(mesh), dict(settings)

    Suite.meshes = meshes
    return Suite()


def test_a_strategy_whose_numbers_differ_in_any_layout_fails() -> None:
    meshes = ({"dp_shard": 2}, {"dp_shard": 4})
    good = suite(PASSED, PASSED, PASSED, PASSED, meshes=meshes)
    good.test_loss_gradients_and_updates_are_those_of_one_process(4)
    assert good.seen == [(mesh, {"a": a}) for mesh in meshes for a in (1, 2)]
    for verdicts in ([FAILED, PASSED, PASSED, PASSED], [PASSED, PASSED, PASSED, FAILED]):
        with pytest.raises(AssertionError, match="the loss is off"):
            suite(*verdicts, meshes=meshes).test_loss_gradients_and_updates_are_those_of_one_process(4)


@pytest.mark.parametrize("verdicts", [(FAILED, PASSED), (PASSED, FAILED)])
def test_a_strategy_that_does_not_continue_in_both_directions_fails(verdicts: tuple[Verdict, Verdict]) -> None:
    suite(PASSED, PASSED).test_a_run_continues_in_one_process_and_back()
    with pytest.raises(AssertionError, match="the loss is off"):
        suite(*verdicts).test_a_run_continues_in_one_process_and_back()


def test_a_subscriber_watches_a_run_that_resumes_from_a_shorter_one(tmp_path: Path) -> None:
    runs: list[tuple[str, int, dict[str, Any]]] = []

    class Watched(SubscriberSuite):
        def watching(self, _directory: Path) -> Any:
            return object()

        def trained(self, directory: Path, subscribers: Sequence[Any], **more: Any) -> Any:
            runs.append((directory.name, len(subscribers), more))
            return SimpleNamespace(weights={"w": torch.tensor(float(len(runs) == 3 and spoils))})

    for spoils in (False, True):
        runs.clear()
        if spoils:
            with pytest.raises(AssertionError, match=r"after a resumed run, \['w'\] differ"):
                Watched().test_it_watches_a_resumed_run(tmp_path)
        else:
            Watched().test_it_watches_a_resumed_run(tmp_path)
        assert runs == [("plain", 0, {}), ("run", 1, {"steps": 4}), ("run", 1, {})]


class Residual(nn.Module):
    """Block that adds the outputs of two of its three children to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.gate = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.gate(x)
        return x + self.first(x) + self.second(x)


class Source(nn.Module):
    """Block without an input."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.ones(2, 4))

    def forward(self) -> Tensor:
        return self.value


class Blocks(nn.Module):
    """Model of three blocks, of which only one is residual."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.residual, self.linear = Source(), Residual(), nn.Linear(4, 3)

    def blocks(self) -> Mapping[str, nn.Module]:
        return {"source": self.source, "residual": self.residual, "linear": self.linear}

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.residual(x + self.source()))


def test_writers_of_the_residual_stream_add_up_to_the_change_of_a_block() -> None:
    torch.manual_seed(0)
    model, x = Blocks(), torch.randn(2, 4)
    found = residual_writers(model, {"x": x})
    outputs = {name: model.residual.get_submodule(name)(x + 1) for name in ("first", "second")}
    assert found == {f"residual.{name}": pytest.approx(out.std().item()) for name, out in outputs.items()}
    assert not model.residual._forward_hooks


@pytest.mark.thorough  # torch imports its compiler for a dispatch mode, which takes seconds
def test_right_factors_of_products_are_known_by_their_parameters() -> None:
    model = nn.ParameterDict({"plain": torch.randn(2, 3), "bank": torch.randn(2, 3, 4), "unused": torch.randn(3, 2)})
    use, x, aten = MatrixUse(model), torch.randn(5, 3), torch.ops.aten
    with torch.no_grad():
        for _ in range(2):
            out = use.__torch_dispatch__(aten.mm.default, (), (x, model["plain"].t()))
        use.__torch_dispatch__(aten.addmm.default, (), (torch.zeros(2), x, model["plain"].t()))
        use.__torch_dispatch__(aten.bmm.default, (), (x.expand(2, -1, -1), model["bank"]))
        use.__torch_dispatch__(aten.mm.default, (), (x, torch.randn(3, 2)))
        use.__torch_dispatch__(aten.mul.Tensor, (), (torch.ones(3, 2), model["unused"]))
    torch.testing.assert_close(out, x @ model["plain"].t())
    assert use.found.keys() == {"plain", "bank"}
    (plain,) = use.found["plain"]
    assert torch.equal(plain, model["plain"].t())
    assert all(torch.equal(one, bank) for one, bank in zip(use.found["bank"], model["bank"], strict=True))


def test_outputs_of_a_sample_depend_on_that_sample_alone_and_on_all_of_it() -> None:
    whole, part = microbatch(slice(0, 4)), microbatch(slice(2, 3))
    every, one = (outputs(batch, torch.ones(())) for batch in (whole, part))
    for name, tensor in one.items():
        torch.testing.assert_close(every[name][2:3], tensor)
    changed = {name: tensor.clone() for name, tensor in whole.items()}
    changed["tokens"][1, -1] += 1
    other = outputs(changed, torch.ones(()))["class_logits"]
    assert [bool(torch.equal(other[row], every["class_logits"][row])) for row in range(4)] == [True, False, True, True]
    assert torch.equal(outputs(whole, torch.tensor(2.0))["y"], 2 * every["y"])


def test_observations_have_no_rank_where_no_token_counts() -> None:
    found = observed(slice(0, 4))
    ignored = found["targets"] == -100
    assert ignored.any()
    assert (found["token_ranks"][ignored] == -1).all()
    assert (found["token_ranks"][~ignored] >= 0).all()
    assert (found["weights"][ignored] == 0).all()
    assert (found["weights"][~ignored] > 0).all()
    assert "y" not in found
    uncounted = microbatch(slice(0, 2), counted=False)
    assert (uncounted["targets"] == -100).all()
    assert (uncounted["labels"] == -100).all()
    assert not uncounted["mask"].any()


def test_the_twelve_example_samples_have_text_labels_and_features() -> None:
    found = microbatch(slice(0, 12))
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {
        "tokens": (12, 7), "targets": (12, 7), "positions": (12, 7), "documents": (12, 7), "labels": (12,),
        "lengths": (12,), "x": (12, 4), "y": (12, 4), "mask": (12,),
    }  # fmt: skip
    assert (found["tokens"].min(), found["tokens"].max()) == (0, 12)
    assert found["positions"][11].tolist() == list(range(7))
    assert [row for row in range(12) if found["labels"][row] == -100] == [0, 4, 8]
    assert found["mask"].tolist() == [1, 0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 0]
    assert found["lengths"].tolist() == [7] * 12
    assert torch.equal(found["y"], found["x"].sin())


def test_example_losses_and_observations_are_those_of_their_samples() -> None:
    batch, found = microbatch(slice(0, 12)), observed(slice(0, 12))
    tokens, targets = batch["tokens"], batch["targets"]
    counted = targets != -100
    expected = ((tokens + targets).float().sin().abs() + 0.1) * counted
    torch.testing.assert_close(found["token_loss"], expected)
    assert found["class_logits"].shape == (12, 5)
    sums = tokens.float().sum(1)
    torch.testing.assert_close(found["class_logits"][:, 2], (3 * sums).sin())
    torch.testing.assert_close(found["absolute"], (torch.tanh(batch["x"]) - batch["y"]).abs())
    assert torch.equal(found["weights"], counted * (tokens % 3 + 0.5))
    assert torch.equal(found["token_ranks"], torch.where(counted, tokens * targets % 13, -1))


def test_a_suite_of_writers_needs_a_way_to_read_their_files(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=f"WriterSuite must override read.*rows of {tmp_path}"):
        WriterSuite().read(tmp_path)
