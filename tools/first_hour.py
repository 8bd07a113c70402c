"""Writes docs/first-hour.md: a trained, evaluated and used model for each kind of 'd9d new job', from wheels alone.

    uv run python tools/first_hour.py    build wheels, install them in a new environment, run all commands, write

The commands are the ones of the pages of docs/journeys; the input of the last command for a classifier and for
embeddings is the job of docs/journeys/infer.md with another task.
"""

from __future__ import annotations

import os
import re
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "first-hour.md"
_ASK = '--prompt "What does math.sin do in Python?" --max-new-tokens 24'
_CONTINUE = '--prompt "The with statement is" --max-new-tokens 24'
_INFER = """\
run: {{name: {name}}}
model: {{pretrained: runs/{kind}}}
task: {task}
data: {{name: documents, sources: ["python:topics"], field: text, sequence_length: 128}}
batch: {{size: 16, microbatch: 8}}
too_long: cut
"""
#: Kind -> commands after 'd9d new job'; a kind may use the models of the kinds before it.
KINDS = {
    "pretrain": [
        "d9d train pretrain.yaml",
        "d9d evaluate runs/pretrain",
        f"d9d generate runs/pretrain/model {_CONTINUE}",
    ],
    "sft": ["d9d train sft.yaml", "d9d evaluate runs/sft", f"d9d generate runs/sft/model {_ASK}"],
    "lora": ["d9d train lora.yaml", "d9d evaluate runs/lora", f"d9d generate runs/lora/model {_ASK}"],
    "dpo": ["d9d train dpo.yaml", "d9d evaluate runs/dpo", f"d9d generate runs/dpo/model {_ASK}"],
    "classification": ["d9d train classification.yaml", "d9d evaluate runs/classification", "d9d infer classes.yaml"],
    "embedding": ["d9d train embedding.yaml", "d9d evaluate runs/embedding", "d9d infer vectors.yaml"],
    "distillation": [
        "d9d train distillation.yaml",
        "d9d evaluate runs/distillation",
        f"d9d generate runs/distillation/model {_CONTINUE}",
    ],
}
OPTIONS = {
    "lora": " --model runs/sft/model --data conversations.jsonl",
    "dpo": " --model runs/sft/model",
    "distillation": " --model runs/pretrain/model --teacher runs/pretrain/model",
}
HEAD = """\
# The first hour, kind by kind

For each kind of job that `d9d new job` writes, this page shows the commands from an empty directory to a model that is
trained, evaluated and used, with their output and the seconds that each command took. The environment has d9d's wheels
and their dependencies, but no clone of the repository. As on a first try, models are small and initialised at random,
and the data comes with the package; `lora`, `dpo` and `distillation` start from the models that `sft` and `pretrain`
trained. To use your own model and records, give two options, see [a first job](journeys/first-job.md).
`tools/first_hour.py` writes this page.
"""


@dataclass(frozen=True)
class Done:
    """Command that ran.

    Attributes:
        command: text of the command.
        wall: seconds on the clock.
        cpu: seconds of all cores.
        output: printed text.
    """

    command: str
    wall: float
    cpu: float
    output: str


def run(command: str, directory: Path, environment: dict[str, str]) -> Done:
    """Run a command as a user types it. Exit with its output if it fails."""
    begin, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        shlex.split(command), cwd=directory, env=environment, capture_output=True, text=True, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    output = done.stdout + done.stderr
    if done.returncode:
        raise SystemExit(f"$ {command}\n{output}\nexit status {done.returncode}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"{time.monotonic() - begin:6.0f} s  {command}", flush=True)
    return Done(command, time.monotonic() - begin, cpu, output)


def installed(directory: Path) -> Path:
    """Build all wheels and install them; returns the folder of the environment's commands."""
    wheels, environment = directory / "wheels", directory / "environment"
    steps: Sequence[Sequence[str | Path]] = (
        ("uv", "build", "--quiet", "--all-packages", "--wheel", "--out-dir", wheels),
        ("uv", "venv", "--quiet", "--python", sys.executable, environment),
        (
            "uv",
            "pip",
            "install",
            "--quiet",
            "--python",
            environment / "bin" / "python",
            "--find-links",
            wheels,
            "d9d-all",
        ),
    )
    for step in steps:
        subprocess.run(step, cwd=ROOT, check=True)
    return environment / "bin"


def page(found: dict[str, list[Done]]) -> Iterator[str]:
    """Lines of the page."""
    yield HEAD
    release = version("torch").partition("+")[0]
    yield f"Times were measured on {os.cpu_count()} cores, without a GPU, with torch {release}.\n"
    yield "| kind | commands | minutes | CPU minutes |\n|---|---|---|---|"
    for kind, done in found.items():
        wall, cpu = (sum(times) / 60 for times in ([one.wall for one in done], [one.cpu for one in done]))
        yield f"| [{kind}](#{kind}) | {len(done)} | {wall:.1f} | {cpu:.1f} |"
    for kind, done in found.items():
        yield f"\n## {kind}\n\n```text"
        for one in done:
            yield f"$ {one.command}    # {one.wall:.0f} s"
            yield from shortened(one.output)
        yield "```"


def shortened(output: str) -> Iterator[str]:
    """Lines of a command's output; of the many lines about steps, the first and the last ones."""
    lines = output.rstrip().splitlines()
    steps = [number for number, line in enumerate(lines) if re.match(r"step +\d+/\d+ ", line)]
    for number, line in enumerate(lines):
        if number in steps[2:-2]:
            if number == steps[2]:
                yield "..."
            continue
        yield line if len(line) <= 120 else f"{line[:117]}..."


def main() -> None:
    """Run all kinds and write the page."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        commands = installed(directory)
        here = directory / "here"
        here.mkdir()
        environment = {**os.environ, "PATH": f"{commands}:{os.environ['PATH']}", "COLUMNS": "100"}
        for kind, job, task in (("classification", "classes", "classes"), ("embedding", "vectors", "embeddings")):
            (here / f"{job}.yaml").write_text(_INFER.format(name=job, kind=kind, task=task), "utf-8")
        found = {
            kind: [
                run(command, here, environment) for command in (f"d9d new job {kind}{OPTIONS.get(kind, '')}", *after)
            ]
            for kind, after in KINDS.items()
        }
        text = "\n".join(page(found)) + "\n"
        PAGE.write_text(text.replace(f"{here}/", "").replace(str(Path.home()), "~"), "utf-8")


if __name__ == "__main__":
    main()
