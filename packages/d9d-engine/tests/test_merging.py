"""An export of a fine-tuning run leaves the model as it was."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_core import events as ev
from d9d_core.errors import CheckpointError
from d9d_engine.compose.merging import merged
from d9d_engine.job import Job
from d9d_testing.toy.modifiers import ToyPeft
from d9d_testing.toy.runs import assert_identical, final_tensors, metrics_of, quiet
from safetensors.torch import load_file
from torch import Tensor, nn

MakeJob = Callable[..., Job]


class Adapted(nn.Module):
    """A block of the toy model with a low-rank addition."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        features = block.get_parameter("weight").shape[0]
        self.left = nn.Parameter(torch.empty(features, 1))
        self.right = nn.Parameter(torch.empty(1, features))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.left)
        nn.init.normal_(self.right)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.block(x) + x @ self.left @ self.right
        return result


class LowRank:
    """Merging writes into weights, buffers and flags, and takes the adapters out."""

    def inject(self, stage: Any) -> frozenset[str]:
        stage.layers["0"] = Adapted(stage.layers["0"])
        return frozenset({"layers.0.left", "layers.0.right"})

    @torch.no_grad()
    def merge(self, stage: Any) -> None:
        adapted = stage.layers["0"]
        adapted.block.weight[:2] += (adapted.left @ adapted.right)[:2]
        adapted.block.weight.requires_grad_(True)
        stage.layers["0"] = adapted.block
        stage.scale.data.fill_(2.0)
        stage.unused.data = stage.unused.data + 1
        stage.merged = True


@pytest.fixture
def tuned(job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Job]:
    for name in ("inject", "merge"):
        monkeypatch.setattr(ToyPeft, name, getattr(LowRank, name))
    return lambda *overrides, **sections: job(*overrides, peft="toy_peft", **sections)


def bits(model: nn.Module) -> dict[str, Tensor]:
    everything = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor.detach().clone() for name, tensor in everything.items()}


class Exports:
    """Exports after every step."""

    def __init__(self) -> None:
        self.trainer: Any = None

    def subscriptions(self) -> list[tuple[type[Any], Callable[[Any], None]]]:
        return [(ev.StepEnds, lambda _event: self.trainer.export())]


@pytest.mark.thorough
def test_training_goes_on_bit_for_bit_after_an_export_in_the_middle(tuned: Callable[..., Job]) -> None:
    straight, exporting = tuned("run.name=straight"), tuned("run.name=exporting")
    quiet(straight).train()
    observer = Exports()
    observer.trainer = exporting.build(lambda _note: None, observers=[observer])
    observer.trainer.train()
    assert_identical(final_tensors(straight), final_tensors(exporting))
    losses = [[line["loss"] for line in metrics_of(run)] for run in (straight, exporting)]
    assert losses[0] == losses[1]
    first, second = (load_file(run.run.directory / "model" / "model.safetensors") for run in (straight, exporting))
    assert_identical(first, second)


def test_an_export_is_merged_and_the_trainer_keeps_its_adapters(tuned: Callable[..., Job]) -> None:
    run = tuned("steps=2")
    trainer = quiet(run)
    trainer.train()
    live: Any = trainer.stage
    assert isinstance(live.layers["0"], Adapted)
    before, kinds = bits(live), {name: type(module) for name, module in live.named_modules()}
    identities = {name: id(parameter) for name, parameter in live.named_parameters()}
    trainer.export()
    assert_identical(before, bits(live))
    assert kinds == {name: type(module) for name, module in live.named_modules()}
    assert identities == {name: id(parameter) for name, parameter in live.named_parameters()}
    assert not hasattr(live, "merged")
    assert [name for name, p in live.named_parameters() if p.requires_grad] == ["layers.0.left", "layers.0.right"]
    written = load_file(run.run.directory / "model" / "model.safetensors")
    weight = before["layers.0.block.weight"].clone()
    weight[:2] += (before["layers.0.left"] @ before["layers.0.right"])[:2]
    assert torch.equal(written["toy.layers.0.weight"], weight)
    assert written["toy.scale"].item() == 2
    assert written["toy.unused"].item() == before["unused"].item() + 1


def test_a_failing_export_leaves_the_model_too(tuned: Callable[..., Job]) -> None:
    run = tuned("steps=1")
    trainer = quiet(run)
    trainer.train()
    before = bits(trainer.stage)
    trainer.prefetcher.stream.save_assets = lambda _directory: (_ for _ in ()).throw(CheckpointError("full"))  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match="full"):
        trainer.export()
    assert_identical(before, bits(trainer.stage))


def test_only_what_merging_writes_into_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[tuple[int, ...]] = []
    to = torch.Tensor.to

    def counting(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if kwargs.get("copy"):
            copied.append(tuple(tensor.shape))
        return to(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", counting)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4))
    before = bits(model)

    def merge(stage: Any) -> None:
        with torch.no_grad():
            torch.mul(stage[0].weight, 2, out=stage[0].weight)
            torch._foreach_add_([stage[0].bias], 1)

    with merged(SimpleNamespace(merge=merge), model):  # type: ignore[arg-type]
        assert torch.equal(bits(model)["0.weight"], before["0.weight"] * 2)
        assert torch.equal(bits(model)["0.bias"], before["0.bias"] + 1)
    assert_identical(before, bits(model))
    assert sorted(copied) == [(3,), (3, 2)]


def test_without_a_fine_tuning_method_nothing_happens() -> None:
    model = nn.Linear(1, 1)
    with merged(None, model):
        pass


def test_stages_of_other_ranks_are_merged_without_memory() -> None:
    model = nn.Sequential(nn.Linear(2, 2, device="meta"), nn.Linear(2, 2))
    before = model[1].weight.detach().clone()

    @torch.no_grad()
    def merge(stage: Any) -> None:
        for layer in stage:
            layer.weight.mul_(2)

    with merged(SimpleNamespace(merge=merge), model):  # type: ignore[arg-type]
        assert torch.equal(model[1].weight, 2 * before)
    assert torch.equal(model[1].weight, before)
    assert model[0].weight.is_meta
