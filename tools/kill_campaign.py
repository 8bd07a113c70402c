"""Disturbs a tiny job at random moments, and compares its results with an undisturbed run.

    uv run python tools/kill_campaign.py --kill 200 --term 50 --stop 20 --fill 20 --seed 1
    uv run python tools/kill_campaign.py --kill 200 --seed 1 --only kill:17     one round again, with the same choices

Each round trains two ranks with a data worker each, with steps, checkpoints, evaluations and an export. A fault strikes
the run (see ``FAULTS``); then it is restarted until it has finished. Weights, export and log must equal those in the
undisturbed run bit for bit, the exit status must be right, and no process, temporary file or shared memory may remain.
Exit status 1 if anything deviates. The seed determines the choices; the exact moment depends on the machine.
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from d9d_engine.run.interrupt import STOPPED
from d9d_testing.logs import read_log_without_times
from d9d_testing.processes import children_of, descendants_of, is_running, ranks_of
from disturbed_run import STEPS, DeviationError, Run, command_of, expect, send, wait_until

#: Moment -> event after which a fault strikes; ``start-up`` waits for no event.
MOMENTS = {
    "start-up": "", "step": "StepEnds", "save": "CheckpointStarts",
    "evaluation": "EvaluationStarts", "export": "CheckpointSaved",
}  # fmt: skip


class Plan(NamedTuple):
    """Choices of one round."""

    fault: str
    number: int
    moment: str
    #: Line to wait for in the event file; empty during start-up.
    event: str
    #: Seconds between the event and the fault.
    delay: float
    #: Seed of the choices at the moment of the fault: which processes, and in which order.
    seed: str

    @classmethod
    def choose(cls, fault: str, number: int, seed: int) -> Plan:
        """Choose a round; all moments are equally likely."""
        choice = chooser(f"{seed} {fault} {number}")
        moment = choice.choice(list(MOMENTS))
        steps = {"step": range(1, STEPS), "save": range(2, STEPS + 1, 2), "evaluation": range(4, STEPS + 1, 4)}
        step = choice.choice(steps.get(moment, [STEPS]))
        event = f"{MOMENTS[moment]} {step}" if moment != "start-up" else ""
        delay = choice.uniform(0, 0.05) if event else choice.uniform(0, 10)
        return cls(fault, number, moment, event, delay, f"{seed} {fault} {number} {moment}")

    def wait(self, run: Run) -> None:
        """Wait for the moment of the fault, or for the end of the run."""
        run.await_event(self.event)
        time.sleep(self.delay)


def chooser(seed: str) -> random.Random:
    """Random generator that makes the same choices for the same seed."""
    return random.Random(seed)  # noqa: S311 - no secrets


def kill(run: Run, plan: Plan) -> str:
    """Kill a rank, the launcher or a data worker; return which one."""
    choice = chooser(plan.seed)
    run.launch()
    plan.wait(run)
    ranks = sorted(ranks_of(run.process.pid).items())
    workers = [pid for _, rank in ranks for pid in children_of(rank) if b"spawn_main" in command_of(pid)]
    victims = {"launcher": [run.process.pid], "rank": [pid for _, pid in ranks], "worker": workers}
    who = choice.choice([who for who, pids in victims.items() if pids])
    victim = choice.choice(victims[who])
    send(victim, signal.SIGKILL)
    status = run.end()
    # The launch may have ended before, and a run may finish without a worker that has read ahead.
    right = {"launcher": {-9, 0}, "rank": {1, 0}, "worker": {1, 0}}[who]
    expect(status in right, f"status {status} after the death of the {who}: {run.output[-2000:]}")
    if who == "rank" and status:
        expect("was killed by SIGKILL" in run.output, f"the kill is not reported: {run.output[-2000:]}")
    expect(not status or "Traceback" not in run.output, f"a traceback: {run.output[-3000:]}")
    return who


def term(run: Run, plan: Plan) -> str:
    """Send SIGTERM to all processes in a random order, or to one rank only; return the choice."""
    choice = chooser(plan.seed)
    run.launch()
    plan.wait(run)
    # A launcher without child processes may be an interpreter that has not yet installed its signal handlers.
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
    right = 0 if "finished" in run.output else STOPPED
    expect(status == right, f"status {status} after SIGTERM to {who}: {run.output[-3000:]}")
    expect("Traceback" not in run.output, f"a traceback: {run.output[-3000:]}")
    done = [int(line.split()[1]) + 1 for line in run.happened() if line.startswith("StepEnds")]
    saved = [int(file.name[5:]) for file in (run.directory / "checkpoints").glob("step-*")]
    expect(not done or max(done) == max(saved, default=0), f"steps until {done[-1:]} were done, {saved} is saved")
    return who


def stop(run: Run, plan: Plan) -> str:
    """Stop a rank with SIGSTOP, as if it hung; the launcher must report it and restart all; return the report."""
    run.launch("--max-restarts", "1", "--set", "timeouts={startup: 60, step: 20, checkpoint: 20}")
    plan.wait(run)
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


def fill(run: Run, plan: Plan) -> str:
    """Fill the disk for up to six seconds: no failed save may end the run or lose a step; return the outcome."""
    with run.small_disk():
        run.launch()
        plan.wait(run)
        with run.full_disk():
            time.sleep(chooser(plan.seed).uniform(0, 6))
        status = run.end()
        # Before the first step there is nothing to lose. Everything is saved before the export; a restart repeats it.
        done = run.happened()
        right = {0, 1} if f"CheckpointSaved {STEPS}" in done else {0} if done else {0, 1, 2}
        expect(status in right, f"status {status}: {run.output[-3000:]}")
        expect("Traceback" not in run.output, f"a traceback: {run.output[-3000:]}")
        told = "could not be written" in run.output or "No space left" in run.output
        expect(status == 0 or told, f"the full disk is not reported: {run.output[-2000:]}")
        finish(run)
        run.keep()
    return f"status {status}, {'told' if told else 'not noticed'}"


#: Faults by name: each one launches a run, disturbs it, checks its end, and returns the target it hit.
FAULTS: Mapping[str, Callable[[Run, Plan], str]] = {"kill": kill, "term": term, "stop": stop, "fill": fill}


def finish(run: Run) -> None:
    """Start the job until it has finished."""
    for _ in range(3):
        run.launch()
        status = run.end()
        expect(status == 0, f"status {status} of an undisturbed launch: {run.output[-3000:]}")
        if "finished" in run.output:
            return
    raise DeviationError(f"the job does not finish: {run.output[-2000:]}")


def compare(straight: Run, broken: Run) -> None:
    """Compare a finished run with the undisturbed one."""
    here, there = ({file.relative_to(run.directory) for file in run.directory.rglob("*")} for run in (straight, broken))
    expect(here == there, f"other files: {sorted(map(str, here ^ there))}")
    for name in here:
        if name.suffix == ".safetensors" or name.name == "config.json":
            same = (straight.directory / name).read_bytes() == (broken.directory / name).read_bytes()
            expect(same, f"{name} differs")
    logs = [read_log_without_times(run.directory) for run in (straight, broken)]
    expect(logs[0] == logs[1], "the log differs")
    left = {file.name for file in broken.temporary.iterdir()} - {file.name for file in straight.temporary.iterdir()}
    expect(not left, f"temporary files are left: {sorted(left)}")


def orphaned_memory() -> set[str]:
    """Shared memory whose creating process has ended."""
    named = [(file.name, re.findall(r"\d+", file.name)) for file in Path("/dev/shm").glob("*")]  # noqa: S108
    return {name for name, numbers in named if numbers and not any(is_running(int(one)) for one in numbers)}


def campaign(
    plans: Sequence[Plan], jobs: int, say: Callable[[str], None]
) -> tuple[Counter[tuple[str, ...]], list[str]]:
    """Run rounds; return the counts of targets and outcomes, and the deviations."""
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
    """Run the campaign for the command-line arguments."""
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
