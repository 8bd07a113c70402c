from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from d9d_core.errors import PluginError
from d9d_core.registry.loader import discover
from d9d_core.registry.policy import FOUNDATION, PluginPolicy

Install = Callable[..., None]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", PluginPolicy()),
        ("none", PluginPolicy(autoload=False)),
        ("-Acme_Moe", PluginPolicy(block=frozenset({"acme-moe"}))),
        ("d9d-moe, ./x.py", PluginPolicy(allow=frozenset({"d9d-moe"}), files=(Path("x.py"),))),
    ],
)
def test_the_environment_restricts_plugins(text: str, expected: PluginPolicy) -> None:
    assert PluginPolicy.from_environment({"D9D_PLUGINS": text}) == expected


def test_policies_combine_to_the_stricter() -> None:
    both = PluginPolicy(allow=frozenset("ab")) | PluginPolicy(allow=frozenset("bc"), block=frozenset("x"), strict=True)
    assert both == PluginPolicy(allow=frozenset("b"), block=frozenset("x"), strict=True)


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (
            PluginPolicy(block=frozenset({"acme-meo"})),
            "plugins.block: no plugin 'acme-meo' is installed; did you mean 'acme-moe'?",
        ),
        (PluginPolicy(allow=frozenset({"zzz"})), "plugins.allow: no plugin 'zzz' is installed; installed: acme-moe, "),
        (
            PluginPolicy.from_environment({"D9D_PLUGINS": "-acme-meo"}),
            "D9D_PLUGINS: no plugin 'acme-meo' is installed; did you mean 'acme-moe'?",
        ),
        # The intersection of both lists is empty, which hides neither name.
        (
            PluginPolicy(allow=frozenset({"acme-meo"})) | PluginPolicy.from_environment({"D9D_PLUGINS": "acme-moe"}),
            "plugins.allow: no plugin 'acme-meo' is installed; did you mean 'acme-moe'?",
        ),
        (
            PluginPolicy(block=frozenset({"d9d-core"})),
            "plugins.block: d9d-core cannot be blocked; d9d's own packages are always loaded",
        ),
    ],
)
def test_a_policy_without_effect_is_an_error(install: Install, policy: PluginPolicy, text: str) -> None:
    install("acme-moe", "9.9", "1 / 0")
    with pytest.raises(PluginError) as caught:
        discover(policy)
    assert str(caught.value).startswith(text)


def test_no_plugins_loads_only_the_foundation(install: Install) -> None:
    install("d9d-mixture", "0.1.0", "1 / 0")
    registry = discover(PluginPolicy(autoload=False))
    assert {origin.distribution for origin in registry.plugins} <= FOUNDATION
    assert registry.find("tracker", "jsonl")


def test_a_required_plugin_must_be_there() -> None:
    with pytest.raises(PluginError, match=r"plugins.require: acme is not installed; install it with: pip install acme"):
        discover(PluginPolicy(require=frozenset({"acme"})))
