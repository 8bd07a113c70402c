"""Ends processes of a tiny job at random moments, and compares what becomes of it with a run that nobody disturbed.

    uv run python tools/kill_campaign.py --kill 200 --term 50 --stop 20 --seed 1
    uv run python tools/kill_campaign.py --kill 200 --seed 1 --only kill:17     one round again, with the same choices

Each round trains two ranks with a data worker each, with steps, saves, evaluations and an export. Something happens to
it (see ``FAULTS``); then it is started again until it has finished. Weights, export and log must be those of the
undisturbed run, bit for bit; the exit status must be right; no process, temporary file or shared memory may be left.
Exit status 1 if anything deviates. What is chosen follows from the seed; when exactly it strikes, from the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from d9d_testing.processes import children_of, descendants_of, is_running, ranks_of

STEPS = 16
#: Names this campaign's round in the environment of all its processes.
MARK = "D9D_CAMPAIGN"
#: Seconds after which something that has not happened will not happen.
PATIENCE = 300.0
#: Event after which a fault strikes; ``start-up`` waits for none.
MOMENTS = {
    "start-up": "", "step": "StepEnds", "save": "CheckpointStarts",
    "evaluation": "EvaluationStarts", "export": "CheckpointSaved",
}  # fmt: skip
#: Writes each event of the main rank to a file, one a line, by which the moments are known.
PLUGIN = """
import os
from typing import Literal
from d9d_core.extend import PluginConfig
from d9d_core import events
from d9d_core.plugin import Ref, SubscriberSpec, hookimpl

class Config(PluginConfig):
    name: Literal["campaign"] = "campaign"
    file: str

class Recorder:
    def __init__(self, config):
        self.file = config.file
    def subscriptions(self):
        kinds = ("StepEnds", "CheckpointStarts", "CheckpointSaved", "EvaluationStarts")
        return [(getattr(events, kind), self.write) for kind in kinds]
    def write(self, event):
        if os.environ.get("RANK", "0") == "0":
            step = event.report.step if hasattr(event, "report") else event.step
            with open(self.file, "a") as file:
                file.write(f"{type(event).__name__} {step}\\n")

@hookimpl
def d9d_subscribers():
    config, build = Ref(f"{__name__}:Config"), Ref(f"{__name__}:Recorder")
    yield SubscriberSpec(name="campaign", summary="records", config=config, build=build)
"""


class DeviationError(Exception):
    """A round did not end as it must."""


class Plan(NamedTuple):
    """Choices of one round."""

    fault: str
    number: int
    moment: str
    #: Line of the events' file to wait for; empty during start-up.
    event: str
    #: Seconds after it.
    delay: float
    #: Of what is chosen when it strikes: which processes, and in which order.
    seed: str

    @classmethod
    def choose(cls, fault: str, number: int, seed: int) -> Plan:
        """Choose a round. All moments have the same chance."""
        choice = chooser(f"{seed} {fault} {number}")
        moment = choice.choice(list(MOMENTS))
        steps = {"step": range(1, STEPS), "save": range(2, STEPS + 1, 2), "evaluation": range(4, STEPS + 1, 4)}
        step = choice.choice(steps.get(moment, [STEPS]))
        event = f"{MOMENTS[moment]} {step}" if moment != "start-up" else ""
        delay = choice.uniform(0, 0.05) if event else choice.uniform(0, 10)
        return cls(fault, number, moment, event, delay, f"{seed} {fault} {number} {moment}")


class Run:
    """Run of the job in a directory of its own, and its launches.

    Args:
        home: of the round; made.
        corpus: what it trains on.
    """

    def __init__(self, home: Path, corpus: Path) -> None:
        self.home = home
        self.directory = home / "runs" / "run"
        self.events = home / "events"
        self.temporary = home / "temporary"
        self.temporary.mkdir(parents=True)
        self.events.touch()
        (home / "plugin.py").write_text(PLUGIN)
        (home / "job.json").write_text(json.dumps(job(home, corpus)))
        self.process: subprocess.Popen[bytes]
        self.seen = 0

    def launch(self, *options: str) -> None:
        """Start the job, or continue it."""
        self.seen = len(self.events.read_text().splitlines())
        environ = os.environ | {MARK: str(self.home), "TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "d9d_core", "train", str(self.home / "job.json"), "--nproc", "2", *options]
        with (self.home / "output").open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output, env=environ)

    @property
    def output(self) -> str:
        """Text that the last launch has printed."""
        return (self.home / "output").read_text(errors="replace")

    def happened(self) -> list[str]:
        """Events since the last launch."""
        return self.events.read_text().splitlines()[self.seen :]

    def await_moment(self, plan: Plan) -> None:
        """Wait until the fault is to strike, or the run has ended."""
        wait_until(lambda: not plan.event or plan.event in self.happened() or self.process.poll() is not None)
        time.sleep(plan.delay)

    def end(self) -> int:
        """Wait for the end of the launch and of all its processes; returns the exit status."""
        try:
            status = self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise DeviationError(f"the launch does not end: {self.output[-2000:]}") from None
        with suppress(TimeoutError):
            wait_until(lambda: not self.processes(), 30)
        if left := self.processes():
            raise DeviationError(
                f"processes are left: {[(pid, command_of(pid)) for pid in left]}; {self.output[-2000:]}"
            )
        return status

    def processes(self) -> list[int]:
        """Processes of this round, by their environment."""
        mark = f"{MARK}={self.home}\0".encode()
        found = []
        for file in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if mark in file.read_bytes() and is_running(int(file.parent.name)):
                    found.append(int(file.parent.name))
        return found

    def clear(self) -> None:
        """End what is left, whatever it is."""
        for pid in self.processes():
            send(pid, signal.SIGKILL)


def job(home: Path, corpus: Path) -> dict[str, Any]:
    """Tiny job that does everything within seconds."""
    data = {"name": "text", "sources": [str(corpus)], "sequence_length": 16, "held_out": 0.2}
    return {
        "run": {"name": "run", "dir": str(home / "runs")}, "device": "cpu", "steps": STEPS,
        "plugins": {"files": [str(home / "plugin.py")]},
        "subscribers": [{"name": "campaign", "file": str(home / "events")}],
        "mesh": {"dp_shard": 2}, "parallel": ["fsdp"], "batch": {"size": 4, "microbatch": 1},
        "model": {
            "name": "qwen3", "vocab_size": 257, "hidden_size": 32, "intermediate_size": 64, "num_layers": 1,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_positions": 64,
        },
        "task": "causal_lm", "metrics": ["perplexity"], "data": {**data, "workers": 1},
        "evaluation": {"every": 4, "packs": 2, "data": {**data, "split": "held_out"}},
        "optimizer": {"name": "adamw", "lr": 0.01}, "lr_schedule": {"name": "cosine", "warmup_steps": 2},
        "trackers": [{"name": "jsonl", "picture": False}], "logging": {"every": 1},
        "checkpoint": {"every": 2, "keep": 1}, "timeouts": {"startup": 180, "step": 120, "checkpoint": 120},
    }  # fmt: skip


def chooser(seed: str) -> random.Random:
    """Source of choices that are the same for a seed."""
    return random.Random(seed)  # noqa: S311 - no secrets


def kill(run: Run, plan: Plan) -> str:
    """Kill a rank, the launcher or a data worker; returns which."""
    choice = chooser(plan.seed)
    run.launch()
    run.await_moment(plan)
    ranks = sorted(ranks_of(run.process.pid).items())
    workers = [pid for _, rank in ranks for pid in children_of(rank) if b"spawn_main" in command_of(pid)]
    victims = {"launcher": [run.process.pid], "rank": [pid for _, pid in ranks], "worker": workers}
    who = choice.choice([who for who, pids in victims.items() if pids])
    victim = choice.choice(victims[who])
    send(victim, signal.SIGKILL)
    status = run.end()
    # A launch may have ended before, and a run may finish without a worker that has read ahead.
    right = {"launcher": {-9, 0}, "rank": {1, 0}, "worker": {1, 2, 0}}[who]
    expect(status in right, f"status {status} after the death of the {who}: {run.output[-2000:]}")
    if who == "rank" and status:
        expect("was killed by SIGKILL" in run.output, f"the death is not told: {run.output[-2000:]}")
    expect(not status or "Traceback" not in run.output, f"a traceback: {run.output[-3000:]}")
    return who


def term(run: Run, plan: Plan) -> str:
    """Ask to stop: all processes in a random order, or one rank only; returns whom."""
    choice = chooser(plan.seed)
    run.launch()
    run.await_moment(plan)
    # Before it has started anything, a launcher may be an interpreter that has not read its first line of ours.
    wait_until(lambda: children_of(run.process.pid) or run.process.poll() is not None)
    pids = [run.process.pid, *descendants_of(run.process.pid)]
    ranks = ranks_of(run.process.pid)
    who = "one rank" if choice.random() < 0.25 and ranks else "all"
    pids = [ranks.get(choice.randrange(2), run.process.pid)] if who == "one rank" else pids
    choice.shuffle(pids)
    gap = choice.choice([0.0, 0.01, 0.3])
    for pid in pids:
        send(pid, signal.SIGTERM)
        time.sleep(gap)
    status = run.end()
    expect(status == 0, f"status {status} after SIGTERM to {who}: {run.output[-3000:]}")
    expect("Traceback" not in run.output, f"a traceback: {run.output[-3000:]}")
    done = [int(line.split()[1]) + 1 for line in run.happened() if line.startswith("StepEnds")]
    saved = [int(file.name[5:]) for file in (run.directory / "checkpoints").glob("step-*")]
    expect(not done or max(done) == max(saved, default=0), f"steps until {done[-1:]} were done, {saved} is saved")
    return who


def stop(run: Run, plan: Plan) -> str:
    """Stop a rank, as if it hung: that is reported, ends all, and all start again; returns what was told."""
    run.launch("--max-restarts", "1", "--set", "timeouts={startup: 60, step: 20, checkpoint: 20}")
    run.await_moment(plan)
    wait_until(lambda: len(ranks_of(run.process.pid)) == 2 or run.process.poll() is not None)
    ranks = ranks_of(run.process.pid)
    if victim := ranks.get(chooser(plan.seed).randrange(2)):
        send(victim, signal.SIGSTOP)
    status = run.end()
    told = next((text for text in ("no progress for", "did not arrive", "did not end") if text in run.output), "")
    if not told:
        expect(status == 0, f"status {status}: {run.output[-3000:]}")
        return "it had ended"
    expect(status == 0, f"status {status} although it was to start again: {run.output[-3000:]}")
    expect("starting all 2 processes again" in run.output, run.output[-3000:])
    return told


#: Faults by name: each launches a run, does something to it, checks how it ended, and says what it hit.
FAULTS: Mapping[str, Callable[[Run, Plan], str]] = {"kill": kill, "term": term, "stop": stop}


def finish(run: Run) -> None:
    """Start the job until it has finished."""
    for _ in range(3):
        run.launch()
        status = run.end()
        expect(status == 0, f"status {status} of an undisturbed launch: {run.output[-3000:]}")
        if "finished" in run.output:
            return
    raise DeviationError(f"it does not finish: {run.output[-2000:]}")


def compare(straight: Run, broken: Run) -> None:
    """Compare a finished run with the undisturbed one."""
    here, there = ({file.relative_to(run.directory) for file in run.directory.rglob("*")} for run in (straight, broken))
    expect(here == there, f"other files: {sorted(map(str, here ^ there))}")
    for name in here:
        if name.suffix == ".safetensors" or name.name == "config.json":
            same = (straight.directory / name).read_bytes() == (broken.directory / name).read_bytes()
            expect(same, f"{name} differs")
    expect(log(straight) == log(broken), "the log differs")
    left = {file.name for file in broken.temporary.iterdir()} - {file.name for file in straight.temporary.iterdir()}
    expect(not left, f"temporary files are left: {sorted(left)}")


def log(run: Run) -> list[dict[str, Any]]:
    """Logged values, without the speed."""
    lines = map(json.loads, (run.directory / "metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in line.items() if key != "tokens_per_second"} for line in lines]


def orphaned_memory() -> set[str]:
    """Shared memory whose maker has ended."""
    named = [(file.name, re.findall(r"\d+", file.name)) for file in Path("/dev/shm").glob("*")]  # noqa: S108
    return {name for name, numbers in named if numbers and not any(is_running(int(one)) for one in numbers)}


def expect(true: bool, text: str) -> None:
    """Raise unless it holds."""
    if not true:
        raise DeviationError(text)


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process, if it still exists."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def wait_until(true: Callable[[], object], patience: float = PATIENCE) -> None:
    """Wait for a condition, and no longer than that."""
    deadline = time.monotonic() + patience
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.002)


def command_of(pid: int) -> bytes:
    """Command line of a process; empty if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def campaign(
    plans: Sequence[Plan], jobs: int, say: Callable[[str], None]
) -> tuple[Counter[tuple[str, ...]], list[str]]:
    """Run rounds; returns how many hit what, and what deviated."""
    hit: Counter[tuple[str, ...]] = Counter()
    deviations: list[str] = []
    with tempfile.TemporaryDirectory(prefix="kill-campaign-") as directory, ThreadPoolExecutor(jobs) as threads:
        home, corpus = Path(directory), Path(directory) / "corpus"
        corpus.mkdir()
        for number in range(12):
            (corpus / f"{number}.txt").write_text(f"{number}: the quick brown fox jumps over the lazy dog. " * 8)
        straight = Run(home / "straight", corpus)
        finish(straight)
        memory = orphaned_memory()

        def play(plan: Plan) -> None:
            run, began = Run(home / f"{plan.fault}-{plan.number}", corpus), time.monotonic()
            what, outcome = "?", "as it must"
            try:
                what = FAULTS[plan.fault](run, plan)
                finish(run)
                compare(straight, run)
            except (DeviationError, TimeoutError) as error:
                outcome = f"DEVIATES: {error}"
                deviations.append(f"{plan.fault}:{plan.number}: {error}")
            finally:
                run.clear()
            hit[plan.fault, what, plan.moment, outcome.split(":")[0]] += 1
            when = f"{plan.moment} ({plan.event or 'launch'} + {plan.delay:.3f} s)"
            say(f"{plan.fault}:{plan.number} {what} at {when}: {outcome} ({time.monotonic() - began:.0f} s)")
            shutil.rmtree(run.home)

        list(threads.map(play, plans))
        if left := orphaned_memory() - memory:
            deviations.append(f"shared memory is left: {sorted(left)}")
    return hit, deviations


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the campaign that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for fault in FAULTS:
        parser.add_argument(f"--{fault}", type=int, default=0, metavar="N", help=f"rounds of '{fault}'")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="rounds at a time")
    parser.add_argument("--only", metavar="FAULT:NUMBER", help="one of these rounds")
    asked = parser.parse_args(arguments)
    plans = [Plan.choose(fault, number, asked.seed) for fault in FAULTS for number in range(getattr(asked, fault))]
    chooser(str(asked.seed)).shuffle(plans)
    if asked.only:
        plans = [plan for plan in plans if f"{plan.fault}:{plan.number}" == asked.only]
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:5.0f} s] {text}", flush=True)

    hit, deviations = campaign(plans, asked.jobs, say)
    print(f"\n{'fault':8}{'what':20}{'moment':14}{'outcome':14}rounds")
    for row, count in sorted(hit.items()):
        print(f"{row[0]:8}{row[1]:20}{row[2]:14}{row[3]:14}{count:6}")
    print(f"\n{len(plans)} rounds, {len(deviations)} deviations")
    print("\n".join(deviations))
    return 1 if deviations else 0


if __name__ == "__main__":
    sys.exit(main())
