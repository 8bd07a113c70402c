"""Dispatchers keep what every dispatcher must."""

from __future__ import annotations

from typing import Any

import pytest
from d9d_moe.all_to_all.dispatcher import AllToAllDispatcher
from d9d_moe.all_to_all.separate import SeparateDispatcher
from d9d_moe.dispatch.local import LocalDispatcher
from d9d_testing.suites.moe.dispatcher import DispatcherSuite


def local(_group: Any, _experts: int) -> LocalDispatcher:
    return LocalDispatcher()


@pytest.mark.thorough
class TestLocalDispatcher(DispatcherSuite):
    factory = f"{__file__}:local"
    ranks = (1,)


@pytest.mark.thorough
class TestAllToAllDispatcher(DispatcherSuite):
    factory = "d9d_moe.all_to_all.dispatcher:AllToAllDispatcher"


def separate(group: Any, experts: int) -> SeparateDispatcher:
    return SeparateDispatcher(AllToAllDispatcher(group, experts))


@pytest.mark.full
class TestSeparateDispatcher(DispatcherSuite):
    factory = f"{__file__}:separate"
