"""Tensor and context parallelism over two GPUs against torch's ``parallelize_module`` and ``context_parallel``.

    python tools/bench/peers.py --what tp cp --rounds 2 --seconds 240 --folder benchmarks
    python tools/bench/peers.py --what tp --samples 4     # where memory is short
    python tools/bench/peers.py --tiny                    # tiny models on the CPU: tries the tool

The tool starts torchrun itself. Contenders take turns in one pair of processes, each built anew for its turn; a
contender that fails is left out of later rounds, and the next turns are taken in new processes. Communication is the
time of a step in which communication kernels run; exposed is the part of this time in which no other kernel runs.
"""

from __future__ import annotations

import argparse
import datetime as dt
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import records
from layout_rows import DENSE, context_row
from rank_processes import answers_of
from rows import Row
from torch_peers import Peer

#: Key that identifies results of this benchmark.
KIND = "peers"
MARKS = ("<!-- peers: written by tools/bench/peers.py -->", "<!-- end of peers -->")
NONE_YET = "Nothing has been measured by this command yet."
RANKS = 2
_HEAD = ("contender", "tokens/s of a GPU", "ms", "peak GiB", "communication, ms", "exposed", "d9d's speed over it")

What = Literal["tp", "cp"]


@dataclass(frozen=True, slots=True)
class Contender:
    """One side of a comparison: a row of d9d, or a peer.

    Attributes:
        what: axis of the comparison.
        made: the built trainer or peer.
    """

    what: What
    made: Row | Peer

    @property
    def name(self) -> str:
        """Name in tables."""
        return f"d9d {self.made.name}" if isinstance(self.made, Row) else self.made.name

    def as_json(self) -> dict[str, Any]:
        """Question for the worker processes."""
        return {"name": self.name, "row" if isinstance(self.made, Row) else "peer": asdict(self.made)}


def main() -> None:
    """Measure, print, and write the result."""
    options = _options()
    page = options.folder / "README.md" if options.folder else None
    if not options.tables:
        contenders = [
            one
            for what in options.what
            for one in contenders_of(what, options.samples, options.attention, options.tiny)
        ]
        result = measure(contenders, options.rounds, options.seconds, f"{'tiny-' * options.tiny}peers")
        print(text_of([result]))
        if options.folder:
            print(f"written: {records.write(result, options.folder)}", flush=True)
    if page and page.exists():
        filled = records.fill(page.read_text(encoding="utf-8"), text_of(records.read(options.folder, KIND)), MARKS)
        page.write_text(filled, encoding="utf-8")


def contenders_of(
    what: What, samples: int | None = None, attention: Literal["cudnn", "flash"] | None = None, tiny: bool = False
) -> list[Contender]:
    """Contenders of a comparison, d9d's first.

    Args:
        what: axis over which both ranks share the model's work.
        samples: samples of a step; 8 of 4,096 positions or 2 of 16,384, if absent.
        attention: kernel that the peers prefer. If absent, ``cudnn`` for ``tp``, as in torchtitan, and ``flash`` for
            ``cp``: for the turns of a ring that use half a shard, torch 2.11 passes the lengths of a whole shard to the
            backward; flash attention does not read these lengths.
        tiny: tiny models that are not compiled.
    """
    if what == "tp":
        ours = [replace(DENSE, samples=8, mesh=(("tp", RANKS),), parallel=("tensor_parallel",))]
    else:
        ours = [context_row(method, 2, 16_384) for method in ("ulysses", "all_gather")]
    if tiny:
        ours = [replace(row, model="tiny", samples=4, length=64, compiled=False) for row in ours]
    if samples is not None:
        ours = [replace(row, samples=samples) for row in ours]
    row = ours[0]
    first = Peer(
        what, row.model, row.samples, row.length, attention=attention or ("cudnn" if what == "tp" else "flash"),
        backend=None if tiny else "inductor",
    )  # fmt: skip
    peers = [first] if what == "tp" else [replace(first, rotate=way) for way in ("allgather", "alltoall")]
    return [*(Contender(what, made) for made in ours), *(Contender(what, made) for made in peers)]


def measure(contenders: Sequence[Contender], rounds: int, seconds: float | None, table: str) -> dict[str, Any]:
    """All measurements, as JSON values.

    Args:
        contenders: contenders of all comparisons.
        rounds: number of turns of each contender; every second round is in reverse order.
        seconds: time limit, after which the tool uses the measurements that it has.
        table: name of the table.

    Raises:
        SystemExit: the time was over before the first answer.
    """
    start = time.perf_counter()
    left = [(number, one) for number in range(rounds) for one in contenders[:: -1 if number % 2 else 1]]
    found: list[dict[str, Any]] = []
    hardware: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        while left:
            budget = None if seconds is None else seconds - (time.perf_counter() - start)
            questions = [one.as_json() for _, one in left]
            answers: list[dict[str, Any]] = []
            if budget is None or budget > 0:
                answers = answers_of("peer_worker.py", questions, RANKS, budget, Path(directory))
            if not answers:
                print(f"no time for the last {len(left)} turns", flush=True)
                break
            hardware = answers[-1]["hardware"]
            for (number, one), answer in zip(left, answers, strict=False):
                told = {key: value for key, value in answer.items() if key != "hardware"}
                found.append({"what": one.what, "round": number, **one.as_json(), **told})
            failed = {answer["name"] for answer in answers if "failed" in answer}
            left = [(number, one) for number, one in left[len(answers) :] if one.name not in failed]
    if not found:
        raise SystemExit("nothing was measured")
    return {
        "table": table, "taken": dt.datetime.now(dt.UTC).date().isoformat(),
        "command": " ".join(["python tools/bench/peers.py", *sys.argv[1:]]),
        "commit": records.commit(), "hardware": hardware, KIND: found,
    }  # fmt: skip


def text_of(results: Sequence[Mapping[str, Any]]) -> str:
    """Tables of results for the page."""
    return "\n\n".join(map(_tables, results)) if results else NONE_YET


def _tables(result: Mapping[str, Any]) -> str:
    parts = [f"### {result['table']}: {result['hardware']['device']}", records.origin(result)]
    for what in dict.fromkeys(turn["what"] for turn in result[KIND]):
        turns = [turn for turn in result[KIND] if turn["what"] == what]
        names = list(dict.fromkeys(turn["name"] for turn in turns))
        parts.append("\n".join(records.table(_HEAD, [line_of(name, turns) for name in names])))
        parts += [longest for name in names if (longest := _longest(name, turns))]
    return "\n\n".join(parts)


def line_of(name: str, turns: Sequence[Mapping[str, Any]]) -> list[str]:
    """Table row of a contender: medians over its turns, or the reason why it has none."""
    own = [turn for turn in turns if turn["name"] == name]
    measured = [turn for turn in own if "failed" not in turn]
    if not measured:
        return [f"`{name}`", own[0]["failed"], *[""] * (len(_HEAD) - 2)]

    def middle(key: str, digits: int, scale: float = 1.0) -> str:
        values = [turn[key] for turn in measured if key in turn]
        return f"{scale * statistics.median(values):,.{digits}f}" if values else ""

    return [
        f"`{name}`", middle("tokens_per_second", 0), middle("seconds", 1, 1e3), middle("peak_gib", 1),
        middle("communication_ms", 1), middle("exposed_ms", 1), "" if "row" in own[0] else _ratio(measured, turns),
    ]  # fmt: skip


def _ratio(measured: Sequence[Mapping[str, Any]], turns: Sequence[Mapping[str, Any]]) -> str:
    """Speed of d9d's fastest variant over a peer's speed in the same round: median, smallest and largest."""
    ours: dict[int, float] = {}
    for turn in turns:
        if "row" in turn and "failed" not in turn:
            ours[turn["round"]] = max(turn["tokens_per_second"], ours.get(turn["round"], 0.0))
    pairs = [(turn["round"], turn["tokens_per_second"]) for turn in measured]
    ratios = [ours[number] / theirs for number, theirs in pairs if number in ours]
    if not ratios:
        return ""
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


def _longest(name: str, turns: Sequence[Mapping[str, Any]]) -> str:
    """Longest communication kernels in a contender's last measured turn."""
    longest = [turn["longest"] for turn in turns if turn["name"] == name and turn.get("longest")]
    if not longest:
        return ""
    named = ", ".join(f"`{kernel.partition('(')[0]}` {ms:.1f} ms" for kernel, ms in longest[-1].items())
    return f"Communication of `{name}`: {named}."


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Parallelism over two GPUs, compared with torch's own.")
    parser.add_argument("--what", nargs="+", choices=["tp", "cp"], default=["tp", "cp"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, help="end after so long, with what there is")
    parser.add_argument("--samples", type=int, help="samples of a step, of every contender")
    parser.add_argument("--attention", choices=["cudnn", "flash"], help="kernel that torch's side prefers")
    parser.add_argument("--folder", type=Path, help="write the result here, as JSON, and the tables into its page")
    parser.add_argument("--tiny", action="store_true", help="tiny models, on a CPU too: tries the tool")
    parser.add_argument("--tables", action="store_true", help="only write the tables of the results that are there")
    return parser.parse_args()


if __name__ == "__main__":
    main()
