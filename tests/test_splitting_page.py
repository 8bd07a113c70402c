"""The page on tensor and context parallelism for an own model: its file, its variants and its messages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from d9d_core.errors import D9dError
from d9d_core.traits import TensorStyle
from d9d_engine.job import Job
from d9d_verify.layouts import parse_layout
from d9d_verify.run import verify

from tests.documents import ROOT, files_of, quoted, tables

PAGE = ROOT / "docs" / "splitting-a-model.md"
TP, CP = "tp=2:tensor_parallel", "cp=2:context_parallel(method=ulysses)"
BOTH = "tp=2,cp=2:tensor_parallel,context_parallel(method=ring)"
#: Edit that puts d9d-nn's head and attention core in the place of the page's own.
BLOCKS = (
    (
        "from torch import Tensor, nn",
        "from d9d_nn.attention.core import AttentionCore\nfrom d9d_nn.heads.causal_lm import CausalLMHead\n"
        "from torch import Tensor, nn",
    ),
    ("Core()  # cp", "AttentionCore(query_heads=4, key_value_heads=4, head_dim=8)  # cp"),
    ("Head(config)\n", "CausalLMHead(32, 257, std=0.02)\n"),
    ('"head": TensorStyle.WHOLE', '"head": TensorStyle.VOCAB'),
)
TENSOR = ("mesh.tp=2", "parallel=[tensor_parallel]")
#: Message of the page -> overrides of the job and edits of the file that cause it.
CAUSES = {
    "needs model trait": (TENSOR, [('"model:tensor_parallel",', "")]),
    "lacks split_sequence()": (TENSOR, [("def split_sequence", "def split_other")]),
    "over tp is unknown": (TENSOR, [('"places": TensorStyle.VOCAB,', "")]),
    "features of": (TENSOR, [("4 * config.width), nn.Linear(4 * config.width", "127), nn.Linear(127")]),
    "which is not an embedding and lacks split_vocabulary()": (
        TENSOR,
        [('"head": TensorStyle.WHOLE', '"head": TensorStyle.VOCAB')],
    ),
    "are one parameter, which would be split in one of its modules only": (
        TENSOR,
        [("Head(config)\n", "Head(config)\n        self.head.weight = self.tokens.weight\n")],
    ),
    "names an attention core": (
        ("mesh.cp=2", "parallel=[{name: context_parallel, method: ulysses}]"),
        [('return {"core": self.core}', "return {}")],
    ),
    "computes whole samples only; use method ulysses": (("mesh.cp=2", "parallel=[context_parallel]"), []),
}


def job_of(directory: Path, *edits: tuple[str, str], overrides: Sequence[str] = ()) -> Job:
    """The job of the page next to its model, each edit applied once."""
    files = files_of(PAGE)
    model = files["my_transformer.py"]
    for old, new in edits:
        assert model.count(old) == 1, old
        model = model.replace(old, new)
    (directory / "my_transformer.py").write_text(model)
    (directory / "split.yaml").write_text(files["split.yaml"])
    return Job.load(directory / "split.yaml", overrides=list(overrides))


def deviations(job: Job, *layouts: str) -> list[str]:
    verdicts = verify(job, [parse_layout(text, job) for text in layouts], 2, lambda _note: None)
    return [verdict.diverged[1] for verdict in verdicts if verdict.diverged]


def test_the_page_explains_every_style_and_marks_what_each_strategy_needs() -> None:
    rows = tables(PAGE, "the child", "style", "receives", "returns")
    assert {name for row in rows for name in quoted(row[1])} == {style.name for style in TensorStyle}
    marked = dict(re.findall(r"def (\w+)\(.*# (tp|cp)$", files_of(PAGE)["my_transformer.py"], re.MULTILINE))
    tensor = ("tensor_parallel_plan", "tensor_parallel_heads", "split_sequence")
    assert marked == dict.fromkeys(tensor, "tp") | dict.fromkeys(("attention_cores", "split_context"), "cp")


def test_the_commands_of_the_page_name_the_layouts_that_are_tested() -> None:
    text = PAGE.read_text("utf-8")
    assert [layout for layout in (TP, CP, BOTH) if layout not in text] == []


def test_the_page_names_the_messages_that_are_tested() -> None:
    named = [row[0] for row in tables(PAGE, "message", "what to do")]
    assert [message for message in CAUSES if not any(message in row for row in named)] == []


@pytest.mark.thorough
@pytest.mark.parametrize("message", CAUSES)
def test_a_mistake_gets_the_message_of_the_page(message: str, tmp_path: Path) -> None:
    overrides, edits = CAUSES[message]
    with pytest.raises(D9dError) as caught:
        job_of(tmp_path, *edits, overrides=overrides).plan()
    row = next(row for row in tables(PAGE, "message", "what to do") if message in row[0])
    assert [piece for piece in quoted(row[0]) if piece not in str(caught.value)] == []


@pytest.mark.full
def test_the_model_of_the_page_computes_the_same_in_every_layout(tmp_path: Path) -> None:
    assert deviations(job_of(tmp_path), TP, CP, "dp_shard=2:fsdp,compile") == []


@pytest.mark.full
def test_it_computes_the_same_with_the_head_and_the_core_of_d9d_nn(tmp_path: Path) -> None:
    assert deviations(job_of(tmp_path, *BLOCKS), TP, "cp=2:context_parallel", BOTH) == []
