"""Journeys of the documentation: each page fits on a screen, and its commands run as they are written.

A page's blocks run in order, in one directory: ``title="FILE"`` makes a file, ``bash`` runs, and each line of ``text``
is one that was printed, with ``...`` for what may be anything. Pages begin in the directory that the page
they need has left.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from d9d_core.inference import InferenceTask
from d9d_core.plugin import ConfiguredSpec
from d9d_core.registry.loader import discover
from d9d_core.registry.policy import PluginPolicy
from d9d_core.registry.registry import Registry
from d9d_engine.job import Job
from d9d_inference.job import InferenceJob

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "journeys"
NAMES = sorted(page.stem for page in FOLDER.glob("*.md"))
INFERENCE = ROOT / "packages" / "d9d-inference" / "README.md"
FENCE = re.compile(r"^```(\w+)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
#: Lines of a page that fit on a screen, next to a Python file that it shows.
SCREEN = 48
JOURNEYS = {
    "pretrain", "continue", "resume-elsewhere", "sft", "lora", "dpo", "evaluate", "infer", "generate", "export",
    "track", "sweep", "notebook", "several-gpus", "slurm", "plugin", "own-model", "first-job", "memory",
}  # fmt: skip


def own_task() -> str:
    """Section about tasks and writers in the README of the engine, which is written as a journey."""
    _, _, rest = INFERENCE.read_text("utf-8").partition("### Tasks and writers of your own\n")
    return re.split(r"^## ", rest, maxsplit=1, flags=re.MULTILINE)[0]


#: Journeys that are sections of other pages.
SECTIONS: dict[str, Callable[[], str]] = {"own-task": own_task}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    title: str | None
    text: str


@dataclass(frozen=True)
class Journey:
    """A page, read.

    Attributes:
        needs: page that comes before it.
        results: files and directories that it says to be there at the end.
    """

    blocks: tuple[Block, ...]
    needs: str | None
    results: tuple[str, ...]

    @classmethod
    def read(cls, name: str) -> Journey:
        text = SECTIONS[name]() if name in SECTIONS else (FOLDER / f"{name}.md").read_text("utf-8")
        blocks = tuple(Block(match[1], match["title"], match["text"]) for match in FENCE.finditer(text))
        prose = FENCE.sub("", text)
        paragraph = re.search(r"^\*\*You need\*\*.*?(?=\n\n)", prose, re.DOTALL | re.MULTILINE)
        assert paragraph is not None, f"{name} does not name its requirements"
        needs = re.search(r"\]\((?:[./]+docs/journeys/)?([\w-]+)\.md\)", paragraph[0])
        results = [path for line in re.findall(r"^- (`.*?): ", prose, re.MULTILINE) for path in line.split("`")[1::2]]
        return cls(blocks, needs and needs[1], tuple(results))


@pytest.mark.parametrize("name", NAMES)
def test_a_journey_fits_on_a_screen_and_says_what_it_makes(name: str) -> None:
    text = (FOLDER / f"{name}.md").read_text("utf-8")
    journey = Journey.read(name)
    code = sum(len(block.text.splitlines()) for block in journey.blocks if (block.title or "").endswith(".py"))
    assert len(text.splitlines()) <= SCREEN + code
    assert max(map(len, text.splitlines())) <= 132
    assert "**Next:**" in text
    assert journey.results
    assert {block.language for block in journey.blocks if block.title is None} <= {"bash", "text"}
    assert any(block.language == "text" for block in journey.blocks)
    assert len(FENCE.findall(text)) * 2 == len(re.findall(r"^```", text, re.MULTILINE))


def test_the_first_page_leads_to_every_journey() -> None:
    first = (ROOT / "docs" / "index.md").read_text("utf-8")
    assert set(NAMES) == JOURNEYS
    assert set(re.findall(r"\(journeys/([\w-]+)\.md\)", first)) == JOURNEYS
    navigation = (ROOT / "mkdocs.yml").read_text("utf-8")
    assert set(re.findall(r"journeys/([\w-]+)\.md", navigation)) == JOURNEYS


@pytest.mark.thorough
def test_the_readmes_name_every_inference_task_with_its_columns() -> None:
    registry = discover(PluginPolicy(allow=frozenset({"d9d-nn"})))
    names = {entry.spec.key for entry in registry.entries("inference task")}
    lines = INFERENCE.read_text("utf-8").splitlines()
    begin = lines.index("| task | columns |") + 2
    rows = [line.split(" | ") for line in lines[begin : lines.index("", begin)]]
    tables = {tuple(re.findall(r"`([^`]+)`", task)): re.findall(r"`([^`]+)`", columns) for task, columns in rows}
    assert {task for task, *_ in tables} == names
    overview = (ROOT / "packages" / "d9d-nn" / "README.md").read_text("utf-8")
    for (name, *settings), columns in tables.items():
        task = task_of(registry, name, settings)
        assert list(task.columns) == columns
        assert [column for column in columns if column != "row" and f"`{column}`" not in overview] == []


def task_of(registry: Registry, name: str, settings: list[str]) -> InferenceTask:
    """Inference task with settings as a job file has them."""
    spec = registry.find("inference task", name).spec
    assert isinstance(spec, ConfiguredSpec)
    values = yaml.safe_load(f"{{{', '.join(settings)}}}")
    task: InferenceTask = spec.build.load()(spec.config.load()(**values))
    return task


def test_the_reference_names_every_field_that_inference_jobs_have_of_their_own() -> None:
    text = (ROOT / "docs" / "job-file.md").read_text("utf-8")
    _, _, rest = text.partition("| field | default | description |\n|---|---|---|\n")
    rows = [line.split(" | ") for line in rest.split("\n\n")[0].splitlines()]
    told = {row[0].strip("|` "): row[1].strip("`") for row in rows}
    fields = InferenceJob.model_fields
    inherited = {name for name in fields if name in Job.model_fields} - {"task", "batch", "nonfinite"}
    own = set(fields) - inherited
    assert {name.partition(".")[0] for name in told} == own
    batch = fields["batch"].default
    expected = {f"batch.{name}": getattr(batch, name) for name in type(batch).model_fields}
    expected |= {name: fields[name].default for name in ("limit", "too_long", "nonfinite")}
    assert {name: told[name] for name in expected} == {
        name: "null" if value is None else str(value) for name, value in expected.items()
    }


class Traveller:
    """Runner of pages, each once, in a directory of its own.

    Args:
        home: for these directories, and an environment in which a page may install.
    """

    def __init__(self, home: Path) -> None:
        self._home = home
        self._done: dict[str, Path] = {}
        commands = environment(home / "environment")
        self._environ = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")} | {
            "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
            "VIRTUAL_ENV": str(commands.parent),
            "CUDA_VISIBLE_DEVICES": "",
            "NO_COLOR": "1",
            "COLUMNS": "200",
        }

    def run(self, name: str) -> Path:
        """Run a page after those that it needs; its directory."""
        if name in self._done:
            return self._done[name]
        journey, directory = Journey.read(name), self._home / name
        if journey.needs is None:
            directory.mkdir()
        else:
            shutil.copytree(self.run(journey.needs), directory)
        printed = ""
        for block in journey.blocks:
            if block.title is not None:
                (directory / block.title).write_text(block.text, "utf-8")
            elif block.language == "bash":
                printed += self._bash(block.text, directory)
            else:
                for line in block.text.splitlines():
                    assert re.search(pattern_of(line), printed, re.MULTILINE), f"{line!r} was not printed:\n{printed}"
        missing = [path for path in journey.results if not (directory / path).exists()]
        assert missing == []
        self._done[name] = directory
        return directory

    def _bash(self, text: str, directory: Path) -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=directory,
            env=self._environ,
            check=False,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}"
        return done.stdout


def pattern_of(line: str) -> str:
    """Regular expression of a line in which ``...`` stands for anything."""
    return f"^{'.*'.join(re.escape(part) for part in line.split('...'))}$"


def environment(directory: Path) -> Path:
    """Make an environment with the packages of this one, in which more can be installed; its directory of commands."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(directory)], check=True)
    scheme = {"base": str(directory), "platbase": str(directory)}
    own = Path(sysconfig.get_path("purelib", vars=scheme))
    # As a line of code, because packages that are installed in place are themselves lines in files of that directory.
    own.joinpath("packages.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    commands = directory / "bin"
    starts = {
        "d9d": "import runpy; runpy.run_module('d9d_core', run_name='__main__')",
        "pytest": "import pytest; raise SystemExit(pytest.console_main())",
        "torchrun": "from torch.distributed.run import main; main()",
        "sbatch": SBATCH,
        "srun": SRUN,
    }
    for name, code in starts.items():
        command = commands / name
        command.write_text(f"#!{commands / 'python'}\n{code}\n")
        command.chmod(0o755)
    return commands


#: Stand-in for a command of Slurm: runs the script here, once or for each task of an array.
SBATCH = """
import os, re, subprocess, sys
script = sys.argv[1]
asked = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\\S+)", open(script).read(), re.MULTILINE))
count = int(asked.get("nodes", 1)) * int(asked.get("ntasks-per-node", 1))
given = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": str(count), "SLURM_JOB_NODELIST": "localhost"}
first, _, last = asked.get("array", "0-0").partition("%")[0].partition("-")
for task in range(int(first), int(last) + 1):
    more = {"SLURM_ARRAY_TASK_ID": str(task)} if "array" in asked else {}
    subprocess.run(["bash", script], env={**os.environ, **given, **more}, check=True)
"""
#: Stand-in for another: starts the tasks here, with the variables that Slurm gives them.
SRUN = """
import os, subprocess, sys
count = int(os.environ["SLURM_NTASKS"])
command = [word for word in sys.argv[1:] if not word.startswith("--kill-on-bad-exit")]
common = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(count), "SLURM_NODEID": "0"}
common["SLURM_TASKS_PER_NODE"] = common["SLURM_STEP_TASKS_PER_NODE"] = str(count)
def start(rank):
    return subprocess.Popen(
        command, env={**os.environ, **common, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
    )
tasks = [start(rank) for rank in range(count)]
raise SystemExit(max([task.wait() for task in tasks]))
"""


@pytest.fixture(scope="module")
def traveller(tmp_path_factory: pytest.TempPathFactory) -> Traveller:
    return Traveller(tmp_path_factory.mktemp("journeys"))


@pytest.mark.full
@pytest.mark.parametrize("name", [*NAMES, *SECTIONS])
def test_a_journey_runs_as_written(traveller: Traveller, name: str) -> None:
    directory = traveller.run(name)
    CHECKS.get(name, lambda directory: None)(directory)


def rows_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def check_infer(directory: Path) -> None:
    from pyarrow import parquet  # type: ignore[import-untyped]

    rows = rows_of(directory / "runs/scores/output.jsonl")
    assert [row["row"] for row in rows] == list(range(40))
    assert parquet.read_table(directory / "runs/table/output.parquet").to_pylist() == rows


def check_generate(directory: Path) -> None:
    answers = rows_of(directory / "answers.jsonl")
    assert [row["prompt"] for row in answers] == ["Tale 1.", "Tale 2.", "Tale 3."]
    assert all(row["completion"] for row in answers)


def check_evaluate(directory: Path) -> None:
    compared = json.loads((directory / "compared.json").read_text("utf-8"))
    assert compared["compare"]["differences"]["other"]["better"] == "first"  # by far more than the interval


def check_dpo(directory: Path) -> None:
    losses = [row["loss"] for row in rows_of(directory / "runs/dpo/metrics.jsonl") if "loss" in row]
    assert isinstance(losses[-1], float)
    assert losses[-1] < 0.6


#: Promises of a page besides files and lines.
CHECKS: dict[str, Callable[[Path], None]] = {
    "infer": check_infer,
    "generate": check_generate,
    "evaluate": check_evaluate,
    "dpo": check_dpo,
}
