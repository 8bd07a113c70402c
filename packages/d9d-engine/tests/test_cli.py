from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import d9d_testing.toy.plugin as toy
import pytest
from d9d_core.cli.main import main

JOB = """\
run: {name: toy, dir: RUNS}
steps: 3
device: cpu
model: toy_model
data: toy_data
task: toy_task
optimizer: toy_optimizer
parallel: [toy_strategy]
"""
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def d9d(tmp_path: Path) -> Run:
    """Run the command line in a process of its own, with the toy plugin only."""
    (tmp_path / "job.yaml").write_text(JOB.replace("RUNS", str(tmp_path / "runs")))

    def run(*arguments: str, plugins: bool = True) -> subprocess.CompletedProcess[str]:
        extra = ["--no-plugins", "--plugin", toy.__file__] if plugins else []
        # The last line of standard output tells whether torch was imported.
        code = (
            "import sys, atexit; atexit.register(lambda: print('torch' in sys.modules));"
            "from d9d_core.cli.main import main; main()"
        )
        command = [sys.executable, "-c", code, *arguments, *extra]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)

    return run


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command line in this process, with the toy plugin only, where the test is not about the process."""
    (tmp_path / "job.yaml").write_text(JOB.replace("RUNS", str(tmp_path / "runs")))
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, plugins: bool = True) -> subprocess.CompletedProcess[str]:
        command = ["d9d", *arguments, *(["--no-plugins", "--plugin", toy.__file__] if plugins else [])]
        monkeypatch.setattr("sys.argv", command)
        capsys.readouterr()
        try:
            main()
            status = 0
        except SystemExit as stop:
            status = int(stop.code or 0)
        return subprocess.CompletedProcess(command, status, *capsys.readouterr())

    return run


@pytest.mark.thorough
def test_help_and_version_need_no_torch(d9d: Run) -> None:
    for arguments in (["--help"], ["train", "--help"], ["--version"]):
        result = d9d(*arguments, plugins=False)
        assert result.returncode == 0, result.stderr
        assert result.stdout.splitlines()[-1] == "False"


@pytest.mark.full
def test_train_ends_with_what_was_promised(d9d: Run, tmp_path: Path) -> None:
    result = d9d("train", "job.yaml", "--set", "steps=2")
    assert result.returncode == 0, result.stderr
    assert "step 2/2  loss" in result.stdout
    assert f"finished 2 steps; results in {tmp_path}/runs/toy" in result.stdout
    assert (tmp_path / "runs" / "toy" / "model" / "config.json").exists()


@pytest.mark.thorough
def test_a_wrong_job_is_one_message_exit_status_2_and_no_torch(d9d: Run) -> None:
    result = d9d("train", "job.yaml", "--set", "optimizer.lrr=1")
    assert result.returncode == 2
    assert "error: --set optimizer.lrr: not a field of 'toy_optimizer'" in result.stderr
    assert "did you mean 'lr'?" in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout.splitlines()[-1] == "False"


@pytest.mark.thorough
def test_a_broken_plugin_that_is_asked_for_shows_its_traceback(d9d: Run, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def f():\n    raise RuntimeError('in the plugin')\nf()\n")
    result = d9d("train", "job.yaml", "--plugin", "broken.py")
    assert result.returncode == 2
    assert "error: broken.py failed to import: RuntimeError('in the plugin')" in result.stderr
    assert "raise RuntimeError('in the plugin')" in result.stderr


@pytest.mark.thorough
def test_the_traceback_of_a_plugin_shows_its_own_frames_only(d9d: Run, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(
        "from d9d_core.plugin import *\n"
        "class Config: ...\n"
        "@hookimpl\n"
        "def d9d_tasks():\n"
        "    yield TaskSpec(name='mine', summary='s', config=Config, build=Ref('json:loads'))\n"
    )
    result = d9d("check", "job.yaml", "--plugin", "broken.py")
    assert result.returncode == 2
    assert "TaskSpec 'mine': config is the class Config itself; write Ref(f\"{__name__}:Config\")" in result.stderr
    frames = [line for line in result.stderr.splitlines() if line.startswith("  File ")]
    assert len(frames) == 1
    assert "broken.py" in frames[0]


@pytest.mark.thorough
def test_check_reports_the_numbers_of_a_job_without_training(here: Run, tmp_path: Path) -> None:
    result = here("check", "job.yaml", "--set", "batch.microbatch=8")
    assert result.returncode == 0, result.stderr
    assert "33 parameters, 33 of them train" in result.stdout
    assert "F0.0 B0.0 F0.1 B0.1 R0" in result.stdout
    assert "ok: this job can run" in result.stdout
    assert not (tmp_path / "runs").exists()


@pytest.mark.thorough
def test_check_compares_the_mesh_with_the_world_size(d9d: Run) -> None:
    result = d9d(
        "check", "job.yaml", "--world-size", "8", "--set", "mesh={pp: 2, dp_shard: 3}", "--set", "batch.size=12"
    )
    assert result.returncode == 2
    assert "mesh: pp=2 x dp_shard=3 = 6 ranks, but the job was started with 8; change mesh or start 6 processes" in (
        result.stderr
    )
    assert result.stdout.splitlines()[-1] == "False"


def test_explain_says_where_everything_comes_from_and_what_was_applied(here: Run) -> None:
    result = here("explain", "job.yaml")
    assert result.returncode == 0, result.stderr
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert any(line.startswith("model toy_model") and "toy/plugin.py" in line for line in lines)
    assert "toy_strategy: layers.0" in lines
    assert any(line.startswith("parallel[0] model:blocks: 'toy_model'") for line in lines)
    assert "all: lr 0.05: unused, layers.0.weight, layers.1.weight" in lines


def test_plugins_list_names_everything_and_has_a_json_form(here: Run) -> None:
    assert "toy_optimizer" in here("plugins", "list").stdout
    records = json.loads(here("plugins", "list", "--json").stdout.rpartition("]")[0] + "]")
    assert {("tracker", "jsonl"), ("writer", "jsonl")} <= {(record["kind"], record["name"]) for record in records}


def test_plugins_show_prints_fields_defaults_and_meanings(here: Run) -> None:
    out = here("plugins", "show", "toy_optimizer").stdout
    assert out.startswith("optimizer toy_optimizer (")
    assert "Base learning rate." in out
    assert "number" in out
    assert "0.05" in out
    listed = here("plugins", "show", "d9d-engine").stdout.splitlines()
    assert listed[0].split() == ["extension", "point", "name", "distribution", "summary"]
    assert any(line.split()[:2] == ["tracker", "jsonl"] for line in listed)
    assert not any("toy" in line for line in listed)
    result = here("plugins", "show", "nothing")
    assert result.returncode == 2
    assert "error: no record is called 'nothing'; names: batch" in result.stderr


def test_plugins_check_finds_references_that_do_not_load(here: Run, tmp_path: Path) -> None:
    assert here("plugins", "check").returncode == 0
    (tmp_path / "dangling.py").write_text(
        "from d9d_core.plugin import *\n"
        "@hookimpl\n"
        "def d9d_tasks():\n"
        "    yield TaskSpec(name='t', summary='s', config=Ref('nowhere:C'), build=Ref('json:nothing'))\n"
    )
    result = here("plugins", "check", "--plugin", "dangling.py")
    assert result.returncode == 1
    assert "dangling.py: task 't': config nowhere:C failed to load: ModuleNotFoundError" in result.stdout
    assert "2 problems" in result.stdout


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A plugin whose configs are none."""
    (tmp_path / "unsound.py").write_text(
        "from d9d_core.plugin import *\n"
        "@hookimpl\n"
        "def d9d_tasks():\n"
        "    for name, config in (('absent', 'nowhere:C'), ('uu', 'json:loads')):\n"
        "        yield TaskSpec(name=name, summary='s', config=Ref(config), build=Ref('json:loads'))\n"
    )
    return tmp_path / "unsound.py"


def test_brackets_in_a_plugins_texts_are_shown_as_they_are(here: Run, tmp_path: Path) -> None:
    code = Path(toy.__file__).read_text().replace("Squared error.", "Error [/nats] per [b]token.")
    (tmp_path / "brackets.py").write_text(code)
    for arguments in (["plugins", "list"], ["plugins", "show", "toy_task"], ["explain", "job.yaml"]):
        command = [*arguments, "--no-plugins", "--plugin", "brackets.py"]
        result = here(*command, plugins=False)
        assert result.returncode == 0, result.stderr
        assert "Error [/nats] per [b]token." in result.stdout


@pytest.mark.usefixtures("broken")
def test_a_record_without_a_config_spoils_no_command(here: Run) -> None:
    result = here("schema", "--plugin", "unsound.py")
    assert result.returncode == 0, result.stderr
    schema = json.loads(result.stdout.rpartition("}")[0] + "}")
    assert schema["properties"]["task"]["anyOf"][0] == {"enum": ["toy_task"]}
    assert "task 'uu' (unsound.py): its config json:loads is not a subclass of" in result.stderr
    assert "task 'absent' (unsound.py): its config nowhere:C failed to load" in result.stderr

    result = here("plugins", "check", "unsound.py", "--plugin", "unsound.py", "--json")
    assert result.returncode == 1, result.stderr
    problems = [finding["problem"] for finding in json.loads(result.stdout.rpartition("}")[0] + "}")["problems"]]
    assert len(problems) == 2
    assert problems[0].startswith("task 'absent': config nowhere:C failed to load: ModuleNotFoundError")
    assert problems[1].startswith("task 'uu' (unsound.py): its config json:loads is not a subclass of")

    for arguments in (["plugins", "show", "uu"], ["plugins", "show", "uu", "--json"], ["train", "job.yaml"]):
        override = ["--set", "task=uu"] if arguments[0] == "train" else []
        result = here(*arguments, *override, "--plugin", "unsound.py")
        assert result.returncode == 2, arguments
        assert "its config json:loads is not a subclass of" in result.stderr
        assert "Traceback" not in result.stderr


@pytest.mark.thorough
def test_an_unknown_kernel_needs_no_torch_to_be_refused(d9d: Run) -> None:
    for command in ("train", "check"):
        result = d9d(command, "job.yaml", "--set", "kernels.attention=spda")
        assert result.returncode == 2
        assert "error: --set kernels.attention: unknown kernel 'attention.spda'" in result.stderr
        assert result.stdout.splitlines()[-1] == "False"


def test_schema_is_json_and_knows_the_plugins(here: Run) -> None:
    schema = json.loads(here("schema").stdout.rpartition("}")[0] + "}")
    assert schema["properties"]["optimizer"]["anyOf"][0] == {"enum": ["toy_optimizer"]}


def test_doctor_runs_checks_and_reports_broken_plugins(here: Run, tmp_path: Path) -> None:
    result = here("doctor")
    assert result.returncode == 0, result.stdout
    assert "ok  torch: torch 2." in result.stdout
    assert "network: --nproc listens on the loopback only; runs on several machines need a private network" in " ".join(
        result.stdout.split()
    )
    (tmp_path / "sick.py").write_text(
        "from d9d_core.plugin import *\n"
        "@hookimpl\n"
        "def d9d_health_checks():\n"
        "    yield HealthCheckSpec(name='sick', summary='s', run=Ref('nowhere:f'))\n"
    )
    result = here("doctor", "--plugin", "sick.py")
    assert result.returncode == 1
    assert "no  sick: the check failed: ModuleNotFoundError" in result.stdout


def test_plugins_check_finds_the_duplicate_names_that_doctor_finds(here: Run, tmp_path: Path) -> None:
    (tmp_path / "twin.py").write_text(
        "from d9d_core.plugin import *\n"
        "@hookimpl\n"
        "def d9d_tasks():\n"
        "    yield TaskSpec(name='toy_task', summary='s', config=Ref('d9d_testing.toy.config:ToyTaskConfig'),\n"
        "                   build=Ref('json:loads'))\n"
        "@hookimpl\n"
        "def d9d_commands():\n"
        "    yield CommandSpec(name='doctor', summary='s', app=Ref('json:loads'))\n"
    )
    for name in ([], ["twin.py"]):
        result = here("plugins", "check", *name, "--plugin", "twin.py")
        out = " ".join(result.stdout.split())
        assert result.returncode == 1, out
        assert "task 'toy_task' is declared by" in out
        assert "command 'doctor' (twin.py) is hidden by d9d's own" in out
        assert "2 problems" in out
    assert "0 problems" in here("plugins", "check", "d9d-engine", "--plugin", "twin.py").stdout
    doctor = " ".join(here("doctor", "--plugin", "twin.py").stdout.split())
    assert "task 'toy_task' is declared by" in doctor
    assert "command 'doctor' (twin.py) is hidden by d9d's own" in doctor


@pytest.mark.thorough
@pytest.mark.parametrize("command", ["train", pytest.param("check", marks=pytest.mark.full)])
def test_a_traceback_of_one_process_has_no_rank_in_front_of_its_lines(d9d: Run, tmp_path: Path, command: str) -> None:
    toy_config = "d9d_testing.toy.config:ToyOptimizerConfig"
    (tmp_path / "bad.py").write_text(
        "from d9d_core.plugin import *\n"
        "def build(config, parameters):\n"
        "    raise RuntimeError('in the plugin')\n"
        "@hookimpl\n"
        "def d9d_optimizers():\n"
        f"    yield OptimizerSpec(name='toy_optimizer', summary='s', config=Ref('{toy_config}'),\n"
        "                        build=Ref(__name__ + ':build'))\n"
    )
    code = (
        Path(toy.__file__).read_text().replace("d9d_optimizers", "_unused").replace("@hookimpl\ndef _unused", "def _")
    )
    (tmp_path / "rest.py").write_text(code)
    files = ["--no-plugins", "--plugin", "rest.py", "--plugin", "bad.py"]
    result = d9d(command, "job.yaml", *files, plugins=False)
    assert result.returncode != 0
    assert "RuntimeError('in the plugin')" in result.stderr or "RuntimeError: in the plugin" in result.stderr
    assert "[rank0]" not in result.stderr


@pytest.mark.thorough
@pytest.mark.parametrize("command", ["check", "explain", "train"])
def test_a_broken_plugin_that_no_job_names_is_a_warning_unless_plugins_are_to_be_strict(
    here: Run, install: Callable[..., None], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    install("acme-tools", "1.0", "raise RuntimeError('broken')\n")
    monkeypatch.setenv("D9D_PLUGINS", "acme-tools")
    arguments = (command, "job.yaml", "--plugin", toy.__file__)
    lenient, strict = here(*arguments, plugins=False), here(*arguments, "--strict-plugins", plugins=False)
    assert (lenient.returncode, strict.returncode) == (0, 2), lenient.stderr
    assert "warning: acme-tools 1.0 failed to import" in lenient.stderr
    assert "error: --strict-plugins: acme-tools 1.0 failed to import" in strict.stderr
