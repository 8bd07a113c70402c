"""Conformance suites of d9d-testing that this package passes; ``d9d plugins conform acme-tuning`` runs them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from d9d_testing.suites.kernel import KernelSuite
from d9d_testing.suites.lr_schedule import LrScheduleSuite
from d9d_testing.suites.optimizer import OptimizerSuite
from d9d_testing.suites.peft import PeftSuite
from d9d_testing.suites.plugin import PluginSuite
from d9d_testing.suites.schedule import ScheduleSuite
from d9d_testing.suites.strategy import StrategySuite

_PLUGIN = "acme_tuning.plugin"


class TestPlugin(PluginSuite):
    """Declarations of the package."""

    plugin = _PLUGIN
    examples = {"signum": {"lr": 0.1}}


class TestSignum(OptimizerSuite):
    """Optimizer ``signum``."""

    plugin = _PLUGIN
    target = "signum"
    config = {"lr": 0.1}


class TestCosineRestarts(LrScheduleSuite):
    """Learning-rate schedule ``cosine_restarts``."""

    plugin = _PLUGIN
    target = "cosine_restarts"
    config = {"cycle": 7, "floor": 0.1}


class TestNorms(PeftSuite):
    """Fine-tuning method ``norms``, on the toy model, whose layers it selects by another pattern."""

    plugin = _PLUGIN
    target = "norms"
    config = {"match": "layers.0.*"}
    matches_nothing = {"match": "absent"}


class TestLean(KernelSuite):
    """Kernel ``lean`` of the op ``silu_mul``."""

    plugin = _PLUGIN
    target = "silu_mul.lean"


class TestHostActivations(StrategySuite):
    """Strategy ``host_activations``."""

    plugin = _PLUGIN
    target = "host_activations"


class TestVGpipe(ScheduleSuite):
    """Schedule ``v_gpipe``."""

    plugin = _PLUGIN
    target = "v_gpipe"

    def most_held(self, ranks: int, microbatches: int, settings: Mapping[str, Any]) -> float:  # noqa: ARG002
        """All microbatches: every forward runs before the first backward."""
        return microbatches
