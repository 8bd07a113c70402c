"""Runs a tiny Qwen3 and a tiny Qwen3-MoE in every layout and writes the tables of deviations in the documentation.

    uv run python tools/layout_table.py    write docs/layouts.md

A test runs the same grid and compares the rows, so the table can neither go stale nor hide a failure.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from d9d_core.verify.compare import Verdict
from d9d_core.verify.layouts import Layout
from d9d_testing.layouts import Harness

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "layouts.md"
DENSE_MARKS = "<!-- layouts: begin -->", "<!-- layouts: end -->"
EXPERT_MARKS = "<!-- expert layouts: begin -->", "<!-- expert layouts: end -->"

PLUGINS = (
    "d9d_nn.plugin", "d9d_data.plugin", "d9d_optim.plugin", "d9d_parallel.plugin", "d9d_moe.plugin",
    "d9d_qwen3.plugin",
)  # fmt: skip
LAYOUTS = (
    Layout("one process", {}, ()),
    Layout("replicate 2", {"dp_replicate": 2}, ["replicate"]),
    Layout("replicate 4", {"dp_replicate": 4}, ["replicate"]),
    Layout("fsdp 2", {"dp_shard": 2}, ["fsdp"]),
    Layout("fsdp 4", {"dp_shard": 4}, ["fsdp"]),
    Layout("hsdp 2 x 2", {"dp_replicate": 2, "dp_shard": 2}, ["hsdp"]),
)
#: Experts over ranks of every kind of data parallelism, and ranks that share experts.
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
)
BATCH = 12
STEPS = 4
Row = tuple[str, int, Verdict]


DENSE = {
    "name": "qwen3", "vocab_size": 257, "hidden_size": 32, "intermediate_size": 48, "num_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_positions": 32,
}  # fmt: skip
#: Everything that balances experts and can keep the contract is switched on.
EXPERTS = {key: value for key, value in DENSE.items() if key != "intermediate_size"} | {
    "name": "qwen3_moe", "num_experts": 8, "experts_per_token": 2, "moe_intermediate_size": 24,
    "balancing": [
        {"name": "auxiliary_loss", "scope": "sequence", "coefficient": 0.01},
        {"name": "z_loss", "coefficient": 0.001},
        {"name": "bias_update", "rate": 0.001},
    ],
}  # fmt: skip


def job(corpus: Path, dtype: str, device: str = "cpu", model: Mapping[str, Any] = DENSE) -> dict[str, Any]:
    """A job of a tiny model over a few kilobytes of text."""
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
    """Every layout in both formats, with one and with three microbatches, against one process without strategies."""
    rows: list[Row] = []
    for dtype in dtypes:
        cases = [(layout, count) for count in counts for layout in layouts]
        sized = [_sized(layout, count) for layout, count in cases]
        harness = Harness(job(corpus, dtype, device, model), PLUGINS, STEPS)
        verdicts = harness.compare(sized, reference=_sized(Layout("reference", {}, ()), 1), fault=fault)
        rows += [(dtype, count, verdict) for (_, count), verdict in zip(cases, verdicts, strict=True)]
    return rows


def _sized(layout: Layout, microbatches: int) -> Layout:
    size = BATCH // layout.data_parallel_size // microbatches
    overrides = (f"batch.size={BATCH}", f"batch.microbatch={size}")
    return Layout(layout.name, layout.mesh, layout.parallel, overrides)


def render(rows: Sequence[Row]) -> str:
    """The table as Markdown."""
    lines = [
        "| parameters | microbatches | layout | loss | gradient norm | worst gradient: 1-cos | its length |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {dtype} | {count} | {v.layout} | {v.loss:.1e} | {v.grad_norm:.1e} | {v.angle[0]:.1e} | {v.norm[0]:.1e} |"
        for dtype, count, v in rows
    ]
    return "\n".join(lines)


def run_experts(
    corpus: Path,
    device: str = "cpu",
    layouts: Sequence[Layout] = EXPERT_LAYOUTS,
    dtypes: Sequence[str] = ("float32", "bfloat16"),
) -> list[Row]:
    """Every layout of the model with experts: in float32 with three microbatches, in bfloat16 with one."""
    counts = {"float32": (3,), "bfloat16": (1,)}
    return [row for d in dtypes for row in run(corpus, layouts, (d,), counts[d], device=device, model=EXPERTS)]


def main() -> None:
    """Write the tables into the page."""
    text = PAGE.read_text("utf-8")
    for (begin, end), measured in ((DENSE_MARKS, run), (EXPERT_MARKS, run_experts)):
        with tempfile.TemporaryDirectory() as directory:
            rows = measured(Path(directory) / "corpus")
        failed = [(dtype, count, v.layout, v.diverged) for dtype, count, v in rows if not v.passed]
        if failed:
            raise SystemExit("\n".join(map(str, failed)))
        text = f"{text.split(begin)[0]}{begin}\n{render(rows)}\n{end}{text.split(end)[1]}"
        print(f"{len(rows)} rows in {PAGE.relative_to(ROOT)}, torch {torch.__version__}")
    PAGE.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
