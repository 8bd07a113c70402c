"""Task files of d9d-skypilot are accepted by SkyPilot's own library, which also finds mistakes in them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from d9d_core.launcher import LaunchRequest
from d9d_skypilot.config import SkyPilotConfig
from d9d_skypilot.launcher import SkyPilotLauncher

from tests.engine_environments import make, python_of

pytestmark = pytest.mark.full

#: Prints what SkyPilot understands of each file, or its error.
READ = """
import json, sys, yaml, sky
for file in sys.argv[1:]:
    try:
        task = sky.Task.from_yaml_config(yaml.safe_load(open(file)))
        (resources,) = task.resources
        found = {
            "name": task.name, "nodes": task.num_nodes, "gpus": resources.accelerators, "spot": resources.use_spot,
            "recovery": resources.job_recovery, "run": task.run, "setup": task.setup,
            "storage": [*(task.volumes or {}), *task.storage_mounts],
        }
    except Exception as error:
        found = {"error": str(error)}
    print("FOUND", json.dumps(found))
"""


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Any:
    if (reason := make("skypilot")) is not None:
        pytest.skip(f"SkyPilot is not tested: {reason}")
    environ = {**os.environ, "HOME": str(tmp_path_factory.mktemp("home")), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}

    def read_all(*files: Path) -> list[dict[str, Any]]:
        command = [str(python_of("skypilot")), "-c", READ, *map(str, files)]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=300)
        lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
        return [json.loads(line.removeprefix("FOUND ")) for line in lines]

    return read_all


def test_task_files_are_valid_and_mean_what_was_asked_for(read: Any, tmp_path: Path) -> None:
    full = {
        "infra": "aws/us-east-1", "gpu": "H100", "cpus": 96, "memory_gib": 900, "disk_gib": 500, "spot": True,
        "image": "registry.example.org/team/d9d:1", "volume": "team-runs", "setup": ["pip install d9d-all"],
        "secrets": ["HF_TOKEN"],
    }  # fmt: skip
    bucket = {"bucket": "s3://team-runs/a", "gpu": "A100-80GB"}
    cases = [(full, 2, "cuda"), (bucket, 1, "cuda"), ({"volume": "v"}, 2, "cpu")]
    files = []
    for number, (fields, nodes, device) in enumerate(cases):
        folder = tmp_path / f"it's $(a) {number}"
        folder.mkdir()
        wanted = LaunchRequest(
            name="My.run_1", command=("python", str(folder / "job.yaml")), job="a: '${HOME}'\n---\n$(x)\n",
            job_file=folder / "job.yaml", folder=folder, working_directory=tmp_path, nodes=nodes, processes=8,
            device=device,
        )  # fmt: skip
        config = SkyPilotConfig.model_validate(fields)
        ((file, text),) = SkyPilotLauncher(config).prepare(wanted).files.items()
        file.write_text(text)
        files.append(file)
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(files[0].read_text().replace("num_nodes", "num_node"))
    *found, error = read(*files, wrong)
    assert [one.get("error") for one in found] == [None, None, None]
    assert [one["nodes"] for one in found] == [2, 1, 2]
    assert [one["gpus"] for one in found] == [{"H100": 8}, {"A100-80GB": 8}, None]
    assert [one["storage"] for one in found] == [["/runs"]] * 3
    assert [one["spot"] for one in found] == [True, False, False]
    assert found[0]["recovery"]["recover_on_exit_codes"] == [75]
    assert found[0]["recovery"]["max_restarts_on_errors"] == 0
    assert found[0]["setup"] == "set -e\npip install d9d-all\n"
    for one, file in zip(found, files, strict=True):
        assert one["run"] == yaml.safe_load(file.read_text())["run"], "the library changes nothing in the script"
    assert "num_nodes" in error["error"]
