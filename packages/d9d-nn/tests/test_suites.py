"""Tasks, metrics and kernels keep what holds for every one."""

from __future__ import annotations

from d9d_testing.suites.metric import MetricSuite


class TestPerplexity(MetricSuite):
    target = "perplexity"
