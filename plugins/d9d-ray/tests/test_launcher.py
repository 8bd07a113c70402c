"""The order of a run, calls of Ray's job server, and the status of a driver; Ray is not needed."""

from __future__ import annotations

import json
import os
import platform
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from d9d_core.errors import JobError, LaunchError
from d9d_core.launcher import LaunchRequest
from d9d_ray import driver
from d9d_ray.config import RayConfig
from d9d_ray.driver import cluster_of
from d9d_ray.launcher import RayLauncher
from d9d_ray.order import END, LOG, ORDER, STOP, TRAINS, Order
from d9d_testing.stand_ins import StandIns
from pydantic import ValidationError

SERVER = "http://head.example.org:8265"


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.fixture
def ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIns:
    made = StandIns(tmp_path / "bin", ["ray"])
    made.first_in_path(monkeypatch)
    return made


def request_in(place: Path, **fields: Any) -> LaunchRequest:
    folder = place / "runs" / "run" / "launch"
    folder.mkdir(parents=True, exist_ok=True)
    made = LaunchRequest(
        name="run",
        command=(sys.executable, "-m", "d9d_core", "train", str(folder / "job.yaml"), "--no-plugins"),
        job="steps: 1\n",
        job_file=folder / "job.yaml",
        folder=folder,
        working_directory=place,
        nodes=2,
        processes=4,
    )
    return replace(made, **fields)


def order_of(config: RayConfig, request: LaunchRequest) -> Order:
    (text,) = RayLauncher(config).prepare(request).files.values()
    (request.folder / ORDER).write_text(text)
    return Order.read((request.folder / ORDER).as_uri())


def test_an_order_has_the_resources_and_the_options_and_survives_its_file(tmp_path: Path) -> None:
    place = tmp_path / "it's $(x) %20 #a"
    config = RayConfig(cpus_per_process=2, restarts=3, startup=60, export=["HF_TOKEN"])
    order = order_of(config, request_in(place))
    assert order.resources == {"CPU": 2, "GPU": 1}
    assert (order.processes, order.restarts, order.startup, order.export) == (8, 3, 60, ["HF_TOKEN"])
    assert (order.options, order.working_directory) == (["--no-plugins"], str(place))
    assert order_of(config, request_in(place, device="cpu")).resources == {"CPU": 2}
    assert order_of(RayConfig(gpus_per_process=0.5), request_in(place)).resources == {"CPU": 1, "GPU": 0.5}
    assert Order(**order.values()) == order
    assert order.text() == json.dumps(dict(order.values()), indent=1) + "\n"
    with pytest.raises(JobError, match="all machines must share run.dir"):
        Order.read((tmp_path / "absent").as_uri())


def test_a_cluster_of_this_machine_has_room_for_the_job_and_listens_at_the_loopback_address(tmp_path: Path) -> None:
    order = order_of(RayConfig(cpus_per_process=20, export=["WANTED", "ABSENT"]), request_in(tmp_path))
    environ = {"WANTED": "value", "OTHER": "secret"}
    found = cluster_of(order, environ)
    assert found == {
        "address": "local",
        "runtime_env": {"env_vars": {"WANTED": "value"}},
        "num_cpus": max(160, os.cpu_count() or 1),
        "object_store_memory": 100 * 2**20,
        "include_dashboard": False,
        "_node_ip_address": "127.0.0.1",
    }
    existing = cluster_of(order, environ | {"RAY_ADDRESS": "10.0.0.1:6379"})
    assert existing == {"address": "10.0.0.1:6379", "runtime_env": {"env_vars": {"WANTED": "value"}}}
    assert cluster_of(replace(order, address=SERVER), {})["address"] == "auto"
    assert cluster_of(replace(order, address="local"), {"RAY_ADDRESS": "10.0.0.1:6379"})["address"] == "local"


def test_the_driver_is_handed_to_the_job_server_with_time_to_save(tmp_path: Path, ray: StandIns) -> None:
    ray.answer("ray", "job", "submit", text="Job 'raysubmit_7' submitted successfully\nNext steps: ...")
    launcher, request = RayLauncher(RayConfig(address=SERVER)), request_in(tmp_path)
    submission = launcher.prepare(request)
    (request.folder / STOP).touch()  # of an earlier submission
    assert launcher.submit(submission) == "job/raysubmit_7"
    assert not (request.folder / STOP).exists()
    ((*words,),) = ray.calls()
    assert words[:6] == ["ray", "job", "submit", "--address", SERVER, "--no-wait"]
    assert json.loads(words[7])["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"] == "1800"
    assert words[8:] == ["--", sys.executable, "-m", "d9d_ray.driver", (request.folder / ORDER).as_uri()]
    ray.answer("ray", "job", "submit", text="no answer of this kind")
    with pytest.raises(LaunchError, match="does not say which job"):
        launcher.submit(submission)


def test_an_address_in_the_environment_is_used_and_not_written(
    tmp_path: Path, ray: StandIns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "http://user:password@head.example.org:8265")
    launcher = RayLauncher(RayConfig())
    submission = launcher.prepare(request_in(tmp_path))
    assert submission.command[:4] == ("ray", "job", "submit", "--no-wait")
    assert "password" not in str(submission)
    launcher.require()
    assert ray.calls() == [["ray", "job", "list"]]
    with pytest.raises(LaunchError, match="leave out --option export"):
        RayLauncher(RayConfig(export=["HF_TOKEN"])).prepare(request_in(tmp_path))
    monkeypatch.setenv("RAY_ADDRESS", "ray://head.example.org:10001")
    with pytest.raises(LaunchError, match=r"address=http://HEAD:8265"):
        launcher.prepare(request_in(tmp_path))


def test_a_missing_ray_is_told_with_its_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("d9d_ray.launcher.find_spec", lambda _: None)
    with pytest.raises(LaunchError, match=r"pip install 'ray\[train\]'"):
        RayLauncher(RayConfig()).require()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match=r"pip install 'ray\[default\]'"):
        RayLauncher(RayConfig(address=SERVER)).require()


@pytest.mark.parametrize(
    ("said", "end", "state", "detail", "status"),
    [
        ("Status for job 'raysubmit_1': PENDING", None, "waiting", "PENDING", None),
        ("Status for job 'raysubmit_1': RUNNING\nStatus message: Job failed", None, "running", "RUNNING", None),
        ("Job 'raysubmit_1' was stopped", {"status": 75}, "failed", "was stopped; status 75", 75),
        ("Status for job 'raysubmit_1': RUNNING", {"status": 75}, "failed", "RUNNING; status 75", 75),
        ("Job 'raysubmit_1' was stopped", None, "cancelled", "was stopped", None),
        (
            "SUCC cli.py:67 -- \x1b[32mJob 'raysubmit_1' succeeded\x1b[39m",
            {"status": 0, "reported": 40},
            "finished",
            "succeeded; status 0, reported step 40",
            0,
        ),
        (
            "Job 'raysubmit_1' failed\nStatus message: ...",
            {"status": 2, "cause": "error: a\nno data"},
            "failed",
            "failed; status 2: no data",
            2,
        ),
        ("Job 'raysubmit_1' failed", None, "failed", "failed", None),
    ],
)
def test_the_state_of_a_job_of_the_server_is_told_with_the_lines_of_the_run(
    tmp_path: Path, ray: StandIns, said: str, end: dict[str, Any] | None, state: str, detail: str, status: int | None
) -> None:
    ray.answer("ray", "job", "status", text=f"2026-11-28 21:17:40,972 {said}")
    own = "\x1b[36m(RayTrainWorker pid=12)\x1b[0m step 1\n(RayTrainWorker pid=12, ip=10.0.0.2) step 2"
    ray.answer("ray", "job", "logs", text=f"{own}\n(raylet) noise")
    if end is not None:
        (tmp_path / END).write_text(json.dumps(end))
    found = RayLauncher(RayConfig(address=SERVER)).status("job/raysubmit_1", tmp_path, 5)
    assert (found.state, found.detail, found.exit_status) == (state, detail, status)
    assert found.log == ("step 1", "step 2")


def test_a_running_job_of_the_server_is_stopped_and_an_ended_one_is_told(ray: StandIns) -> None:
    launcher = RayLauncher(RayConfig(address=SERVER))
    ray.answer("ray", "job", "status", text="Status for job 'raysubmit_1': RUNNING")
    assert "save and stop" in launcher.cancel("job/raysubmit_1")
    assert ray.calls()[-1] == ["ray", "job", "stop", "--address", SERVER, "--no-wait", "raysubmit_1"]
    ray.answer("ray", "job", "status", text="Job 'raysubmit_1' failed")
    with pytest.raises(LaunchError, match="job raysubmit_1 of Ray is failed"):
        launcher.cancel("job/raysubmit_1")
    ray.answer("ray", "job", "status", text="an answer of another release")
    with pytest.raises(LaunchError, match="the answer has no status: 'an answer of another release"):
        launcher.cancel("job/raysubmit_1")
    ray.answer("ray", "job", "status", text="connection refused", status=1)
    with pytest.raises(LaunchError, match="ray job status: connection refused"):
        launcher.status("job/raysubmit_1", Path(), 1)


def test_the_end_of_a_driver_of_this_machine_is_told(tmp_path: Path) -> None:
    launcher, name = RayLauncher(RayConfig()), f"process/{platform.node()}/{os.getpid()}"
    assert launcher.status(name, tmp_path, 3).state == "unknown"
    (tmp_path / LOG).write_text("(raylet) started\n")
    killed = launcher.status(name, tmp_path, 3)
    assert (killed.state, killed.log) == ("failed", ("(raylet) started",))
    assert "was killed" in killed.detail
    (tmp_path / END).write_text('{"status": 75, "cause": ""}')
    stopped = launcher.status(name, tmp_path, 0)
    assert (stopped.state, stopped.exit_status, stopped.log) == ("failed", 75, ())
    with pytest.raises(LaunchError, match="the driver runs on elsewhere"):
        launcher.cancel("process/elsewhere/12")


def test_a_driver_is_asked_to_stop_by_sigterm_and_another_process_of_its_number_is_not(tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    code = "import signal, sys; signal.signal(15, lambda *_: sys.exit(75)); print('ready', flush=True); signal.pause()"
    ours = subprocess.Popen([sys.executable, "-c", code, "d9d_ray.driver"], stdout=subprocess.PIPE)
    try:
        assert ours.stdout is not None
        ours.stdout.readline()
        launcher = RayLauncher(RayConfig())
        with pytest.raises(LaunchError, match="is no driver"):
            launcher.cancel(f"process/{platform.node()}/{other.pid}")
        name = f"process/{platform.node()}/{ours.pid}"
        assert launcher.status(name, tmp_path, 1).state == "waiting"
        (tmp_path / TRAINS).touch()
        assert launcher.status(name, tmp_path, 1).state == "running"
        assert "save and stop" in launcher.cancel(f"process/{platform.node()}/{ours.pid}")
        assert ours.wait(30) == 75
        assert other.poll() is None
    finally:
        for process in (other, ours):
            process.kill()
            process.communicate()


@pytest.fixture
def handlers() -> Any:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("handlers")
def test_the_driver_writes_its_end_and_sigterm_becomes_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    request = request_in(tmp_path)
    order_of(RayConfig(startup=77), request)
    environ: dict[str, str] = {"RAY_COLOR_PREFIX": "1"}

    def runs(_order: Order, given: Any, _stop: Callable[[], None]) -> tuple[int, str, int | None]:
        assert (given["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"], given["RAY_COLOR_PREFIX"]) == ("77", "1")
        os.kill(os.getpid(), signal.SIGTERM)
        until = time.monotonic() + 30
        while not (request.folder / STOP).exists():
            assert time.monotonic() < until
        return 75, "", 12

    (request.folder / TRAINS).touch()
    monkeypatch.setattr(driver, "_run", runs)
    assert driver.main([(request.folder / ORDER).as_uri()], environ) == 75
    assert json.loads((request.folder / END).read_text()) == {"status": 75, "cause": "", "reported": 12}
    assert driver.main([(tmp_path / "absent").as_uri()], environ) == 2
    assert "all machines must share run.dir" in capsys.readouterr().out


def test_the_driver_reads_the_order_that_its_command_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["driver", (tmp_path / "absent").as_uri()])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(driver.__file__, run_name="__main__")
    assert ended.value.code == 2
    assert capsys.readouterr().out.startswith(f"error: {tmp_path / 'absent'}: cannot be read: ")


@pytest.mark.usefixtures("handlers")
def test_a_driver_that_waits_for_machines_ends_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ray that never finds machines is a module of the test."""
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "__init__.py").write_text(
        "import os, signal, time\ndef init(**_):\n    os.kill(os.getpid(), signal.SIGTERM)\n    time.sleep(60)\n"
    )
    names = "CheckpointConfig = FailureConfig = RunConfig = ScalingConfig = DataParallelTrainer = None\n"
    for folder in ("train", "train/v2", "train/v2/api"):
        (tmp_path / "ray" / folder).mkdir()
        (tmp_path / "ray" / folder / "__init__.py").write_text(names)
    (tmp_path / "ray/train/v2/api/data_parallel_trainer.py").write_text(names)
    for name in [name for name in sys.modules if name.partition(".")[0] == "ray"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    request = request_in(tmp_path)
    order_of(RayConfig(), request)
    began = time.monotonic()
    try:
        assert driver.main([(request.folder / ORDER).as_uri()], {}) == 75
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "ray"]:
            del sys.modules[name]
    assert time.monotonic() - began < 50
    end = json.loads((request.folder / END).read_text())
    assert (end["status"], end["cause"]) == (
        75,
        "cancelled while no worker trained; the newest checkpoint is as it was",
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [("address", "ray://head:10001"), ("address", "http://a b"), ("address", "$(id)"), ("export", ["A=B"]),
     ("cpus_per_process", 0), ("restarts", -1), ("startup", 0), ("gpus_per_process", -1)],
)  # fmt: skip
def test_wrong_options_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=field):
        RayConfig(**{field: value})


def test_the_options_of_the_readme_are_valid() -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    (block,) = re.findall(r"^```yml[^\n]*\n(.*?)^```$", readme, re.DOTALL | re.MULTILINE)
    assert RayConfig(**yaml.safe_load(block)).restarts == 20
