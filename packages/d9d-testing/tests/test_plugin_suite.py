"""The plugin suite accepts a good plugin and names the fault of a faulty one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from d9d_testing.suites.plugin import PluginSuite

pytestmark = pytest.mark.thorough

_NUMBERS = itertools.count()

PLUGIN = """
from __future__ import annotations
from d9d_core.plugin import CapabilitySpec, Ref, TaskSpec, hookimpl
{top}
D9D_API = {api}

@hookimpl
def d9d_tasks():
    yield TaskSpec(
        name="guess",
        summary={summary!r},
        config=Ref(f"{{__name__}}_config:{config}"),
        build=Ref(f"{{__name__}}_config:{build}"),
        requires=frozenset({requires}),
    )

@hookimpl
def d9d_capabilities():
    yield CapabilitySpec(token="acme:thing", summary="Something of ours.")
"""

CONFIG = '''
from __future__ import annotations
from typing import Literal
from pydantic import BaseModel, Field, field_serializer
from d9d_core.config import PluginConfig, Section

class Inner(Section):
    """A nested section."""

    depth: int = 1
    {inner_docstring}

class Config(PluginConfig):
    """A config."""

    name: Literal["{name}"] = "{name}"
    """Selects the plugin."""
    size: int = {size}
    """Documented."""
    inner: Inner = Inner()
    """Documented."""
    {body}

class Loose(BaseModel):
    name: Literal["guess"] = "guess"

class Open(PluginConfig):
    """A config that ignores typing errors."""

    model_config = {{"extra": "ignore"}}
    name: Literal["guess"] = "guess"
    """Selects the plugin."""

def build(config):
    return config

NUMBER = 1
'''

Make = Callable[..., PluginSuite]


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Writes a plugin, good apart from the given parts, and returns the suite for it."""

    def make(examples: dict[str, dict[str, object]] | None = None, **parts: object) -> PluginSuite:
        name = f"acme_plugin_{next(_NUMBERS)}"
        plugin: dict[str, object] = {"top": "", "api": 2, "summary": "Guess.", "config": "Config", "build": "build"}
        config: dict[str, object] = {"inner_docstring": '"""Documented."""', "name": "guess", "size": 1, "body": ""}
        plugin["requires"] = {"acme:thing", "mesh:tp", "model:blocks", "device:cuda>=9.0"}
        plugin.update((key, value) for key, value in parts.items() if key in plugin)
        config.update((key, value) for key, value in parts.items() if key in config)
        (tmp_path / f"{name}.py").write_text(PLUGIN.format(**plugin))
        (tmp_path / f"{name}_config.py").write_text(CONFIG.format(**config))
        monkeypatch.syspath_prepend(str(tmp_path))
        made: PluginSuite = type("Suite", (PluginSuite,), {"plugin": name, "examples": examples or {}})()
        return made

    return make


def checks(suite: PluginSuite) -> dict[str, Callable[[], None]]:
    found = {name: getattr(suite, name) for name in dir(PluginSuite) if name.startswith("test_")}
    heavy = found["test_declaration_imports_nothing_heavy"]
    return found | {"test_declaration_imports_nothing_heavy": lambda: heavy(lambda *_: None)}


def failures(suite: PluginSuite) -> dict[str, str]:
    """What fails, by name of the check."""
    texts = {}
    for name, check in checks(suite).items():
        try:
            check()
        except AssertionError as error:
            texts[name] = str(error)
    return texts


def test_a_good_plugin_passes_everything(suite: Make) -> None:
    assert failures(suite()) == {}
    assert len(checks(suite())) == 13


def test_the_time_of_the_declaration_is_reported(suite: Make) -> None:
    reported: dict[str, object] = {}
    suite().test_declaration_imports_nothing_heavy(reported.__setitem__)
    assert isinstance(reported["declaration_milliseconds"], float)


@pytest.mark.parametrize(
    ("parts", "check", "text"),
    [
        ({"top": "import pydantic"}, "test_declaration_imports_nothing_heavy", "imports pydantic; refer to heavy code"),
        ({"summary": "x" * 101}, "test_summaries_are_one_line", "at most 100 characters"),
        ({"summary": "two\nlines"}, "test_summaries_are_one_line", "must be one line"),
        ({"build": "missing"}, "test_references_load", "does not load: AttributeError"),
        ({"build": "NUMBER"}, "test_references_load", "is a int, which is not callable"),
        ({"name": "gues"}, "test_configs_belong_to_their_records", "Literal['guess'] = 'guess'"),
        ({"config": "Loose"}, "test_configs_belong_to_their_records", "not a subclass of d9d_core"),
        ({"config": "Open"}, "test_configs_belong_to_their_records", "refuse unknown fields"),
        ({"inner_docstring": ""}, "test_every_config_field_is_documented", "Inner.depth has no docstring"),
        ({"body": "bare: int = 1"}, "test_every_config_field_is_documented", "Config.bare has no docstring"),
        (
            {"body": "lossy: float = Field(default=0.5, description='Lossy.')\n    @field_serializer('lossy')\n"
             "    def _cut(self, value): return int(value)"},
            "test_configs_round_trip_through_json",
            "reads back as",
        ),
        ({"size": "Field()"}, "test_configs_round_trip_through_json", "name them in Suite.examples"),
        ({"requires": {"model:block"}}, "test_capability_tokens_are_known", "'model:block' is neither core's nor"),
        ({"requires": {"acme:thin"}}, "test_capability_tokens_are_known", "'acme:thin' is neither core's nor"),
    ],
)  # fmt: skip
def test_a_fault_is_found_and_named(suite: Make, parts: dict[str, object], check: str, text: str) -> None:
    found = failures(suite(**parts))
    assert text in found.get(check, "passed")


def test_examples_supply_what_has_no_default(suite: Make) -> None:
    assert failures(suite(size="Field()", examples={"guess": {"size": 3}})) == {}


@pytest.mark.parametrize(
    "parts", [{"api": 99}, {"top": "raise RuntimeError('broken')"}, {"top": "from nowhere import x"}]
)
def test_a_plugin_that_does_not_load_fails(suite: Make, parts: dict[str, object]) -> None:
    broken = suite(**parts)
    for check in ("test_references_load", "test_registers_at_least_one_record"):
        with pytest.raises(Exception, match=r"API 99|broken|nowhere"):
            checks(broken)[check]()
