"""Campaign of faulty plugins: each misbehaves in one way at one place; d9d's commands must contain it.

    uv run python tools/plugin_campaign.py [--every N] [--only TEXT]

If a plugin fails where it matters, the command must exit with a status other than 0 and name the plugin. There must be
no traceback without a frame of the plugin, no invalid JSON, and no control character of a plugin's text on the
terminal. Prints one line for each violation, and the counts; exit status 1 if there is any.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import d9d_testing.toy.plugin
from d9d_core.cli.main import main as command_line
from d9d_core.untrusted import visible

#: Characters that would control a terminal: a title, a colour, a one-character colour sequence, a change of direction.
CONTROLS = "\x1b]0;x\x07\x1b[31m\x9b31m\u202e\r"
#: Misbehaviour -> its code; a returned value replaces the expected one.
WAYS = {
    "raises": "raise ValueError('no')",
    "raises BaseException": "raise type('Odd', (BaseException,), {})('no')",
    "exits": "raise SystemExit(0)",
    "interrupts": "raise KeyboardInterrupt",
    "leaves": "import os; os._exit(0)",
    "recurses": "return misbehave()",
    "huge repr": "raise ValueError('x' * 10_000_000)",
    "broken repr": "raise type('Mute', (Exception,), {'__repr__': lambda s: 1 / 0, '__str__': lambda s: 1 / 0})()",
    "surrogates": "raise ValueError('\\ud800')",
    "wrong type": "return object()",
    "prints": "print('{not json'); return GOOD",
    "hangs": "\n    while True: pass",
    "raises controls": (
        "error = type(CONTROLS, (ValueError,), {}); note = CONTROLS; made = error(CONTROLS); made.add_note(note); "
        "exec(compile('raise made', CONTROLS, 'exec'))"
    ),
    "raises controls at the end": "raise type(CONTROLS, (BaseException,), {})(CONTROLS)",
    "controls": "return CONTROLS",
    "names of controls": "import torch; return {CONTROLS: torch.ones(())}",
}
#: Places that only declare something, which all commands read.
DECLARING = ("import", "D9D_API", "attribute", "hook", "record", "summary")
#: Method of a component of the toy plugin -> section of the job that uses it.
METHODS = {
    "ToyStream.__init__": "data",
    "ToyStream.next_pack": "data",
    "ToyStream.state": "data",
    "ToyTask.losses": "task",
    "ToyTask.weights": "task",
    "ToyMetric.update": "metric",
    "ToyMetric.compute": "metric",
    "ToyTracker.open": "tracker",
    "ToyTracker.write": "tracker",
    "ToyTracker.flush": "tracker",
    "ToyTracker.state": "tracker",
    "ToyTracker.close": "tracker",
    "ToyRecorder._record": "subscriber",
    "ToyRecorder.subscriptions": "subscriber",
    "ToyOptimizer.step": "optimizer",
    "ToyOptimizer.state": "optimizer",
}
PLACES = (*DECLARING, "config", "field", *METHODS)
#: Places whose value is not used, or may have any type.
IGNORED = {
    "import", "config", "field", "ToyMetric.update", "ToyRecorder._record", "ToyOptimizer.step", "ToyStream.__init__",
}  # fmt: skip
#: Places that may return a mapping with arbitrary names to tensors.
NAMING = {"ToyMetric.compute", "ToyOptimizer.state"}
#: Misbehaviours that return a wrong value.
RETURNING = ("wrong type", "controls", "names of controls")

_HEADER = """
import sys
from d9d_core.plugin import Ref, SubscriberSpec, hookimpl
GOOD = None
CONTROLS = {controls!r}

def misbehave(*_, **__):
    {code}
"""
_RECORDS = """
{api}
{extra}

@hookimpl
def d9d_subscribers():
    {hook}
    yield SubscriberSpec(
        name={name}, summary={summary}, config=Ref(f"{{__name__}}:Config"), build=Ref(f"{{__name__}}:build")
    )
"""
_COMPONENT = """
from typing import Literal
from pydantic import Field
from d9d_core.config import PluginConfig
{config}
class Config(PluginConfig):
    name: Literal["hostile"] = "hostile"
    text: object = Field({field}, description=str({field}))

def build(config):
    import d9d_testing.toy.{module} as toy
    {patch}
    return type("Quiet", (), {{"subscriptions": lambda self: []}})()
"""


@dataclass(frozen=True)
class Case:
    """Plugin that misbehaves in one way at one place."""

    place: str
    way: str

    @property
    def matters(self) -> bool:
        """Whether a run with the plugin must fail; failures of a tracker are contained, so they need not."""
        if self.way == "prints" or self.place.startswith("ToyTracker"):
            return False
        if self.way == "names of controls" and self.place in NAMING:
            return False
        return not (self.way in RETURNING and self.place in IGNORED)

    def source(self) -> str:
        """Source of the plugin."""
        # A hook that only prints continues; another value of the hook replaces the record.
        here = {place: "misbehave()" if self.place == place else "" for place in PLACES}
        api = "" if self.place == "attribute" else f"D9D_API = {here['D9D_API'] or 2}"
        extra = "def __getattr__(name): return misbehave()" if self.place == "attribute" else here["import"]
        name, summary, field = (here[place] or '"hostile"' for place in ("record", "summary", "field"))
        # The data is used first: other misbehaviour is triggered by building the subscriber.
        owner, _, method = self.place.partition(".")
        modules = {
            "ToyStream": "data",
            "ToyOptimizer": "optimizer",
            "ToyTracker": "observers",
            "ToyRecorder": "observers",
        }
        patch = ""
        if self.place in METHODS:
            patch = f"toy.{owner}.{method} = misbehave"
        return (
            _HEADER.format(code=WAYS[self.way], controls=CONTROLS)
            + _RECORDS.format(
                api=api,
                extra=extra,
                hook="if (made := misbehave()) is not GOOD: yield made" if here["hook"] else "",
                name=name,
                summary=summary,
            )
            + _COMPONENT.format(config=here["config"], field=field, module=modules.get(owner, "task"), patch=patch)
        )


def cases() -> list[Case]:
    """All combinations of place and misbehaviour; endless loops only where d9d has a time limit."""
    found = [Case(place, way) for place in PLACES for way in WAYS]
    return [case for case in found if case.way != "hangs" or case.place in DECLARING]


@dataclass(frozen=True)
class Ended:
    """Output and exit status of a command."""

    status: int
    out: str
    err: str


def run(*arguments: str) -> Ended:
    """Run a command in this process; exceptions end it as in the interpreter."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    kept = {cls: dict(vars(cls)) for cls in _toy_classes()}
    try:
        with (
            mock.patch.object(sys, "argv", ["d9d", *arguments]),
            mock.patch.object(sys, "excepthook", sys.__excepthook__),
            redirect_stdout(out),
            redirect_stderr(err),
        ):
            try:
                command_line()
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else int(end.code is not None)
            except BaseException as error:
                sys.excepthook(type(error), error, error.__traceback__)
                status = 1
    finally:
        for cls, attributes in kept.items():
            for name, value in attributes.items():
                if vars(cls).get(name) is not value:
                    setattr(cls, name, value)
    return Ended(status, out.getvalue(), err.getvalue())


def _toy_classes() -> list[type]:
    from d9d_testing.toy import data, observers, optimizer, task

    names = {place.partition(".")[0] for place in METHODS}
    return [found for module in (data, observers, optimizer, task) for n in names if (found := vars(module).get(n))]


def faults(case: Case, directory: Path) -> Iterator[str]:
    """Violations in one case."""
    stem = f"hostile_{PLACES.index(case.place)}_{list(WAYS).index(case.way)}"
    plugin = directory / f"{stem}.py"
    plugin.write_text(case.source(), "utf-8", errors="surrogatepass")
    job = directory / "job.json"
    job.write_text(json.dumps(_job(directory, plugin)))
    with mock.patch.dict(os.environ, {"D9D_PLUGINS": "none", "D9D_PLUGIN_SECONDS": "1"}):
        listed = run("plugins", "list", "--json", "--plugin", str(plugin))
        checked = run("plugins", "check", str(plugin), "--json", "--plugin", str(plugin))
        shows = [["list"], ["show", "hostile"], ["check", str(plugin)]] if "controls" in case.way else []
        shown = {words[0]: run("plugins", *words, "--plugin", str(plugin)) for words in shows}
        planned = run("check", str(job))
        trained = run("train", str(job))
    declares = case.place in DECLARING and case.matters
    for name, ended, must_fail in (
        ("plugins list", listed, declares),
        ("plugins check", checked, declares or (case.place == "config" and case.matters)),
        ("check", planned, declares),
        ("train", trained, case.matters),
    ):
        said = ended.out + ended.err
        if must_fail and ended.status == 0:
            yield f"{name}: status 0"
        # For a method of the toy plugin, "toy" names the plugin. Ctrl-C is indistinguishable from a raised
        # KeyboardInterrupt.
        named = stem in said or (case.place in METHODS and ("toy" in said or case.way == "interrupts"))
        if ended.status and not named:
            yield f"{name}: not named: {said[-300:]!r}"
        if "Traceback" in ended.err and not named:
            yield f"{name}: a traceback without a frame of the plugin: {said[-300:]!r}"
        if len(said) > 50_000 and "Traceback" not in said:  # a traceback of the plugin may be long
            yield f"{name}: {len(said):,} characters"
    commands = {"plugins list --json": listed, "plugins check --json": checked, "check": planned, "train": trained}
    for name, ended in (commands | {f"plugins {name}": ended for name, ended in shown.items()}).items():
        said = ended.out + ended.err
        if visible(said) != said:
            at = next(at for at, letter in enumerate(said) if visible(letter) != letter)
            yield f"{name}: controls the terminal: {said[max(0, at - 60) : at + 20]!r}"
    for name, ended in (("plugins list", listed), ("plugins check", checked)):
        if ended.out and not _is_json(ended.out):
            yield f"{name}: no JSON: {ended.out[:100]!r}"


def _job(directory: Path, plugin: Path) -> dict[str, object]:
    events = directory / "events"
    return {
        "run": {"name": plugin.stem, "dir": str(directory / "runs")},
        "steps": 3,
        "device": "cpu",
        "batch": {"size": 4},
        "model": "toy_model",
        "data": "toy_data",
        "task": "toy_task",
        "optimizer": "toy_optimizer",
        "metrics": ["toy_metric"],
        "logging": {"every": 1},
        "checkpoint": {"every": 2},
        "subscribers": ["hostile", {"name": "toy_recorder", "path": str(events)}],
        "trackers": ["toy_tracker"],
        "export": False,
        "plugins": [d9d_testing.toy.plugin.__file__, str(plugin)],
    }


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def campaign(chosen: list[Case]) -> list[str]:
    """Run the cases; one line for each violation."""
    found = []
    directory = Path(tempfile.mkdtemp(prefix="d9d-plugins-"))
    try:
        for case in chosen:
            found += [f"{case.place}, {case.way}: {text}" for text in faults(case, directory)]
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return found


def main() -> int:
    """Run the campaign for the command-line arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="take each n-th only")
    parser.add_argument("--only", default="", help="cases whose place and way contain this text")
    options = parser.parse_args()
    chosen = [case for case in cases() if options.only in f"{case.place}, {case.way}"][:: options.every]
    found = campaign(chosen)
    print("\n".join([*found, f"{len(chosen)} plugins, 4 commands each: {len(found)} violations"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
