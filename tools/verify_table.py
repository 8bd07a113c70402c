"""Runs ``d9d verify`` on jobs with seeded faults and on sound jobs, and writes both tables into the documentation.

    uv run python tools/verify_table.py                     write docs/layouts.md and docs/layouts.json
    uv run python tools/verify_table.py faults [NAME ...]   only faults; with names only those, and nothing is written
    uv run python tools/verify_table.py sound [NAME ...]    the same for sound jobs

Each fault must be caught in float32 and in bfloat16, except for those that a limit hides (:data:`HIDDEN`); each sound
job must pass. Tests run parts of both tables.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import layout_table
import pytest
import torch
from d9d_engine.job import Job
from d9d_testing.layouts import topology_here
from d9d_testing.world import World
from d9d_verify.compare import Verdict
from d9d_verify.layouts import Layout
from d9d_verify.run import verify
from d9d_verify.worker import measure_plan
from layout_table import SCHEDULES

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "layouts.md"
FAULT_MODULES = ("gradients", "pipelines", "updates", "data", "state", "tensors", "contexts", "second")
FAULT_MARKS = "<!-- faults: begin -->", "<!-- faults: end -->"
DTYPES = ("float32", "bfloat16")
STEPS = 4
#: Dtype, case, fault and verdict.
Row = tuple[str, str, str | None, Verdict]

DENSE = layout_table.DENSE | {"max_positions": 64}
TIED = DENSE | {"num_layers": 4, "tie_embeddings": True}
DYNAMIC = DENSE | {"rope_scaling": {"type": "dynamic", "factor": 2.0, "original_max_positions": 8}}
EXPERTS = layout_table.EXPERTS | {"max_positions": 64}


@dataclass(frozen=True)
class Case:
    """Jobs of one model, and their layouts.

    Attributes:
        model: fields of the section ``model``.
        layouts: name -> mesh, strategies and a schedule.
        sections: other sections of the job.
    """

    model: Mapping[str, Any]
    layouts: Mapping[str, Layout]
    sections: Mapping[str, Any] = field(default_factory=dict)


_LAYOUTS = {layout.name: layout for layout in (*layout_table.LAYOUTS, *layout_table.EXPERT_LAYOUTS)}
REPLICATE, FSDP, HSDP = (_LAYOUTS[name] for name in ("replicate 2", "fsdp 2", "hsdp 2 x 2"))
FSDP_EP, REPLICATE_EP = (_LAYOUTS[f"{name}, ep 2"] for name in ("fsdp 2", "replicate 2"))
TP, TP_REPEATED, TP_FSDP = (_LAYOUTS[name] for name in ("tp 2", "tp 4", "fsdp 2, tp 2"))
TP_EP = _LAYOUTS["tp 2, ep 2"]
CP, CP_RING, CP_HYBRID, CP_TP = (
    _LAYOUTS[name] for name in ("cp 2, all_gather", "cp 2, ring", "cp 4, hybrid", "cp 2, ring, tp 2")
)
CP_ULYSSES, CP_FSDP = (_LAYOUTS[name] for name in ("cp 4, ulysses", "fsdp 2, cp 2, ulysses"))
CP_EP = _LAYOUTS["cp 2, all_gather, ep 2"]
APART = Layout("replicate 2, norms apart", {"dp_replicate": 2}, [{"name": "replicate", "ignore": ["*norm*"]}])
PIPELINE = Layout("pp 2", {"pp": 2}, ())
PIPELINE_TP = Layout("pp 2, tp 2", {"pp": 2, "tp": 2}, ["tensor_parallel"])
PIPELINE_CP_TP = Layout("pp 2, cp 2, tp 2", {"pp": 2, **CP_TP.mesh}, CP_TP.parallel)
PIPELINE_FSDP = Layout("pp 2, fsdp 2", {"pp": 2, "dp_shard": 2}, ["fsdp"])

DOCUMENTS = {"data": {"name": "documents", "sequence_length": 24, "pad_multiple": 1, "bucket_window": 24}}
#: Fault -> case and layout that show it.
FAULTS: Mapping[str, tuple[str, str]] = {
    # gradients
    "forgotten_reduction": ("dense", APART.name),
    "double_reduction": ("dense", REPLICATE.name),
    "average_instead_of_sum": ("dense", FSDP.name),
    "forgotten_replicas": ("dense", HSDP.name),
    "wrong_loss_weight": ("documents", FSDP.name),
    "heavier_rank": ("dense", FSDP.name),
    "mean_of_means": ("documents", REPLICATE.name),
    "last_microbatch_only": ("dense", FSDP.name),
    "lost_owner": ("dense", APART.name),
    "flipped_sign": ("dense", FSDP.name),
    "stale_gradients": ("dense", FSDP.name),
    "lost_gradient": ("dense", FSDP.name),
    # pipelines
    "swapped_microbatches": ("gpipe", PIPELINE.name),
    "dropped_boundary_gradient": ("1f1b", PIPELINE.name),
    "forgotten_weights": ("zb1p", PIPELINE.name),
    "forgotten_tie_across_ranks": ("1f1b", PIPELINE.name),
    "forgotten_tie_on_a_rank": ("zero_bubble_v", PIPELINE.name),
    "stale_copy": ("zero_bubble_v", PIPELINE.name),
    "tie_counted_twice": ("1f1b", PIPELINE.name),
    # tensor parallelism
    "norms_apart": ("dense, tp", TP.name),
    "repeated_heads_apart": ("dense, tp", TP_REPEATED.name),
    "own_gradient_of_hidden_states": ("dense, tp", TP.name),
    "own_logit_of_the_target": ("dense, tp", TP.name),
    "unmerged_words": ("dense, tp", TP.name),
    "positions_of_another": ("experts, tp", TP.name),
    "norm_of_the_first_share": ("dense, tp", TP.name),
    # context parallelism
    "skipped_turn": ("dense, cp", CP_RING.name),
    "leaking_document": ("dense, cp", CP.name),
    "leaking_document_in_a_ring": ("dense, cp", CP_RING.name),
    "unsplit_positions": ("dense, cp", CP.name),
    "own_gradient_of_gathered_keys": ("dense, cp", CP.name),
    # updates
    "frozen_rank": ("1f1b", PIPELINE.name),
    "forgotten_moments": ("dense", FSDP.name),
    "no_decay": ("dense", FSDP.name),
    "other_betas": ("dense", FSDP.name),
    "doubled_rate": ("dense", FSDP.name),
    "late_schedule": ("dense", FSDP.name),
    "skipped_parameter": ("dense", FSDP.name),
    "stuck_counter": ("dense", FSDP.name),
    "update_twice": ("dense", FSDP.name),
    # clipping
    "norm_of_own_shard": ("dense", FSDP.name),
    "unclipped_rank": ("dense", FSDP.name),
    "unclipped": ("dense", FSDP.name),
    "clipped_by_own_norm": ("dense", FSDP.name),
    "other_limit": ("dense", FSDP.name),
    # data, labels, masks, positions
    "shuffled_shard": ("dense", FSDP.name),
    "same_samples": ("dense", FSDP.name),
    "repeated_pack": ("dense", FSDP.name),
    "other_token": ("dense", FSDP.name),
    "late_targets": ("dense", FSDP.name),
    "one_wrong_target": ("dense", FSDP.name),
    "unmasked_targets": ("documents", FSDP.name),
    "masked_targets": ("dense", FSDP.name),
    "across_documents": ("dense", FSDP.name),
    "stretched_positions": ("dense", FSDP.name),
    # initial values, replicas, buffers
    "other_initial_weights": ("dense", REPLICATE.name),
    "other_replica": ("dense", APART.name),
    "drifting_replica": ("dense", APART.name),
    "own_loads": ("experts", FSDP_EP.name),
    "frozen_bias": ("experts", FSDP_EP.name),
    "heavier_balance": ("experts", FSDP_EP.name),
    # evaluation, metrics
    "evaluated_alone": ("dense", FSDP.name),
    "evaluated_on_other_data": ("dense", FSDP.name),
    "unmerged_metric": ("dense", FSDP.name),
    "lost_observations": ("dense", FSDP.name),
    # saves, resumes
    "shard_of_another": ("dense", FSDP.name),
    "unloaded_optimizer": ("dense", FSDP.name),
    "unloaded_weights": ("dense", FSDP.name),
    "unmoved_data": ("dense", FSDP.name),
    # second list: saved and restored state
    "saved_place_behind": ("dense", FSDP.name),
    "unsaved_metrics": ("dense", FSDP.name),
    "unloaded_metrics": ("dense", FSDP.name),
    "metrics_counted_again": ("dense", FSDP.name),
    "unloaded_buffers": ("experts", FSDP_EP.name),
    "crossed_moments": ("dense", FSDP.name),
    "rounded_save": ("dense", FSDP.name),
    "saved_zeros": ("dense", FSDP.name),
    # logged numbers, evaluation
    "one_token_more": ("dense", FSDP.name),
    "swapped_terms": ("experts", FSDP_EP.name),
    "louder_log": ("dense", FSDP.name),
    "evaluated_without_average": ("averages", FSDP.name),
    "evaluated_without_average_on_a_rank": ("averages", FSDP.name),
    "evaluated_without_last_targets": ("dense", FSDP.name),
    # samples of a microbatch
    "swapped_targets": ("dense", FSDP.name),
    "first_sample_only": ("dense", FSDP.name),
    "repeated_sample": ("dense", FSDP.name),
    "swapped_documents": ("dense", FSDP.name),
    # updates
    "frozen_norms": ("dense", FSDP.name),
    "longer_updates_of_norms": ("dense", FSDP.name),
    "longer_updates_of_the_head": ("dense", FSDP.name),
    "large_epsilon": ("dense", FSDP.name),
    "rounded_moments": ("dense", FSDP.name),
    "longer_second_moments": ("dense", FSDP.name),
    "skipped_step": ("dense", FSDP.name),
    "late_gradients": ("dense", FSDP.name),
    # gradients
    "rounded_gradients": ("dense", FSDP.name),
    "noisy_gradients": ("dense", FSDP.name),
    "reversed_rows": ("dense", FSDP.name),
    "lost_row": ("dense", FSDP.name),
    "heavier_last_microbatch": ("dense", FSDP.name),
    # experts
    "heavier_experts": ("experts", FSDP_EP.name),
    "swapped_experts": ("experts", FSDP_EP.name),
    # tensor and context parallelism, pipelines
    "head_of_the_neighbour": ("dense, tp", TP_REPEATED.name),
    "vocabulary_off_by_one": ("dense, tp", TP.name),
    "swapped_positions": ("dense, tp", TP.name),
    "unsummed_features": ("dense, tp", TP.name),
    "chunks_in_order": ("dense, cp", CP.name),
    "heads_in_reverse": ("dense, cp", CP_ULYSSES.name),
    "swapped_boundary_gradients": ("1f1b", PIPELINE.name),
    "rounded_boundary": ("gpipe", PIPELINE.name),
    "half_a_tie": ("1f1b", PIPELINE.name),
}
#: Dtype and fault -> limit that hides the fault.
HIDDEN: Mapping[tuple[str, str], str] = {
    ("bfloat16", "rounded_moments"): "no effect: moments are in bfloat16",
    ("bfloat16", "rounded_gradients"): "no effect: gradients are in bfloat16",
    ("bfloat16", "rounded_boundary"): "no effect: hidden states are in bfloat16",
    ("bfloat16", "rounded_save"): "no effect on weights, which are in bfloat16; sums of metrics may be off by 0.3 %",
    ("bfloat16", "noisy_gradients"): "not detected: errors of 0.1 % are smaller than half a bit of bfloat16, 0.2 %",
    ("bfloat16", "heavier_experts"): (
        "not detected: correct runs move tokens between experts, and so change gradients by more (1-cos 4e-3)"
    ),
}


def fault_cases() -> dict[str, Case]:
    """Cases in which faults are seeded."""
    dense = {layout.name: layout for layout in (REPLICATE, APART, FSDP, HSDP)}
    piped = {PIPELINE.name: PIPELINE}
    return {
        "dense": Case(DENSE, dense),
        "documents": Case(DENSE, dense, DOCUMENTS),
        "experts": Case(EXPERTS, {FSDP_EP.name: FSDP_EP}),
        "dense, tp": Case(DENSE, {TP.name: TP, TP_REPEATED.name: TP_REPEATED}),
        "experts, tp": Case(EXPERTS, {TP.name: TP}),
        "dense, cp": Case(DENSE, {CP.name: CP, CP_RING.name: CP_RING, CP_ULYSSES.name: CP_ULYSSES}),
        "averages": Case(DENSE, dense, {"optimizer": {"name": "schedule_free", "lr": 1e-3}}),
        **{name: Case(TIED, piped, {"pipeline": name}) for name in ("gpipe", "1f1b", "zb1p", "zero_bubble_v")},
    }


def sound_cases() -> dict[str, Case]:
    """Cases without faults."""
    data = {layout.name: layout for layout in (REPLICATE, FSDP, HSDP)}
    two = {layout.name: layout for layout in (REPLICATE, FSDP)}
    experts = {layout.name: layout for layout in (FSDP, FSDP_EP, REPLICATE_EP)}
    router = {"metrics": ["perplexity", "router"]}
    piped = {layout.name: layout for layout in (PIPELINE, PIPELINE_FSDP)}
    split = {layout.name: layout for layout in (TP, TP_REPEATED, TP_FSDP)}
    split_experts = {layout.name: layout for layout in (TP, TP_EP, TP_FSDP)}
    shared = {layout.name: layout for layout in (CP, CP_RING, CP_ULYSSES, CP_HYBRID, CP_TP, CP_FSDP)}
    padded = {"data": {**DOCUMENTS["data"], "pad_multiple": 8}}
    sgd = {"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}}
    return {
        "dense": Case(DENSE, data),
        "dense, documents": Case(DENSE, data, DOCUMENTS),
        "dense, SGD": Case(DENSE, two, sgd),
        "dense, float32 state": Case(DENSE, two, {"optimizer": {"name": "adamw", "state_dtype": "float32"}}),
        "dense, noisy signs": Case(DENSE, two, {"optimizer": {"name": "adamw", "lr": 0.01, "betas": [0.0, 0.0]}}),
        "dynamic NTK": Case(DYNAMIC, two, DOCUMENTS),
        "experts": Case(EXPERTS, experts, router),
        "experts, documents": Case(EXPERTS, experts, DOCUMENTS | router),
        "dense, tp": Case(DENSE, split),
        "dense, tp, documents": Case(DENSE, split, DOCUMENTS | {"data": {**DOCUMENTS["data"], "pad_multiple": 4}}),
        "experts, tp": Case(EXPERTS, split_experts, router),
        "dense, cp": Case(DENSE, shared),
        "dense, cp, documents": Case(DENSE, shared, DOCUMENTS | padded),
        "experts, cp": Case(EXPERTS, {layout.name: layout for layout in (CP_RING, CP_EP)}, router),
        "experts, cp, documents": Case(EXPERTS, {layout.name: layout for layout in (CP_RING, CP_EP)}, padded | router),
        "tied, cp, tp, 1f1b": Case(TIED, {PIPELINE_CP_TP.name: PIPELINE_CP_TP}, {"pipeline": "1f1b"}),
        "tied, tp, zero_bubble_v": Case(TIED, {PIPELINE_TP.name: PIPELINE_TP}, {"pipeline": "zero_bubble_v"}),
        **{f"tied, {name}": Case(TIED, piped, {"pipeline": name}) for name in SCHEDULES},
    }


def job(directory: Path, case: Case, dtype: str) -> Job:
    """Job of a case."""
    corpus = directory / "corpus"
    if not corpus.exists():
        corpus.mkdir()
        for number in range(120):
            text = "the quick brown fox jumps over the lazy dog. "[: 2 + 5 * (number % 9)]
            (corpus / f"{number}.txt").write_text(f"{number}: {text}")
    sections = {name: value for name, value in case.sections.items() if name != "data"}
    data = {"name": "text", "sources": [str(corpus)], "sequence_length": 24, "held_out": 0.3}
    data |= dict(case.sections.get("data", {}))
    values = {
        "run": {"name": "verified", "dir": str(directory / "runs")},
        "device": "cpu",
        "steps": 100,
        "batch": {"size": 12, "microbatch": 2},
        "model": dict(case.model),
        "task": "causal_lm",
        "data": data,
        "optimizer": {"name": "adamw", "lr": 1e-3},
        "lr_schedule": {"name": "cosine", "warmup_steps": 50},
        "precision": {"parameters": dtype},
        "metrics": ["perplexity"],
        "evaluation": {"every": 50, "data": data | {"split": "held_out"}},
        **sections,
    }
    return Job.from_values(values)


class Launcher:
    """Launcher that runs ``d9d verify`` in worlds of processes, which start faster, with a fault in each layout.

    Args:
        faults: fault of each layout, in order; ``None`` for none.
    """

    def __init__(self, faults: Sequence[str | None]) -> None:
        self._faults = faults

    def __call__(self, directory: Path, ranks: int) -> str | None:
        """Run the processes; return the reason of a failure."""
        fault = self._faults[int(directory.name)] if directory.name.isdecimal() else None
        try:
            World(ranks, timeout=180.0).run(work, str(directory), fault)
        except Exception as error:
            return str(error).strip().splitlines()[-1]
        return None


def fault_named(name: str) -> Callable[[Job, pytest.MonkeyPatch], None]:
    """Find a fault in ``tests/seeded_faults``."""
    if str(ROOT / "tests") not in sys.path:
        sys.path.append(str(ROOT / "tests"))
    modules = [importlib.import_module(f"seeded_faults.{module}") for module in FAULT_MODULES]
    found: Callable[[Job, pytest.MonkeyPatch], None] = next(
        getattr(module, name) for module in modules if name in vars(module)
    )
    return found


def work(directory: str, fault: str | None) -> None:
    """Run the work of one process of ``d9d verify``, with a fault."""
    with pytest.MonkeyPatch.context() as patch:
        here = Job.load(Path(directory) / "job.json")
        if fault is not None:
            fault_named(fault)(here, patch)
        measure_plan(Path(directory), topology_here(here))


def run(
    directory: Path, cases: Mapping[str, Case], faults: Mapping[str, tuple[str, str]] | None, dtypes: Sequence[str]
) -> Iterator[Row]:
    """Verify cases, with or without faults; yields dtype, case, fault and verdict."""
    for dtype in dtypes:
        for name, case in cases.items():
            if faults is None:
                seeded: list[tuple[str | None, Layout]] = [(None, layout) for layout in case.layouts.values()]
            else:
                seeded = [(fault, case.layouts[layout]) for fault, (of, layout) in faults.items() if of == name]
            if not seeded:
                continue
            verdicts = verify(
                job(directory, case, dtype),
                [layout for _, layout in seeded],
                STEPS,
                lambda _text: None,
                Launcher([fault for fault, _ in seeded]),
            )
            for (fault, _), verdict in zip(seeded, verdicts, strict=True):
                print(dtype, name, verdict.layout, fault or "sound", verdict.diverged or "passed", flush=True)
                yield dtype, name, fault, verdict


def render_faults(rows: Sequence[Row]) -> str:
    """Markdown table of faults, with the check that caught each one."""
    lines = ["| fault | what it breaks | float32 | bfloat16 |", "|---|---|---|---|"]
    for fault in FAULTS:
        said = {
            dtype: _caught(verdict) if is_caught(verdict) else HIDDEN[dtype, fault]
            for dtype, _, of, verdict in rows
            if of == fault
        }
        about = (fault_named(fault).__doc__ or "").strip().rstrip(".")
        lines.append(f"| {fault} | {about} | {said['float32']} | {said['bfloat16']} |")
    return "\n".join(lines)


def sound_records(rows: Sequence[Row]) -> list[layout_table.Record]:
    """Records of sound jobs for docs/layouts.json: the largest deviations over the layouts."""
    records = []
    for name, dtype in dict.fromkeys((name, dtype) for dtype, name, _, _ in rows):
        found = [verdict for of, job, _, verdict in rows if (job, of) == (name, dtype)]
        each = [layout_table.record(verdict, job=name, parameters=dtype) for verdict in found]
        worst = {column: max(one[column] for one in each) for column in layout_table.DEVIATIONS}
        records.append({**each[0], "layout": ", ".join(one["layout"] for one in each), **worst})
    return records


def shown(marks: tuple[str, str]) -> set[str]:
    """First cells of a table in the documentation."""
    text = PAGE.read_text("utf-8").split(marks[0])[1].split(marks[1])[0]
    return {line.split(" | ")[0].removeprefix("| ") for line in text.strip().splitlines()[2:]}


def is_caught(verdict: Verdict) -> bool:
    """Whether a comparison found the fault, in contrast to a failed process."""
    return verdict.diverged is not None and not verdict.diverged[1].startswith("failed: ")


def main() -> None:
    """Write the tables into the page."""
    part, names = sys.argv[1:2], sys.argv[2:]
    tables: dict[tuple[str, str], str] = {}
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        if part != ["sound"]:
            faults = {name: where for name, where in FAULTS.items() if not names or name in names}
            found = list(run(directory, fault_cases(), faults, DTYPES))
            wrong += [
                f"{dtype}: {fault} was missed"
                for dtype, _, fault, verdict in found
                if not is_caught(verdict) and (dtype, fault) not in HIDDEN
            ]
            if not names and not wrong:
                tables[FAULT_MARKS] = render_faults(found)
        if part != ["faults"]:
            cases = {name: case for name, case in sound_cases().items() if not names or name in names}
            sound = list(run(directory, cases, None, DTYPES))
            wrong += [f"{dtype}: {name}, {v.layout}: {v.diverged}" for dtype, name, _, v in sound if not v.passed]
            if not names and not wrong:
                layout_table.write("sound jobs", sound_records(sound))
    if wrong:
        raise SystemExit("\n".join(wrong))
    for marks, table in tables.items():  # read the page again, because another tool may have changed it meanwhile
        PAGE.write_text(_replaced(PAGE.read_text("utf-8"), marks, table), "utf-8")
    print(f"all faults were caught and all sound jobs passed, torch {torch.__version__}")


def _caught(verdict: Verdict) -> str:
    assert verdict.diverged is not None
    step, text = verdict.diverged
    return f"step {step + 1}: " + text.partition(" (allowed")[0].partition("; ")[0]


def _replaced(text: str, marks: tuple[str, str], table: str) -> str:
    begin, end = marks
    return f"{text.partition(begin)[0]}{begin}\n{table}\n{end}{text.partition(end)[2]}"


if __name__ == "__main__":
    main()
