"""Kills elastic replicas of a tiny job at random moments, and compares its results with an undisturbed run.

    uv run python tools/elastic_campaign.py --kill 200 --seed 1          in an environment that has torchft

Replicas of one rank train toy data on the CPU and save checkpoints. Random replicas get SIGKILL at random moments, also
while they start, take a state or save, and are started again at once; a replica that has committed a step always stays.
The campaign fails, with exit status 1, if a committed step did not run each of its samples exactly once, if the
replicas end with different bits, or if their results differ from the undisturbed run's by more than 1e-5. It prints
undone attempts, stalls of the survivors and recovery times.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import secrets
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PLUGINS = (ROOT / "tools/elastic_plugin.py", ROOT / "packages/d9d-testing/src/d9d_testing/toy/plugin.py")
BATCH, MICROBATCH = 12, 2
#: Largest difference of a weight from the undisturbed run.
TOLERANCE = 1e-5
#: Seconds in which a run must end once no more replicas are killed.
PATIENCE = 600.0


def job(steps: int, pause: float) -> dict[str, Any]:
    """Values of the job."""
    return {
        "steps": steps,
        "device": "cpu",
        "batch": {"size": BATCH, "microbatch": MICROBATCH},
        "model": {"name": "toy_model", "features": 16, "blocks": 3, "dropout": 0.1},
        "data": "numbered",
        "task": {"name": "recording", "pause": pause},
        "optimizer": {"name": "adamw", "lr": 0.001},
        "metrics": ["toy_metric"],
        "trackers": [{"name": "jsonl", "picture": False}],
        "logging": {"every": 10},
        "checkpoint": {"every": 20, "keep": 2},
        "export": False,
        "parallel": [{"name": "torchft", "timeout": 30.0, "quorum_timeout": 300.0}],
    }


def train(directory: Path, name: str, environ: Mapping[str, str]) -> None:
    """Train one replica, in a forked process."""
    os.environ.update(environ)
    output = os.open(directory / f"output-{name}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    import torch
    from d9d_core.cli.main import main

    torch.set_num_threads(1)
    plugins = [word for file in PLUGINS for word in ("--plugin", str(file))]
    where = [f"run.dir={directory}", f"run.name=run-{name}"]
    sys.argv = ["d9d", "train", str(directory / "job.json"), *plugins, *(w for text in where for w in ("--set", text))]
    main()


@dataclass
class Fleet:
    """Replicas of one run, in forked processes.

    Args:
        directory: directory of the runs and records.
        names: names of the replicas.
        environ: environment variables of all replicas.
        context: forks processes.
    """

    directory: Path
    names: Sequence[str]
    environ: Mapping[str, str]
    context: Any
    processes: dict[str, BaseProcess] = field(default_factory=dict)

    def start(self, name: str) -> None:
        """Start a replica, or start it again."""
        from d9d_torchft.settings import REPLICA

        record = str(self.directory / f"record-{name}.jsonl")
        environ = {**self.environ, REPLICA: name, "ELASTIC_RECORD": record}
        process = self.context.Process(target=train, args=(self.directory, name, environ))
        process.start()
        self.processes[name] = process

    def events(self, name: str) -> list[dict[str, Any]]:
        """Recorded events of all processes of a replica."""
        path = self.directory / f"record-{name}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def settled(self) -> list[str]:
        """Replicas whose present process has committed a step."""
        return [
            name
            for name, process in self.processes.items()
            if process.is_alive()
            and any(e["event"] == "commit" and e["process"] == process.pid for e in self.events(name)[-40:])
        ]

    def end(self) -> None:
        """Wait until all replicas have finished; restart none."""
        deadline = time.monotonic() + PATIENCE
        for name, process in self.processes.items():
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode != 0:
                tail = (self.directory / f"output-{name}.txt").read_text()[-3000:]
                raise SystemExit(f"replica {name} ended with {process.exitcode}:\n{tail}")

    def kill(self) -> None:
        """Kill all processes that still run."""
        for process in self.processes.values():
            process.kill()
            process.join()

    def weights(self) -> dict[str, dict[str, Any]]:
        """Tensors of the last checkpoint of each replica."""
        from safetensors.torch import load_file

        newest = {n: sorted((self.directory / f"run-{n}" / "checkpoints").glob("step-*"))[-1] for n in self.names}
        return {name: load_file(path / "tensors-00000.safetensors") for name, path in newest.items()}


@dataclass(frozen=True)
class Kill:
    """One kill: its time, the replica, and the event that its process had recorded last."""

    time: float
    name: str
    after: str


def disturb(fleet: Fleet, count: int, gap: float, choice: random.Random) -> list[Kill]:
    """Kill random replicas at random moments and start them again; return the kills."""
    kills: list[Kill] = []
    while len(kills) < count:
        time.sleep(choice.uniform(0, 2 * gap))
        if any(process.exitcode == 0 for process in fleet.processes.values()):
            print(f"the job ended after {len(kills)} kills; give it more --steps")
            break
        for name, process in fleet.processes.items():
            if not process.is_alive():
                tail = (fleet.directory / f"output-{name}.txt").read_text()[-3000:]
                raise SystemExit(f"replica {name} ended by itself with {process.exitcode}:\n{tail}")
        victim = choice.choice(list(fleet.names))
        if not set(fleet.settled()) - {victim}:
            continue
        pid = fleet.processes[victim].pid
        fleet.processes[victim].kill()
        fleet.processes[victim].join()
        own = [e for e in fleet.events(victim)[-3:] if e["process"] == pid]
        kills.append(Kill(time.time(), victim, own[-1]["event"] if own else "start"))
        fleet.start(victim)
        if len(kills) % 20 == 0:
            print(f"{len(kills)} kills", flush=True)
    return kills


def check_samples(events: Mapping[str, list[dict[str, Any]]], steps: int) -> tuple[list[str], dict[str, int]]:
    """Check that each step was committed once, with each of its samples once; return problems and counts."""
    ran: dict[str, Counter[int]] = defaultdict(Counter)
    commits: dict[int, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name, of_replica in events.items():
        for event in of_replica:
            if event["event"] == "ran":
                ran[event["key"]].update(event["numbers"])
            elif event["event"] == "commit":
                commits[event["step"]][event["key"]].add(name)
    problems = [f"step {step} was never committed" for step in range(steps) if step not in commits]
    for step, keys in commits.items():
        whole = Counter(range(step * BATCH, (step + 1) * BATCH))
        problems += [f"step {step}, {key}: {ran[key] - whole} {whole - ran[key]}" for key in keys if ran[key] != whole]
    twice = {step: keys for step, keys in commits.items() if len(keys) > 1}
    undone = len(ran.keys() - {key for keys in commits.values() for key in keys})
    return problems, {"committed twice": len(twice), "attempts without a commit": undone}


def report(fleet: Fleet, kills: Sequence[Kill], steps: int) -> list[str]:
    """Print figures of a disturbed run; return its problems."""
    events = {name: fleet.events(name) for name in fleet.names}
    problems, counts = check_samples(events, steps)
    print(f"kills after: {dict(Counter(kill.after for kill in kills))}")
    print(f"steps: {steps}, each with {BATCH} samples, exactly once; {counts}")
    stalls, recoveries, lost = [], [], []
    for index, kill in enumerate(kills):
        until = kills[index + 1].time if index + 1 < len(kills) else float("inf")
        for name in fleet.names:
            commits = [e["time"] for e in events[name] if e["event"] == "commit" and e["time"] > kill.time]
            if name == kill.name:
                recoveries += [commits[0] - kill.time] if commits else []
                continue
            before = [e for e in events[name] if e["time"] <= kill.time]
            if commits and before and before[-1]["event"] != "start":
                stalls.append(commits[0] - kill.time)
                tried = [e for e in events[name] if kill.time - 5 < e["time"] <= min(commits[0], until)]
                lost.append(_undone_after(tried, kill.time))
    for what, values in (("stall of a survivor", stalls), ("until the killed replica commits again", recoveries)):
        if values:
            last = ", ".join(f"{value:.1f}" for value in sorted(values)[-5:])
            print(f"{what}: median {statistics.median(values):.1f} s, five longest {last} s")
    print(f"attempts that a survivor repeated after a kill: {dict(sorted(Counter(lost).items()))}")
    return problems


def _undone_after(events: Iterable[Mapping[str, Any]], moment: float) -> int:
    """Number of attempts that ended without a commit after a moment."""
    undone, running = 0, False
    for event in events:
        if event["event"] == "attempt":
            undone += running and event["time"] > moment
            running = True
        elif event["event"] == "commit":
            running = False
    return undone


def run(directory: Path, args: argparse.Namespace, count: int, context: Any) -> tuple[Fleet, list[Kill]]:
    """Run the job with all replicas, disturbed by a number of kills."""
    from d9d_torchft.settings import LIGHTHOUSE, TOKEN_FILE
    from d9d_torchft.supervisor import started_lighthouse

    directory.mkdir()
    (directory / "job.json").write_text(json.dumps(job(args.steps, args.pause if count else 0.0)))
    (directory / "token").write_text(secrets.token_hex(32))
    lighthouse = started_lighthouse()
    environ = {LIGHTHOUSE: lighthouse.address, TOKEN_FILE: str(directory / "token")}
    fleet = Fleet(directory, [chr(ord("a") + index) for index in range(args.replicas)], environ, context)
    try:
        for name in fleet.names:
            fleet.start(name)
        kills = disturb(fleet, count, args.gap, random.Random(args.seed)) if count else []  # noqa: S311
        (directory / "fast").touch()
        fleet.end()
    finally:
        fleet.kill()
        lighthouse.process.kill()
        lighthouse.process.wait()
    return fleet, kills


def main() -> int:
    """Run both runs and compare them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kill", type=int, default=50, help="number of kills")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--gap", type=float, default=4.0, help="mean seconds between kills")
    parser.add_argument("--pause", type=float, default=0.3, help="seconds of a step while replicas are killed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--folder", type=Path, help="directory of runs, records and outputs; by default a temporary one"
    )
    args = parser.parse_args()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch", "torchft.coordination", "d9d_engine.compose.training", "safetensors.torch"]
    )
    with tempfile.TemporaryDirectory(prefix="d9d-elastic-") as temporary:
        folder = args.folder or temporary
        calm, _ = run(Path(folder) / "calm", args, 0, context)
        fleet, kills = run(Path(folder) / "disturbed", args, args.kill, context)
        problems = report(fleet, kills, args.steps)
        reference = calm.weights()[calm.names[0]]
        found = fleet.weights()
        first = found[fleet.names[0]]
        if any(not tensor.equal(other[name]) for other in found.values() for name, tensor in first.items()):
            problems.append("the replicas ended with different bits")
        largest = max((first[n].double() - t.double()).abs().max().item() for n, t in reference.items() if t.numel())
        print(f"largest difference from the undisturbed run: {largest:.2e}, in weights and optimizer state")
        if largest > TOLERANCE:
            problems.append(f"the results differ by {largest:.2e}")
    print("\n".join(problems) or "no deviation")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
