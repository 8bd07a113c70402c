"""Kills inference jobs at random moments; the output must not depend on the layouts that continue it.

    uv run python tools/inference_campaign.py --kills 20 --seed 0

A tiny Qwen3 with experts reads short texts. Each start takes a random layout of 1, 2 or 4 processes (fsdp, pipeline,
experts, and both), and kill -9 ends its whole process group after a random time. When a run is complete, its output is
compared byte by byte with the output of one undisturbed process, and another run begins, until all kills are done.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from d9d_testing.processes import descendants_of

_WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "and", "sleeps", "under", "trees", "while")
#: Expert parallelism whose combine adds the experts' outputs in the order of a single process.
EXPERTS = [{"name": "expert_parallel", "combine": "separate"}, "fsdp"]
#: Layout -> processes and options.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "fsdp 2": (2, {"mesh": {"dp_shard": 2}, "parallel": ["fsdp"]}),
    "pp 2": (2, {"mesh": {"pp": 2}, "pipeline": "1f1b"}),
    "ep 2": (2, {"mesh": {"dp_shard": 2, "ep": 2}, "parallel": EXPERTS}),
    "pp 2 x ep 2": (
        4,
        {
            "mesh": {"pp": 2, "dp_shard": 2, "ep": 2},
            "pipeline": "gpipe",
            "parallel": EXPERTS,
        },
    ),
    "fsdp 4": (4, {"mesh": {"dp_shard": 4}, "parallel": ["fsdp"]}),
}  # fmt: skip


def write_model(directory: Path) -> None:
    """Write a tiny Qwen3 with experts, as transformers does."""
    import torch
    import transformers

    torch.manual_seed(1)
    config = transformers.Qwen3MoeConfig(
        vocab_size=257, hidden_size=64, intermediate_size=64, moe_intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, num_experts=4,
        num_experts_per_tok=2, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[], initializer_range=0.3,
    )  # fmt: skip
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(directory)


def write_texts(path: Path, count: int, draw: random.Random) -> None:
    """Write texts of 40 to 100 bytes."""
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            text = " ".join(draw.choices(_WORDS, k=draw.randint(9, 18)))[:100]
            file.write(json.dumps({"text": text}) + "\n")


def job_of(folder: Path, name: str, layout: str) -> Path:
    """Write the job file of a run in a layout."""
    values: dict[str, Any] = {
        "run": {"name": name, "dir": str(folder / "runs")}, "device": "cpu",
        "model": {"name": "qwen3_moe", "pretrained": str(folder / "model")},
        "task": {"name": "log_probs", "per": "token"},
        "data": {
            "name": "documents", "sources": [str(folder / "texts.jsonl")], "sequence_length": 104, "tokenizer": "bytes",
        },
        "batch": {"size": 32, "microbatch": 4}, **LAYOUTS[layout][1],
    }  # fmt: skip
    path = folder / f"{name}-{layout.replace(' ', '-')}.json"
    path.write_text(json.dumps(values))
    return path


def start(folder: Path, name: str, layout: str) -> subprocess.Popen[str]:
    """Start a run in a process group of its own."""
    processes, _ = LAYOUTS[layout]
    words = [sys.executable, "-m", "d9d_core", "infer", str(job_of(folder, name, layout))]
    words += ["--nproc", str(processes)] if processes > 1 else []
    return subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def kill_all(process: subprocess.Popen[str]) -> None:
    """Kill a launcher and its child processes, which have their own sessions."""
    for number in (process.pid, *descendants_of(process.pid)):
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    process.communicate()


def campaign(
    folder: Path, kills: int, texts: int, seed: int, layouts: Sequence[str], patience: float
) -> dict[str, Any]:
    """Kill runs ``kills`` times in total; return the statistics.

    Raises:
        AssertionError: an output differs, or a start that was not killed has failed.
    """
    draw = random.Random(seed)  # noqa: S311 - not for cryptography
    write_model(folder / "model")
    write_texts(folder / "texts.jsonl", texts, draw)
    began = time.monotonic()
    undisturbed = start(folder, "undisturbed", "one")
    said, _ = undisturbed.communicate()
    assert undisturbed.returncode == 0, said
    longest = time.monotonic() - began
    expected = (folder / "runs" / "undisturbed" / "output.jsonl").read_bytes()
    done: list[dict[str, Any]] = []
    runs = 0
    while sum(one["killed"] for one in done) < kills or not done[-1]["complete"]:
        name = f"run-{runs}"
        layout = draw.choice(list(layouts))
        more = sum(one["killed"] for one in done) < kills
        process = start(folder, name, layout)
        try:
            said, _ = process.communicate(timeout=draw.uniform(0.3, patience * longest) if more else None)
            killed = False
        except subprocess.TimeoutExpired:
            kill_all(process)
            killed = True
        output = folder / "runs" / name / "output.jsonl"
        complete = not killed
        assert killed or process.returncode == 0, f"{layout}: {said}"
        progress = folder / "runs" / name / "progress.json"
        samples = json.loads(progress.read_text())["samples"] if progress.exists() else 0
        done.append({"run": name, "layout": layout, "killed": killed, "complete": complete, "samples": samples})
        print(json.dumps(done[-1]), flush=True)
        if complete:
            assert output.read_bytes() == expected, f"{name}, finished by {layout}, differs"
            shutil.rmtree(output.parent)
            runs += 1
    by_layout = {layout: sum(one["killed"] for one in done if one["layout"] == layout) for layout in layouts}
    return {"kills": sum(one["killed"] for one in done), "runs": runs, "kills_by_layout": by_layout, "texts": texts}


def main() -> None:
    """Run the campaign and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--texts", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--patience", type=float, default=1.5, help="longest time before a kill, in undisturbed runs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        print(json.dumps(campaign(folder, options.kills, options.texts, options.seed, list(LAYOUTS), options.patience)))


if __name__ == "__main__":
    main()
