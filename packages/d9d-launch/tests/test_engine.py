"""Options of an engine, and its launcher, which a plugin declares."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Literal

import pytest
from d9d_core.config import PluginConfig
from d9d_core.errors import JobError, PluginError
from d9d_core.launcher import EngineStatus, LaunchRequest, Submission
from d9d_core.plugin import LauncherSpec, Ref, hookimpl
from d9d_core.registry.known import KnownPlugins
from d9d_core.registry.registry import Registry
from d9d_launch.engine import build_launcher, engine_config, read_options
from pydantic import PositiveInt, field_validator


class BoxConfig(PluginConfig):
    """Options of the engine."""

    name: Literal["box"] = "box"
    queue: str = "long"
    hours: PositiveInt = 1
    image_pull_secret: str = ""

    @field_validator("queue", "image_pull_secret")
    @classmethod
    def _plain(cls, value: str) -> str:
        if " " in value:
            raise ValueError("Spaces are not allowed")
        return value


class BoxLauncher:
    """Launcher that does nothing."""

    def __init__(self, config: BoxConfig) -> None:
        self.config = config

    def require(self) -> None:
        raise NotImplementedError

    def prepare(self, request: LaunchRequest) -> Submission:
        raise NotImplementedError

    def submit(self, submission: Submission) -> str:
        raise NotImplementedError

    def status(self, identifier: str, folder: Path, lines: int) -> EngineStatus:
        raise NotImplementedError

    def cancel(self, identifier: str) -> str:
        raise NotImplementedError


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    plugin, parts = ModuleType("box"), ModuleType("box_parts")
    spec = LauncherSpec(
        name="box", summary="Box.", config=Ref("box_parts:BoxConfig"), build=Ref("box_parts:BoxLauncher")
    )
    vars(plugin).update(D9D_API=2, d9d_launchers=hookimpl(lambda: [spec]))
    vars(parts).update(BoxConfig=BoxConfig, BoxLauncher=BoxLauncher)
    monkeypatch.setitem(sys.modules, "box_parts", parts)
    return Registry.of(plugin)


def test_an_engine_is_built_from_its_options(registry: Registry) -> None:
    config = engine_config(registry, "box", {"queue": "short", "hours": 3})
    assert config == BoxConfig(queue="short", hours=3)
    assert engine_config(registry, "box", {}) == BoxConfig()
    launcher = build_launcher(registry, "box", config)
    assert isinstance(launcher, BoxLauncher)
    assert launcher.config is config


@pytest.mark.parametrize(
    ("fields", "lines"),
    [
        ({"hours": 0}, ["--option hours: input should be greater than 0, got '0'"]),
        ({"queue": "a b"}, ["--option queue: spaces are not allowed, got 'a b'"]),
        ({"queue": "a " + 90 * "b"}, [f"--option queue: spaces are not allowed, got 'a {78 * 'b'}'"]),
        ({"image_pull_secret": "a b"}, ["--option image_pull_secret: spaces are not allowed"]),
        ({"hour": 2}, ["--option hour: not a field of the engine 'box' (box); did you mean 'hours'?"]),
        (
            {"queue": "a b", "hours": -1},
            [
                "--option queue: spaces are not allowed, got 'a b'",
                "--option hours: input should be greater than 0, got '-1'",
            ],
        ),
    ],
)
def test_a_wrong_option_is_told_in_one_line_without_secrets(
    registry: Registry, fields: dict[str, object], lines: list[str]
) -> None:
    with pytest.raises(JobError) as caught:
        engine_config(registry, "box", fields)
    assert str(caught.value).splitlines() == lines


def test_an_unknown_engine_says_what_to_install(registry: Registry) -> None:
    with pytest.raises(PluginError) as caught:
        engine_config(registry, "crate", {})
    assert str(caught.value).startswith("--engine crate: unknown launcher 'crate'")
    assert str(caught.value).endswith("; an engine is a plugin: install the one that offers it")
    known = Registry(known=KnownPlugins.shipped())
    with pytest.raises(PluginError) as caught:
        engine_config(known, "slurm", {})
    expected = "--engine slurm: launcher 'slurm' comes from d9d-slurm; install it with: pip install d9d-slurm"
    assert str(caught.value) == expected


def test_options_of_a_file_are_replaced_by_the_ones_of_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("queue: long\nhours: 2\n")
    assert read_options(None, []) == {}
    assert read_options(file, []) == {"queue": "long", "hours": 2}
    assert read_options(file, ["hours=3", "nodes=[a, b=c]"]) == {"queue": "long", "hours": 3, "nodes": ["a", "b=c"]}
    for wrong in ("hours", "=3", "a b=3"):
        with pytest.raises(JobError, match=f"^--option {wrong}: write FIELD=VALUE, for example --option partition=gpu"):
            read_options(file, [wrong])
    with pytest.raises(
        JobError, match="absent: no such file; name a YAML, TOML or JSON file with the engine's options"
    ):
        read_options(tmp_path / "absent", [])
