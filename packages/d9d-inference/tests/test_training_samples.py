"""Samples of a training run: when they are made, their lines, and jobs and prompts that are refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from d9d_core.errors import JobError
from d9d_core.job_file.job import JobConfig
from d9d_engine.distributed.mesh import Topology
from d9d_inference.generation import samples as module
from d9d_inference.generation.config import SamplesConfig
from d9d_inference.generation.samples import Samples
from torch import Tensor

VOCABULARY = 20


class Forward:
    """Prefers the token after the last one; notes the number of microbatches and of rows."""

    def __init__(self, least: int = 1) -> None:
        self.least_microbatches, self.seen = least, list[tuple[int, int]]()

    def __call__(self, pack: Sequence[Mapping[str, Tensor]], outputs: Callable[..., None]) -> None:
        self.seen.append((len(pack), len(pack[0]["tokens"])))
        for one in pack:
            logits = torch.nn.functional.one_hot((one["tokens"] + 1) % VOCABULARY, VOCABULARY) * 1.0
            outputs({"logits": logits}, one)


class Tokenizer:
    """Words are numbers."""

    def encode(self, text: str) -> Any:
        return SimpleNamespace(ids=[int(word) for word in text.split()])

    def decode(self, ids: list[int]) -> str:
        return "words " + " ".join(map(str, ids))


class Run:
    """A training run that the subscriber observes."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        directory: Path,
        tokenizer: bool = True,
        positions: int | None = None,
        **config: Any,
    ) -> None:
        self.notes: list[str] = []
        monkeypatch.setattr(module, "print_note", self.notes.append)
        monkeypatch.setattr(module, "tokenizer_of", lambda *_: Tokenizer() if tokenizer else None)
        monkeypatch.setattr(module, "ends_of_text", lambda _job, facts: frozenset(facts["ends"]))
        self.directory, self.forward = directory, Forward(config.pop("least", 1))
        self.samples = Samples(SamplesConfig(**{"every": 2, "max_new_tokens": 3, **config}))
        self.model = SimpleNamespace(max_positions=positions)

    def begin(self, step: int = 0, total: int = 5, cp: int = 1, rank: int = 0) -> None:
        construct: Any = JobConfig.model_construct
        job = construct(
            mesh=SimpleNamespace(cp=cp), run=SimpleNamespace(directory=self.directory), model=self.model
        )  # fmt: skip
        self.samples._configure(cast("Any", SimpleNamespace(job=job)))
        self.samples._encode(cast("Any", SimpleNamespace(stream=SimpleNamespace(facts={"ends": [9]}))))
        topology = Topology()
        names = ("sizes", "coordinate", "axes_group", "device")
        process = SimpleNamespace(**{name: getattr(topology, name) for name in names}, rank=rank)
        self.samples._take_model(cast("Any", SimpleNamespace(forward=self.forward, topology=process)))
        self.samples._start(cast("Any", SimpleNamespace(step=step, total_steps=total)))

    def step(self, step: int) -> None:
        self.samples._step(cast("Any", SimpleNamespace(step=step)))

    @property
    def lines(self) -> list[Any]:
        file = self.directory / "samples.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_samples_are_made_before_the_first_step_at_the_interval_and_after_the_last(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = Run(monkeypatch, tmp_path, prompts=["1 2", [6, 7]])
    run.begin()
    for step in range(5):
        run.step(step)
    run.samples._close(None)
    assert [line["step"] for line in run.lines] == [0, 0, 2, 2, 4, 4, 5, 5]
    assert run.lines[:2] == [
        {"step": 0, "sample": 0, "prompt": "1 2", "completion": "words 3 4 5", "tokens": [3, 4, 5], "finish": "length"},
        {"step": 0, "sample": 1, "prompt": [6, 7], "completion": "words 8 9", "tokens": [8, 9], "finish": "stop"},
    ]
    assert run.notes[:2] == [
        "sample at step 0: '1 2' -> 'words 3 4 5'", "sample at step 0: [6, 7] -> 'words 8 9'",
    ]  # fmt: skip
    assert run.samples._file is None


def test_a_resumed_run_makes_no_samples_at_its_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = Run(monkeypatch, tmp_path, prompts=["1 2"], show=False, stop=[4])
    run.begin(step=1)
    assert run.lines == []
    run.step(1)
    run.samples._close(None)
    assert [(line["step"], line["tokens"], line["finish"]) for line in run.lines] == [(2, [3, 4], "stop")]
    assert run.notes == []


def test_prompts_are_spread_over_forwards_of_a_few_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = []
    for rows, least in ((2, 1), (3, 1), (8, 4)):
        run = Run(monkeypatch, tmp_path, prompts=["1"] * 5, rows=rows, least=least)
        run.begin()
        run.samples._close(None)
        found.append(run.forward.seen[0])
        assert len(run.lines) == 5
        (tmp_path / "samples.jsonl").unlink()
    assert found == [(3, 2), (2, 3), (4, 2)]


def test_other_ranks_write_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = Run(monkeypatch, tmp_path, prompts=["1"])
    run.begin(rank=1)
    assert run.forward.seen
    assert (run.lines, run.notes) == ([], [])


def test_draws_depend_on_the_step_and_the_seed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def tokens(seed: int, step: int) -> list[int]:
        directory = tmp_path / f"{seed}-{step}"
        directory.mkdir()
        run = Run(monkeypatch, directory, prompts=["1"], temperature=9.0, seed=seed, max_new_tokens=8, stop=[])
        run.begin(step=1)
        run.step(step - 1)
        run.samples._close(None)
        return cast("list[int]", run.lines[0]["tokens"])

    assert len({tuple(tokens(seed, step)) for seed in (0, 1) for step in (2, 4)}) == 4


@pytest.mark.parametrize(
    ("config", "begin", "problem"),
    [
        ({"prompts": ["1"]}, {"cp": 2}, "needs full prompts, but mesh.cp is 2"),
        ({"prompts": ["1"], "tokenizer": False}, {}, "the run has no tokenizer; give prompts as lists of token ids"),
        ({"prompts": ["1", " "]}, {}, "the prompt ' ' has no token; change it"),
        ({"prompts": ["1", "1 2 3"], "positions": 5}, {}, r"'1 2 3' has 3 tokens, .* max_new_tokens 3 exceeds .* 5 "),
    ],
)
def test_jobs_and_prompts_that_cannot_be_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, config: dict[str, Any], begin: dict[str, Any], problem: str
) -> None:
    with pytest.raises(JobError, match=f"^subscriber samples.*{problem}"):
        Run(monkeypatch, tmp_path, **config).begin(**begin)


def test_a_prompt_may_fill_the_positions_and_token_ids_need_no_tokenizer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = Run(monkeypatch, tmp_path, prompts=[[1, 2, 3], [1]], positions=6, tokenizer=False)
    run.begin()
    run.samples._close(None)
    assert [(line["completion"], line["tokens"]) for line in run.lines] == [(None, [4, 5, 6]), (None, [2, 3, 4])]
    assert run.notes[0] == "sample at step 0: [1, 2, 3] -> [4, 5, 6]"


def test_prompts_come_from_a_file_of_texts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "1"}\n{"prompt": "2"}\n')
    run = Run(monkeypatch, tmp_path, file=file)
    run.begin()
    run.samples._close(None)
    assert [line["prompt"] for line in run.lines] == ["1", "2"]
    file.write_text('{"messages": [{"role": "user", "content": "1"}]}\n')
    with pytest.raises(JobError, match=r"prompts.jsonl:1: messages need a chat template, which is not applied here"):
        Run(monkeypatch, tmp_path, file=file).begin()


def test_inference_has_no_samples_and_a_failure_closes_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = Run(monkeypatch, tmp_path, prompts=["1"])
    with pytest.raises(JobError, match="observes training only; remove it, or use the task 'generations'"):
        run.samples._configure(cast("Any", SimpleNamespace(job=object())))
    run.begin()

    def fail(*_: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(module, "padded_prompts", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        run.step(1)
    assert run.samples._file is None


def test_models_with_other_than_causal_attention_have_no_samples(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = Run(monkeypatch, tmp_path, prompts=["1"])
    run.model.attention_mask = "prefix"
    with pytest.raises(JobError, match="continues texts with causal attention, but model.attention_mask is prefix"):
        run.begin()


def test_long_texts_are_printed_up_to_sixty_characters() -> None:
    assert module._short("x" * 58) == repr("x" * 58)
    assert module._short("x" * 59) == "'" + "x" * 56 + "..."
