"""Runs a tiny Qwen3 and a tiny Qwen3-MoE in every layout and records the deviations from one process.

    uv run python tools/layout_table.py              write docs/layouts.json and the summary in docs/layouts.md
    uv run python tools/layout_table.py pipelines    only the rows of pipelines

Tests run the same layouts and compare them with the records, so the records stay up to date.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from d9d_testing.layouts import Harness
from d9d_verify.compare import Verdict, compare
from d9d_verify.deviations import Limits
from d9d_verify.layouts import Layout

ROOT = Path(__file__).resolve().parents[1]
PAGE, DATA = ROOT / "docs" / "layouts.md", ROOT / "docs" / "layouts.json"
MARKS = "<!-- summary: begin, by tools/layout_table.py -->", "<!-- summary: end -->"
#: Columns with deviations.
DEVIATIONS = ("loss", "gradient norm", "1-cos", "length", "update")
#: Part of the records -> its title in the summary.
PARTS = {
    "dense": "dense model",
    "experts": "model with experts",
    "pipelines": "pipelines",
    "sound jobs": "sound jobs of `d9d verify`",
}

PLUGINS = (
    "d9d_nn.plugin", "d9d_data.plugin", "d9d_optim.plugin", "d9d_parallel.plugin", "d9d_moe.plugin",
    "d9d_pipeline.plugin", "d9d_qwen3.plugin", "d9d_llama.plugin", "d9d_gemma.plugin",
    "d9d_qwen3_next.plugin",
)  # fmt: skip


def context(method: str, **fields: Any) -> dict[str, Any]:
    """Entry of the strategy ``context_parallel`` in a job."""
    return {"name": "context_parallel", "method": method, **fields}


LAYOUTS = (
    Layout("one process", {}, ()),
    Layout("replicate 2", {"dp_replicate": 2}, ["replicate"]),
    Layout("replicate 4", {"dp_replicate": 4}, ["replicate"]),
    Layout("fsdp 2", {"dp_shard": 2}, ["fsdp"]),
    Layout("fsdp 4", {"dp_shard": 4}, ["fsdp"]),
    Layout("hsdp 2 x 2", {"dp_replicate": 2, "dp_shard": 2}, ["hsdp"]),
    Layout("tp 2", {"tp": 2}, ["tensor_parallel"]),
    Layout("tp 4", {"tp": 4}, ["tensor_parallel"]),  # the model has 2 key/value heads
    Layout(
        "tp 2, checkpointed, compiled",
        {"tp": 2},
        ["tensor_parallel", "activation_checkpointing", {"name": "compile", "backend": "aot_eager"}],
    ),
    Layout("replicate 2, tp 2", {"dp_replicate": 2, "tp": 2}, ["tensor_parallel", "replicate"]),
    Layout("fsdp 2, tp 2", {"dp_shard": 2, "tp": 2}, ["tensor_parallel", "fsdp"]),
    Layout("hsdp 2 x 2, tp 2", {"dp_replicate": 2, "dp_shard": 2, "tp": 2}, ["tensor_parallel", "hsdp"]),
    Layout("cp 2, all_gather", {"cp": 2}, [context("all_gather")]),
    Layout("cp 2, ring", {"cp": 2}, [context("ring")]),
    Layout("cp 4, ulysses", {"cp": 4}, [context("ulysses")]),
    Layout("cp 4, ring", {"cp": 4}, [context("ring")]),
    Layout("cp 4, hybrid", {"cp": 4}, [context("hybrid", head_ranks=2)]),
    Layout(
        "cp 2, ring, checkpointed, compiled",
        {"cp": 2},
        [context("ring"), "activation_checkpointing", {"name": "compile", "backend": "aot_eager"}],
    ),
    Layout("replicate 2, cp 2, all_gather", {"dp_replicate": 2, "cp": 2}, [context("all_gather"), "replicate"]),
    Layout("fsdp 2, cp 2, ulysses", {"dp_shard": 2, "cp": 2}, [context("ulysses"), "fsdp"]),
    Layout("cp 2, ring, tp 2", {"cp": 2, "tp": 2}, [context("ring"), "tensor_parallel"]),
    Layout("tp 2, asynchronous", {"tp": 2}, [{"name": "tensor_parallel", "asynchronous": True}]),
)
#: Layouts of models with experts: every kind of data parallelism, with and without expert parallelism.
EXPERT_LAYOUTS = (
    Layout("one process", {}, ()),
    Layout("replicate 2", {"dp_replicate": 2}, ["replicate"]),
    Layout("replicate 2, ep 2", {"dp_replicate": 2, "ep": 2}, ["replicate", "expert_parallel"]),
    Layout("replicate 4, ep 4", {"dp_replicate": 4, "ep": 4}, ["replicate", "expert_parallel"]),
    Layout("fsdp 2", {"dp_shard": 2}, ["fsdp"]),
    Layout("fsdp 2, ep 2", {"dp_shard": 2, "ep": 2}, ["fsdp", "expert_parallel"]),
    Layout("fsdp 4, ep 2", {"dp_shard": 4, "ep": 2}, ["fsdp", "expert_parallel"]),
    Layout("fsdp 4, ep 4", {"dp_shard": 4, "ep": 4}, ["fsdp", "expert_parallel"]),
    Layout("hsdp 2 x 2", {"dp_replicate": 2, "dp_shard": 2}, ["hsdp"]),
    Layout("hsdp 2 x 2, ep 2", {"dp_replicate": 2, "dp_shard": 2, "ep": 2}, ["hsdp", "expert_parallel"]),
    Layout("hsdp 2 x 2, ep 4", {"dp_replicate": 2, "dp_shard": 2, "ep": 4}, ["hsdp", "expert_parallel"]),
    Layout(
        "fsdp 4, ep 2, checkpointed",
        {"dp_shard": 4, "ep": 2},
        ["fsdp", "expert_parallel", "activation_checkpointing"],
    ),
    Layout("tp 2", {"tp": 2}, ["tensor_parallel"]),
    Layout("tp 2, ep 2", {"tp": 2, "ep": 2}, ["tensor_parallel", "expert_parallel"]),
    Layout("fsdp 2, tp 2", {"dp_shard": 2, "tp": 2}, ["tensor_parallel", "fsdp"]),
    Layout("fsdp 2, tp 2, ep 2", {"dp_shard": 2, "tp": 2, "ep": 2}, ["tensor_parallel", "fsdp", "expert_parallel"]),
    Layout("fsdp 2, tp 2, ep 4", {"dp_shard": 2, "tp": 2, "ep": 4}, ["tensor_parallel", "fsdp", "expert_parallel"]),
    Layout(
        "replicate 2, tp 2, ep 4",
        {"dp_replicate": 2, "tp": 2, "ep": 4},
        ["tensor_parallel", "replicate", "expert_parallel"],
    ),
    Layout("cp 2, ring", {"cp": 2}, [context("ring")]),
    Layout("cp 2, all_gather, ep 2", {"cp": 2, "ep": 2}, [context("all_gather"), "expert_parallel"]),
    Layout(
        "fsdp 2, cp 2, ulysses, ep 2",
        {"dp_shard": 2, "cp": 2, "ep": 2},
        [context("ulysses"), "fsdp", "expert_parallel"],
    ),
    Layout("fsdp 2, cp 2, ring, ep 4", {"dp_shard": 2, "cp": 2, "ep": 4}, [context("ring"), "fsdp", "expert_parallel"]),
    Layout(
        "cp 2, all_gather, tp 2, ep 4",
        {"cp": 2, "tp": 2, "ep": 4},
        [context("all_gather"), "tensor_parallel", "expert_parallel"],
    ),
)
BATCH = 12
STEPS = 4
Row = tuple[str, int, Verdict]
Record = dict[str, Any]


DENSE = {
    "name": "qwen3", "vocab_size": 257, "hidden_size": 32, "intermediate_size": 48, "num_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_positions": 32,
}  # fmt: skip
#: Model with all load-balancing methods whose results do not depend on the layout.
EXPERTS = {key: value for key, value in DENSE.items() if key != "intermediate_size"} | {
    "name": "qwen3_moe", "num_experts": 8, "experts_per_token": 2, "moe_intermediate_size": 24,
    "balancing": [
        {"name": "auxiliary_loss", "scope": "sequence", "coefficient": 0.01},
        {"name": "z_loss", "coefficient": 0.001},
        {"name": "bias_update", "rate": 0.001},
    ],
}  # fmt: skip

#: Other families of dense models.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": DENSE | {"name": "llama"},
    "mistral": DENSE | {"name": "mistral", "sliding_window": 8},
    "qwen2": DENSE | {"name": "qwen2", "tie_embeddings": True},
    "glm": DENSE | {"name": "glm"},
    "gemma 2": DENSE | {
        "name": "gemma", "generation": 2, "sliding_window": 8, "tie_embeddings": True, "score_softcap": 2.0,
        "logit_softcap": 3.0,
    },
    "gemma 3": DENSE | {"name": "gemma", "sliding_window": 8, "tie_embeddings": True, "local_rope_theta": 10_000.0},
    "qwen3_5": DENSE | {
        "name": "qwen3_5", "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 4,
        "linear_num_value_heads": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 16,
        "partial_rotary_factor": 0.5,
    },
}  # fmt: skip
#: Family with experts: as Qwen3.5, with the experts and balancing of Qwen3-MoE, and an expert that all tokens share.
HYBRID_EXPERTS = FAMILIES["qwen3_5"] | {
    name: value for name, value in EXPERTS.items() if name not in DENSE
} | {"name": "qwen3_next", "shared_expert_intermediate_size": 16}  # fmt: skip


def of_family(family: str) -> list[Layout]:
    """Layouts of a family: with a soft cap of scores, context parallelism only by ``ulysses``."""
    if "score_softcap" not in FAMILIES[family]:
        return list(LAYOUTS)
    return [layout for layout in LAYOUTS if "cp" not in layout.mesh or "ulysses" in layout.name]


def job(corpus: Path, dtype: str, device: str = "cpu", model: Mapping[str, Any] = DENSE) -> dict[str, Any]:
    """Job of a tiny model on a few kilobytes of text."""
    if not corpus.exists():
        corpus.mkdir()
        for number in range(6):
            text = f"{number}: " + "the quick brown fox jumps over the lazy dog, and then it sleeps. " * (3 + number)
            (corpus / f"{number}.txt").write_text(text)
    return {
        "steps": STEPS,
        "device": device,
        "run": {"dir": str(corpus.parent / "runs")},
        "model": dict(model),
        "task": "causal_lm",
        "data": {"name": "text", "sources": [str(corpus)], "sequence_length": 24},
        "optimizer": {"name": "adamw", "lr": 0.002},
        "gradient_clipping": {"max_norm": None},
        "precision": {"parameters": dtype},
        "trackers": [],
        "export": False,
    }  # fmt: skip


def run(
    corpus: Path,
    layouts: Sequence[Layout] = LAYOUTS,
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    counts: Sequence[int] = (1, 3),
    fault: str | None = None,
    device: str = "cpu",
    model: Mapping[str, Any] = DENSE,
) -> list[Row]:
    """Verdict on every layout, in both dtypes and for each number of microbatches, against one process."""
    rows: list[Row] = []
    for dtype in dtypes:
        cases = [(layout, count) for count in counts for layout in layouts]
        harness = Harness(job(corpus, dtype, device, model), PLUGINS, STEPS)
        verdicts = harness.compare(
            [sized(*case) for case in cases], reference=sized(Layout("reference", {}, ()), 1), fault=fault
        )
        rows += [(dtype, count, verdict) for (_, count), verdict in zip(cases, verdicts, strict=True)]
    return rows


def sized(layout: Layout, microbatches: int) -> Layout:
    """Layout with the given number of microbatches on each rank."""
    size = BATCH // layout.data_parallel_size // microbatches
    overrides = (f"batch.size={BATCH}", f"batch.microbatch={size}")
    return Layout(layout.name, layout.mesh, layout.parallel, overrides)


def record(verdict: Verdict, **about: str) -> Record:
    """Deviations of a layout, rounded to two digits, with facts about the measurement."""
    numbers = (verdict.loss, verdict.grad_norm, verdict.angle[0], verdict.norm[0], verdict.update[0])
    shown = {name: float(f"{number:.1e}") for name, number in zip(DEVIATIONS, numbers, strict=True)}
    return {**about, "layout": verdict.layout, **shown}


def records(rows: Sequence[Row]) -> list[Record]:
    """One record for each layout, dtype and number of microbatches."""
    return [record(verdict, parameters=dtype, microbatches=str(count)) for dtype, count, verdict in rows]


def merged(rows: Sequence[Row]) -> list[Record]:
    """One record for each layout and dtype: the largest deviations over the numbers of microbatches."""
    found: dict[tuple[str, str], Record] = {}
    for one in records(rows):
        known = found.setdefault((one["parameters"], one["layout"]), one)
        if known is not one:
            known["microbatches"] += f", {one['microbatches']}"
            known |= {name: max(known[name], one[name]) for name in DEVIATIONS}
    return list(found.values())


def render(shown: Sequence[Record]) -> str:
    """Records as a Markdown table."""
    names = list(shown[0])
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    lines += [f"| {' | '.join(_cell(one[name]) for name in names)} |" for one in shown]
    return "\n".join(lines)


def recorded() -> dict[str, list[Record]]:
    """All records of the documentation."""
    found: dict[str, list[Record]] = json.loads(DATA.read_text("utf-8"))
    return found


def summary(parts: Mapping[str, Sequence[Record]]) -> str:
    """Largest deviations of each part and dtype, as a Markdown table."""
    lines = []
    for part, name in PARTS.items():
        for dtype in dict.fromkeys(one["parameters"] for one in parts[part]):
            found = [one for one in parts[part] if one["parameters"] == dtype]
            worst = {column: max(one[column] for one in found) for column in DEVIATIONS}
            lines.append({"": name, "parameters": dtype, "rows": str(len(found)), **worst})
    return render(lines)


def write(part: str, found: Sequence[Record]) -> None:
    """Replace the records of a part, and the summary on the page."""
    parts = recorded() | {part: list(found)}
    texts = (f'"{name}": [\n' + ",\n".join(map(json.dumps, rows)) + "\n]" for name, rows in parts.items())
    DATA.write_text("{\n" + ",\n".join(texts) + "\n}\n", "utf-8")
    PAGE.write_text(page(parts), "utf-8")


def page(parts: Mapping[str, Sequence[Record]]) -> str:
    """Text of the page with the summary of the given records."""
    (begin, end), text = MARKS, PAGE.read_text("utf-8")
    return f"{text.split(begin)[0]}{begin}\n{summary(parts)}\n{end}{text.split(end)[1]}"


def _cell(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:.1e}"


def pairwise(layouts: Sequence[Layout]) -> list[Layout]:
    """Choose layouts with each pair of axes and strategies, each size of an axis and all options of strategies."""
    missing = set[frozenset[str]]().union(*map(_pairs, layouts))
    chosen = []
    while missing:
        chosen.append(max(layouts, key=lambda layout: (len(_pairs(layout) & missing), -layout.ranks)))
        missing -= _pairs(chosen[-1])
    return chosen


def _pairs(layout: Layout) -> set[frozenset[str]]:
    strategies = [one if isinstance(one, str) else f"{one['name']} {one.get('method', '')}" for one in layout.parallel]
    alone = [*(f"{axis} {size}" for axis, size in layout.mesh.items()), *map(json.dumps, layout.parallel)]
    return {*map(frozenset, product({*layout.mesh, *strategies}, repeat=2)), *(frozenset({one}) for one in alone)}


def run_experts(
    corpus: Path,
    device: str = "cpu",
    layouts: Sequence[Layout] = EXPERT_LAYOUTS,
    dtypes: Sequence[str] = ("float32", "bfloat16"),
) -> list[Row]:
    """Verdict on every layout of the model with experts: float32 with three microbatches, bfloat16 with one."""
    counts = {"float32": (3,), "bfloat16": (1,)}
    return [row for d in dtypes for row in run(corpus, layouts, (d,), counts[d], device=device, model=EXPERTS)]


#: Samples of a microbatch, over all data-parallel ranks.
SAMPLES = 4
PIPELINE_STEPS = 3
SCHEDULES = ("gpipe", "looped_bfs", "1f1b", "interleaved_1f1b", "zb1p", "zero_bubble_v", "dual_pipe_v")
DEEP_DENSE, DEEP_EXPERTS = DENSE | {"num_layers": 8}, EXPERTS | {"num_layers": 4}


class Piped(NamedTuple):
    """Layout with a pipeline.

    Attributes:
        schedule: name of the pipeline schedule.
        pp: number of pipeline ranks.
        microbatches: number of microbatches on each rank.
        data: layout of the data parallelism.
        about: special feature of the layout, for the table.
        overrides: further fields of the job.
        tied: whether the embedding and the head, on different stages, share their weight.
        model: fields of the model.
        often: whether the layout belongs to the part that is always tested.
    """

    schedule: str
    pp: int
    microbatches: int
    data: Layout = LAYOUTS[0]
    about: str = ""
    overrides: tuple[str, ...] = ()
    tied: bool = False
    model: Mapping[str, Any] = DEEP_DENSE
    often: bool = False

    @property
    def layout(self) -> Layout:
        """Layout to verify. The batch grows with the number of microbatches, so that any number is possible."""
        parts = (f"{self.schedule}, pp {self.pp}", self.data.name if self.data.ranks > 1 else "", self.about)
        own = (
            f"pipeline.name={self.schedule}",
            f"batch.microbatch={SAMPLES // self.data.data_parallel_size}",
            *self.overrides,
        )
        mesh = {"pp": self.pp, **self.data.mesh}
        return Layout(", ".join(filter(None, parts)), mesh, self.data.parallel, (*self._common, *own))

    @property
    def reference(self) -> Layout:
        """Layout of the reference: the same model and batch on one process, in one microbatch."""
        metrics = (override for override in self.overrides if override.startswith("metrics"))
        return Layout("reference", {}, (), (*self._common, f"batch.microbatch={self.microbatches * SAMPLES}", *metrics))

    @property
    def _common(self) -> tuple[str, ...]:
        return f"batch.size={self.microbatches * SAMPLES}", f"model.tie_embeddings={str(self.tied).lower()}"


def counts(schedule: str, pp: int) -> tuple[int, int, int]:
    """Numbers of microbatches to test: the minimum of the schedule, an odd number that pp does not divide, and more."""
    least = 2 * pp if schedule == "dual_pipe_v" else 1
    return least, (least if least > 1 else pp) + 1, 3 * pp


def pipelines() -> list[Piped]:
    """Every schedule on 2 and 4 ranks, alone and with data parallelism, for few and many microbatches."""
    data = (LAYOUTS[0], LAYOUTS[1], LAYOUTS[3])
    found = []
    for (place, schedule), pp, (side, layout) in product(enumerate(SCHEDULES), (2, 4), enumerate(data)):
        for number, count in enumerate(counts(schedule, pp)):
            tied = (place + side + number) % 2 == 0
            found.append(Piped(schedule, pp, count, layout, tied=tied))
    return found


def covering_pipelines() -> list[Piped]:
    """A subset: each schedule on 2 and on 4 ranks, once with the fewest microbatches, and the special features."""
    chosen = set()
    for place, schedule in enumerate(SCHEDULES):
        data = LAYOUTS[3] if place % 4 < 2 else LAYOUTS[1]
        chosen.add((schedule, 4, counts(schedule, 4)[place % 2], LAYOUTS[0].name))
        chosen.add((schedule, 2, counts(schedule, 2)[1 - place % 2], data.name))
    plain = [case for case in pipelines() if (case.schedule, case.pp, case.microbatches, case.data.name) in chosen]
    return plain + [case for case in special_pipelines() if case.often]


def special_pipelines() -> list[Piped]:
    """Pipelines combined with other strategies and features that split or change a model."""
    fsdp, hsdp = LAYOUTS[3], LAYOUTS[5]
    fsdp_ep, replicate_ep = EXPERT_LAYOUTS[5], EXPERT_LAYOUTS[2]
    checkpointed = Layout("fsdp 2", {"dp_shard": 2}, ["fsdp", "activation_checkpointing"])
    experts_checkpointed = Layout(fsdp_ep.name, fsdp_ep.mesh, [*fsdp_ep.parallel, "activation_checkpointing"])
    tp, fsdp_tp, tp_ep = LAYOUTS[6], LAYOUTS[10], EXPERT_LAYOUTS[13]
    cp, cp_tp, fsdp_cp_ep = LAYOUTS[12], LAYOUTS[20], EXPERT_LAYOUTS[21]
    router = ('metrics=["router"]',)
    experts: dict[str, Any] = {"model": DEEP_EXPERTS, "overrides": router}
    return [
        Piped("1f1b", 4, 5, about="layers 1, 4, 1, 2", overrides=("pipeline.layers=[1,4,1,2]",), tied=True, often=True),
        Piped("zero_bubble_v", 2, 5, fsdp, "layers 2, 1, 4, 1", ("pipeline.layers=[2,1,4,1]",), tied=True),
        Piped("1f1b", 2, 3, checkpointed, "checkpointed", tied=True),
        Piped("zb1p", 2, 3, checkpointed, "checkpointed", often=True),
        Piped("dual_pipe_v", 2, 5, checkpointed, "checkpointed", tied=True),
        Piped("interleaved_1f1b", 2, 3, hsdp, tied=True),
        Piped("zero_bubble_v", 2, 3, hsdp, tied=True),
        *(
            Piped(name, 2, counts(name, 2)[1], fsdp_ep, "experts", often=name == "dual_pipe_v", **experts)
            for name in ("gpipe", "1f1b", "interleaved_1f1b", "zb1p", "zero_bubble_v", "dual_pipe_v")
        ),
        Piped("1f1b", 2, 3, replicate_ep, "experts", often=True, **experts),
        Piped("zero_bubble_v", 2, 3, replicate_ep, "experts", **experts),
        Piped("zero_bubble_v", 2, 3, experts_checkpointed, "experts, checkpointed", tied=True, often=True, **experts),
        Piped("dual_pipe_v", 2, 4, experts_checkpointed, "experts, checkpointed", **experts),
        Piped("1f1b", 2, 3, hsdp, "experts", **experts),
        *(
            Piped(name, 2, counts(name, 2)[1], tp, tied=name != "zb1p", often=name == "zero_bubble_v")
            for name in SCHEDULES
        ),
        Piped("1f1b", 2, 3, fsdp_tp, tied=True),
        Piped("zero_bubble_v", 2, 3, tp_ep, "experts", often=True, **experts),
        Piped("dual_pipe_v", 2, 5, tp_ep, "experts", **experts),
        *(Piped(name, 2, counts(name, 2)[1], cp, tied=name != "zb1p", often=name == "1f1b") for name in SCHEDULES),
        Piped("1f1b", 2, 3, cp_tp, tied=True),
        Piped("zero_bubble_v", 2, 3, cp_tp, often=True),
        Piped("1f1b", 2, 3, fsdp_cp_ep, "experts", **experts),
    ]


def run_pipelines(
    corpus: Path,
    cases: Sequence[Piped] | None = None,
    dtype: str = "float32",
    device: str = "cpu",
    steps: int = PIPELINE_STEPS,
) -> list[Row]:
    """Verdict on layouts with pipelines, against one process that computes the same batch in one microbatch."""
    cases = [*pipelines(), *special_pipelines()] if cases is None else cases
    rows: dict[int, Row] = {}
    for model in {id(case.model): case.model for case in cases}.values():
        places = sorted((p for p, case in enumerate(cases) if case.model is model), key=lambda p: cases[p].layout.ranks)
        harness = Harness(job(corpus, dtype, device, model), PLUGINS, steps)
        references = list({cases[p].reference.overrides: cases[p].reference for p in places}.values())
        exact = harness.measure(references)
        sound = harness.measure(references, guides=exact, elsewhere=True)
        limits = [Limits.of(getattr(torch, dtype), one, [other]) for one, other in zip(exact, sound, strict=True)]
        known = {of.overrides: pair for of, pair in zip(references, zip(exact, limits, strict=True), strict=True)}
        # A few at a time, because a world's time limit covers all its layouts.
        for part in (places[start : start + 14] for start in range(0, len(places), 14)):
            layouts = [cases[place].layout for place in part]
            expected = [known[cases[place].reference.overrides] for place in part]
            found = harness.measure(layouts, guides=[reference for reference, _ in expected])
            for place, layout, measured, (reference, allowed) in zip(part, layouts, found, expected, strict=True):
                verdict = compare(layout.name, measured, reference, allowed)
                rows[place] = dtype, cases[place].microbatches, verdict
    return [rows[place] for place in range(len(cases))]


def main() -> None:
    """Measure each part, and write it at once."""
    parts: dict[str, Callable[[Path], list[Row]]] = {
        "dense": run, "experts": run_experts, "pipelines": run_pipelines
    }  # fmt: skip
    if set(sys.argv[1:]) - parts.keys():
        raise SystemExit(__doc__)
    for name in sys.argv[1:] or parts:
        with tempfile.TemporaryDirectory() as directory:
            rows = parts[name](Path(directory) / "corpus")
        failed = [(dtype, count, v.layout, v.diverged) for dtype, count, v in rows if not v.passed]
        if failed:
            raise SystemExit("\n".join(map(str, failed)))
        write(name, merged(rows) if name == "pipelines" else records(rows))
        print(f"{len(rows)} rows in {DATA.relative_to(ROOT)}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
