"""Feeds damaged and malicious files to the readers of d9d, and prints a table of the outcomes.

    uv run python tools/hostile_campaign.py --jobs 10000 --models 2000 --checkpoints 1000 --tokenizers 1000
    uv run python tools/hostile_campaign.py --models 200 --seed 7
    uv run python tools/hostile_campaign.py --runs 500 --adapters 2000 --tables 500 --templates 300
    uv run python tools/hostile_campaign.py --generations 500 --rows 2000

A reader must read the file or refuse it with an error of d9d. Exit status 1: a traceback, a reader that takes more than
ten seconds, access to a file outside of the campaign, or values that the undamaged file does not have.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from unittest import mock

from d9d_core.registry.loader import discover
from d9d_core.registry.policy import PluginPolicy
from d9d_testing.hostile.judge import Judge, Verdict
from hostile_files import (
    adapter_case,
    checkpoint_case,
    job_case,
    model_case,
    run_case,
    table_case,
    template_case,
    tokenizer_case,
)
from hostile_generations import generated, generation_case, heard
from hostile_rows import row_case
from hostile_sound import Case, Sound
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

#: Kind of files -> its case.
CASES: Mapping[str, Case] = {
    "jobs": job_case,
    "models": model_case,
    "checkpoints": checkpoint_case,
    "tokenizers": tokenizer_case,
    "runs": run_case,
    "adapters": adapter_case,
    "tables": table_case,
    "templates": template_case,
    "generations": generation_case,
    "rows": row_case,
}


class Report:
    """Report of one campaign.

    Attributes:
        counts: verdict -> number of files.
        faults: verdict and place -> number of files, and one example.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.faults: dict[str, tuple[int, str]] = {}

    def add(self, verdict: Verdict, how: str) -> None:
        """Count a verdict."""
        self.counts[verdict.kind] += 1
        if not verdict.is_sound:
            name = f"{verdict.kind}: {verdict.about}"
            times, example = self.faults.get(name, (0, how))
            self.faults[name] = (times + 1, min(example, how, key=len))


def campaign(case: Case, sound: Sound, examples: int, number: int, judge: Judge, work: Path) -> Report:
    """Judge a reader on many damaged files.

    Args:
        case: draws the damage and applies it.
        sound: sound files.
        examples: number of files.
        number: random seed.
        judge: judge of the reader.
        work: directory for copies.
    """
    report = Report()

    @seed(number)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def run(data: st.DataObject) -> None:
        copy = work / "copy"
        if copy.exists():
            shutil.rmtree(copy)
        how, read = case(sound, data.draw, copy)
        report.add(judge(read), how)

    run()
    return report


def run(examples: Mapping[str, int], number: int) -> dict[str, Report]:
    """Run the campaigns: kind -> number of examples. Only on the main thread."""
    # Warnings of libraries are irrelevant here.
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings(), ExitStack() as contexts:
        warnings.simplefilter("ignore")
        root = Path(directory).resolve() / "inside"
        root.mkdir()
        contexts.enter_context(mock.patch.object(tempfile, "tempdir", str(root)))
        sound = Sound(root, discover(PluginPolicy()))
        import_module("torch._inductor.compile_fx")  # takes long; must not be interrupted by a time limit
        if "generations" in examples:
            import_module("transformers").utils.logging.disable_progress_bar()
            with heard():
                generated(sound.model, 0, {})  # its imports take long
        reports = {}
        for kind, count in examples.items():
            # A job file may name any existing file.
            named = [Path("/etc/passwd"), Path.home()] if kind == "jobs" else []
            judge = Judge(root, *named)
            reports[kind] = campaign(CASES[kind], sound, count, number, judge, root)
    return reports


def main(arguments: list[str]) -> int:
    """Run the campaigns of the command line, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for kind in CASES:
        parser.add_argument(f"--{kind}", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    given = vars(parser.parse_args(arguments))
    examples = {kind: given[kind] for kind in CASES if given[kind]}
    reports = run(examples or dict.fromkeys(CASES, 100), given["seed"])
    columns = ("refused", "read", "traceback", "hang", "outside", "wrong")
    print("| files | " + " | ".join(columns) + " |\n|---|" + "---|" * len(columns))
    for kind, report in reports.items():
        print(f"| {kind} | " + " | ".join(f"{report.counts[column]:,}" for column in columns) + " |")
    for kind, report in reports.items():
        for fault, (times, example) in sorted(report.faults.items(), key=lambda item: -item[1][0]):
            print(f"{kind}: {times} x {fault}\n    {example}")
    return int(any(report.faults for report in reports.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
