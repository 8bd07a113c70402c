"""The declaration keeps what holds for every plugin."""

from __future__ import annotations

from d9d_fp8 import plugin
from d9d_testing.suites.plugin import PluginSuite


class TestPlugin(PluginSuite):
    plugin = "d9d_fp8.plugin"


def test_only_the_kernel_is_an_operation_for_the_compiler() -> None:
    assert {one.name: one.operators for one in plugin.d9d_kernels()} == {
        "fp8": ("d9d_fp8.scaled_grouped_mm",), "fp8_emulated": (),
    }  # fmt: skip
