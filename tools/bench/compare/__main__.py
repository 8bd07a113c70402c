"""Speed and memory of a training step: d9d and its rivals in turns, one command per table.

    python tools/bench/compare dense-2b                       4 x 4096 random tokens, all that is installed
    python tools/bench/compare dense-2b --length 16k --data packed
    python tools/bench/compare moe-5.6b --contenders d9d transformers torchtitan --rounds 3
    python tools/bench/compare dense-2b --precision fp8       a table of its own: products of linear layers in float8
    python tools/bench/compare qwen3-8b --lora --samples 2    LoRA of rank 16, against peft
    python tools/bench/compare --tiny                         the whole harness on a CPU, in less than a minute
    python tools/bench/compare --tables                       only the tables of benchmarks/README.md, from its files

All contenders have the same shapes, data, number formats, optimizer and clipping, and the exact loss over the whole
vocabulary. Each contender runs in a process of its own, round after round in changing order (:mod:`rounds`), by its
public interface alone; a contender that is not installed is left out with the reason. The result goes into
``benchmarks/`` and, from there, into its page.
"""

from __future__ import annotations

import argparse
import datetime as dt
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

# Timing is shared with the benchmarks in the parent directory.
sys.path.append(str(Path(__file__).parents[1]))

import record
import records
import rounds
import tables
import worker
from contender import CONTENDERS, DEFAULT, FLOAT8, LORA
from settings import CHECKPOINTED, MODELS, Precision, Setting

LENGTHS = {"4k": 4096, "8k": 8192, "16k": 16_384, "64k": 65_536}
BENCHMARKS = records.BENCHMARKS
TINY_CONTENDERS = ("d9d", "transformers", "liger")
TINY = Setting("tiny", 64, 2, backend="aot_eager", warmup=1, steps=2)


def main() -> None:
    """Run one comparison, and write its table."""
    if sys.argv[1:2] == ["--worker"]:
        worker.main(*sys.argv[2:])
        return
    options = _options()
    folder, page = options.folder, options.folder / "README.md"
    if options.model or options.tiny:
        setting = _setting(options)
        answers = rounds.run(setting, options.contenders, options.rounds, options.seconds, say=_say)
        if not any("seconds" in answer for found in answers.values() for answer in found):
            raise SystemExit("compare: nothing was measured, for the reasons above; nothing was written")
        command = " ".join(["python tools/bench/compare", *sys.argv[1:]])
        result = record.summary(setting, answers, command, dt.datetime.now(dt.UTC).date().isoformat())
        print(tables.text_of([result]))
        _say(f"written: {records.write(result, folder)}")
    results = records.read(folder, record.KIND)
    if page.exists():
        tables.write(page, results)
    if folder == BENCHMARKS:
        tables.write_summary(records.ROOT / "README.md", results)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="compare", description="Speed and memory of a training step, side by side.")
    parser.add_argument("model", nargs="?", choices=MODELS, help="model of the table")
    parser.add_argument("--length", choices=LENGTHS, default="4k", help="positions of a sample")
    parser.add_argument("--data", choices=("random", "packed"), default="random")
    parser.add_argument("--precision", choices=get_args(Precision), default="bfloat16")
    parser.add_argument("--contenders", nargs="+", help=f"of {', '.join(CONTENDERS)}, or a function module:function")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20, help="measured steps of a round")
    parser.add_argument("--warmup", type=int, default=5, help="steps before them")
    parser.add_argument("--checkpointed", action="store_true", help="compute activations again at any length")
    parser.add_argument("--lora", action="store_true", help="train LoRA, and freeze the model")
    parser.add_argument("--samples", type=int, help="samples of a step; by default 16,384 tokens")
    parser.add_argument("--seconds", type=float, help="budget: a round that would exceed it is left out")
    parser.add_argument("--folder", type=Path, default=BENCHMARKS, help="where the results are")
    parser.add_argument("--tiny", action="store_true", help="a tiny model: tries the harness, measures nothing")
    parser.add_argument("--tables", action="store_true", help="only write the tables of the results that are there")
    options = parser.parse_args()
    if not (options.model or options.tiny or options.tables):
        parser.error("name a model, or give --tiny or --tables")
    if unknown := [name for name in options.contenders or () if name not in CONTENDERS and ":" not in name]:
        parser.error(f"unknown contender '{unknown[0]}'; known: {', '.join(CONTENDERS)}, or a function module:function")
    special = LORA if options.lora else FLOAT8 if options.precision == "fp8" else None
    options.contenders = options.contenders or special or (TINY_CONTENDERS if options.tiny else DEFAULT)
    if options.tiny and options.folder == BENCHMARKS:
        options.folder = Path("runs", "compare-tiny")  # the numbers of tiny models are meaningless
    return options


def _setting(options: argparse.Namespace) -> Setting:
    if options.tiny:
        return replace(TINY, precision=options.precision, lora=options.lora)
    length = LENGTHS[options.length]
    samples = options.samples or max(1, 16_384 // length)
    return Setting(
        options.model, length, samples, options.data, options.precision, options.checkpointed or length >= CHECKPOINTED,
        options.lora, warmup=options.warmup, steps=options.steps,
    )  # fmt: skip


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
