"""Faults of dispatchers and routers, whose implementations stand in files of their own."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from d9d_testing.suites.moe.dispatcher import DispatcherSuite
from d9d_testing.suites.moe.factory import load_factory
from d9d_testing.suites.moe.router import RouterSuite

HERE = Path(__file__).parent / "implementations"


class SoundDispatcher(DispatcherSuite):
    factory = f"{HERE / 'broken_dispatchers.py'}:Sound"
    ranks = (2,)
    dtypes = ("float32",)
    hidden = 8


class SoundRouter(RouterSuite):
    factory = f"{HERE / 'broken_routers.py'}:Router"
    settings = {"plain": {}, "dropping": {"capacity": 1}}
    fault = ""

    def make(self, name: str) -> Any:
        made = partial(load_factory(self.factory), fault=self.fault)
        return made(24, 8, 3, **self.settings[name])


def _dispatcher(name: str) -> tuple[dict[str, Any], str]:
    return {"factory": f"{HERE / 'broken_dispatchers.py'}:{name}"}, ""


DISPATCHERS = {
    "doubles the gradient of tokens": _dispatcher("DoublesTheGradientOfTokens"),
    "forgets the gradient of weights": _dispatcher("ForgetsTheGradientOfWeights"),
    "averages": _dispatcher("Averages"),
    "changes tokens": _dispatcher("ChangesTokens"),
    "hides spare rows": _dispatcher("HidesSpareRows"),
    "counts too many": _dispatcher("CountsTooMany"),
    "returns a wider dtype": _dispatcher("Widens"),
    "leaves things to chance": _dispatcher("LeavesThingsToChance"),
    "has a buffer of few rows": _dispatcher("HasABufferOfFewRows"),
    "keeps the last handle": _dispatcher("KeepsTheLastHandle"),
}
ROUTERS = {
    fault: ({"fault": fault}, "")
    for fault in (
        "narrow indices",
        "counts wrong",
        "one expert twice",
        "equal weights",
        "weighs what it drops",
        "narrow scores",
        "higher expert wins",
        "overflows",
        "teaches nothing",
        "exceeds its capacity",
        "counts drops wrong",
        "state is not saved",
        "draws noise",
        "teaches the best expert only",
    )
}
