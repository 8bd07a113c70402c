"""The router keeps what every router must."""

from __future__ import annotations

from d9d_testing.suites.moe.router import RouterSuite


class TestTopKRouter(RouterSuite):
    factory = "d9d_moe.router.top_k:TopKRouter"
    settings = {
        "softmax": {"std": 0.3},
        "as published": {"std": 0.3, "renormalise": False},
        "sigmoid": {"std": 0.3, "scoring": "sigmoid", "scale": 2.5, "selection_bias": True},
        "groups": {"std": 0.3, "scoring": "sigmoid", "groups": 4, "top_groups": 2},
        "capacity": {"std": 0.3, "capacity": 1.25},
        "capacity and groups": {"std": 0.3, "groups": 2, "top_groups": 1, "capacity": 1.0},
    }
    sums = {"softmax": 1.0, "sigmoid": 2.5, "groups": 1.0, "capacity": 1.0, "capacity and groups": 1.0}
