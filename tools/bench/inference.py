"""Rows per second of an inference job against transformers' batched forward, and memory over many rows.

    python tools/bench/inference.py speed
    python tools/bench/inference.py speed --attention flex --compile
    python tools/bench/inference.py memory --rows 1000000

Speed: both compute the log-probability of every row, in bfloat16, with the same random weights, attention and tokens.
Theirs takes rows as they come, or sorted by length (the best that padding can do), in padded batches of ``--batch``
rows; ours packs them. Rounds alternate. The written rows are compared. Lengths are log-normal, like the lengths of
texts. It also says how much of the time that writing takes is hidden behind the computation.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from d9d_core import events as ev
from d9d_inference.job import InferenceJob
from d9d_inference.row_thread import RowThread
from timing import synchronise
from torch.nn import functional

_WORDS = (
    "alpha",
    "of",
    "gradient",
    "the",
    "pipeline",
    "a",
    "token",
    "and",
    "kernel",
    "shard",
    "in",
    "tensor",
    "expert",
)


def write_rows(path: Path, count: int, median: int, spread: float, longest: int) -> list[int]:
    """Write texts of random lengths; returns their lengths in bytes."""
    draw = random.Random(0)  # noqa: S311 - texts, no secrets
    lengths = []
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            length = min(longest, max(8, int(median * draw.lognormvariate(0, spread))))
            text = " ".join(draw.choices(_WORDS, k=length // 3 + 2))[:length].rstrip().ljust(length, ".")
            file.write(json.dumps({"text": text}) + "\n")
            lengths.append(length)
    return lengths


def write_model(directory: Path, options: argparse.Namespace) -> None:
    """Write a Qwen3 with random weights in Hugging Face layout."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=options.vocabulary, hidden_size=options.hidden, intermediate_size=options.inside,
        num_hidden_layers=options.layers, num_attention_heads=options.heads, num_key_value_heads=options.groups,
        head_dim=options.head, max_position_embeddings=options.sequence, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    model.save_pretrained(directory)


def job_of(folder: Path, name: str, options: argparse.Namespace) -> InferenceJob:
    """Inference job of the benchmark."""
    values: dict[str, Any] = {
        "run": {"name": name, "dir": str(folder / "runs")},
        "model": {"name": "qwen3", "pretrained": str(folder / "model")},
        "task": {"name": "log_probs", "per": options.per},
        "data": {
            "name": "text", "sources": [str(folder / "rows.jsonl")], "field": "text", "tokenizer": "bytes",
            "packing": "best_fit", "sequence_length": options.sequence, "workers": 1,
        },
        "batch": {"size": options.pack, "microbatch": options.microbatch},
        "precision": {"parameters": "bfloat16" if torch.cuda.is_available() else "float32"},
        "parallel": ["compile"] if options.compile else [],
        "kernels": {"attention": options.attention} if options.attention else {},
    }  # fmt: skip
    return InferenceJob.from_values(values)


class Writing:
    """Timer of the thread that writes rows: seconds in which it was busy."""

    def __init__(self) -> None:
        self.seconds = 0.0
        before = RowThread._write  # noqa: SLF001 - to be timed

        def timed(thread: RowThread, pack: Any) -> None:
            if pack.copied is not None:
                pack.copied.synchronize()
            start = time.perf_counter()
            before(thread, pack)
            self.seconds += time.perf_counter() - start

        RowThread._write = timed  # type: ignore[assignment, method-assign] # noqa: SLF001


def ours(folder: Path, name: str, options: argparse.Namespace, writing: Writing) -> tuple[float, float, list[float]]:
    """Seconds of a d9d run without start-up, seconds of writing, and log-probabilities."""
    inference = job_of(folder, name, options).build(note=lambda _text: None)
    writing.seconds = 0.0
    synchronise()
    start = time.perf_counter()
    inference.run()
    synchronise()
    seconds = time.perf_counter() - start
    with (folder / "runs" / name / "output.jsonl").open() as file:
        return seconds, writing.seconds, [json.loads(line)["log_prob"] for line in file]


def their_run(folder: Path, options: argparse.Namespace) -> Callable[[bool], tuple[float, list[float]]]:
    """Function that measures transformers: seconds, and log-probabilities in the order of the rows."""
    import transformers

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=dtype, attn_implementation="sdpa")
    model.to(device).eval()  # type: ignore[arg-type] # its wrapper has no type for devices
    rows = [json.loads(line)["text"].encode() for line in (folder / "rows.jsonl").open()]
    end = 256

    def batch(indices: Sequence[int]) -> list[float]:
        ids = [[*rows[index], end] for index in indices]
        longest = max(map(len, ids))
        tokens = torch.tensor([one + [end] * (longest - len(one)) for one in ids])
        mask = torch.tensor([[1] * len(one) + [0] * (longest - len(one)) for one in ids])
        tokens, mask = tokens.to(device, non_blocking=True), mask.to(device, non_blocking=True)
        logits = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits[:, :-1]
        targets = tokens[:, 1:].masked_fill(mask[:, 1:] == 0, -100)
        losses = [
            functional.cross_entropy(one.float(), target, reduction="sum", ignore_index=-100)
            for one, target in zip(logits, targets, strict=True)
        ]
        return (-torch.stack(losses)).tolist()

    @torch.inference_mode()
    def run(by_length: bool) -> tuple[float, list[float]]:
        order = sorted(range(len(rows)), key=lambda index: len(rows[index])) if by_length else list(range(len(rows)))
        found = [0.0] * len(rows)
        synchronise()
        start = time.perf_counter()
        with (folder / "theirs.jsonl").open("w") as file:
            for begin in range(0, len(order), options.batch):
                indices = order[begin : begin + options.batch]
                for index, value in zip(indices, batch(indices), strict=True):
                    found[index] = value
                    file.write(json.dumps({"row": index, "log_prob": value}) + "\n")
        synchronise()
        return time.perf_counter() - start, found

    return run


def measure_speed(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Compare d9d and transformers, in alternating rounds."""
    lengths = write_rows(folder / "rows.jsonl", options.rows, options.median, options.spread, options.sequence)
    write_model(folder / "model", options)
    writing = Writing()
    theirs = their_run(folder, options)
    ours(folder, "warm", options, writing)
    theirs(True)
    times: dict[str, list[float]] = {"ours": [], "as they come": [], "by length": []}
    written, results = [], {}
    for number in range(options.rounds):
        seconds, busy, results["ours"] = ours(folder, f"round-{number}", options, writing)
        times["ours"].append(seconds)
        written.append(busy)
        for name, by_length in (("as they come", False), ("by length", True)):
            seconds, results[name] = theirs(by_length)
            times[name].append(seconds)
    middle = {name: statistics.median(values) for name, values in times.items()}
    pairs = zip(results["ours"], results["by length"], strict=True)
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "rows": len(lengths), "mean_length": statistics.mean(lengths),
        "rows_per_second": {name: len(lengths) / seconds for name, seconds in middle.items()},
        "tokens_per_second": {name: sum(lengths) / seconds for name, seconds in middle.items()},
        "ratio": {name: middle[name] / middle["ours"] for name in ("as they come", "by length")},
        "seconds": times, "writing_seconds": written,
        "largest_difference_per_token": max(abs(a - b) / n for (a, b), n in zip(pairs, lengths, strict=True)),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None,
    }  # fmt: skip


class Watch:
    """Subscriber that records the memory of the process while rows are written."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, float]] = []

    def subscriptions(self) -> list[tuple[type[Any], Callable[[Any], None]]]:
        """Event after which memory is recorded."""
        return [(ev.RowsWritten, self._note)]

    def _note(self, event: ev.RowsWritten) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.seen.append((event.samples, pages * resource.getpagesize() / 2**20))


def measure_memory(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Memory of the process over a long run."""
    write_rows(folder / "rows.jsonl", options.rows, options.median, options.spread, options.sequence)
    write_model(folder / "model", options)
    watch = Watch()
    inference = job_of(folder, "memory", options).build(note=print, observers=[watch])
    outcome = inference.run()
    each = max(1, len(watch.seen) // 10)
    return {
        "rows": outcome.rows,
        "seconds": outcome.values["seconds"],
        "rows_per_second": outcome.values["rows_per_second"],
        "mib_after_samples": watch.seen[::each] + watch.seen[-1:],
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "output_mib": (folder / "runs" / "memory" / "output.jsonl").stat().st_size / 2**20,
    }


def main() -> None:
    """Measure and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speed", "memory"))
    for name, value in (
        ("rows", 8000), ("median", 250), ("sequence", 4096), ("microbatch", 4), ("pack", 64), ("batch", 16),
        ("layers", 28), ("hidden", 1024), ("heads", 16), ("groups", 8), ("head", 128), ("inside", 3072),
        ("vocabulary", 151_936), ("rounds", 3),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--spread", type=float, default=0.8)
    parser.add_argument("--per", choices=("row", "token"), default="row")
    parser.add_argument("--attention", default=None)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        measure = measure_speed if options.what == "speed" else measure_memory
        print(json.dumps(measure(options, Path(directory))))


if __name__ == "__main__":
    main()
