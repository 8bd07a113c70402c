"""Forward passes of the trained model and of a model without training. Executors are stand-ins."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_core.data import SampleLengths
from d9d_core.errors import JobError, TrainingError
from d9d_core.job_file.job import JobConfig
from d9d_engine.compose import forward as module
from d9d_engine.compose.executor import _draws
from d9d_engine.compose.forward import WithoutLoss, assemble_forward, build_forward
from d9d_engine.compose.parts.sample_lengths import check_lengths
from d9d_engine.run.forward import ModelForward, evaluation_mode, inputs_by_name
from d9d_engine.step.randomness import MicrobatchSeeds
from torch import nn

STANCES: list[str] = []


@pytest.fixture(autouse=True)
def _without_dynamo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record the stance of compilation instead of importing Dynamo, which takes seconds."""
    STANCES.clear()
    monkeypatch.setattr(torch.compiler, "set_stance", lambda stance: STANCES.append(stance) or nullcontext())


class Forward:
    """A forward pass that keeps its calls."""

    def __init__(self, packed: bool | None = None, cp: int = 1, **sizes: int) -> None:
        self.did: list[Any] = []
        self.model = nn.Sequential(nn.Linear(1, 1), nn.Dropout())
        self.model[1].eval()
        watchdog = SimpleNamespace(beat=lambda: self.did.append("beat"))
        topology: Any = SimpleNamespace(
            watchdog=watchdog, sizes={"cp": cp, **sizes} if cp else sizes, device=torch.device("cpu")
        )
        pipeline: Any = SimpleNamespace(least_microbatches=lambda most: most - 3)
        self.run = ModelForward(self.build, self.model, pipeline, 8, topology, packed)

    def build(self) -> Any:
        self.did.append("built")
        return SimpleNamespace(evaluate=self.evaluate)

    def evaluate(self, pack: Any, outputs: Any) -> None:
        self.did.append((pack, outputs, [module.training for module in self.model.modules()], torch.rand(()).item()))


def test_a_forward_pass_leaves_modes_and_random_numbers_as_they_were() -> None:
    forward = Forward()
    torch.manual_seed(3)
    expected = torch.rand(2).tolist()
    torch.manual_seed(3)
    found = [torch.rand(()).item()]
    forward.run(["pack"], "outputs")  # type: ignore[arg-type]
    forward.run(["other"], "outputs")  # type: ignore[arg-type]
    found.append(torch.rand(()).item())
    assert found == expected
    assert [done if isinstance(done, str) else done[:3] for done in forward.did] == [
        "beat",
        "built",
        (["pack"], "outputs", [False, False, False]),
        "beat",
        (["other"], "outputs", [False, False, False]),
    ]
    assert [module.training for module in forward.model.modules()] == [True, True, False]
    assert forward.run.least_microbatches == 5
    assert STANCES == ["force_eager", "force_eager"]


def test_modes_come_back_after_an_error() -> None:
    model = nn.Sequential(nn.Linear(1, 1))

    def fails() -> None:
        assert not model.training
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"), evaluation_mode(model):
        fails()
    assert model.training


def test_parts_of_samples_are_refused() -> None:
    with pytest.raises(TrainingError, match="needs full samples, but ranks of cp have parts"):
        Forward(cp=2).run([], print)
    Forward(cp=0).run([], print)  # a topology without the axis


@pytest.mark.parametrize(
    ("microbatch", "refused"),
    [
        ({}, False),
        ({"documents": [[0, 0, 0]]}, False),
        ({"documents": [[5, 5, 5], [6, 6, 6]]}, False),
        ({"documents": [[0, 0, 1]]}, True),
        ({"documents": [[0, 0, 1]], "lengths": [2]}, False),
        ({"documents": [[0, 0, 1]], "lengths": [3]}, True),
        ({"documents": [[0, 0, 0], [0, 1, 1]], "lengths": [3, 1]}, False),
        ({"documents": [[0, 0, 0], [0, 1, 1]], "lengths": [3, 2]}, True),
    ],
)
def test_several_documents_in_a_sample_are_refused_if_the_data_declares_one(
    microbatch: dict[str, Any], refused: bool
) -> None:
    pack: Any = [{name: torch.tensor(values) for name, values in microbatch.items()}]
    for packed in (None, True):
        Forward(packed).run(pack, print)
    if not refused:
        Forward(False).run(pack, print)
        return
    with pytest.raises(TrainingError, match="a sample of this microbatch holds several documents"):
        Forward(False).run(pack, print)


def test_only_tokens_go_to_the_first_stage_alone() -> None:
    tokens, positions = torch.ones(1), torch.zeros(1)
    found = inputs_by_name({"tokens": tokens, "positions": positions})
    assert found.first == {"tokens": tokens}
    assert found.shared == {"positions": positions}


# --- a model without training -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rank", "holds_last"), [(0, False), (1, True)])
def test_a_model_for_forward_passes_is_built_in_evaluation_mode(
    monkeypatch: pytest.MonkeyPatch, rank: int, holds_last: bool
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(module, "start_model", lambda *given: made.append(given) or ("published", None))
    monkeypatch.setattr(module, "step_mark", made.append)
    monkeypatch.setattr(module, "build_frozen_executor", lambda *given: given)
    pipeline = SimpleNamespace(stages=[{0}, {1}, {2}], stages_of=[{0, 1}, {2}].__getitem__)
    assembly: Any = SimpleNamespace(model=nn.Linear(1, 1), applied="applied", pipeline=pipeline)
    topology = SimpleNamespace(coordinate={"pp": rank}, world="world")
    root: Any = SimpleNamespace(job="job", selection="selection", topology=topology)
    inputs: Any = lambda microbatch: microbatch  # noqa: E731
    found = build_forward(root, assembly, inputs, "task")  # type: ignore[arg-type]
    assert (found.published, found.holds_last, found.model is assembly.model) == ("published", holds_last, True)
    assert found.executor == ("job", "selection", assembly, topology, "task", inputs, "world")
    assert not assembly.model.training
    assert made == [(root, assembly), "applied"]
    without: Any = build_forward(root, assembly, inputs).executor
    assert isinstance(without[4], WithoutLoss)
    assert without[4].inputs is inputs


def test_a_model_for_forward_passes_has_no_training_and_uses_every_named_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []
    assembly = SimpleNamespace(kernels="bound", ops_elsewhere="elsewhere")
    monkeypatch.setattr(module, "assemble", lambda root, trains: seen.append((root, trains)) or assembly)
    monkeypatch.setattr(module, "refuse_unused", lambda *given: seen.append(given))
    root: Any = SimpleNamespace(job=SimpleNamespace(kernels="named"))
    assert assemble_forward(root) is assembly  # type: ignore[comparison-overlap]
    assert seen == [(root, False), ("named", "bound", "elsewhere")]


def test_a_task_without_losses_counts_samples_and_has_no_terms() -> None:
    task = WithoutLoss(lambda _microbatch: None)  # type: ignore[arg-type, return-value]
    microbatch = {"a": torch.zeros(3, 2)}
    assert (task.count(microbatch), task.late, task.coefficients) == (3, False, {})
    assert (task.weigh({}, microbatch), task.weights(microbatch)) == ({}, {})
    assert (task.losses({}, microbatch), task.observations({}, microbatch)) == ({}, {})
    task.check(None, {})


def test_random_numbers_of_a_rank_begin_at_its_first_sample() -> None:
    job: Any = SimpleNamespace(seed=7, batch=SimpleNamespace(size=24), microbatch_size=2)
    topology: Any = SimpleNamespace(data_parallel_rank=2, data_parallel_size=3, coordinate={"cp": 1})
    assert _draws(job, topology) == MicrobatchSeeds(7, 16, 2, 1)


# --- lengths of samples -----------------------------------------------------------------------------------------------


def lengths_of(cp: int, data: SampleLengths | None, ranks: int | None = None, evaluated: Any = None) -> None:
    construct: Any = JobConfig.model_construct
    job = construct(
        mesh=SimpleNamespace(cp=cp),
        data=SimpleNamespace(sample_lengths=data),
        evaluation=None
        if evaluated is None
        else SimpleNamespace(datasets={name: SimpleNamespace(sample_lengths=one) for name, one in evaluated.items()}),
    )
    chosen = SimpleNamespace(where="parallel[0]", spec=SimpleNamespace(name="tp"))
    applied: Any = [] if ranks is None else [(chosen, SimpleNamespace(sequence_ranks=ranks))]
    check_lengths(job, applied)


def test_lengths_are_multiples_of_the_parts_that_ranks_split_them_into() -> None:
    for cp, length in ((1, 7), (2, 8), (3, 12)):
        lengths_of(cp, SampleLengths(length, length))
    lengths_of(2, None)
    lengths_of(1, SampleLengths(6, 6), ranks=3)
    with pytest.raises(JobError) as caught:
        lengths_of(2, SampleLengths(6, 6))
    assert str(caught.value) == (
        "mesh.cp: 2 ranks split each sample into two chunks each, but sequence lengths are 6 (data.sequence_length); "
        "use 4 or 8, or other sizes of the mesh"
    )
    with pytest.raises(JobError) as caught:
        lengths_of(1, SampleLengths(10), ranks=4)
    assert str(caught.value) == (
        "parallel[0]: strategy 'tp' splits positions over 4 ranks, but sequence lengths are multiples of 10 "
        "(data.pad_multiple); use 8 or 12, or other sizes of the mesh"
    )
    with pytest.raises(JobError) as caught:
        lengths_of(2, SampleLengths(20, 20), ranks=3)
    assert str(caught.value) == (
        "parallel[0]: strategy 'tp' splits positions over 3 ranks, within each of 2 ranks of cp, but sequence lengths "
        "are 20 (data.sequence_length); use 12 or 24, or other sizes of the mesh"
    )


def test_lengths_of_an_evaluation_are_checked_at_their_field() -> None:
    with pytest.raises(JobError, match=r"are 6 \(evaluation.data.sequence_length\)"):
        lengths_of(2, SampleLengths(8, 8), evaluated={"": SampleLengths(6, 6)})
    with pytest.raises(JobError, match=r"are 6 \(evaluation.sets.b.sequence_length\)"):
        lengths_of(2, SampleLengths(8, 8), evaluated={"a": SampleLengths(8, 8), "b": SampleLengths(6, 6)})
