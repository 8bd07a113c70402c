"""Comparison of five small jobs in several tools on a CPU: lines of the user, CPU seconds, peak memory, loss.

    python tools/bench/first_jobs.py --python d9d=.venv/bin/python --python axolotl=ENVIRONMENT/bin/python
    python tools/bench/first_jobs.py --page        only the tables of docs/comparison.md, from the files

The scripts are in ``benchmarks/first_jobs``. Each run is one process with two threads in a fresh directory, so tools
read and tokenise the records anew. Two cores that do other things too make CPU seconds larger, never smaller, so the
tables show the smallest of all runs. Results of a file that exists are kept, and new runs are added to them.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import records
from first_jobs_data import prepare

#: Key that identifies results of this benchmark.
KIND = "first_jobs"
SCRIPTS = records.BENCHMARKS / KIND
PAGE = records.ROOT / "docs" / "comparison.md"
MARKS = ("<!-- first jobs: written by tools/bench/first_jobs.py -->", "<!-- end of first jobs -->")
JOBS = ("pretrain", "sft", "lora", "dpo", "classification")
TOOLS = {
    "d9d": ("d9d-core", "torch"),
    "transformers": ("transformers", "trl", "peft", "torch"),
    "axolotl": ("axolotl", "transformers", "torch"),
    "lightning": ("lightning", "transformers", "peft", "torch"),
    "torchtitan": ("torchtitan", "torch"),
}
NEEDS_GPU = ("torchtitan",)
LOSS = re.compile(r"eval[/_]loss\W+(\d+\.\d+)")
VERSIONS = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"


def main() -> None:
    """Measure the jobs of the given tools, and write the result and the page."""
    options = _options()
    pythons = dict(item.split("=", 1) for item in options.python)
    if pythons:
        measure({tool: Path(path).absolute() for tool, path in pythons.items()}, options)
    text = text_of(records.read(options.folder, KIND))
    PAGE.write_text(records.fill(PAGE.read_text(encoding="utf-8"), text, MARKS), encoding="utf-8")


def measure(pythons: Mapping[str, Path], options: argparse.Namespace) -> None:
    """Run every job in every tool, and write the result after each run."""
    known = records.read(options.folder, KIND)
    result: dict[str, Any] = known[0] if known else {"table": "first-jobs", KIND: {}, "versions": {}}
    result["taken"] = dt.datetime.now(dt.UTC).date().isoformat()
    result["command"] = "python tools/bench/first_jobs.py " + " ".join(f"--python {tool}=PATH" for tool in pythons)
    result |= {"commit": records.commit(), "hardware": records.hardware()}
    for tool, python in pythons.items():
        asked = [str(python), "-c", VERSIONS, *TOOLS[tool]]
        result["versions"][tool] = json.loads(subprocess.run(asked, capture_output=True, check=True).stdout)
    with tempfile.TemporaryDirectory(prefix="d9d-jobs-") as place:
        data = Path(place, "data")
        prepare(data, pythons["d9d"].with_name("d9d"), SCRIPTS / "d9d" / "pretrain.yaml")
        for number in range(options.runs):
            for job in options.jobs:
                for tool, python in pythons.items():
                    if not scripts(tool, job) or tool in NEEDS_GPU:
                        continue
                    cell = result[KIND].setdefault(tool, {}).setdefault(job, {"runs": []})
                    cell["runs"].append(run(tool, job, python, data, Path(place, "work")))
                    print(f"run {number + 1}: {tool} {job}: {cell['runs'][-1]}", file=sys.stderr, flush=True)
                    records.write(result, options.folder)


def run(tool: str, job: str, python: Path, data: Path, work: Path) -> dict[str, float]:
    """Run a job; return its CPU seconds, peak resident MiB and last loss on the held-out records.

    Raises:
        SystemExit: the job failed or printed no such loss.
    """
    shutil.copytree(data, work)
    shutil.copytree(SCRIPTS / tool, work, dirs_exist_ok=True)
    commands = {"d9d": ["d9d", "train", f"{job}.yaml"], "axolotl": ["axolotl", "train", f"{job}.yaml"]}
    environment = {
        **os.environ, "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE", "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(work / "cache"), "AXOLOTL_DO_NOT_TRACK": "1",
        "PATH": f"{python.parent}:{os.environ['PATH']}",
    }  # fmt: skip
    for name in ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "VIRTUAL_ENV"):
        environment.pop(name, None)
    command = commands.get(tool, ["python", f"{job}.py"])
    command += ["--launcher", "python"] if tool == "axolotl" else []
    command[0] = str(python.with_name(command[0]))
    timed = ["/usr/bin/time", "-o", "time.txt", "-f", "%U %S %M", *command]
    done = subprocess.run(timed, cwd=work, env=environment, capture_output=True, text=True, check=False)
    losses = LOSS.findall(done.stdout + done.stderr)
    if done.returncode or not losses:
        raise SystemExit(f"{tool} {job} ended with status {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}")
    user, system, kib = map(float, (work / "time.txt").read_text().split())
    shutil.rmtree(work)
    return {"cpu_seconds": round(user + system, 2), "peak_mib": round(kib / 1024), "loss": float(losses[-1])}


def scripts(tool: str, job: str) -> list[Path]:
    """Files that a user of a tool writes for a job; empty if the tool has no such job."""
    return sorted([*(SCRIPTS / tool).glob(f"{job}.*"), *(SCRIPTS / tool / job).glob("*")])


def lines_of(tool: str, job: str) -> int:
    """Lines of the files of a job without empty lines and comments."""
    lines = (line.strip() for file in scripts(tool, job) for line in file.read_text(encoding="utf-8").splitlines())
    return sum(bool(line) and not line.startswith("#") for line in lines)


def text_of(results: Sequence[Mapping[str, Any]]) -> str:
    """Tables of the page."""
    parts = [_table("lines that the user writes", lambda tool, job: f"{lines_of(tool, job)}")]
    for result in results:

        def cell(tool: str, job: str, key: str, form: str, cells: Mapping[str, Any] = result[KIND]) -> str:
            runs = cells.get(tool, {}).get(job, {}).get("runs")
            if not runs:
                return "needs a GPU"
            low, high = (form.format(pick(run[key] for run in runs)) for pick in (min, max))
            # Noise only adds time and memory; a loss that differs between runs is a fact about the tool.
            return f"{low} to {high}" if key == "loss" and low != high else low

        parts.append(_table("CPU seconds", lambda tool, job, cell=cell: cell(tool, job, "cpu_seconds", "{:.1f}")))
        parts.append(_table("peak memory, MiB", lambda tool, job, cell=cell: cell(tool, job, "peak_mib", "{:,.0f}")))
        parts.append(_table("loss, held out", lambda tool, job, cell=cell: cell(tool, job, "loss", "{:.3f}")))
        versions = "; ".join(
            f"{tool}: {', '.join(f'{name} {version}' for name, version in named.items())}"
            for tool, named in result["versions"].items()
        )
        parts.append(f"{result['hardware']['device']}; {versions}; commit {result['commit']}, {result['taken']}.")
    return "\n\n".join(parts)


def _table(title: str, cell: Any) -> str:
    rows = [[tool, *(cell(tool, job) if scripts(tool, job) else "none" for job in JOBS)] for tool in TOOLS]
    return "\n".join(records.table([title, *JOBS], rows))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", metavar="TOOL=PATH", action="append", default=[], help="Python of a tool")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=JOBS)
    parser.add_argument("--folder", type=Path, default=records.BENCHMARKS, help="where the results are")
    parser.add_argument("--page", action="store_true", help="only write the tables of the results that are there")
    return parser.parse_args()


if __name__ == "__main__":
    main()
