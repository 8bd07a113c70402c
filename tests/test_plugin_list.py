"""The list of third-party plugins: its page is up to date, and a wrong entry is an error that says where."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
GOOD = """
[[plugin]]
name = "acme"
distribution = "acme-metrics"
summary = "Metrics."
url = "https://git.acme.org/acme-metrics"
core = ">=0.1"
adds = { metric = ["bits"] }
"""


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import plugin_list

    return plugin_list


def refused(tool: Any, tmp_path: Path, text: str) -> str:
    file = tmp_path / "third-party.toml"
    file.write_text(text)
    with pytest.raises(tool.ListError) as error:
        tool.listed(file)
    return str(error.value)


def test_the_page_is_up_to_date_and_every_extension_point_has_two_implementations() -> None:
    done = subprocess.run(
        [sys.executable, "tools/plugin_list.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = re.findall(
        r"^\| [a-z ]+ \| `d9d_\w+` \| (\d+) \| (.+) \|$", (ROOT / "docs/plugins-list.md").read_text(), re.M
    )
    assert len(rows) == 21
    for count, examples in rows:
        assert examples != "none"
        assert int(count) + examples.count("`") // 2 >= 2


def test_a_good_entry_is_read_and_shown(tool: Any, tmp_path: Path) -> None:
    file = tmp_path / "third-party.toml"
    file.write_text(GOOD.replace("acme-metrics", "Acme_Metrics", 1))
    (plugin,) = tool.listed(file)
    assert (plugin.distribution, plugin.install) == ("acme-metrics", "acme-metrics")
    row = "| [acme-metrics](https://git.acme.org/acme-metrics): Metrics. | metric `bits` | `>=0.1` | none |"
    assert row in tool.page([plugin])


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ('url = "https://git.acme.org/acme-metrics"\n', "", "plugin 1 (acme-metrics): url is missing"),
        ("https://git.acme.org", "https://example.com/FILL-IN", "url is the placeholder https://example.com/FILL-IN"),
        ("https://git.acme.org/", "ftp://", "plugin 1 (acme-metrics): url is 'ftp://acme-metrics'; write an address"),
        ("metric =", "metrics =", "adds has the unknown kind 'metrics'; kinds: model, strategy"),
        ('["bits"]', "[]", "adds.metric is []; write a list of names"),
        (">=0.1", "new", "core is 'new', which is no range of versions"),
        ('"acme-metrics"', '"d9d_metrics"', "plugin 1 (d9d_metrics): this is a package of d9d"),
        ("summary =", "sumary =", "unknown field 'sumary'"),
        ("Metrics.", "M" * 101, "the summary has more than 100 characters"),
        ("[[plugin]]", "[[plugins]]", "unknown key 'plugins'; write [[plugin]]"),
        ("[[plugin]]", "[[plugin]", "third-party.toml: "),
        ("adds =", "suites = { passed = 3 }\nadds =", "suites needs exactly date"),
    ],
)
def test_a_wrong_entry_is_refused(tool: Any, tmp_path: Path, old: str, new: str, complaint: str) -> None:
    assert complaint in refused(tool, tmp_path, GOOD.replace(old, new))


def test_two_plugins_of_one_name_are_refused(tool: Any, tmp_path: Path) -> None:
    text = refused(tool, tmp_path, GOOD + GOOD.replace('"acme"', '"other"').replace("acme-metrics", "acme.metrics"))
    assert "plugins 1 and 2: both have the distribution 'acme-metrics'; rename or remove one" in text
    text = refused(tool, tmp_path, GOOD + GOOD.replace("acme-metrics", "acme-other"))
    assert "plugins 1 and 2: both have the name 'acme'" in text


def test_an_entry_that_differs_from_its_example_is_refused(tool: Any) -> None:
    plugins = [plugin for plugin in tool.listed() if plugin.distribution != "d9d-hello"]
    with pytest.raises(tool.ListError, match="d9d-hello is missing; add it, with the url examples/d9d-hello"):
        tool.check_examples(plugins)
    adds = {"task": ["smooth"]}
    wrong = tool.Plugin("hello", "d9d-hello", "x", "examples/d9d-hello", ">=9", adds)
    with pytest.raises(tool.ListError) as error:
        tool.check_examples([*plugins, wrong])
    assert "adds is {'task': ['smooth']}; its plugin.py declares" in str(error.value)
    assert "core is >=9; its pyproject.toml has another range" in str(error.value)
