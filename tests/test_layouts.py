"""Every layout computes what one process does, and a layout that does not is noticed."""

from __future__ import annotations

import runpy
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from d9d_core.testing import Document
from d9d_engine.api import Layout, Verdict
from d9d_engine.testing import Measurement, compare, measure
from d9d_testing.layouts import assert_passed, job_of, topology_here
from d9d_testing.world import World

SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("dtype", "count"),
    [("float32", 3), *(pytest.param(*rest, marks=SLOW) for rest in (("float32", 1), ("bfloat16", 1), ("bfloat16", 3)))],
)
def test_every_layout_computes_what_one_process_does(table: ModuleType, tmp_path: Path, dtype: str, count: int) -> None:
    rows = table.run(tmp_path / "corpus", dtypes=[dtype], counts=[count])
    assert len(rows) == 6
    assert [(v.layout, v.diverged) for _, _, v in rows if not v.passed] == []
    shown = [row for row in _shown(table, table.DENSE_MARKS) if row[:2] == [f"| {dtype}", str(count)]]
    assert shown == _rows(rows), _STALE


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("dtype", "spread"),
    [("float32", True), pytest.param("float32", False, marks=SLOW), pytest.param("bfloat16", None, marks=SLOW)],
    ids=["float32 spread", "float32 in place", "bfloat16"],
)
def test_experts_compute_what_one_process_does_wherever_they_are(
    table: ModuleType, tmp_path: Path, dtype: str, spread: bool | None
) -> None:
    layouts = [one for one in table.EXPERT_LAYOUTS if spread is None or ("ep" in one.mesh) == spread]
    rows = table.run_experts(tmp_path / "corpus", layouts=layouts, dtypes=[dtype])
    assert len(rows) == {True: 8, False: 4, None: 12}[spread]
    assert [(count, v.layout, v.diverged) for _, count, v in rows if not v.passed] == []
    names = {layout.name for layout in layouts}
    shown = [row for row in _shown(table, table.EXPERT_MARKS) if row[0] == f"| {dtype}" and row[2] in names]
    assert shown == _rows(rows), _STALE


_STALE = "docs/layouts.md shows other rows; run tools/layout_table.py"


def _rows(rows: list[Any]) -> list[list[str]]:
    return [[f"| {dtype}", str(count), v.layout] for dtype, count, v in rows]


def _shown(table: ModuleType, marks: tuple[str, str]) -> list[list[str]]:
    text = table.PAGE.read_text("utf-8").split(marks[0])[1].split(marks[1])[0]
    lines = [line for line in text.splitlines() if line.startswith(("| float32", "| bfloat16"))]
    return [line.split(" | ")[:3] for line in lines]


def test_the_table_shows_these_layouts_only(table: ModuleType) -> None:
    assert len(_shown(table, table.DENSE_MARKS)) == 2 * 2 * 6
    assert len(_shown(table, table.EXPERT_MARKS)) == 2 * 12


# --- faults


#: Norms are outside of FSDP, so the synchroniser has something to do.
WITHOUT_NORMS = Layout("replicate 2, norms apart", {"dp_replicate": 2}, [{"name": "replicate", "ignore": ["*norm*"]}])
FAULTS = {
    "forgotten_reduction": ("replicate 2, norms apart", "replicated parameters outside of FSDP keep partial sums"),
    "double_reduction": ("replicate 2", "gradients are summed over ranks twice"),
    "average_instead_of_sum": ("fsdp 2", "FSDP2 divides by the number of ranks"),
    "forgotten_replicas": ("hsdp 2 x 2", "shards are summed, copies of shards are not"),
    "wrong_loss_weight": ("fsdp 2", "each rank divides by its own targets instead of all"),
    "shuffled_shard": ("fsdp 2", "one rank reads other samples"),
    "last_microbatch_only": ("fsdp 2", "earlier microbatches are dropped"),
    "other_initial_weights": ("replicate 2", "initial weights depend on the rank"),
    "norm_of_own_shard": ("fsdp 2", "the gradient norm covers one shard only"),
    "lost_owner": ("replicate 2, norms apart", "one parameter's gradient stays local"),
    "swapped_microbatches": ("gpipe, pp 2", "a stage computes with another microbatch's activations"),
    "dropped_boundary_gradient": ("1f1b, pp 2", "a microbatch trains the last stage only"),
    "forgotten_weights": ("zb1p, pp 2", "a microbatch does not train the weights"),
    "forgotten_tie_across_ranks": ("1f1b, pp 2", "the embedding and the head go apart, on two ranks"),
    "forgotten_tie_on_a_rank": ("zero_bubble_v, pp 2", "the embedding lacks the head's gradient, on one rank"),
    "stale_copy": ("zero_bubble_v, pp 2", "the head stays what it was when the embedding moves on"),
    "tie_counted_twice": ("1f1b, pp 2", "the gradient norm has the embedding twice"),
}
STEPS_WITH_FAULTS = 2


@pytest.fixture(scope="module")
def verdicts(table: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str | None, str], Verdict]:
    """What comes of every fault, and of its layout without one: fault, layout -> verdict.

    One world for each number of ranks computes them all, because starting it takes longer.
    """
    corpus = tmp_path_factory.mktemp("faults") / "corpus"
    jobs = {model: table.job(corpus, "float32", model=getattr(table, model)) for model in ("DENSE", "DEEP_DENSE")}
    plain = [table.sized(layout, 3) for layout in (*table.LAYOUTS, WITHOUT_NORMS)]
    piped = [table.Piped(name, 2, 3, tied=True) for name in ("gpipe", "1f1b", "zb1p", "zero_bubble_v")]
    layouts = {x.name: ("DENSE", x) for x in plain} | {x.layout.name: ("DEEP_DENSE", x.layout) for x in piped}
    references = {
        "DENSE": table.sized(Layout("reference", {}, ()), 1),
        "DEEP_DENSE": piped[0].reference,
    }
    wanted: list[tuple[str | None, str]] = [(fault, name) for fault, (name, _) in FAULTS.items()]
    wanted += [(None, name) for name in dict.fromkeys(name for _, name in wanted)]
    expected = dict(zip(jobs, _measured(table, [(jobs[m], references[m], None) for m in jobs]), strict=True))
    cases = [(jobs[layouts[name][0]], layouts[name][1], fault) for fault, name in wanted]
    return {
        (fault, name): compare(name, measured, expected[layouts[name][0]], torch.float32)
        for (fault, name), measured in zip(wanted, _measured(table, cases), strict=True)
    }


@pytest.mark.thorough
@pytest.mark.parametrize("fault", FAULTS)
def test_a_seeded_fault_is_caught(verdicts: dict[tuple[str | None, str], Verdict], fault: str) -> None:
    layout, meaning = FAULTS[fault]
    assert not verdicts[fault, layout].passed, meaning


@pytest.mark.thorough
def test_the_layouts_of_the_faults_pass_without_one(verdicts: dict[tuple[str | None, str], Verdict]) -> None:
    sound = [verdict for (fault, _), verdict in verdicts.items() if fault is None]
    assert len(sound) == 8
    assert_passed(sound)


def _measured(table: ModuleType, cases: Sequence[tuple[dict[str, Any], Layout, str | None]]) -> list[Measurement]:
    """What jobs compute in their layouts, with their faults."""
    found: dict[int, Measurement] = {}
    for ranks in sorted({layout.ranks for _, layout, _ in cases}):
        here = [place for place, (_, layout, _) in enumerate(cases) if layout.ranks == ranks]
        given = [(_values(*cases[place][:2]), cases[place][2]) for place in here]
        results = World(ranks, timeout=180.0).run(measure_with_faults, given, list(table.PLUGINS))[0]
        found |= {place: Measurement(**result) for place, result in zip(here, results, strict=True)}
    return [found[place] for place in range(len(cases))]


def _values(job: dict[str, Any], layout: Layout) -> dict[str, Any]:
    values = job | {"mesh": dict(layout.mesh), "parallel": list(layout.parallel)}
    return Document(values).override(layout.overrides).values


def measure_with_faults(cases: list[tuple[dict[str, Any], str | None]], plugins: list[str]) -> list[dict[str, Any]]:
    """Measure jobs one after the other, each with its fault only; runs on every rank of a world."""
    found = []
    for values, fault in cases:
        job = job_of(values, plugins)
        with pytest.MonkeyPatch.context() as patch:
            if fault is not None:
                runpy.run_path(str(Path(__file__).with_name("faults.py")))[fault](job, patch)
            found.append(vars(measure(job, topology_here(job), STEPS_WITH_FAULTS)))
    return found
